/* generate.c — the loop from prompt to text.
 *
 * Nothing here allocates: the window of recent tokens and the text assembler
 * live on the stack (about 10 KiB). */
#include <string.h>

#include "emit.h"
#include "generate.h"
#include "os.h"
#include "sample.h"

/* The last tokens, oldest first; twice the length so that the tail moves down
 * only once every CB_REPEAT_MAX tokens. */
struct window {
    uint32_t n;
    int32_t id[2 * CB_REPEAT_MAX];
};

static void window_add(struct window *w, int32_t id)
{
    if (w->n == 2 * CB_REPEAT_MAX) {
        memmove(w->id, w->id + CB_REPEAT_MAX, CB_REPEAT_MAX * sizeof w->id[0]);
        w->n = CB_REPEAT_MAX;
    }
    w->id[w->n++] = id;
}

static int eval_seen(struct cb_engine *e, const int32_t *tokens, uint32_t n,
                     const struct cb_observer *see, struct cb_err *err)
{
    int rc = cb_eval(e, tokens, n, NULL, see ? see->experts : NULL, err);
    if (rc == CB_OK && see)
        see->fn(see->ud, see->experts, n);
    return rc;
}

/* Runs the prompt a batch at a time and calls fn with no text and id -1 between
 * batches, so that a long prompt can be given up. Returns 1 when fn asked to
 * stop. A single token left over joins the last batch: alone it would be
 * counted as decoding. */
static int eval_prompt(struct cb_engine *e, const int32_t *prompt, uint32_t n, uint32_t batch,
                       cb_text_fn fn, void *ud, const struct cb_observer *see, struct cb_err *err)
{
    for (uint32_t at = 0; at < n;) {
        uint32_t part = n - at <= (uint64_t)batch + 1 ? n - at : batch;
        int rc = eval_seen(e, prompt + at, part, see, err);
        if (rc < 0)
            return rc;
        at += part;
        if (at < n && fn && fn(ud, "", 0, -1) != 0)
            return 1;
    }
    return CB_OK;
}

static int check_args(const struct cb_engine *e, const struct cb_info *info, const int32_t *prompt,
                      uint32_t n_prompt, struct cb_err *err)
{
    if (n_prompt == 0)
        return cb_fail(err, CB_EINVAL, "the prompt is empty");
    uint32_t at = cb_position(e);
    if (at > info->ctx || n_prompt > info->ctx - at)
        return cb_fail(err, CB_ECONTEXT, "the prompt has %u tokens; %u of the context's %u are free",
                       n_prompt, at > info->ctx ? 0 : info->ctx - at, info->ctx);
    for (uint32_t i = 0; i < n_prompt; i++)
        if (prompt[i] < 0 || (uint32_t)prompt[i] >= info->n_vocab)
            return cb_fail(err, CB_EINVAL, "prompt token %u is %d, outside the vocabulary of %u", i,
                           prompt[i], info->n_vocab);
    return CB_OK;
}

/* Samples and shows up to max_new tokens; sets res->finish. */
static int decode(struct cb_engine *e, uint32_t ctx, uint32_t max_new, const struct cb_sampling *s,
                  struct window *recent, struct cb_emit *out, cb_text_fn fn, void *ud,
                  const struct cb_observer *see, uint64_t start, struct cb_gen_result *res,
                  struct cb_err *err)
{
    res->finish = CB_FINISH_LENGTH;
    while (res->n_gen < max_new) {
        int32_t id = 0;
        int rc = cb_sample(e, cb_logits(e), s, res->n_gen, recent->id, recent->n, &id, err);
        if (rc < 0)
            return rc;
        if (res->ns_first == 0)
            res->ns_first = cb_os_now_ns() - start;
        if (cb_is_eog(e, id)) {
            res->finish = CB_FINISH_EOG;
            break;
        }
        res->n_gen++;
        window_add(recent, id);
        size_t len = 0;
        const char *bytes = cb_token_bytes(e, id, 0, &len);
        if (cb_emit_push(out, bytes, len, id, fn, ud) != 0) {
            res->finish = CB_FINISH_CANCEL;
            return CB_OK;
        }
        if (out->stopped) {
            res->finish = CB_FINISH_STOP;
            break;
        }
        if (res->n_gen == max_new)
            break;
        if (cb_position(e) >= ctx) {
            res->finish = CB_FINISH_CONTEXT;
            break;
        }
        rc = eval_seen(e, &id, 1, see, err);
        if (rc < 0)
            return rc;
    }
    if (cb_emit_flush(out, fn, ud) != 0)
        res->finish = CB_FINISH_CANCEL;
    return CB_OK;
}

int cb_generate_observed(struct cb_engine *e, const int32_t *prompt, uint32_t n_prompt,
                         uint32_t max_new, const struct cb_sampling *s, const char *const *stop,
                         uint32_t n_stop, cb_text_fn fn, void *ud, const struct cb_observer *see,
                         struct cb_gen_result *res, struct cb_err *err)
{
    struct cb_counters before, after;
    struct cb_gen_result unused;
    struct cb_info info;
    struct cb_emit out;
    struct window recent;
    uint64_t start = cb_os_now_ns();

    res = res ? res : &unused;
    memset(res, 0, sizeof *res);
    res->n_prompt = n_prompt;
    cb_engine_info(e, &info);
    cb_engine_counters(e, &before);
    int rc = cb_sampling_check(s, err);
    if (rc == CB_OK)
        rc = cb_emit_init(&out, stop, n_stop, err);
    if (rc == CB_OK)
        rc = check_args(e, &info, prompt, n_prompt, err);
    if (rc == CB_OK)
        rc = eval_prompt(e, prompt, n_prompt, info.batch ? info.batch : 1, fn, ud, see, err);
    if (rc == 1) {
        res->finish = CB_FINISH_CANCEL;
        rc = CB_OK;
    } else if (rc == CB_OK) {
        recent.n = 0;
        for (uint32_t i = n_prompt > CB_REPEAT_MAX ? n_prompt - CB_REPEAT_MAX : 0; i < n_prompt; i++)
            window_add(&recent, prompt[i]);
        rc = decode(e, info.ctx, max_new, s, &recent, &out, fn, ud, see, start, res, err);
    }
    cb_engine_counters(e, &after);
    res->degraded = after.degraded - before.degraded;
    res->zeros = after.zeros - before.zeros;
    res->extra = after.extra - before.extra;
    res->ns_total = cb_os_now_ns() - start;
    return rc;
}

int cb_generate(struct cb_engine *e, const int32_t *prompt, uint32_t n_prompt, uint32_t max_new,
                const struct cb_sampling *s, const char *const *stop, uint32_t n_stop, cb_text_fn fn,
                void *ud, struct cb_gen_result *res, struct cb_err *err)
{
    return cb_generate_observed(e, prompt, n_prompt, max_new, s, stop, n_stop, fn, ud, NULL, res,
                                err);
}

/* worker.c — the thread that owns the engine.
 *
 * Each turn steps every running request by one token and at most one prompt by
 * a piece, in one batch: they share expert loads, and each gets the bits that it
 * would get alone. Requests come in and end between two turns. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/os.h"
#include "core/pool.h"
#include "core/sample.h"
#include "model/engine.h"
#include "serve/logprob.h"
#include "serve/server.h"

#define STOP_NS (UINT64_C(10) * 1000000000) /* longer than a step takes, even on a slow board */

void cb_worker_wake(struct cb_server *s)
{
    pthread_cond_signal(&s->wake);
}

static void wake_http(struct cb_server *s)
{
    char one = 1;
    ssize_t done = write(s->wake_fd[1], &one, 1);
    (void)done; /* full: it is awake anyway */
}

/* Under the lock. */
static void end(struct cb_server *s, struct cb_req *r, int finish)
{
    if (r->state == CB_REQ_PREFILL || r->state == CB_REQ_DECODE)
        s->seq_req[r->seq] = NULL;
    r->n_tok = r->w_tok;
    r->n_text = r->w_text;
    r->finish = finish;
    r->t_end = cb_os_now_ns();
    r->state = CB_REQ_DONE;
}

/* Under the lock. Experts that failed in a release that is gone are not missing now. */
static void take_counters(struct cb_server *s)
{
    cb_engine_counters(s->e, &s->counters);
    s->counters.unhealthy -= s->unhealthy_gone;
}

/* An engine's error as the client sees it. */
static void refuse_engine(struct cb_refusal *no, const struct cb_err *err)
{
    if (err->code == CB_ECONTEXT)
        cb_refuse(no, 400, "context_length_exceeded", "prompt", "%s", err->msg);
    else if (err->code == CB_EINVAL || err->code == CB_EUTF8)
        cb_refuse(no, 400, "invalid_value", "prompt", "%s", err->msg);
    else if (err->code == CB_ECANCEL)
        cb_refuse(no, 503, "model_replaced", NULL, "%s", err->msg);
    else if (err->code == CB_EEXPERT)
        cb_refuse(no, 500, "expert_failed", NULL, "%s", err->msg);
    else
        cb_refuse(no, 500, cb_code_name(err->code), NULL, "%s", err->msg);
}

static void fail(struct cb_server *s, struct cb_req *r, const struct cb_err *err)
{
    struct cb_refusal no;
    refuse_engine(&no, err);
    pthread_mutex_lock(&s->lock);
    r->refusal = no;
    s->m.failed_experts += err->code == CB_EEXPERT;
    take_counters(s); /* no step may go well any more, and that is when they are looked at */
    end(s, r, CB_FINISH_CANCEL);
    pthread_mutex_unlock(&s->lock);
    if (no.status == 500)
        cb_log_say(s->log, "error", "engine", err->msg);
}

/* ---- taking requests in ------------------------------------------------- */

/* Those whose client left or whose time is over. Under the lock. */
static void drop_expired(struct cb_server *s)
{
    uint64_t now = cb_os_now_ns();
    for (uint32_t i = 0; i < s->n_req; i++) {
        struct cb_req *r = &s->req[i];
        if (r->state != CB_REQ_QUEUED && r->state != CB_REQ_PREFILL && r->state != CB_REQ_DECODE)
            continue;
        if (!r->cancel && now < r->t_deadline)
            continue;
        if (!r->cancel) {
            cb_refuse(&r->refusal, 504, "deadline_exceeded", NULL,
                      "not done within %u s; %u of %u prompt tokens and %u tokens of answer were",
                      (unsigned)((r->t_deadline - r->t_arrive) / UINT64_C(1000000000)), r->n_done,
                      r->n_prompt, r->n_tok);
            s->m.expired++;
        }
        if (r->state == CB_REQ_QUEUED)
            r->w_tok = r->w_text = 0;
        end(s, r, CB_FINISH_CANCEL);
    }
}

static struct cb_req *oldest_queued(struct cb_server *s)
{
    struct cb_req *best = NULL;
    for (uint32_t i = 0; i < s->n_req; i++)
        if (s->req[i].state == CB_REQ_QUEUED && (best == NULL || s->req[i].number < best->number))
            best = &s->req[i];
    return best;
}

/* Is an answer still written out with the tokens of the release before this one,
 * whose room the next release needs? All else of an answer is its own, and no
 * more such answers can come. Under the lock. */
static int room_is_read(const struct cb_server *s)
{
    for (uint32_t i = 0; i < s->n_req; i++) {
        const struct cb_req *r = &s->req[i];
        if (r->state == CB_REQ_DONE && r->words != NULL && r->words != &s->e->rel->text)
            return 1;
    }
    return 0;
}

/* Gives free KV caches to the oldest, unless a swap waits for those that run. Under
 * the lock. */
static void admit(struct cb_server *s)
{
    if (s->swap_wanted && !room_is_read(s))
        return;
    for (uint32_t q = 0; q < s->opt.sequences; q++) {
        struct cb_req *r = s->seq_req[q] == NULL ? oldest_queued(s) : NULL;
        if (r == NULL)
            continue;
        s->seq_req[q] = r;
        r->seq = q;
        r->w_tok = r->w_text = r->raw = 0;
        r->overflow = 0;
        memcpy(r->model, s->info.name, sizeof r->model);
        memcpy(r->golden, s->info.golden, sizeof r->golden);
        r->words = r->ask.logprobs ? &s->e->rel->text : NULL;
        r->state = CB_REQ_PREFILL;
        r->t_start = cb_os_now_ns();
    }
}

/* The prompt as ids; text[] is the answer's from then on. */
static int prepare(struct cb_server *s, struct cb_req *r, struct cb_err *err)
{
    const char *stop[CB_STOP_MAX];
    int got = (int)r->ask.n_ids;
    for (uint32_t i = 0; i < r->ask.n_stop; i++)
        stop[i] = r->ask.stop[i];
    int rc = cb_emit_init(&r->emit, stop, r->ask.n_stop, err);
    if (rc < 0)
        return rc;
    if (!r->ask.have_ids) {
        got = cb_encode(s->e, r->text, r->ask.n_text, 1, 1, r->ids, s->opt.ctx + 1u, err);
        if (got == CB_ECONTEXT)
            return cb_fail(err, got, "the prompt is longer than the context of %u tokens",
                           s->opt.ctx);
        if (got < 0)
            return got;
        int has_bos = got > 0 && (uint32_t)r->ids[0] == s->info.bos;
        if (s->info.add_bos && s->info.bos != UINT32_MAX && !has_bos &&
            (uint32_t)got <= s->opt.ctx) {
            memmove(r->ids + 1, r->ids, (size_t)got * sizeof *r->ids);
            r->ids[0] = (int32_t)s->info.bos;
            got++;
        }
    }
    if (got == 0)
        return cb_fail(err, CB_EINVAL, "the prompt is empty");
    if ((uint32_t)got > s->opt.ctx)
        return cb_fail(err, CB_ECONTEXT, "the prompt has %d tokens, the context holds %u", got,
                       s->opt.ctx);
    r->n_ids = (uint32_t)got;
    cb_seq_reset(s->e, r->seq);
    return CB_OK;
}

static void prepare_new(struct cb_server *s)
{
    for (uint32_t q = 0; q < s->opt.sequences; q++) {
        struct cb_req *r = s->seq_req[q];
        struct cb_err err = {0, ""};
        if (r == NULL || r->prepared)
            continue;
        int rc = r->ask.chat && r->ask.release != s->release
                     ? cb_fail(&err, CB_ECANCEL, "the model was replaced meanwhile; send it again")
                     : prepare(s, r, &err);
        if (rc < 0) {
            fail(s, r, &err);
            continue;
        }
        pthread_mutex_lock(&s->lock);
        r->prepared = 1;
        r->n_prompt = r->n_ids;
        s->m.tokens_prompt += r->n_ids;
        pthread_mutex_unlock(&s->lock);
    }
}

/* ---- one turn ----------------------------------------------------------- */

/* Decoding first, then a piece of the oldest prompt with the rest of the batch. */
static uint32_t plan_steps(struct cb_server *s)
{
    uint32_t n = 0, left = s->info.batch;
    const struct cb_req *oldest = NULL;
    for (uint32_t q = 0; q < s->opt.sequences; q++) {
        const struct cb_req *r = s->seq_req[q];
        if (r == NULL)
            continue;
        if (r->state == CB_REQ_DECODE) {
            s->step[n++] = (struct cb_step){.seq = q, .tokens = r->ids + r->n_ids - 1, .n = 1};
            left--;
        } else if (oldest == NULL || r->number < oldest->number) {
            oldest = r;
        }
    }
    if (oldest != NULL && left > 0) {
        uint32_t rest = oldest->n_prompt - oldest->n_done;
        s->step[n++] = (struct cb_step){.seq = oldest->seq, .tokens = oldest->ids + oldest->n_done,
                                        .n = rest < left ? rest : left};
    }
    return n;
}

static int on_text(void *ud, const char *text, size_t n, int32_t id)
{
    struct cb_req *r = ud;
    (void)id;
    if (n > r->text_cap - r->w_text) {
        r->overflow = 1;
        return 1;
    }
    memcpy(r->text + r->w_text, text, n);
    r->w_text += (uint32_t)n;
    return 0;
}

/* Takes the token that the logits give. Returns 1 when the answer is complete,
 * with its enum cb_finish. */
static int take_token(struct cb_server *s, struct cb_req *r, const float *logits, int *finish,
                      struct cb_err *err)
{
    int32_t id = 0;
    uint32_t from = r->n_ids > CB_REPEAT_MAX ? r->n_ids - CB_REPEAT_MAX : 0;
    size_t len = 0;
    int rc = cb_sample(s->e, logits, &r->ask.sampling, r->w_tok, r->ids + from, r->n_ids - from, &id,
                       err);
    if (rc < 0)
        return rc;
    *finish = CB_FINISH_EOG;
    if (cb_is_eog(s->e, id))
        return 1;
    struct cb_tok *t = &r->tok[r->w_tok];
    t->id = id;
    if (r->ask.logprobs)
        cb_logprob(logits, s->info.n_vocab, id, &t->logprob, r->tops + (size_t)r->w_tok * r->ask.top,
                   r->ask.top);
    const char *bytes = cb_token_bytes(s->e, id, 0, &len);
    int full = cb_emit_push(&r->emit, bytes, len, id, on_text, r);
    r->raw += (uint32_t)len;
    t->raw_end = r->raw;
    t->text_end = r->w_text;
    r->ids[r->n_ids++] = id;
    r->w_tok++;
    *finish = r->emit.stopped ? CB_FINISH_STOP : CB_FINISH_LENGTH;
    if (r->emit.stopped || full || r->w_tok >= r->ask.max_new)
        return 1;
    *finish = CB_FINISH_CONTEXT;
    return cb_seq_position(s->e, r->seq) >= s->opt.ctx;
}

/* Under the lock: what the HTTP thread may see of r after a step. */
static void publish(struct cb_server *s, struct cb_req *r, uint32_t n, uint64_t now)
{
    if (r->state == CB_REQ_PREFILL) {
        r->n_done += n;
        if (r->n_done == r->n_prompt)
            r->state = CB_REQ_DECODE;
    }
    if (r->w_tok > 0 && r->t_first == 0)
        r->t_first = now;
    s->m.tokens_answer += r->w_tok - r->n_tok;
    r->n_tok = r->w_tok;
    r->n_text = r->w_text;
}

/* After a step that went well. */
static void after_step(struct cb_server *s, const struct cb_step *st)
{
    struct cb_req *r = s->seq_req[st->seq];
    struct cb_err err = {0, ""};
    int finish = CB_FINISH_LENGTH, rc = 0;
    int whole = r->state == CB_REQ_DECODE || r->n_done + st->n == r->n_prompt;
    if (whole)
        rc = take_token(s, r, st->logits, &finish, &err);
    if (rc < 0) {
        fail(s, r, &err);
        return;
    }
    if (rc == 1 && !r->overflow)
        (void)cb_emit_flush(&r->emit, on_text, r);
    pthread_mutex_lock(&s->lock);
    publish(s, r, st->n, cb_os_now_ns());
    if (rc == 1)
        end(s, r, finish);
    pthread_mutex_unlock(&s->lock);
}

/* Counters, the heat map, and what made these answers other than the model's. */
static void note_step(struct cb_server *s, const struct cb_step *step, uint32_t n, uint64_t ns)
{
    const int32_t *chosen = cb_last_experts(s->e);
    uint32_t k = s->info.n_expert_used, n_expert = s->info.n_expert, decoding = 0;
    pthread_mutex_lock(&s->lock);
    take_counters(s);
    for (uint32_t i = 0; i < n; i++) {
        struct cb_req *r = s->seq_req[step[i].seq];
        r->degraded += step[i].degraded;
        r->zeros += step[i].zeros;
        r->extra += step[i].extra;
        decoding += r->state == CB_REQ_DECODE;
    }
    if (decoding > 0)
        cb_hist_add(&s->m.token, ns);
    for (uint32_t l = 0; l < s->info.n_moe_layer; l++)
        for (uint32_t i = 0; i < k; i++) {
            int32_t x = chosen[(size_t)l * k + i];
            if (x >= 0 && (uint32_t)x < n_expert)
                s->heat[(size_t)l * n_expert + (uint32_t)x]++;
        }
    pthread_mutex_unlock(&s->lock);
}

static void run_steps(struct cb_server *s, struct cb_step *step, uint32_t n)
{
    struct cb_err err = {0, ""};
    uint64_t start = cb_os_now_ns();
    int rc = cb_run(s->e, step, n, &err);
    if (rc < 0 && n > 1) { /* whose expert was it? Each alone; no position has moved. */
        for (uint32_t i = 0; i < n; i++)
            run_steps(s, &step[i], 1);
        return;
    }
    if (rc < 0) {
        fail(s, s->seq_req[step[0].seq], &err);
        return;
    }
    note_step(s, step, n, cb_os_now_ns() - start);
    for (uint32_t i = 0; i < n; i++)
        after_step(s, &step[i]);
}

/* ---- another release ---------------------------------------------------- */

/* Nobody is computed. Under the lock, which it gives up meanwhile. */
static void swap(struct cb_server *s)
{
    struct cb_err err = {0, ""};
    struct cb_counters before, after;
    struct cb_info info;
    struct cb_line line;
    s->swapping = 1;
    s->t_swap = cb_os_now_ns();
    pthread_mutex_unlock(&s->lock);
    cb_engine_counters(s->e, &before);
    int rc = cb_swap(s->e, s->opt.model_dir, &err);
    uint64_t ns = cb_os_now_ns() - s->t_swap;
    cb_engine_counters(s->e, &after);
    cb_engine_info(s->e, &info);
    pthread_mutex_lock(&s->lock);
    if (rc == 0) {
        if (memcmp(&s->chat, &s->e->rel->m.chat, sizeof s->chat) != 0) {
            s->chat = s->e->rel->m.chat;
            s->release++;
        }
        s->info = info;
        s->unhealthy_gone = after.unhealthy;
    } else {
        s->m.swaps_refused++;
        s->unhealthy_gone += after.unhealthy - before.unhealthy; /* the refused one's */
    }
    take_counters(s);
    s->swapping = s->swap_wanted = 0;
    pthread_mutex_unlock(&s->lock);
    cb_line_begin(&line, s->log, rc == 0 ? "info" : "error", rc == 0 ? "swapped" : "swap_refused");
    cb_line_str(&line, "model", info.name);
    cb_line_str(&line, "model_id", info.model_id);
    cb_line_ms(&line, "ms", ns);
    if (rc < 0)
        cb_line_str(&line, "message", err.msg);
    cb_line_end(&line);
    pthread_mutex_lock(&s->lock);
}

/* ---- the loop ----------------------------------------------------------- */

/* Under the lock: sleeps until something is to be done, at most a second, which
 * counts as progress: an idle engine is not a stuck one. */
static void sleep_idle(struct cb_server *s)
{
    cb_cond_wait_until(&s->wake, &s->lock, cb_os_now_ns() + 1000000000u);
    take_counters(s); /* a link has its troubles also while nobody asks */
}

static uint32_t count_running(const struct cb_server *s)
{
    uint32_t n = 0;
    for (uint32_t q = 0; q < s->opt.sequences; q++)
        n += s->seq_req[q] != NULL;
    return n;
}

static void *work(void *arg)
{
    struct cb_server *s = arg;
    pthread_mutex_lock(&s->lock);
    while (!s->stop) {
        atomic_fetch_add(&s->progress, 1);
        drop_expired(s);
        admit(s);
        if (count_running(s) == 0) {
            if (s->swap_wanted && !room_is_read(s)) {
                swap(s);
                continue;
            }
            wake_http(s);
            sleep_idle(s);
            continue;
        }
        pthread_mutex_unlock(&s->lock);
        prepare_new(s);
        uint32_t n = plan_steps(s);
        if (n > 0)
            run_steps(s, s->step, n);
        wake_http(s);
        pthread_mutex_lock(&s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

int cb_worker_start(struct cb_server *s, struct cb_err *err)
{
    pthread_attr_t attr;
    take_counters(s);
    s->chat = s->e->rel->m.chat;
    pthread_attr_init(&attr);
    int rc = pthread_attr_setstack(&attr, s->stack, CB_WORKER_STACK);
    if (rc == 0)
        rc = pthread_create(&s->worker, &attr, work, s);
    pthread_attr_destroy(&attr);
    if (rc != 0)
        return cb_fail(err, CB_EIO, "cannot start the engine's thread: %s", strerror(rc));
    pthread_setname_np(s->worker, "colibri-engine");
    return CB_OK;
}

int cb_worker_stop(struct cb_server *s)
{
    struct timespec pause = {0, 5 * 1000 * 1000};
    pthread_mutex_lock(&s->lock);
    s->stop = 1;
    cb_worker_wake(s);
    pthread_mutex_unlock(&s->lock);
    /* pthread_timedjoin_np() would go by a clock that may be set meanwhile. */
    for (uint64_t end = cb_os_now_ns() + STOP_NS; cb_os_now_ns() < end; nanosleep(&pause, NULL))
        if (pthread_tryjoin_np(s->worker, NULL) == 0)
            return 0;
    return -1;
}
#else
typedef int cb_serve_worker_is_posix;
#endif

/* engine.c — the public functions: plan, open, evaluate, report. */
#include "model/engine.h"

#include <string.h>

#include "core/os.h"
#include "core/sample.h"
#include "model/forward.h"
#include "model/layout.h"
#include "offload/offload.h"

/* ---- planning and opening ----------------------------------------------- */

static void hex32(const uint8_t id[16], char out[33])
{
    static const char digit[] = "0123456789abcdef";
    for (int i = 0; i < 16; i++) {
        out[2 * i] = digit[id[i] >> 4];
        out[2 * i + 1] = digit[id[i] & 15];
    }
    out[32] = '\0';
}

void cb_engine_info(const struct cb_engine *e, struct cb_info *info)
{
    const struct cb_manifest *m = &e->rel->m;
    memset(info, 0, sizeof *info);
    memcpy(info->name, m->name, sizeof info->name);
    memcpy(info->arch, m->arch, sizeof info->arch);
    memcpy(info->golden, m->golden, sizeof info->golden);
    hex32(m->model_id, info->model_id);
    strncpy(info->isa, e->kern.isa != NULL ? e->kern.isa : "", sizeof info->isa - 1);
    info->n_layer = m->n_layer;
    info->n_embd = m->n_embd;
    info->n_head = m->n_head;
    info->n_head_kv = m->n_head_kv;
    info->head_dim = m->head_dim;
    info->n_vocab = m->n_vocab;
    info->n_ff = m->n_ff;
    info->n_expert = m->n_expert;
    info->n_expert_used = m->n_used;
    info->n_expert_ff = m->n_expert_ff;
    info->n_moe_layer = cb_manifest_moe_layers(m);
    info->ctx = e->opt.ctx;
    info->ctx_train = m->ctx_train;
    info->batch = e->opt.batch;
    info->threads = e->opt.threads;
    info->experts_loaded = e->n_slot;
    info->bos = e->rel->text_bos;
    info->eos = e->rel->text_eos;
    info->add_bos = e->rel->text_add_bos;
}

/* Everything up to the sum: files, options, kernels, counted layout. */
static int make_plan(struct cb_engine *draft, struct cb_files *f, const struct cb_options *opt,
                     struct cb_ledger *ledger, struct cb_err *err)
{
    const char *why = "";
    struct cb_arena count;
    memset(draft, 0, sizeof *draft);
    memset(ledger, 0, sizeof *ledger);
    memset(&count, 0, sizeof count);
    draft->rel = &draft->release[0]; /* also what a failed plan is asked about */
    int rc = cb_files_open(f, opt->model_dir, err);
    if (rc != 0)
        return rc;
    draft->rel->m = *f->m;
    draft->opt = *opt;
    draft->rel->text_bos = draft->rel->text_eos = UINT32_MAX;
    if ((rc = cb_options_resolve(&draft->opt, f->m, err)) != 0)
        goto out;
    if (cb_kernels_init(&draft->kern, opt->isa, &why) != 0) {
        rc = cb_fail(err, CB_EUNSUPPORTED, "isa %s: %s", opt->isa != NULL ? opt->isa : "(best)",
                     why);
        goto out;
    }
    cb_arena_take(&count, CB_L_DENSE, 1, sizeof *draft);
    if ((rc = cb_layout(draft, &count, f, err)) != 0)
        goto out;
    for (int i = 0; i < CB_L_COUNT; i++) {
        ledger->bytes[i] = count.line[i];
        ledger->total += count.line[i];
    }
    draft->block_bytes = count.used;
    ledger->slots = draft->n_slot;
    ledger->records = cb_manifest_moe_layers(f->m) * f->m->n_expert;
    ledger->slot_bytes = draft->slot_bytes;
    rc = cb_ledger_check(&draft->opt, ledger, err);
out:
    if (rc != 0)
        cb_files_close(f);
    return rc;
}

int cb_plan(const struct cb_options *opt, struct cb_ledger *ledger, struct cb_info *info,
            struct cb_err *err)
{
    struct cb_files f;
    struct cb_engine *draft = cb_os_map(sizeof *draft, 0, err);
    if (draft == NULL)
        return CB_EIO;
    int rc = make_plan(draft, &f, opt, ledger, err);
    if (rc == 0)
        cb_files_close(&f);
    if (info != NULL)
        cb_engine_info(draft, info);
    cb_os_unmap(draft, sizeof *draft);
    return rc;
}

/* Maps the block, lays everything out in it and loads it. */
static int build(const struct cb_engine *draft, struct cb_files *f, struct cb_engine **out,
                 struct cb_err *err)
{
    struct cb_arena a;
    memset(&a, 0, sizeof a);
    a.size = draft->block_bytes;
    a.base = cb_os_map(a.size, draft->opt.lock != 0, err);
    if (a.base == NULL)
        return CB_EIO;
    struct cb_engine *e = cb_arena_take(&a, CB_L_DENSE, 1, sizeof *e);
    *e = *draft;
    e->rel = &e->release[0];
    e->block = a.base;
    int rc = cb_layout(e, &a, f, err);
    if (rc == 0)
        rc = cb_pool_open(&e->pool, e->opt.threads, err);
    if (rc == 0)
        rc = cb_load(e, e->rel, f, err);
    if (rc == 0)
        rc = cb_store_open(&e->store, f, &e->opt, &e->counters, err);
    if (rc == 0)
        rc = cb_watch_open(&e->watch, &e->opt, &e->store, err);
    if (rc == 0)
        rc = cb_forward_prepare(e, err);
    if (rc == 0)
        rc = cb_offload_open(e, err);
    if (rc != 0) {
        cb_engine_close(e);
        return rc;
    }
    e->opt.model_dir = NULL;
    e->opt.isa = NULL;
    e->opt.pin_file = NULL;
    e->opt.offload = NULL;
    *out = e;
    return 0;
}

int cb_engine_open(const struct cb_options *opt, struct cb_engine **out, struct cb_err *err)
{
    struct cb_files f;
    struct cb_ledger ledger;
    *out = NULL;
    struct cb_engine *draft = cb_os_map(sizeof *draft, 0, err);
    if (draft == NULL)
        return CB_EIO;
    int rc = make_plan(draft, &f, opt, &ledger, err);
    if (rc == 0) {
        rc = build(draft, &f, out, err);
        cb_files_close(&f);
    }
    if (rc == 0)
        (*out)->ledger = ledger;
    cb_os_unmap(draft, sizeof *draft);
    return rc;
}

void cb_engine_close(struct cb_engine *e)
{
    if (e == NULL)
        return;
    cb_offload_close(e->offload);
    cb_watch_close(&e->watch);
    cb_pool_close(&e->pool);
    cb_store_close(&e->store);
    cb_arena_forget(e->block, e->block_bytes);
    cb_os_unmap(e->block, e->block_bytes);
}

void cb_engine_ledger(const struct cb_engine *e, struct cb_ledger *ledger)
{
    *ledger = e->ledger;
}

/* ---- tokens in, logits out ---------------------------------------------- */

void cb_reset(struct cb_engine *e)
{
    e->pos[0] = 0;
}

uint32_t cb_position(const struct cb_engine *e)
{
    return e->pos[0];
}

struct collect {
    float *all;
    uint32_t n_vocab;
};

static void collect_logits(void *ud, uint32_t i, const float *logits)
{
    const struct collect *c = ud;
    memcpy(c->all + (size_t)i * c->n_vocab, logits, c->n_vocab * sizeof *logits);
}

int cb_eval(struct cb_engine *e, const int32_t *tokens, uint32_t n, float *all, int32_t *experts,
            struct cb_err *err)
{
    struct collect c = {all, e->rel->m.n_vocab};
    return cb_forward(e, tokens, n, all != NULL ? collect_logits : NULL, &c, experts, err);
}

const float *cb_logits(const struct cb_engine *e)
{
    return e->w.last_logits;
}

void cb_engine_counters(const struct cb_engine *e, struct cb_counters *c)
{
    cb_store_counters(&e->store, c);
    if (e->offload != NULL)
        cb_offload_counters(e->offload, c);
}

const uint64_t *cb_route_ns(const struct cb_engine *e)
{
    return e->route_ns;
}

const int32_t *cb_last_experts(const struct cb_engine *e)
{
    return e->last_experts;
}

const float *cb_last_weights(const struct cb_engine *e)
{
    return e->last_weights;
}

/* ---- text and sampling -------------------------------------------------- */

int cb_encode(const struct cb_engine *e, const char *text, size_t n, int special, int strict_utf8,
              int32_t *ids, size_t cap, struct cb_err *err)
{
    if (n > e->text_max)
        return cb_fail(err, CB_ECONTEXT, "the text has %zu bytes; at most %zu fit a context of %u",
                       n, e->text_max, e->opt.ctx);
    return cb_text_encode(&e->rel->text, text, n, special, strict_utf8, ids, cap, e->text_scratch,
                          cb_text_scratch_bytes(e->text_max), err);
}

const char *cb_token_bytes(const struct cb_engine *e, int32_t id, int special, size_t *len)
{
    return cb_text_token(&e->rel->text, id, special, len);
}

int cb_is_eog(const struct cb_engine *e, int32_t id)
{
    return cb_text_is_eog(&e->rel->text, id);
}

int cb_sample(struct cb_engine *e, const float *logits, const struct cb_sampling *s, uint64_t n,
              const int32_t *recent, uint32_t n_recent, int32_t *id, struct cb_err *err)
{
    return cb_sample_core(e->sample_weight, e->sample_index, logits, e->rel->m.n_vocab, s, n, recent,
                          n_recent, id, err);
}

/* ---- build facts -------------------------------------------------------- */

uint32_t cb_abi(void)
{
    return CB_ABI;
}

size_t cb_sizeof(const char *name)
{
    static const struct {
        const char *name;
        size_t bytes;
    } sizes[] = {
        {"cb_err", sizeof(struct cb_err)},
        {"cb_options", sizeof(struct cb_options)},
        {"cb_ledger", sizeof(struct cb_ledger)},
        {"cb_info", sizeof(struct cb_info)},
        {"cb_counters", sizeof(struct cb_counters)},
        {"cb_offload_info", sizeof(struct cb_offload_info)},
        {"cb_sampling", sizeof(struct cb_sampling)},
        {"cb_gen_result", sizeof(struct cb_gen_result)},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        if (strcmp(name, sizes[i].name) == 0)
            return sizes[i].bytes;
    return 0;
}

const char *cb_isa_list(void)
{
    return cb_kernels_built();
}

const char *cb_isa_best(void)
{
    struct cb_kernels k;
    const char *why = "";
    return cb_kernels_init(&k, NULL, &why) == 0 ? k.isa : "none";
}

/* layout.c — see layout.h. Runs twice with the same code: counting, then for real. */
#include "model/layout.h"

#include <stdio.h>
#include <string.h>

/* Code, libc and what the kernel keeps for us; measured at 0.6 to 1.4 MiB. */
#define RUNTIME_BYTES (2u << 20)

static uint32_t min32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint32_t max32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

int cb_options_resolve(struct cb_options *opt, const struct cb_manifest *m, struct cb_err *err)
{
    if (opt->ctx == 0)
        opt->ctx = min32(m->ctx_train, 4096);
    if (opt->batch == 0)
        opt->batch = 32;
    if (opt->threads == 0)
        opt->threads = min32(cb_os_physical_cores(), CB_POOL_MAX);
    if (opt->ctx < 16 || opt->ctx > m->ctx_train)
        return cb_fail(err, CB_EINVAL, "ctx %u is outside 16 to %u, what the model was trained for",
                       opt->ctx, m->ctx_train);
    if (opt->batch > CB_BATCH_MAX)
        return cb_fail(err, CB_EINVAL, "batch %u is more than %u", opt->batch, CB_BATCH_MAX);
    if (opt->threads > CB_POOL_MAX)
        return cb_fail(err, CB_EINVAL, "threads %u is more than %u", opt->threads, CB_POOL_MAX);
    if (opt->kv_type != CB_KV_F16 && opt->kv_type != CB_KV_F32)
        return cb_fail(err, CB_EINVAL, "kv type %u is unknown", opt->kv_type);
    opt->batch = min32(opt->batch, opt->ctx);
    return 0;
}

/* ---- dense tensors ------------------------------------------------------ */

struct want {
    const char *name;
    uint32_t rows, cols;   /* rows 1 = a vector */
    int optional;
    struct cb_mat *mat;    /* where a matrix goes … */
    const float **vec;     /* … or a vector */
};

/* Finds the tensor, checks its shape and takes its room. */
static int take_tensor(struct cb_engine *e, struct cb_arena *a, const struct cb_files *f,
                       const struct want *w, struct cb_err *err)
{
    struct cb_dense_entry t;
    if (w->mat != NULL)
        memset(w->mat, 0, sizeof *w->mat);
    else
        *w->vec = NULL;
    for (uint32_t i = 0; i < f->dense.count; i++) {
        if (strncmp((const char *)f->dense_dir + (uint64_t)i * CB_DENSE_ENTRY, w->name, 48) != 0)
            continue;
        int rc = cb_dense_entry_parse(f->dense_dir, i, &f->dense, &t, err);
        if (rc != 0)
            return rc;
        if (t.rows != w->rows || t.cols != w->cols)
            return cb_fail(err, CB_EFORMAT, "dense.coli: %s is %u x %u; the geometry says %u x %u",
                           w->name, t.rows, t.cols, w->rows, w->cols);
        void *p = cb_arena_take(a, CB_L_DENSE, t.size, 1);
        if (w->mat != NULL) {
            if (e->kern.gemm[t.type] == NULL)
                return cb_fail(err, CB_EUNSUPPORTED, "dense.coli: %s: no kernel for type %u",
                               w->name, t.type);
            cb_mat_init(w->mat, t.type, t.rows, t.cols, p);
        } else {
            *w->vec = p;
        }
        return 0;
    }
    return w->optional ? 0 : cb_fail(err, CB_EFORMAT, "dense.coli: %s is missing", w->name);
}


static int take_layer(struct cb_engine *e, struct cb_arena *a, const struct cb_files *f,
                      uint32_t il, struct cb_layer *l, struct cb_err *err)
{
    const struct cb_manifest *m = &e->m;
    uint32_t d = m->n_embd, nq = m->n_head * m->head_dim, nk = m->n_head_kv * m->head_dim;
    int dense = m->n_expert == 0 || il < m->n_dense_layer;
    int shared = !dense && m->n_shexp_ff > 0;
    uint32_t qn = m->qk_norm == CB_QK_ROW ? nq : m->head_dim;
    uint32_t kn = m->qk_norm == CB_QK_ROW ? nk : m->head_dim;
    int no_qk = m->qk_norm == CB_QK_NONE;
    const struct want wants[] = {
        {"attn_norm", 1, d, 0, NULL, &l->attn_norm},
        {"attn_q", nq, d, 0, &l->q, NULL},
        {"attn_k", nk, d, 0, &l->k, NULL},
        {"attn_v", nk, d, 0, &l->v, NULL},
        {"attn_output", d, nq, 0, &l->o, NULL},
        {"attn_q_bias", 1, nq, 1, NULL, &l->q_bias},
        {"attn_k_bias", 1, nk, 1, NULL, &l->k_bias},
        {"attn_v_bias", 1, nk, 1, NULL, &l->v_bias},
        {"attn_output_bias", 1, d, 1, NULL, &l->o_bias},
        {"attn_q_norm", 1, qn, no_qk, NULL, &l->q_norm},
        {"attn_k_norm", 1, kn, no_qk, NULL, &l->k_norm},
        {"ffn_norm", 1, d, 0, NULL, &l->ffn_norm},
        {"ffn_gate", m->n_ff, d, !dense, &l->ffn.gate, NULL},
        {"ffn_up", m->n_ff, d, !dense, &l->ffn.up, NULL},
        {"ffn_down", d, m->n_ff, !dense, &l->ffn.down, NULL},
        {"router", m->n_expert, d, dense, &l->router, NULL},
        {"shexp_gate", m->n_shexp_ff, d, !shared, &l->shexp.gate, NULL},
        {"shexp_up", m->n_shexp_ff, d, !shared, &l->shexp.up, NULL},
        {"shexp_down", d, m->n_shexp_ff, !shared, &l->shexp.down, NULL},
        {"shexp_router", 1, d, 1, NULL, &l->shexp_router},
    };
    for (size_t i = 0; i < sizeof wants / sizeof wants[0]; i++) {
        char name[48];
        struct want w = wants[i];
        snprintf(name, sizeof name, "blk.%u.%s", il, w.name);
        w.name = name;
        int rc = take_tensor(e, a, f, &w, err);
        if (rc != 0)
            return rc;
    }
    if (!dense && l->router.type != CB_F32)
        return cb_fail(err, CB_EFORMAT, "dense.coli: blk.%u.router must be F32", il);
    return 0;
}

static int take_dense(struct cb_engine *e, struct cb_arena *a, const struct cb_files *f,
                      struct cb_layer *layers, struct cb_err *err)
{
    const struct cb_manifest *m = &e->m;
    uint32_t d = m->n_embd, V = m->n_vocab;
    const struct want wants[] = {
        {"token_embd", V, d, 0, &e->token_embd, NULL},
        {"output_norm", 1, d, 0, NULL, &e->output_norm},
        {"output", V, d, 1, &e->output, NULL},
        {"rope_freqs", 1, m->rope_dim / 2, 1, NULL, &e->rope_freqs},
    };
    for (size_t i = 0; i < sizeof wants / sizeof wants[0]; i++) {
        int rc = take_tensor(e, a, f, &wants[i], err);
        if (rc != 0)
            return rc;
    }
    if (e->output.rows == 0)
        e->output = e->token_embd;
    for (uint32_t il = 0; il < m->n_layer; il++) {
        struct cb_layer spare; /* while counting there is no table to fill */
        struct cb_layer *l = layers != NULL ? &layers[il] : &spare;
        int rc = take_layer(e, a, f, il, l, err);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* ---- experts ------------------------------------------------------------ */

static int take_experts(struct cb_engine *e, struct cb_arena *a, const struct cb_files *f,
                        struct cb_err *err)
{
    const struct cb_manifest *m = &e->m;
    struct cb_experts *s = &e->experts;
    s->n_layer = cb_manifest_moe_layers(m);
    s->n_expert = m->n_expert;
    uint64_t n = (uint64_t)s->n_layer * s->n_expert;
    s->ffn = cb_arena_take(a, CB_L_EXPERTS, n, sizeof *s->ffn);
    for (uint64_t i = 0; i < n; i++) {
        const struct cb_expert_entry *r = &f->record[i];
        const uint8_t *p = cb_arena_take(a, CB_L_EXPERTS, r->size, 1);
        struct cb_mat part[3];
        for (int k = 0; k < 3; k++) {
            if (e->kern.gemm[r->part[k].type] == NULL)
                return cb_fail(err, CB_EUNSUPPORTED, "layer %u, expert %u: no kernel for type %u",
                               r->layer, r->expert, r->part[k].type);
            cb_mat_init(&part[k], r->part[k].type, r->part[k].rows, r->part[k].cols,
                        p != NULL ? p + r->part[k].offset : NULL);
        }
        if (s->ffn != NULL)
            s->ffn[i] = (struct cb_ffn){part[0], part[1], part[2]};
    }
    return 0;
}

/* ---- activations and the rest ------------------------------------------- */

static void take_kv(struct cb_engine *e, struct cb_arena *a)
{
    const struct cb_manifest *m = &e->m;
    uint64_t item = e->opt.kv_type == CB_KV_F32 ? 4 : 2;
    uint64_t n = (uint64_t)m->n_head_kv * m->head_dim * e->opt.ctx;
    for (uint32_t il = 0; il < m->n_layer; il++) {
        void *k = cb_arena_take(a, CB_L_KV, n, item);
        void *v = cb_arena_take(a, CB_L_KV, n, item);
        if (e->layer != NULL) {
            e->layer[il].k_cache = k;
            e->layer[il].v_cache = v;
        }
    }
}

static float *take_f32(struct cb_arena *a, uint64_t rows, uint32_t cols)
{
    return cb_arena_take(a, CB_L_ACT, rows * cb_pad_group(cols), sizeof(float));
}

static void take_work(struct cb_engine *e, struct cb_arena *a)
{
    const struct cb_manifest *m = &e->m;
    struct cb_work *w = &e->w;
    uint32_t d = m->n_embd, nq = m->n_head * m->head_dim, nk = m->n_head_kv * m->head_dim;
    uint64_t T = e->opt.batch, K = m->n_used > 0 ? m->n_used : 1, R = T * K + T;
    w->ff = cb_pad_group(max32(max32(m->n_ff, m->n_expert_ff), m->n_shexp_ff));
    w->x = take_f32(a, T, d);
    w->xn = take_f32(a, T, d);
    w->q = take_f32(a, T, nq);
    w->k = take_f32(a, T, nk);
    w->v = take_f32(a, T, nk);
    w->att = take_f32(a, T, nq);
    w->proj = take_f32(a, T, d);
    w->score = take_f32(a, e->opt.threads, e->opt.ctx);
    w->route = take_f32(a, T, m->n_expert);
    w->gate = take_f32(a, R, w->ff);
    w->up = take_f32(a, R, w->ff);
    w->out = take_f32(a, R, d);
    w->rope_cos = take_f32(a, T, m->rope_dim / 2);
    w->rope_sin = take_f32(a, T, m->rope_dim / 2);
    w->inv_freq = cb_arena_take(a, CB_L_ACT, m->rope_dim / 2, sizeof(double));
    w->logits = take_f32(a, CB_LOGIT_TILE, m->n_vocab);
    w->chosen = cb_arena_take(a, CB_L_ACT, T * K, sizeof *w->chosen);
    w->weight = cb_arena_take(a, CB_L_ACT, T * K, sizeof *w->weight);
    w->seg = cb_arena_take(a, CB_L_ACT, (uint64_t)m->n_expert + 1, sizeof *w->seg);
    w->row_token = cb_arena_take(a, CB_L_ACT, R, sizeof *w->row_token);
    w->row_out = cb_arena_take(a, CB_L_ACT, R, sizeof *w->row_out);
    cb_acts_take(&w->in, a, T, max32(d, nq));
    cb_acts_take(&w->mid, a, R, w->ff);
    uint64_t n_moe = cb_manifest_moe_layers(m);
    e->route_ns = cb_arena_take(a, CB_L_ACT, n_moe, sizeof *e->route_ns);
    e->last_experts = cb_arena_take(a, CB_L_ACT, n_moe * K, sizeof *e->last_experts);
    e->last_weights = cb_arena_take(a, CB_L_ACT, n_moe * K, sizeof *e->last_weights);
    e->sample_weight = cb_arena_take(a, CB_L_ACT, m->n_vocab, sizeof *e->sample_weight);
    e->sample_index = cb_arena_take(a, CB_L_ACT, m->n_vocab, sizeof *e->sample_index);
}

int cb_layout(struct cb_engine *e, struct cb_arena *a, const struct cb_files *f,
              struct cb_err *err)
{
    int rc;
    const struct cb_manifest *m = &e->m;
    e->layer = cb_arena_take(a, CB_L_DENSE, m->n_layer, sizeof *e->layer);
    if ((rc = take_dense(e, a, f, e->layer, err)) != 0 || (rc = take_experts(e, a, f, err)) != 0)
        return rc;
    take_kv(e, a);
    take_work(e, a);
    /* A token stands for 4 to 5 bytes of common text; 16 leave room for runs. */
    e->text_max = (size_t)max32(e->opt.ctx, 4096) * 16;
    e->text_file = cb_arena_take(a, CB_L_TOKENIZER, f->tokenizer_bytes, 1);
    e->text_scratch = cb_arena_take(a, CB_L_TOKENIZER, cb_text_scratch_bytes(e->text_max), 1);
    if (a->overflow)
        return cb_fail(err, CB_EBUDGET, "the plan does not fit in 64 bits");
    a->line[CB_L_STACKS] = (uint64_t)e->opt.threads * CB_POOL_STACK;
    a->line[CB_L_RUNTIME] = RUNTIME_BYTES;
    return 0;
}

/* ---- the ledger --------------------------------------------------------- */

const char *cb_ledger_name(int line)
{
    static const char *const names[CB_L_COUNT] = {
        "dense weights", "experts", "KV cache", "activations", "tokenizer", "stacks", "server",
        "runtime",
    };
    return line >= 0 && line < CB_L_COUNT ? names[line] : "?";
}

static double mib(uint64_t bytes)
{
    return (double)bytes / 1048576.0;
}

int cb_ledger_check(const struct cb_options *opt, struct cb_ledger *l, struct cb_err *err)
{
    l->budget = opt->budget;
    l->available = cb_os_mem_available();
    uint64_t limit = opt->budget != 0 && opt->budget < l->available ? opt->budget : l->available;
    if (l->total <= limit || opt->over_budget)
        return 0;
    char with[32] = "none given";
    if (opt->budget != 0)
        snprintf(with, sizeof with, "%.1f MiB", mib(opt->budget));
    return cb_fail(err, CB_EBUDGET,
                   "needs %.1f MiB = dense %.1f + experts %.1f + KV %.1f + activations %.1f + "
                   "tokenizer %.1f + stacks, runtime %.1f; budget %s, the machine has %.1f MiB "
                   "left; lower ctx or batch, or pass --over-budget",
                   mib(l->total), mib(l->bytes[CB_L_DENSE]), mib(l->bytes[CB_L_EXPERTS]),
                   mib(l->bytes[CB_L_KV]), mib(l->bytes[CB_L_ACT]), mib(l->bytes[CB_L_TOKENIZER]),
                   mib(l->bytes[CB_L_STACKS] + l->bytes[CB_L_SERVER] + l->bytes[CB_L_RUNTIME]),
                   with, mib(l->available));
}

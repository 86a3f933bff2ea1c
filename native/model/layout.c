/* layout.c — see layout.h. Runs twice with the same code: counting, then for real. */
#include "model/layout.h"

#include <stdio.h>
#include <string.h>

#include "model/kv.h"
#include "offload/offload.h"

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
    if (opt->kv_type > CB_KV_Q8_0)
        return cb_fail(err, CB_EINVAL, "kv type %u is unknown", opt->kv_type);
    if (cb_kv_row_bytes(opt->kv_type, m->head_dim) == 0)
        return cb_fail(err, CB_EUNSUPPORTED, "kv q8_0 needs heads of a multiple of 32; this model "
                       "has %u", m->head_dim);
    if (opt->weights > CB_WEIGHTS_PRELOAD || opt->cache_policy > CB_CACHE_LFU ||
        opt->on_bad > CB_BAD_NEXT || opt->on_miss > CB_MISS_ZEROS ||
        opt->readers > CB_READERS_MAX)
        return cb_fail(err, CB_EINVAL, "weights, cache policy, on-bad, on-miss or readers is out "
                       "of range");
    if (opt->sequences == 0)
        opt->sequences = 1;
    if (opt->sequences > CB_SEQ_MAX)
        return cb_fail(err, CB_EINVAL, "sequences %u is more than %u", opt->sequences, CB_SEQ_MAX);
    opt->batch = max32(min32(opt->batch, opt->ctx), opt->sequences); /* a decode step fits */
    return cb_offload_check(opt, m, err);
}

/* ---- dense tensors ------------------------------------------------------ */

struct want {
    const char *name;
    uint32_t rows, cols;   /* rows 1 = a vector */
    int optional;
    struct cb_mat *mat;    /* where a matrix goes … */
    const float **vec;     /* … or a vector */
};

uint32_t cb_dense_find(const struct cb_files *f, const char *name)
{
    for (uint32_t i = 0; i < f->dense.count; i++)
        if (strncmp((const char *)f->dense_dir + (uint64_t)i * CB_DENSE_ENTRY, name, 48) == 0)
            return i;
    return UINT32_MAX;
}

/* Finds the tensor, checks its shape and takes its room. */
static int take_tensor(struct cb_engine *e, struct cb_arena *a, const struct cb_files *f,
                       const struct want *w, struct cb_err *err)
{
    struct cb_dense_entry t;
    if (w->mat != NULL)
        memset(w->mat, 0, sizeof *w->mat);
    else
        *w->vec = NULL;
    uint32_t i = cb_dense_find(f, w->name);
    if (i == UINT32_MAX)
        return w->optional ? 0 : cb_fail(err, CB_EFORMAT, "dense.coli: %s is missing", w->name);
    int rc = cb_dense_entry_parse(f->dense_dir, i, &f->dense, &t, err);
    if (rc != 0)
        return rc;
    if (t.rows != w->rows || t.cols != w->cols)
        return cb_fail(err, CB_EFORMAT, "dense.coli: %s is %u x %u; the geometry says %u x %u",
                       w->name, t.rows, t.cols, w->rows, w->cols);
    if (w->mat == NULL) {
        *w->vec = cb_arena_take(a, CB_L_DENSE, t.size, 1);
        return 0;
    }
    if (e->kern.gemm[t.type] == NULL)
        return cb_fail(err, CB_EUNSUPPORTED, "dense.coli: %s: no kernel for type %u", w->name,
                       t.type);
    /* A matrix of one row is stored like a vector, but products read whole groups. */
    cb_mat_init(w->mat, t.type, t.rows, t.cols,
                cb_arena_take(a, CB_L_DENSE, cb_mat_bytes(t.type, t.rows, t.cols), 1));
    return 0;
}

static int take_layer(struct cb_engine *e, const struct cb_manifest *m, struct cb_arena *a,
                      const struct cb_files *f, uint32_t il, struct cb_layer *l,
                      struct cb_err *err)
{
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
    l->router_norm = dense ? NULL : cb_arena_take(a, CB_L_DENSE, m->n_expert, sizeof(float));
    return 0;
}

static int take_dense(struct cb_engine *e, struct cb_release *rel, struct cb_arena *a,
                      const struct cb_files *f, struct cb_err *err)
{
    const struct cb_manifest *m = &rel->m;
    uint32_t d = m->n_embd, V = m->n_vocab;
    const struct want wants[] = {
        {"token_embd", V, d, 0, &rel->token_embd, NULL},
        {"output_norm", 1, d, 0, NULL, &rel->output_norm},
        {"output", V, d, 1, &rel->output, NULL},
        {"rope_freqs", 1, m->rope_dim / 2, 1, NULL, &rel->rope_freqs},
    };
    for (size_t i = 0; i < sizeof wants / sizeof wants[0]; i++) {
        int rc = take_tensor(e, a, f, &wants[i], err);
        if (rc != 0)
            return rc;
    }
    if (rel->output.rows == 0)
        rel->output = rel->token_embd;
    for (uint32_t il = 0; il < m->n_layer; il++) {
        struct cb_layer spare; /* while counting there is no table to fill */
        struct cb_layer *l = a->base != NULL ? &rel->layer[il] : &spare;
        int rc = take_layer(e, m, a, f, il, l, err);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* ---- activations and the rest ------------------------------------------- */

/* One cache for every release: it holds no weights. */
static void take_kv(struct cb_engine *e, struct cb_arena *a)
{
    const struct cb_manifest *m = &e->rel->m;
    uint64_t row = cb_kv_row_bytes(e->opt.kv_type, m->head_dim);
    /* The golden is about F16: a narrower cache borrows, so take room for it. */
    uint64_t least = cb_kv_row_bytes(CB_KV_F16, m->head_dim) * CB_GOLDEN_TOKENS;
    for (uint32_t il = 0; il < m->n_layer; il++) {
        uint64_t head = row * cb_kv_len(e, il) > least ? row * cb_kv_len(e, il) : least;
        uint64_t heads = (uint64_t)e->opt.sequences * m->n_head_kv;
        void *k = cb_arena_take(a, CB_L_KV, heads, head);
        void *v = cb_arena_take(a, CB_L_KV, heads, head);
        for (int i = 0; i < 2 && a->base != NULL; i++)
            if (e->release[i].layer != NULL) {
                e->release[i].layer[il].k_cache = k;
                e->release[i].layer[il].v_cache = v;
            }
    }
}

static float *take_f32(struct cb_arena *a, uint64_t rows, uint32_t cols)
{
    return cb_arena_take(a, CB_L_ACT, rows * cb_pad_group(cols), sizeof(float));
}

static void take_work(struct cb_engine *e, struct cb_arena *a)
{
    const struct cb_manifest *m = &e->rel->m;
    struct cb_work *w = &e->w;
    uint32_t d = m->n_embd, nq = m->n_head * m->head_dim, nk = m->n_head_kv * m->head_dim;
    e->used_max = m->n_used + (m->n_used > 0 && e->opt.extra_expert != 0);
    uint64_t T = e->opt.batch, K = e->used_max > 0 ? e->used_max : 1, R = T * K + T;
    w->ff = cb_pad_group(max32(max32(m->n_ff, m->n_expert_ff), m->n_shexp_ff));
    w->place = cb_arena_take(a, CB_L_ACT, T, sizeof *w->place);
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
    w->logits = take_f32(a, max32(CB_LOGIT_TILE, e->opt.sequences), m->n_vocab);
    e->pos = cb_arena_take(a, CB_L_ACT, e->opt.sequences, sizeof *e->pos);
    w->chosen = cb_arena_take(a, CB_L_ACT, T * K, sizeof *w->chosen);
    w->weight = cb_arena_take(a, CB_L_ACT, T * K, sizeof *w->weight);
    w->seg = cb_arena_take(a, CB_L_ACT, (uint64_t)m->n_expert + 1, sizeof *w->seg);
    w->distinct = cb_arena_take(a, CB_L_ACT, m->n_expert, sizeof *w->distinct);
    w->row_first = cb_arena_take(a, CB_L_ACT, (uint64_t)m->n_expert + 1, sizeof *w->row_first);
    w->exclude = cb_arena_take(a, CB_L_ACT, m->n_expert, sizeof *w->exclude);
    w->guess = take_f32(a, 1, m->n_expert);
    w->guess_chosen = cb_arena_take(a, CB_L_ACT, K + 1, sizeof *w->guess_chosen);
    w->guess_weight = cb_arena_take(a, CB_L_ACT, K + 1, sizeof *w->guess_weight);
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

int cb_release_layout(struct cb_engine *e, struct cb_release *rel, struct cb_arena *a,
                      const struct cb_files *f, struct cb_err *err)
{
    uint64_t from = a->used;
    unsigned char *room = a->base != NULL ? a->base + a->used : NULL;
    rel->m = *f->m;
    rel->layer = cb_arena_take(a, CB_L_DENSE, rel->m.n_layer, sizeof *rel->layer);
    int rc = take_dense(e, rel, a, f, err);
    rel->text_file = cb_arena_take(a, CB_L_TOKENIZER, f->tokenizer_bytes, 1);
    rel->text_bytes = f->tokenizer_bytes;
    if (rel->room == NULL) { /* a second layout in the same room keeps its bounds */
        rel->room = room;
        rel->room_bytes = a->used - from;
    }
    return rc;
}

/* What expert slots may take: what is left of the limit after all else. */
static int take_store(struct cb_engine *e, struct cb_arena *a, const struct cb_files *f,
                      struct cb_err *err)
{
    if (a->base == NULL) {
        uint64_t limit = cb_memory_limit(&e->opt);
        uint64_t fixed = a->used + (uint64_t)e->opt.threads * CB_POOL_STACK + RUNTIME_BYTES;
        uint64_t records = (uint64_t)cb_manifest_moe_layers(f->m) * f->m->n_expert;
        uint64_t tables = records * sizeof(struct cb_record) + (1u << 16) +
                          records * (sizeof(struct cb_slot) + 4);
        uint64_t room = limit > fixed + tables ? limit - fixed - tables : 0;
        uint32_t least;
        if (e->opt.over_budget)
            room = UINT64_MAX / 4;
        uint32_t fit = cb_store_slots(f, &e->opt, room, &least, &e->slot_bytes);
        /* Too little even for one token: count the least, the check refuses with the sum. */
        e->n_slot = fit > 0 ? fit : e->opt.weights == CB_WEIGHTS_PRELOAD ? (uint32_t)records : least;
        if (e->opt.weights == CB_WEIGHTS_LAZY)
            e->opt.lazy_limit_bytes = e->opt.over_budget ? 0 : room > 1 ? room : 1;
    }
    return cb_store_layout(&e->store, a, f, &e->opt, e->n_slot, e->slot_bytes, err);
}

int cb_layout(struct cb_engine *e, struct cb_arena *a, const struct cb_files *f,
              struct cb_err *err)
{
    int rc;
    for (uint32_t i = 0; i < 1u + (e->opt.hot_swap != 0); i++)
        if ((rc = cb_release_layout(e, &e->release[i], a, f, err)) != 0)
            return rc;
    take_kv(e, a);
    take_work(e, a);
    /* A token stands for 4 to 5 bytes of common text; 16 leave room for runs. Texts end
     * at 16 MiB all the same. */
    e->text_max = (size_t)min32(max32(e->opt.ctx, 4096), 1u << 20) * 16;
    e->text_scratch = cb_arena_take(a, CB_L_TOKENIZER, cb_text_scratch_bytes(e->text_max), 1);
    if (e->opt.offload != NULL)
        cb_offload_layout(&e->offload, a, e);
    if ((rc = take_store(e, a, f, err)) != 0)
        return rc;
    if (a->overflow)
        return cb_fail(err, CB_EBUDGET, "the plan does not fit in 64 bits");
    a->line[CB_L_STACKS] += (uint64_t)e->opt.threads * CB_POOL_STACK;
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

uint64_t cb_memory_limit(const struct cb_options *opt)
{
    uint64_t available = cb_os_mem_available();
    if (opt->budget == 0) /* leave the machine a twentieth */
        return available - available / 20;
    return opt->budget < available ? opt->budget : available;
}

int cb_ledger_check(const struct cb_options *opt, struct cb_ledger *l, struct cb_err *err)
{
    l->budget = opt->budget;
    l->available = cb_os_mem_available();
    if (l->total <= cb_memory_limit(opt) || opt->over_budget)
        return 0;
    char with[32] = "none given";
    if (opt->budget != 0)
        snprintf(with, sizeof with, "%.1f MiB", mib(opt->budget));
    return cb_fail(err, CB_EBUDGET,
                   "needs %.1f MiB = dense %.1f + experts %.1f (%u of %u) + KV %.1f + activations "
                   "%.1f + tokenizer %.1f + rest %.1f; budget %s, the machine has %.1f MiB left; "
                   "lower ctx or batch, or --over-budget",
                   mib(l->total), mib(l->bytes[CB_L_DENSE]), mib(l->bytes[CB_L_EXPERTS]), l->slots,
                   l->records, mib(l->bytes[CB_L_KV]), mib(l->bytes[CB_L_ACT]),
                   mib(l->bytes[CB_L_TOKENIZER]),
                   mib(l->bytes[CB_L_STACKS] + l->bytes[CB_L_SERVER] + l->bytes[CB_L_RUNTIME]),
                   with, mib(l->available));
}

/* attention.c — grouped-query attention with RoPE over the KV cache. */
#include "model/forward.h"

/* Rotates one head's row x [hd] by the position's angles: pairs (2i, 2i+1) for
 * `norm`, (i, i + rope_dim/2) for `neox`; the rest of the head stays. */
static void rope_head(float *x, const float *cs, const float *sn, uint32_t half, enum cb_rope kind)
{
    for (uint32_t i = 0; i < half; i++) {
        uint32_t a = kind == CB_ROPE_NORM ? 2 * i : i;
        uint32_t b = kind == CB_ROPE_NORM ? 2 * i + 1 : i + half;
        float xa = x[a], xb = x[b];
        x[a] = xa * cs[i] - xb * sn[i];
        x[b] = xa * sn[i] + xb * cs[i];
    }
}

static void bias_norm_rope(const struct cb_chunk *c, float *x, uint32_t n_head, const float *bias,
                           const float *norm, uint32_t t)
{
    const struct cb_engine *e = c->e;
    const struct cb_manifest *m = &e->m;
    uint32_t hd = m->head_dim, half = m->rope_dim / 2, pad = cb_pad_group(half);
    if (bias != NULL)
        e->kern.add(x, bias, (size_t)n_head * hd);
    if (m->qk_norm == CB_QK_ROW)
        e->kern.rmsnorm(x, x, norm, (size_t)n_head * hd, m->norm_eps);
    for (uint32_t h = 0; h < n_head; h++) {
        if (m->qk_norm == CB_QK_HEAD)
            e->kern.rmsnorm(x + (size_t)h * hd, x + (size_t)h * hd, norm, hd, m->norm_eps);
        if (m->rope != CB_ROPE_NONE)
            rope_head(x + (size_t)h * hd, e->w.rope_cos + (size_t)t * pad,
                      e->w.rope_sin + (size_t)t * pad, half, m->rope);
    }
}

/* Copies row x [G][hd] to position pos of a cache [G][ctx][hd]. */
static void cache_put(const struct cb_engine *e, void *cache, const float *x, uint32_t pos)
{
    const struct cb_manifest *m = &e->m;
    uint32_t hd = m->head_dim;
    for (uint32_t g = 0; g < m->n_head_kv; g++) {
        size_t at = ((size_t)g * e->opt.ctx + pos) * hd;
        if (e->opt.kv_type == CB_KV_F32)
            for (uint32_t i = 0; i < hd; i++)
                ((float *)cache)[at + i] = x[(size_t)g * hd + i];
        else
            e->kern.f32_to_f16((uint16_t *)cache + at, x + (size_t)g * hd, hd);
    }
}

/* After the products: bias, norm and RoPE on q and k; k and v into the cache. */
static void qkv_rows(void *arg, uint32_t thread, uint32_t n_threads)
{
    struct cb_chunk *c = arg;
    struct cb_engine *e = c->e;
    const struct cb_manifest *m = &e->m;
    const struct cb_layer *l = &e->layer[c->il];
    uint32_t nq = cb_pad_group(m->n_head * m->head_dim);
    uint32_t nk = cb_pad_group(m->n_head_kv * m->head_dim);
    uint64_t lo, hi;
    cb_share(c->n, thread, n_threads, &lo, &hi);
    for (uint64_t t = lo; t < hi; t++) {
        float *k = e->w.k + t * nk, *v = e->w.v + t * nk;
        bias_norm_rope(c, e->w.q + t * nq, m->n_head, l->q_bias, l->q_norm, (uint32_t)t);
        bias_norm_rope(c, k, m->n_head_kv, l->k_bias, l->k_norm, (uint32_t)t);
        if (l->v_bias != NULL)
            e->kern.add(v, l->v_bias, (size_t)m->n_head_kv * m->head_dim);
        cache_put(e, l->k_cache, k, e->pos + (uint32_t)t);
        cache_put(e, l->v_cache, v, e->pos + (uint32_t)t);
    }
}

/* One head of one token against positions 0 … its own. */
static void one_head(const struct cb_engine *e, const struct cb_layer *l, uint32_t t, uint32_t h,
                     float *score)
{
    const struct cb_manifest *m = &e->m;
    uint32_t hd = m->head_dim, nq = cb_pad_group(m->n_head * hd);
    size_t n_pos = (size_t)e->pos + t + 1;
    size_t at = (size_t)(h / (m->n_head / m->n_head_kv)) * e->opt.ctx * hd;
    const float *q = e->w.q + (size_t)t * nq + (size_t)h * hd;
    float *o = e->w.att + (size_t)t * nq + (size_t)h * hd;
    int f32 = e->opt.kv_type == CB_KV_F32;
    if (f32)
        e->kern.attn_score_f32(score, q, (const float *)l->k_cache + at, n_pos, hd, m->attn_scale);
    else
        e->kern.attn_score_f16(score, q, (const uint16_t *)l->k_cache + at, n_pos, hd,
                               m->attn_scale);
    e->kern.softmax(score, n_pos);
    if (f32)
        e->kern.attn_mix_f32(o, score, (const float *)l->v_cache + at, n_pos, hd);
    else
        e->kern.attn_mix_f16(o, score, (const uint16_t *)l->v_cache + at, n_pos, hd);
}

/* (head, token) pairs over the threads, heads outermost so that one thread
 * stays with one part of the cache. */
static void heads_part(void *arg, uint32_t thread, uint32_t n_threads)
{
    struct cb_chunk *c = arg;
    struct cb_engine *e = c->e;
    float *score = e->w.score + (size_t)thread * cb_pad_group(e->opt.ctx);
    uint64_t lo, hi;
    cb_share((uint64_t)e->m.n_head * c->n, thread, n_threads, &lo, &hi);
    for (uint64_t i = lo; i < hi; i++)
        one_head(e, &e->layer[c->il], (uint32_t)(i % c->n), (uint32_t)(i / c->n), score);
}

static void att_prepare_rows(void *arg, uint32_t thread, uint32_t n_threads)
{
    struct cb_chunk *c = arg;
    struct cb_engine *e = c->e;
    uint32_t nq = e->m.n_head * e->m.head_dim;
    uint64_t lo, hi;
    cb_share(c->n, thread, n_threads, &lo, &hi);
    cb_acts_prepare(&e->w.in, &e->kern, cb_mat_wants(&e->layer[c->il].o), e->w.att,
                    cb_pad_group(nq), nq, lo, hi);
}

void cb_attention(struct cb_chunk *c)
{
    struct cb_engine *e = c->e;
    struct cb_work *w = &e->w;
    const struct cb_layer *l = &e->layer[c->il];
    uint32_t nq = cb_pad_group(e->m.n_head * e->m.head_dim);
    uint32_t nk = cb_pad_group(e->m.n_head_kv * e->m.head_dim);
    const struct cb_product qkv[3] = {{&l->q, w->q, nq}, {&l->k, w->k, nk}, {&l->v, w->v, nk}};
    const struct cb_product out = {&l->o, w->proj, cb_pad_group(e->m.n_embd)};
    cb_products(&e->pool, &e->kern, &w->in, c->n, qkv, 3);
    cb_rows_run(c, qkv_rows);
    cb_pool_run(&e->pool, heads_part, c);
    w->in.f32 = w->att;
    w->in.stride = nq;
    cb_rows_run(c, att_prepare_rows);
    cb_products(&e->pool, &e->kern, &w->in, c->n, &out, 1);
}

/* attention.c — grouped-query attention with RoPE over the KV cache. */
#include "model/forward.h"
#include "model/kv.h"

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
    const struct cb_manifest *m = &e->rel->m;
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

/* After the products: bias, norm and RoPE on q and k; k and v into the cache. */
static void qkv_rows(void *arg, uint32_t thread, uint32_t n_threads)
{
    struct cb_chunk *c = arg;
    struct cb_engine *e = c->e;
    const struct cb_manifest *m = &e->rel->m;
    const struct cb_layer *l = &e->rel->layer[c->il];
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
        cb_kv_put(e, c->il, l->k_cache, k, &e->w.place[t]);
        cb_kv_put(e, c->il, l->v_cache, v, &e->w.place[t]);
    }
}

/* One head of one token against the positions it sees: 0 … its own, or as many
 * as the layer's window holds. */
static void one_head(const struct cb_engine *e, uint32_t il, uint32_t t, uint32_t h, float *score)
{
    const struct cb_manifest *m = &e->rel->m;
    uint32_t hd = m->head_dim, nq = cb_pad_group(m->n_head * hd);
    const struct cb_place *at = &e->w.place[t];
    uint32_t n = at->pos + 1, from = 0, g = h / (m->n_head / m->n_head_kv);
    const float *q = e->w.q + (size_t)t * nq + (size_t)h * hd;
    if (m->windowed[il] && n > m->window) {
        from = n - m->window;
        n = m->window;
    }
    cb_kv_score(e, il, at->seq, g, q, score, from, n);
    e->kern.softmax(score, n);
    cb_kv_mix(e, il, at->seq, g, score, e->w.att + (size_t)t * nq + (size_t)h * hd, from, n);
}

/* (head, token) pairs over the threads, heads outermost so that one thread
 * stays with one part of the cache. */
static void heads_part(void *arg, uint32_t thread, uint32_t n_threads)
{
    struct cb_chunk *c = arg;
    struct cb_engine *e = c->e;
    float *score = e->w.score + (size_t)thread * cb_pad_group(e->opt.ctx);
    uint64_t lo, hi;
    cb_share((uint64_t)e->rel->m.n_head * c->n, thread, n_threads, &lo, &hi);
    for (uint64_t i = lo; i < hi; i++)
        one_head(e, c->il, (uint32_t)(i % c->n), (uint32_t)(i / c->n), score);
}

static void att_prepare_rows(void *arg, uint32_t thread, uint32_t n_threads)
{
    struct cb_chunk *c = arg;
    struct cb_engine *e = c->e;
    uint32_t nq = e->rel->m.n_head * e->rel->m.head_dim;
    uint64_t lo, hi;
    cb_share(c->n, thread, n_threads, &lo, &hi);
    uint64_t bad = cb_acts_prepare(&e->w.in, &e->kern, cb_mat_wants(&e->rel->layer[c->il].o),
                                   e->w.att, cb_pad_group(nq), nq, lo, hi);
    if (bad != 0)
        c->bad = (uint32_t)bad;
}

void cb_attention(struct cb_chunk *c)
{
    struct cb_engine *e = c->e;
    struct cb_work *w = &e->w;
    const struct cb_layer *l = &e->rel->layer[c->il];
    uint32_t nq = cb_pad_group(e->rel->m.n_head * e->rel->m.head_dim);
    uint32_t nk = cb_pad_group(e->rel->m.n_head_kv * e->rel->m.head_dim);
    const struct cb_product qkv[3] = {{&l->q, w->q, nq}, {&l->k, w->k, nk}, {&l->v, w->v, nk}};
    const struct cb_product out = {&l->o, w->proj, cb_pad_group(e->rel->m.n_embd)};
    cb_products(&e->pool, &e->kern, &w->in, c->n, qkv, 3);
    cb_rows_run(c, qkv_rows);
    cb_pool_run(&e->pool, heads_part, c);
    w->in.f32 = w->att;
    w->in.stride = nq;
    cb_rows_run(c, att_prepare_rows);
    cb_products(&e->pool, &e->kern, &w->in, c->n, &out, 1);
}

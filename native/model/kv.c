/* kv.c — see kv.h. Q8_0 rows are widened exactly (scale times integer, one
 * rounding) to a small tile of F32, then go the way of F32: the same bits on
 * every ISA without a kernel of their own. */
#include "model/kv.h"

#include <string.h>

#define TILE_FLOATS 4096u /* 16 KiB of stack */
#define Q8_BYTES 34u

uint64_t cb_kv_row_bytes(uint32_t kv_type, uint32_t head_dim)
{
    switch (kv_type) {
    case CB_KV_F32:
        return 4 * (uint64_t)head_dim;
    case CB_KV_F16:
        return 2 * (uint64_t)head_dim;
    case CB_KV_Q8_0:
        return head_dim % 32 == 0 && head_dim <= TILE_FLOATS ? head_dim / 32 * (uint64_t)Q8_BYTES
                                                             : 0;
    default:
        return 0;
    }
}

uint32_t cb_kv_len(const struct cb_engine *e, uint32_t il)
{
    const struct cb_manifest *m = &e->rel->m;
    uint64_t window = (uint64_t)m->window + e->opt.batch;
    return m->windowed[il] && window < e->opt.ctx ? (uint32_t)window : e->opt.ctx;
}

/* One KV head's ring of one sequence in one layer. */
struct ring {
    uint8_t *base;
    size_t row;       /* bytes */
    uint32_t len;     /* rows */
};

static struct ring ring_of(const struct cb_engine *e, uint32_t il, void *cache, uint32_t seq,
                           uint32_t g)
{
    size_t row = (size_t)cb_kv_row_bytes(e->opt.kv_type, e->rel->m.head_dim);
    uint32_t len = cb_kv_len(e, il);
    size_t head = (size_t)seq * e->rel->m.n_head_kv + g;
    return (struct ring){(uint8_t *)cache + head * len * row, row, len};
}

static void put_q8_0(const struct cb_engine *e, uint8_t *to, const float *x, uint32_t hd)
{
    for (uint32_t i = 0; i < hd; i += 32, to += Q8_BYTES) {
        struct cb_q8_0 q;
        uint16_t d;
        e->kern.quant_q8_0(&q, x + i, 32);
        e->kern.f32_to_f16(&d, &q.d, 1); /* exact: it came from F16 */
        memcpy(to, &d, 2);
        memcpy(to + 2, q.q, 32);
    }
}

void cb_kv_put(const struct cb_engine *e, uint32_t il, void *cache, const float *x,
               const struct cb_place *at)
{
    uint32_t hd = e->rel->m.head_dim;
    for (uint32_t g = 0; g < e->rel->m.n_head_kv; g++, x += hd) {
        struct ring r = ring_of(e, il, cache, at->seq, g);
        uint8_t *to = r.base + (size_t)(at->pos % r.len) * r.row;
        if (e->opt.kv_type == CB_KV_F32)
            memcpy(to, x, hd * sizeof *x);
        else if (e->opt.kv_type == CB_KV_F16)
            e->kern.f32_to_f16((uint16_t *)(void *)to, x, hd);
        else
            put_q8_0(e, to, x, hd);
    }
}

/* n rows of Q8_0 to F32 [n][hd]. */
static void widen(const struct cb_engine *e, const uint8_t *from, float *to, size_t n)
{
    for (size_t b = 0; b < n * (e->rel->m.head_dim / 32); b++, from += Q8_BYTES, to += 32) {
        uint16_t half;
        float d;
        memcpy(&half, from, 2);
        e->kern.f16_to_f32(&d, &half, 1);
        for (int i = 0; i < 32; i++)
            to[i] = d * (float)(int8_t)from[2 + i];
    }
}

/* n rows that stand one after the other. */
static void score_rows(const struct cb_engine *e, const uint8_t *k, size_t row, const float *q,
                       float *score, uint32_t n)
{
    uint32_t hd = e->rel->m.head_dim, tile = TILE_FLOATS / hd;
    float scale = e->rel->m.attn_scale, wide[TILE_FLOATS];
    if (e->opt.kv_type == CB_KV_F32)
        e->kern.attn_score_f32(score, q, (const float *)(const void *)k, n, hd, scale);
    else if (e->opt.kv_type == CB_KV_F16)
        e->kern.attn_score_f16(score, q, (const uint16_t *)(const void *)k, n, hd, scale);
    else
        for (uint32_t p = 0; p < n; p += tile) {
            uint32_t part = n - p < tile ? n - p : tile;
            widen(e, k + p * row, wide, part);
            e->kern.attn_score_f32(score + p, q, wide, part, hd, scale);
        }
}

void cb_kv_score(const struct cb_engine *e, uint32_t il, uint32_t seq, uint32_t g, const float *q,
                 float *score, uint32_t from, uint32_t n)
{
    struct ring r = ring_of(e, il, e->rel->layer[il].k_cache, seq, g);
    uint32_t at = from % r.len, first = n < r.len - at ? n : r.len - at;
    score_rows(e, r.base + at * r.row, r.row, q, score, first);
    if (first < n)
        score_rows(e, r.base, r.row, q, score + first, n - first);
}

/* Rows one by one onto o: what the mix kernels do from 0, continued. */
static void add_rows(const struct cb_engine *e, const uint8_t *v, size_t row, const float *score,
                     float *o, uint32_t n)
{
    uint32_t hd = e->rel->m.head_dim;
    float wide[TILE_FLOATS];
    for (uint32_t p = 0; p < n; p++, v += row) {
        const float *x = wide;
        if (e->opt.kv_type == CB_KV_F32)
            x = (const float *)(const void *)v;
        else if (e->opt.kv_type == CB_KV_F16)
            e->kern.f16_to_f32(wide, (const uint16_t *)(const void *)v, hd);
        else
            widen(e, v, wide, 1);
        e->kern.axpy(o, score[p], x, hd);
    }
}

void cb_kv_mix(const struct cb_engine *e, uint32_t il, uint32_t seq, uint32_t g,
               const float *score, float *o, uint32_t from, uint32_t n)
{
    struct ring r = ring_of(e, il, e->rel->layer[il].v_cache, seq, g);
    uint32_t hd = e->rel->m.head_dim, at = from % r.len;
    uint32_t first = n < r.len - at ? n : r.len - at;
    const uint8_t *v = r.base + at * r.row;
    if (e->opt.kv_type == CB_KV_F32) {
        e->kern.attn_mix_f32(o, score, (const float *)(const void *)v, first, hd);
    } else if (e->opt.kv_type == CB_KV_F16) {
        e->kern.attn_mix_f16(o, score, (const uint16_t *)(const void *)v, first, hd);
    } else {
        memset(o, 0, hd * sizeof *o);
        add_rows(e, v, r.row, score, o, first);
    }
    add_rows(e, r.base, r.row, score + first, o, n - first);
}

/* quant32.c — F32, F16, BF16, Q8_0 (the one usual way) and Q4_0, Q4_1, Q5_0, Q5_1 (searched).
 *
 * The searched types also try the usual direct scale (extreme value at the end of the range) and
 * keep it unless the search is better, so no block is worse than with the direct method.
 */
#include <float.h>

#include "search.h"

void cb_quant_row_f32(const float *x, const float *importance, size_t n, uint8_t *out)
{
    (void)importance;
    memcpy(out, x, n * sizeof *x);
}

void cb_quant_row_f16(const float *x, const float *importance, size_t n, uint8_t *out)
{
    (void)importance;
    for (size_t i = 0; i < n; i++) {
        cb_put_u16(out + 2 * i, cb_f32_to_f16(x[i]));
    }
}

void cb_quant_row_bf16(const float *x, const float *importance, size_t n, uint8_t *out)
{
    (void)importance;
    for (size_t i = 0; i < n; i++) {
        const uint32_t u = cb_f32_bits(x[i]);
        cb_put_u16(out + 2 * i, (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16));
    }
}

/* Half away from zero, as ggml rounds here. */
static int cb_round_away(float v)
{
    const float a = v < 0.0f ? -v : v;
    int q = (int)a;
    q += a - (float)q >= 0.5f;
    return v < 0.0f ? -q : q;
}

/* d = amax/127, q = round(x/d) with the unrounded d: ggml's bytes. */
void cb_quant_row_q8_0(const float *x, const float *importance, size_t n, uint8_t *out)
{
    (void)importance;
    for (size_t b = 0; b < n / 32; b++, x += 32, out += 34) {
        float amax = 0.0f;
        for (size_t i = 0; i < 32; i++) {
            const float a = x[i] < 0.0f ? -x[i] : x[i];
            amax = a > amax ? a : amax;
        }
        const float d = amax / 127.0f;
        const float inv = cb_inv(d);
        cb_put_u16(out, cb_f32_to_f16(d));
        for (size_t i = 0; i < 32; i++) {
            /* a subnormal d has no finite inverse; it is stored as 0 in any case */
            const int q = inv <= FLT_MAX ? cb_round_away(x[i] * inv) : 0;
            out[2 + i] = (uint8_t)(int8_t)(q > 127 ? 127 : q < -127 ? -127 : q);
        }
    }
}

/* A block's candidate: scale, offset, integers 0 … 31, error in scaled values. */
struct cb_pick {
    struct cb_stored d, m;
    float q[32];
    float err;
};

static void cb_keep(struct cb_pick *best, const struct cb_pick *c)
{
    if (c->err < best->err) {
        *best = *c;
    }
}

/* Nearest integers for the stored d (and m), and their error. z: zero point. */
static void cb_assign_stored(const struct cb_block *b, struct cb_pick *c, float z, float hi)
{
    const float inv = cb_inv(c->d.v);
    cb_assign(b->x, 32, inv, z - c->m.v * inv, 0.0f, hi, c->q);
    c->err = cb_error(b->x, b->w, 32, c->q, c->d.v, c->m.v - z * c->d.v);
}

/* Symmetric: x ≈ d·(q - z), q in [0, 2z). */
static void cb_pick_symmetric(const struct cb_block *b, float z, struct cb_pick *best)
{
    const struct cb_stored zero = {0, 0.0f};
    const float hi = 2.0f * z - 1.0f;
    struct cb_pick c;
    float max = 0.0f, amax = 0.0f;
    for (size_t i = 0; i < 32; i++) {
        const float a = b->x[i] < 0.0f ? -b->x[i] : b->x[i];
        if (a > amax) {
            amax = a;
            max = b->x[i];
        }
    }
    /* The direct method, with the unrounded inverse and truncation: ggml's bytes. */
    best->m = zero;
    best->d = cb_store_f16(max / -z, b->exp);
    const float inv = cb_inv(max / -z);
    for (size_t i = 0; i < 32; i++) {
        best->q[i] = (float)(int)cb_clampf(b->x[i] * inv + (z + 0.5f), 0.0f, hi);
    }
    best->err = cb_error(b->x, b->w, 32, best->q, best->d.v, -z * best->d.v);

    c.m = zero;
    c.d = cb_store_f16(cb_search_scale(b->x, b->w, 32, -z, z - 1.0f), b->exp);
    cb_assign_stored(b, &c, z, hi);
    cb_keep(best, &c);
    for (int round = 0; round < 2; round++) { /* fit d to the integers, assign again */
        float sxq = 0.0f, sqq = 0.0f;
        for (size_t i = 0; i < 32; i++) {
            const float q = c.q[i] - z;
            sxq += b->w[i] * q * b->x[i];
            sqq += b->w[i] * q * q;
        }
        c.d = cb_store_f16(sqq > 0.0f ? sxq / sqq : 0.0f, b->exp);
        cb_assign_stored(b, &c, z, hi);
        cb_keep(best, &c);
    }
}

/* With offset: x ≈ d·q + m, q in [0, hi]. */
static void cb_pick_offset(const struct cb_block *b, float hi, struct cb_pick *best)
{
    struct cb_pick c;
    float lo_x = b->x[0], hi_x = b->x[0], d, m;
    for (size_t i = 0; i < 32; i++) {
        lo_x = b->x[i] < lo_x ? b->x[i] : lo_x;
        hi_x = b->x[i] > hi_x ? b->x[i] : hi_x;
    }
    d = (hi_x - lo_x) / hi;
    best->d = cb_store_f16(d, b->exp);
    best->m = cb_store_f16(lo_x, b->exp);
    const float inv = cb_inv(d);
    for (size_t i = 0; i < 32; i++) {
        best->q[i] = (float)(int)cb_clampf((b->x[i] - lo_x) * inv + 0.5f, 0.0f, hi);
    }
    best->err = cb_error(b->x, b->w, 32, best->q, best->d.v, best->m.v);

    cb_search_offset(b->x, b->w, 32, hi, 0, &d, &m);
    c.d = cb_store_f16(d, b->exp);
    c.m = cb_store_f16(m, b->exp);
    cb_assign_stored(b, &c, 0.0f, hi);
    cb_keep(best, &c);
    for (int round = 0; round < 2; round++) { /* fit m to the integers and the rounded d */
        float e = 0.0f, w = 0.0f;
        for (size_t i = 0; i < 32; i++) {
            e += b->w[i] * (b->x[i] - c.d.v * c.q[i]);
            w += b->w[i];
        }
        c.m = cb_store_f16(w > 0.0f ? e / w : 0.0f, b->exp);
        cb_assign_stored(b, &c, 0.0f, hi);
        cb_keep(best, &c);
    }
}

/* Nibbles: element i low, i + 16 high; qh: the fifth bits. */
static uint32_t cb_pack_nibbles(const float q[32], uint8_t *qs)
{
    uint32_t qh = 0;
    for (unsigned i = 0; i < 16; i++) {
        const unsigned lo = (unsigned)q[i], up = (unsigned)q[i + 16];
        qs[i] = (uint8_t)((lo & 15u) | (up & 15u) << 4);
        qh |= (lo >> 4) << i | (up >> 4) << (i + 16);
    }
    return qh;
}

/* d · (m) · (qh) · qs */
static void cb_put_block(const struct cb_pick *p, int offset, int five, uint8_t *out)
{
    uint8_t *qh = out + (offset ? 4 : 2);
    cb_put_u16(out, p->d.h);
    if (offset) {
        cb_put_u16(out + 2, p->m.h);
    }
    const uint32_t bits = cb_pack_nibbles(p->q, qh + (five ? 4 : 0));
    if (five) {
        cb_put_u16(qh, (uint16_t)bits);
        cb_put_u16(qh + 2, (uint16_t)(bits >> 16));
    }
}

static void cb_row32(const float *x, const float *importance, size_t n, uint8_t *out, int offset,
                     int five)
{
    const size_t bytes = 18u + (offset ? 2u : 0u) + (five ? 4u : 0u);
    for (size_t b = 0; b < n; b += 32, out += bytes) {
        struct cb_block blk;
        struct cb_pick best;
        cb_block_load(&blk, x + b, importance != NULL ? importance + b : NULL, 32);
        if (offset) {
            cb_pick_offset(&blk, five ? 31.0f : 15.0f, &best);
        } else {
            cb_pick_symmetric(&blk, five ? 16.0f : 8.0f, &best);
        }
        cb_put_block(&best, offset, five, out);
    }
}

void cb_quant_row_q4_0(const float *x, const float *importance, size_t n, uint8_t *out)
{
    cb_row32(x, importance, n, out, 0, 0);
}

void cb_quant_row_q4_1(const float *x, const float *importance, size_t n, uint8_t *out)
{
    cb_row32(x, importance, n, out, 1, 0);
}

void cb_quant_row_q5_0(const float *x, const float *importance, size_t n, uint8_t *out)
{
    cb_row32(x, importance, n, out, 0, 1);
}

void cb_quant_row_q5_1(const float *x, const float *importance, size_t n, uint8_t *out)
{
    cb_row32(x, importance, n, out, 1, 1);
}

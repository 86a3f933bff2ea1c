/* search.h — what the searches for scales share.
 *
 * Method. A block is x ≈ d·q (symmetric) or x ≈ d·q + m (with offset) for small integers q. For a
 * fixed q the best d (and m) is a weighted least-squares fit; for a fixed d (and m) the best q is
 * the nearest. We try a short list of starting scales around the one that maps the extreme value
 * to the end of the range, fit each, keep the one with the least error, and refine once more with
 * the rounded scale as it will be stored. This alternation is Lloyd's method ("Least squares
 * quantization in PCM", 1982) restricted to uniform levels; the list of starts around the range's
 * end is common practice for these formats.
 *
 * Work is done on x scaled by a power of two so that the block's largest magnitude is in [1, 2):
 * exact, and squares neither overflow nor vanish. Sums run over CB_QL lanes of binary32, element
 * i in lane i mod CB_QL, added in lane order at the end: the same on every machine, and a
 * compiler can use vectors for it without changing a bit.
 */
#ifndef CB_QUANT_SEARCH_H
#define CB_QUANT_SEARCH_H

#include <stddef.h>

#include "../kernels/f16.h"
#include "../kernels/kernels.h"

#define CB_QL 8        /* lanes */
#define CB_QMAX 256    /* weights of the largest block */

/* One block, ready to be searched. */
struct cb_block {
    float x[CB_QMAX];  /* values · 2^-exp, the largest magnitude in [1, 2) (or all 0) */
    float w[CB_QMAX];  /* weights of the squared errors, the largest in [1, 2) or all 1 */
    size_t n;
    int exp;
};

void cb_block_load(struct cb_block *b, const float *x, const float *importance, size_t n);

/* v · 2^e, rounded once; |e| <= 300. */
float cb_scaled(float v, int e);

/* A scale as it is stored, and what it is in the block's scaled values. */
struct cb_stored {
    uint16_t h;
    float v;
};

/* v (in scaled values) as binary16 of v·2^exp, saturated to the largest finite. */
struct cb_stored cb_store_f16(float v, int exp);

/* The scale of scales: `largest` is to be at most `steps` (and a half) times it. Among subnormal
 * binary16 the nearest may be too small for that, or 0: then the next larger magnitude. */
struct cb_stored cb_store_step(float largest, float steps, int exp);

/* Round to nearest even for |v| < 2^22. */
CB_INLINE float cb_near(float v)
{
    return (v + 12582912.0f) - 12582912.0f;
}

CB_INLINE float cb_clampf(float v, float lo, float hi)
{
    v = v > lo ? v : lo;
    return v < hi ? v : hi;
}

CB_INLINE float cb_inv(float d)
{
    return d != 0.0f ? 1.0f / d : 0.0f;
}

/* Σ over lanes in a fixed order. */
CB_INLINE float cb_lane_sum(const float s[CB_QL])
{
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

/* q[i] = nearest of x[i]·inv + add in [lo, hi], as floats. n is a multiple of CB_QL. */
CB_INLINE void cb_assign(const float *x, size_t n, float inv, float add, float lo, float hi,
                         float *q)
{
    for (size_t i = 0; i < n; i++) {
        q[i] = cb_near(cb_clampf(x[i] * inv + add, lo, hi));
    }
}

/* Σ w·(x - (d·q + m))² */
CB_INLINE float cb_error(const float *x, const float *w, size_t n, const float *q, float d, float m)
{
    float s[CB_QL] = {0.0f};
    for (size_t i = 0; i < n; i += CB_QL) {
        for (size_t k = 0; k < CB_QL; k++) {
            const float e = x[i + k] - (d * q[i + k] + m);
            s[k] += w[i + k] * e * e;
        }
    }
    return cb_lane_sum(s);
}

/* The symmetric search: scale s for n values x ≈ s·q, q in [lo, hi], lo = -hi - 1. 0 if all are 0. */
float cb_search_scale(const float *x, const float *w, size_t n, float lo, float hi);

/* The search with offset: x ≈ d·q + m, q in [0, hi]; with m_max_0 the offset is at most 0. */
void cb_search_offset(const float *x, const float *w, size_t n, float hi, int m_max_0, float *d,
                      float *m);

/* Rows of one type: x[n] to out. */
typedef void cb_quant_row_fn(const float *x, const float *importance, size_t n, uint8_t *out);
cb_quant_row_fn cb_quant_row_f32, cb_quant_row_f16, cb_quant_row_bf16, cb_quant_row_q8_0;
cb_quant_row_fn cb_quant_row_q4_0, cb_quant_row_q4_1, cb_quant_row_q5_0, cb_quant_row_q5_1;
cb_quant_row_fn cb_quant_row_q4_k, cb_quant_row_q5_k, cb_quant_row_q6_k;

typedef void cb_dequant_row_fn(const uint8_t *in, size_t n, float *out);
cb_dequant_row_fn cb_deq_f32, cb_deq_f16, cb_deq_bf16, cb_deq_q8_0, cb_deq_q4_0, cb_deq_q4_1;
cb_dequant_row_fn cb_deq_q5_0, cb_deq_q5_1, cb_deq_q4_k, cb_deq_q5_k, cb_deq_q6_k;

CB_INLINE void cb_put_u16(uint8_t *p, uint16_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

#endif

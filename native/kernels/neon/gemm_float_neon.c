/* gemm_float_neon.c — F32, F16 and BF16 matrices: y = dot(row, x), rows stand one after another. */
#include "dot_neon.h"
#include "neon.h"

/* One token: rows in storage order, so one stream of weights. */
CB_INLINE_NEON void wide_decode_neon(enum wide_neon kind, float *y, const float *x,
                                     const uint8_t *w, size_t n_cols)
{
    const size_t stride = n_cols * wide_bytes_neon(kind);
    for (size_t r = 0; r < 8; r += 4, w += 4 * stride) {
        const float32x4_t a = dot_fold_neon(kind, w, x, n_cols);
        const float32x4_t b = dot_fold_neon(kind, w + stride, x, n_cols);
        const float32x4_t c = dot_fold_neon(kind, w + 2 * stride, x, n_cols);
        const float32x4_t d = dot_fold_neon(kind, w + 3 * stride, x, n_cols);
        vst1q_f32(y + r, lanes_last4_neon(a, b, c, d));
    }
}

/* Two tokens share each load and widening of a weight. y0, y1: one output each. */
CB_INLINE_NEON void wide_pair_neon(enum wide_neon kind, float *y0, float *y1, const float *x0,
                                   const float *x1, const uint8_t *w, size_t n_cols)
{
    struct lanes_neon l0 = lanes_zero_neon(), l1 = l0;
    size_t i = 0;
    for (; i + 32 <= n_cols; i += 32) {
        _Pragma("GCC unroll 8")
        for (size_t j = 0; j < 8; j++) {
            const float32x4_t v = wide_load_neon(kind, w, i + 4 * j);
            l0.q[j] = vfmaq_f32(l0.q[j], v, vld1q_f32(x0 + i + 4 * j));
            l1.q[j] = vfmaq_f32(l1.q[j], v, vld1q_f32(x1 + i + 4 * j));
        }
    }
    if (i < n_cols) {
        l0 = dot_rest_neon(l0, kind, w, x0, i, n_cols - i);
        l1 = dot_rest_neon(l1, kind, w, x1, i, n_cols - i);
    }
    *y0 = lanes_last_neon(lanes_fold_neon(&l0));
    *y1 = lanes_last_neon(lanes_fold_neon(&l1));
}

CB_INLINE_NEON void wide_gemm_neon(enum wide_neon kind, float *const *y, const void *const *x,
                                   size_t n_tok, const void *w, size_t n_groups, size_t n_cols)
{
    const uint8_t *p = (const uint8_t *)w;
    const size_t stride = n_cols * wide_bytes_neon(kind);
    for (size_t g = 0; g < n_groups; g++, p += 8 * stride) {
        size_t t = 0;
        for (; t + 2 <= n_tok; t += 2) {
            for (size_t r = 0; r < 8; r++) {
                wide_pair_neon(kind, y[t] + 8 * g + r, y[t + 1] + 8 * g + r,
                               (const float *)x[t], (const float *)x[t + 1], p + r * stride,
                               n_cols);
            }
        }
        if (t < n_tok) {
            wide_decode_neon(kind, y[t] + 8 * g, (const float *)x[t], p, n_cols);
        }
    }
}

void cb_gemm_f32_neon(float *const *y, const void *const *x, size_t n_tok, const void *w,
                      size_t n_groups, size_t n_cols)
{
    wide_gemm_neon(WIDE_F32, y, x, n_tok, w, n_groups, n_cols);
}

void cb_gemm_f16_neon(float *const *y, const void *const *x, size_t n_tok, const void *w,
                      size_t n_groups, size_t n_cols)
{
    wide_gemm_neon(WIDE_F16, y, x, n_tok, w, n_groups, n_cols);
}

void cb_gemm_bf16_neon(float *const *y, const void *const *x, size_t n_tok, const void *w,
                       size_t n_groups, size_t n_cols)
{
    wide_gemm_neon(WIDE_BF16, y, x, n_tok, w, n_groups, n_cols);
}

/* gemm_float.c — y = dot(row, x) for row-major F32, F16 and BF16 (AVX2; determinism.md §2). */
#include "lanes.h"

CB_DEFINE_DOT2(f32, float, cb_widen_f32_avx2)
CB_DEFINE_DOT2(f16, uint16_t, cb_widen_f16_avx2)
CB_DEFINE_DOT2(bf16, uint16_t, cb_widen_bf16_avx2)

/* Two rows at a time for all tokens: the rows stay in the first-level cache. */
#define CB_DEFINE_FLOAT_GEMM(name, type)                                                   \
    void cb_gemm_##name##_avx2(float *const *y, const void *const *x, size_t n_tok,        \
                               const void *w, size_t n_groups, size_t n_cols)              \
    {                                                                                      \
        const type *rows = w;                                                              \
        for (size_t r = 0; r < n_groups * CB_GROUP; r += 2) {                              \
            for (size_t t = 0; t < n_tok; t++) {                                           \
                cb_dot2_##name##_avx2(rows + r * n_cols, n_cols, x[t], n_cols, y[t] + r);  \
            }                                                                              \
        }                                                                                  \
    }

CB_DEFINE_FLOAT_GEMM(f32, float)
CB_DEFINE_FLOAT_GEMM(f16, uint16_t)
CB_DEFINE_FLOAT_GEMM(bf16, uint16_t)

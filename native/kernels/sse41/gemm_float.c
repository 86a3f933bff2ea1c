/* gemm_float.c — y = dot(row, x) for row-major F32, F16 and BF16 (SSE4.1). */
#include "sse41.h"

#define CB_GEMM_FLOAT(W, BYTES)                                                            \
    const uint8_t *row = w;                                                                \
    for (size_t r = 0; r < n_groups * CB_GROUP; r++, row += n_cols * (BYTES)) {            \
        for (size_t t = 0; t < n_tok; t++) {                                               \
            y[t][r] = cb_dot_any(row, x[t], n_cols, W);                                    \
        }                                                                                  \
    }

void cb_gemm_f32_sse41(float *const *y, const void *const *x, size_t n_tok, const void *w,
                       size_t n_groups, size_t n_cols)
{
    CB_GEMM_FLOAT(CB_W_F32, 4)
}

void cb_gemm_f16_sse41(float *const *y, const void *const *x, size_t n_tok, const void *w,
                       size_t n_groups, size_t n_cols)
{
    CB_GEMM_FLOAT(CB_W_F16, 2)
}

void cb_gemm_bf16_sse41(float *const *y, const void *const *x, size_t n_tok, const void *w,
                        size_t n_groups, size_t n_cols)
{
    CB_GEMM_FLOAT(CB_W_BF16, 2)
}

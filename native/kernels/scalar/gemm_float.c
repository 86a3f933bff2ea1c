/* gemm_float.c — y = dot(row, x) for row-major F32, F16 and BF16 (scalar). */
#include "lanes.h"
#include "scalar.h"

void cb_gemm_f32_scalar(float *const *y, const void *const *x, size_t n_tok, const void *w,
                        size_t n_groups, size_t n_cols)
{
    const float *rows = w;
    for (size_t r = 0; r < n_groups * CB_GROUP; r++) {
        for (size_t t = 0; t < n_tok; t++) {
            y[t][r] = cb_lanes_dot(rows + r * n_cols, x[t], n_cols);
        }
    }
}

void cb_gemm_f16_scalar(float *const *y, const void *const *x, size_t n_tok, const void *w,
                        size_t n_groups, size_t n_cols)
{
    const uint16_t *rows = w;
    for (size_t r = 0; r < n_groups * CB_GROUP; r++) {
        for (size_t t = 0; t < n_tok; t++) {
            y[t][r] = cb_lanes_dot_f16(rows + r * n_cols, x[t], n_cols);
        }
    }
}

void cb_gemm_bf16_scalar(float *const *y, const void *const *x, size_t n_tok, const void *w,
                         size_t n_groups, size_t n_cols)
{
    const uint16_t *rows = w;
    for (size_t r = 0; r < n_groups * CB_GROUP; r++) {
        for (size_t t = 0; t < n_tok; t++) {
            y[t][r] = cb_lanes_dot_bf16(rows + r * n_cols, x[t], n_cols);
        }
    }
}

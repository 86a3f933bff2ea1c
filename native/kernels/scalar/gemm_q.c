/* gemm_q.c — products of the 32-block types with Q8_0 activations (scalar; determinism.md §3). */
#include "scalar.h"
#include "unpack.h"

/* S = sum of w·q over a block: |S| <= 32·128·127, exact. */
CB_INLINE int32_t cb_isum32(const int8_t *w, const int8_t *q)
{
    int32_t s = 0;
    for (size_t i = 0; i < 32; i++) {
        s += (int32_t)w[i] * (int32_t)q[i];
    }
    return s;
}

/* The loops over groups, tokens, blocks and rows, the same for every type:
 * UNPACK fills w[32]; MIN is 1 where the type has an offset m. */
#define CB_GEMM_Q(UNPACK, BLOCK_BYTES, MIN)                                                \
    const uint8_t *group = w_;                                                             \
    const size_t n_blocks = n_cols / 32;                                                   \
    for (size_t g = 0; g < n_groups; g++, group += n_blocks * 8 * (BLOCK_BYTES)) {         \
        for (size_t t = 0; t < n_tok; t++) {                                               \
            const struct cb_q8_0 *a = x[t];                                                \
            float acc[CB_GROUP] = {0.0f};                                                  \
            for (size_t b = 0; b < n_blocks; b++) {                                        \
                const uint8_t *sb = group + b * 8 * (BLOCK_BYTES);                         \
                for (size_t r = 0; r < CB_GROUP; r++) {                                    \
                    int8_t w[32];                                                          \
                    UNPACK(sb, r, w);                                                      \
                    const float s = (float)cb_isum32(w, a[b].q);                           \
                    acc[r] = cb_fmaf(cb_row_d(sb, r) * a[b].d, s, acc[r]);                 \
                    if (MIN) {                                                             \
                        const float sum = (float)a[b].sum;                                 \
                        acc[r] = cb_fmaf(cb_row_m(sb, r) * a[b].d, sum, acc[r]);           \
                    }                                                                      \
                }                                                                          \
            }                                                                              \
            memcpy(y[t] + g * CB_GROUP, acc, sizeof acc);                                  \
        }                                                                                  \
    }

void cb_gemm_q4_0_scalar(float *const *y, const void *const *x, size_t n_tok, const void *w_,
                         size_t n_groups, size_t n_cols)
{
    CB_GEMM_Q(cb_unpack_q4_0, 18, 0)
}

void cb_gemm_q4_1_scalar(float *const *y, const void *const *x, size_t n_tok, const void *w_,
                         size_t n_groups, size_t n_cols)
{
    CB_GEMM_Q(cb_unpack_q4_1, 20, 1)
}

void cb_gemm_q5_0_scalar(float *const *y, const void *const *x, size_t n_tok, const void *w_,
                         size_t n_groups, size_t n_cols)
{
    CB_GEMM_Q(cb_unpack_q5_0, 22, 0)
}

void cb_gemm_q5_1_scalar(float *const *y, const void *const *x, size_t n_tok, const void *w_,
                         size_t n_groups, size_t n_cols)
{
    CB_GEMM_Q(cb_unpack_q5_1, 24, 1)
}

void cb_gemm_q8_0_scalar(float *const *y, const void *const *x, size_t n_tok, const void *w_,
                         size_t n_groups, size_t n_cols)
{
    CB_GEMM_Q(cb_unpack_q8_0, 34, 0)
}

/* gemm_k.c — products of the 256-block types with Q8_K activations (scalar; determinism.md §3). */
#include "scalar.h"
#include "unpack.h"

CB_INLINE int32_t cb_isum(const int8_t *w, const int8_t *q, size_t n)
{
    int32_t s = 0;
    for (size_t i = 0; i < n; i++) {
        s += (int32_t)w[i] * (int32_t)q[i];
    }
    return s;
}

/* One block of a row with scales and minima: |S| <= 256·63·31·127, |M| <= 256·63·127. */
CB_INLINE float cb_block_k_min(const uint8_t *sb, size_t r, const int8_t w[256],
                               const struct cb_q8_k *a, float acc)
{
    uint8_t sc[8], m[8];
    int32_t s = 0, mins = 0;
    cb_unpack_k_scales(sb, r, sc, m);
    for (size_t j = 0; j < 8; j++) {
        s += (int32_t)sc[j] * cb_isum(w + 32 * j, a->q + 32 * j, 32);
        mins += (int32_t)m[j] * ((int32_t)a->bsum[2 * j] + (int32_t)a->bsum[2 * j + 1]);
    }
    acc = cb_fmaf(cb_row_d(sb, r) * a->d, (float)s, acc);
    return cb_fmaf(-(cb_row_m(sb, r) * a->d), (float)mins, acc);
}

CB_INLINE float cb_block_q4_k(const uint8_t *sb, size_t r, const struct cb_q8_k *a, float acc)
{
    int8_t w[256];
    cb_unpack_q4_k(sb, r, w);
    return cb_block_k_min(sb, r, w, a, acc);
}

CB_INLINE float cb_block_q5_k(const uint8_t *sb, size_t r, const struct cb_q8_k *a, float acc)
{
    int8_t w[256];
    cb_unpack_q5_k(sb, r, w);
    return cb_block_k_min(sb, r, w, a, acc);
}

/* |S| <= 256·128·32·127 < 2^31. */
CB_INLINE float cb_block_q6_k(const uint8_t *sb, size_t r, const struct cb_q8_k *a, float acc)
{
    int8_t w[256];
    int32_t s = 0;
    cb_unpack_q6_k(sb, r, w);
    for (size_t g = 0; g < 16; g++) {
        s += (int32_t)cb_q6_k_scale(sb, r, g) * cb_isum(w + 16 * g, a->q + 16 * g, 16);
    }
    return cb_fmaf(cb_row_d(sb, r) * a->d, (float)s, acc);
}

#define CB_GEMM_K(BLOCK, BLOCK_BYTES)                                                      \
    const uint8_t *group = w;                                                              \
    const size_t n_blocks = n_cols / 256;                                                  \
    for (size_t g = 0; g < n_groups; g++, group += n_blocks * 8 * (BLOCK_BYTES)) {         \
        for (size_t t = 0; t < n_tok; t++) {                                               \
            const struct cb_q8_k *a = x[t];                                                \
            float acc[CB_GROUP] = {0.0f};                                                  \
            for (size_t b = 0; b < n_blocks; b++) {                                        \
                for (size_t r = 0; r < CB_GROUP; r++) {                                    \
                    acc[r] = BLOCK(group + b * 8 * (BLOCK_BYTES), r, a + b, acc[r]);       \
                }                                                                          \
            }                                                                              \
            memcpy(y[t] + g * CB_GROUP, acc, sizeof acc);                                  \
        }                                                                                  \
    }

void cb_gemm_q4_k_scalar(float *const *y, const void *const *x, size_t n_tok, const void *w,
                         size_t n_groups, size_t n_cols)
{
    CB_GEMM_K(cb_block_q4_k, 144)
}

void cb_gemm_q5_k_scalar(float *const *y, const void *const *x, size_t n_tok, const void *w,
                         size_t n_groups, size_t n_cols)
{
    CB_GEMM_K(cb_block_q5_k, 176)
}

void cb_gemm_q6_k_scalar(float *const *y, const void *const *x, size_t n_tok, const void *w,
                         size_t n_groups, size_t n_cols)
{
    CB_GEMM_K(cb_block_q6_k, 210)
}

/* avx2.h — what the AVX2 files share: the slots, and the x8c16 load-and-transpose.
 *
 * Lane order. A 16-byte chunk of 8 rows is four registers, each with an even row
 * in the low half and the odd one after it in the high half. Transposing them as
 * 4x4 dwords inside the halves gives four registers whose dword lanes are rows
 * 0 2 4 6 | 1 3 5 7, each with four consecutive weights of its row ("row lanes"
 * below). Every product is then a maddubs against one broadcast dword of the
 * activation, sums stay inside a row's lane, and nothing is ever added across
 * lanes. Fields that come as one item a row are brought into the same order;
 * the float accumulator is put back into row order once, at the end.
 *
 * Forced-inline functions carry their file's instruction set, as `_avx2` says.
 */
#ifndef CB_AVX2_H
#define CB_AVX2_H

#include <immintrin.h>
#include <string.h>

#include "../fma.h"
#include "../impl.h"

#define CB_TILE 4 /* tokens that share one unpacked weight; remainders go by 2 and 1 */

/* Runs `stmt` for t = 0 … T-1 with t a constant, so that arrays over t become registers. */
#define CB_EACH(T, stmt)                     \
    do {                                     \
        { enum { t = 0 }; stmt; }            \
        if ((T) > 1) { enum { t = 1 }; stmt; } \
        if ((T) > 2) { enum { t = 2 }; stmt; } \
        if ((T) > 3) { enum { t = 3 }; stmt; } \
    } while (0)

cb_gemm_fn cb_gemm_f32_avx2, cb_gemm_f16_avx2, cb_gemm_bf16_avx2;
cb_gemm_fn cb_gemm_q4_0_avx2, cb_gemm_q4_1_avx2, cb_gemm_q5_0_avx2, cb_gemm_q5_1_avx2;
cb_gemm_fn cb_gemm_q8_0_avx2, cb_gemm_q4_k_avx2, cb_gemm_q5_k_avx2, cb_gemm_q6_k_avx2;

void cb_quant_q8_0_avx2(struct cb_q8_0 *y, const float *x, size_t n);
void cb_quant_q8_k_avx2(struct cb_q8_k *y, const float *x, size_t n);

float cb_dot_avx2(const float *a, const float *b, size_t n);
float cb_sum_avx2(const float *x, size_t n);
float cb_max_avx2(const float *x, size_t n);
void cb_rmsnorm_avx2(float *y, const float *x, const float *w, size_t n, float eps);
void cb_add_avx2(float *y, const float *x, size_t n);
void cb_scale_avx2(float *x, float s, size_t n);
void cb_axpy_avx2(float *y, float a, const float *x, size_t n);
void cb_silu_mul_avx2(float *y, const float *gate, const float *up, size_t n);
void cb_softmax_avx2(float *x, size_t n);
void cb_f32_to_f16_avx2(uint16_t *y, const float *x, size_t n);
void cb_f16_to_f32_avx2(float *y, const uint16_t *x, size_t n);
void cb_attn_score_f32_avx2(float *s, const float *q, const float *k, size_t n_pos, size_t hd,
                            float scale);
void cb_attn_score_f16_avx2(float *s, const float *q, const uint16_t *k, size_t n_pos, size_t hd,
                            float scale);
void cb_attn_mix_f32_avx2(float *o, const float *s, const float *v, size_t n_pos, size_t hd);
void cb_attn_mix_f16_avx2(float *o, const float *s, const uint16_t *v, size_t n_pos, size_t hd);

/* Loads and stores of any alignment. */
CB_INLINE __m256i cb_load_avx2(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

CB_INLINE __m128i cb_load128_avx2(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

/* The dword at p in all 8 lanes: a load, no shuffle. */
CB_INLINE __m256i cb_bcast32_avx2(const void *p)
{
    int32_t v;
    memcpy(&v, p, sizeof v);
    return _mm256_set1_epi32(v);
}

/* Chunk p (8 rows of 16 bytes) as row lanes: v[k] holds bytes 4k … 4k+3 of every row. */
CB_INLINE void cb_transpose_avx2(const uint8_t *p, __m256i v[4])
{
    const __m256i r01 = cb_load_avx2(p), r23 = cb_load_avx2(p + 32);
    const __m256i r45 = cb_load_avx2(p + 64), r67 = cb_load_avx2(p + 96);
    const __m256i a = _mm256_unpacklo_epi32(r01, r23), b = _mm256_unpacklo_epi32(r45, r67);
    const __m256i c = _mm256_unpackhi_epi32(r01, r23), d = _mm256_unpackhi_epi32(r45, r67);
    v[0] = _mm256_unpacklo_epi64(a, b);
    v[1] = _mm256_unpackhi_epi64(a, b);
    v[2] = _mm256_unpacklo_epi64(c, d);
    v[3] = _mm256_unpackhi_epi64(c, d);
}

/* u32[8] in row order -> row lanes. */
CB_INLINE __m256i cb_rows32_avx2(const void *p)
{
    return _mm256_permutevar8x32_epi32(cb_load_avx2(p), _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

/* f16[8] in row order -> floats in row lanes. */
CB_INLINE __m256 cb_rows16_avx2(const void *p)
{
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm256_cvtph_ps(_mm_shuffle_epi8(cb_load128_avx2(p), order));
}

/* Row lanes -> y[0 … 7] in row order. */
CB_INLINE void cb_store_rows_avx2(float *y, __m256 acc)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_ps(y, _mm256_permutevar8x32_ps(acc, order));
}

CB_INLINE __m256i cb_lo4_avx2(__m256i v)
{
    return _mm256_and_si256(v, _mm256_set1_epi8(15));
}

CB_INLINE __m256i cb_hi4_avx2(__m256i v)
{
    return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
}

/* w unsigned, q signed: acc (16 bit) += the two products of each pair. */
CB_INLINE __m256i cb_mac_avx2(__m256i acc, __m256i w, const int8_t *q)
{
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, cb_bcast32_avx2(q)));
}

/* One tile: 8 rows × T tokens. y[t], x[t] as in cb_gemm_fn, y already at the group. */
typedef void cb_tile_avx2_fn(float *const *y, const void *const *x, size_t row, const uint8_t *w,
                             size_t n_blocks);

/* Groups outside, tokens inside: a group's weights stay in the cache for all tokens. */
CB_INLINE void cb_tiles_avx2(float *const *y, const void *const *x, size_t n_tok, const uint8_t *w,
                             size_t n_groups, size_t n_blocks, size_t block_bytes,
                             cb_tile_avx2_fn *tile1, cb_tile_avx2_fn *tile2, cb_tile_avx2_fn *tile4)
{
    for (size_t g = 0; g < n_groups; g++, w += n_blocks * block_bytes * CB_GROUP) {
        size_t i = 0;
        for (; i + 4 <= n_tok; i += 4) {
            tile4(y + i, x + i, g * CB_GROUP, w, n_blocks);
        }
        if (i + 2 <= n_tok) {
            tile2(y + i, x + i, g * CB_GROUP, w, n_blocks);
            i += 2;
        }
        if (i < n_tok) {
            tile1(y + i, x + i, g * CB_GROUP, w, n_blocks);
        }
    }
}

/* The three tile sizes of a type, and its slot. TILE(y, x, row, w, n_blocks, T) is forced inline. */
#define CB_DEFINE_GEMM(name, block, block_bytes)                                                  \
    static void cb_##name##_x1_avx2(float *const *y, const void *const *x, size_t row,            \
                                    const uint8_t *w, size_t n_blocks)                            \
    {                                                                                             \
        cb_##name##_tile_avx2(y, x, row, w, n_blocks, 1);                                         \
    }                                                                                             \
    static void cb_##name##_x2_avx2(float *const *y, const void *const *x, size_t row,            \
                                    const uint8_t *w, size_t n_blocks)                            \
    {                                                                                             \
        cb_##name##_tile_avx2(y, x, row, w, n_blocks, 2);                                         \
    }                                                                                             \
    static void cb_##name##_x4_avx2(float *const *y, const void *const *x, size_t row,            \
                                    const uint8_t *w, size_t n_blocks)                            \
    {                                                                                             \
        cb_##name##_tile_avx2(y, x, row, w, n_blocks, 4);                                         \
    }                                                                                             \
    void cb_gemm_##name##_avx2(float *const *y, const void *const *x, size_t n_tok,               \
                               const void *w, size_t n_groups, size_t n_cols)                     \
    {                                                                                             \
        cb_tiles_avx2(y, x, n_tok, w, n_groups, n_cols / (block), block_bytes,                    \
                      cb_##name##_x1_avx2, cb_##name##_x2_avx2, cb_##name##_x4_avx2);             \
    }

#endif

/* gemm_q.c — Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 × Q8_0 activations (AVX2; determinism.md §3).
 *
 * 16-bit sums: two products of a 4-bit weight are at most 2·15·127 = 3 810, so a
 * whole block (8 additions a lane) fits: 30 480. 5 bits: 2·31·127 = 7 874, so 4
 * additions fit: 31 496. 8 bits: 2·128·127 = 32 512, so every pair is widened.
 */
#include "avx2.h"

CB_INLINE __m256i cb_widen_avx2(__m256i v)
{
    return _mm256_madd_epi16(v, _mm256_set1_epi16(1));
}

/* acc = fma(dw·da, S, acc) */
CB_INLINE __m256 cb_combine_avx2(__m256 acc, __m256 dw, float da, __m256i s)
{
    return _mm256_fmadd_ps(_mm256_mul_ps(dw, _mm256_set1_ps(da)), _mm256_cvtepi32_ps(s), acc);
}

/* Fifth bits of the four weights 4e … 4e+3 of each row, at bit 4 of their bytes. qh: row lanes,
 * shifted left by 4 when e is even, so that the wanted bits are the upper four of byte e/2. */
CB_INLINE __m256i cb_fifth_avx2(__m256i qh, int e)
{
    const __m256i byte = _mm256_add_epi8(_mm256_set1_epi32((e / 2) * 0x01010101),
                                         _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0C0C0C0C,
                                                           0, 0x04040404, 0x08080808, 0x0C0C0C0C));
    const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(qh, byte),
                                          _mm256_set1_epi32((int)0x80402010u));
    return _mm256_min_epu8(bits, _mm256_set1_epi8(16));
}

/* Four weights of each row (lo or hi nibbles of chunk dword k) times every token. */
CB_INLINE void cb_q_step_avx2(__m256i w, const struct cb_q8_0 *const *a, size_t b, size_t at,
                              __m256i *sum, const int T)
{
    CB_EACH(T, sum[t] = cb_mac_avx2(sum[t], w, a[t][b].q + at));
}

/* min: the type has offsets m (at byte 16 of the super-block); qh_at, qs_at: byte offsets,
 * qh_at = 0 for 4 bits; z: zero point. */
CB_INLINE void cb_q45_avx2(float *const *y, const void *const *x, size_t row, const uint8_t *w,
                           size_t n_blocks, size_t sb_bytes, int min, size_t qh_at, size_t qs_at,
                           int z, const int T)
{
    const struct cb_q8_0 *a[CB_TILE];
    __m256 acc[CB_TILE];
    CB_EACH(T, a[t] = x[t]; acc[t] = _mm256_setzero_ps());
    for (size_t b = 0; b < n_blocks; b++, w += sb_bytes) {
        __m256i v[4], s[CB_TILE], h[CB_TILE];
        const __m256 d = cb_rows16_avx2(w);
        cb_transpose_avx2(w + qs_at, v);
        CB_EACH(T, s[t] = _mm256_setzero_si256());
        CB_EACH(T, h[t] = _mm256_setzero_si256());
        if (qh_at == 0) {
            cb_q_step_avx2(cb_lo4_avx2(v[0]), a, b, 0, s, T);
            cb_q_step_avx2(cb_lo4_avx2(v[1]), a, b, 4, s, T);
            cb_q_step_avx2(cb_lo4_avx2(v[2]), a, b, 8, s, T);
            cb_q_step_avx2(cb_lo4_avx2(v[3]), a, b, 12, s, T);
            cb_q_step_avx2(cb_hi4_avx2(v[0]), a, b, 16, s, T);
            cb_q_step_avx2(cb_hi4_avx2(v[1]), a, b, 20, s, T);
            cb_q_step_avx2(cb_hi4_avx2(v[2]), a, b, 24, s, T);
            cb_q_step_avx2(cb_hi4_avx2(v[3]), a, b, 28, s, T);
            CB_EACH(T, s[t] = cb_widen_avx2(s[t]));
        } else {
            const __m256i odd = cb_rows32_avx2(w + qh_at), even = _mm256_slli_epi32(odd, 4);
#define CB_W5(nibbles, e, half) \
    _mm256_or_si256(nibbles(v[(e) % 4]), cb_fifth_avx2(half, e))
            cb_q_step_avx2(CB_W5(cb_lo4_avx2, 0, even), a, b, 0, s, T);
            cb_q_step_avx2(CB_W5(cb_lo4_avx2, 1, odd), a, b, 4, s, T);
            cb_q_step_avx2(CB_W5(cb_lo4_avx2, 2, even), a, b, 8, s, T);
            cb_q_step_avx2(CB_W5(cb_lo4_avx2, 3, odd), a, b, 12, s, T);
            cb_q_step_avx2(CB_W5(cb_hi4_avx2, 4, even), a, b, 16, h, T);
            cb_q_step_avx2(CB_W5(cb_hi4_avx2, 5, odd), a, b, 20, h, T);
            cb_q_step_avx2(CB_W5(cb_hi4_avx2, 6, even), a, b, 24, h, T);
            cb_q_step_avx2(CB_W5(cb_hi4_avx2, 7, odd), a, b, 28, h, T);
#undef CB_W5
            CB_EACH(T, s[t] = _mm256_add_epi32(cb_widen_avx2(s[t]), cb_widen_avx2(h[t])));
        }
        if (z != 0) { /* Σ(w - z)q = Σwq - zΣq */
            CB_EACH(T, s[t] = _mm256_sub_epi32(s[t], _mm256_set1_epi32(z * a[t][b].sum)));
        }
        CB_EACH(T, acc[t] = cb_combine_avx2(acc[t], d, a[t][b].d, s[t]));
        if (min) {
            const __m256 m = cb_rows16_avx2(w + 16);
            CB_EACH(T, acc[t] = cb_combine_avx2(acc[t], m, a[t][b].d,
                                                _mm256_set1_epi32(a[t][b].sum)));
        }
    }
    CB_EACH(T, cb_store_rows_avx2(y[t] + row, acc[t]));
}

/* Four 8-bit weights of each row: |w|·(q with w's sign); |-128| is 128 as an unsigned byte. */
CB_INLINE void cb_q8_step_avx2(__m256i w, const struct cb_q8_0 *const *a, size_t b, size_t at,
                               __m256i *s, const int T)
{
    const __m256i mag = _mm256_abs_epi8(w);
    CB_EACH(T, s[t] = _mm256_add_epi32(
                   s[t], cb_widen_avx2(_mm256_maddubs_epi16(
                             mag, _mm256_sign_epi8(cb_bcast32_avx2(a[t][b].q + at), w)))));
}

CB_INLINE void cb_q8_0_tile_avx2(float *const *y, const void *const *x, size_t row,
                                 const uint8_t *w, size_t n_blocks, const int T)
{
    const struct cb_q8_0 *a[CB_TILE];
    __m256 acc[CB_TILE];
    CB_EACH(T, a[t] = x[t]; acc[t] = _mm256_setzero_ps());
    for (size_t b = 0; b < n_blocks; b++, w += 272) {
        __m256i v[4], s[CB_TILE];
        const __m256 d = cb_rows16_avx2(w);
        CB_EACH(T, s[t] = _mm256_setzero_si256());
        cb_transpose_avx2(w + 16, v);
        cb_q8_step_avx2(v[0], a, b, 0, s, T);
        cb_q8_step_avx2(v[1], a, b, 4, s, T);
        cb_q8_step_avx2(v[2], a, b, 8, s, T);
        cb_q8_step_avx2(v[3], a, b, 12, s, T);
        cb_transpose_avx2(w + 144, v);
        cb_q8_step_avx2(v[0], a, b, 16, s, T);
        cb_q8_step_avx2(v[1], a, b, 20, s, T);
        cb_q8_step_avx2(v[2], a, b, 24, s, T);
        cb_q8_step_avx2(v[3], a, b, 28, s, T);
        CB_EACH(T, acc[t] = cb_combine_avx2(acc[t], d, a[t][b].d, s[t]));
    }
    CB_EACH(T, cb_store_rows_avx2(y[t] + row, acc[t]));
}

#define cb_q4_0_tile_avx2(y, x, row, w, nb, T) cb_q45_avx2(y, x, row, w, nb, 144, 0, 0, 16, 8, T)
#define cb_q4_1_tile_avx2(y, x, row, w, nb, T) cb_q45_avx2(y, x, row, w, nb, 160, 1, 0, 32, 0, T)
#define cb_q5_0_tile_avx2(y, x, row, w, nb, T) cb_q45_avx2(y, x, row, w, nb, 176, 0, 16, 48, 16, T)
#define cb_q5_1_tile_avx2(y, x, row, w, nb, T) cb_q45_avx2(y, x, row, w, nb, 192, 1, 32, 64, 0, T)

CB_DEFINE_GEMM(q4_0, 32, 18)
CB_DEFINE_GEMM(q4_1, 32, 20)
CB_DEFINE_GEMM(q5_0, 32, 22)
CB_DEFINE_GEMM(q5_1, 32, 24)
CB_DEFINE_GEMM(q8_0, 32, 34)

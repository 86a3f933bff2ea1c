/* gemm_k.c — Q4_K and Q5_K × Q8_K activations (AVX2; determinism.md §3).
 *
 * Super-block of 8 rows: d f16[8] · dmin f16[8] · scales: 3 planes u32[8] · (Q5_K: qh 2 × 128) ·
 * qs 8 × 128. Chunk c of qs holds elements 16·(c%2) … of sub-blocks c/2·2 (low nibbles) and
 * c/2·2 + 1 (high nibbles). A plane is one register: the 6-bit fields of all 8 rows come out of
 * it with a few shifts and masks.
 *
 * 16-bit sums: 32 weights of 4 bits are 8 additions of at most 2·15·127: 30 480. Of 5 bits only
 * 16 weights fit (4 additions: 31 496), so each half is multiplied by the scale on its own.
 */
#include "avx2.h"

#define CB_AT_SCALES 32
#define CB_AT_FIELDS 128 /* qs of Q4_K; qh of Q5_K, its qs 256 later */

/* 6-bit scales and minima as pairs of 16 bits, [j] = (x_j, x_j) in row lanes. */
struct cb_scales_avx2 {
    __m256i sc[8];
    __m256i m[8];
};

/* Byte j of each dword, zero-extended, in both 16-bit halves. */
CB_INLINE __m256i cb_spread_avx2(__m256i v, int j)
{
    const int k = j | 0x80 << 8;
    const __m256i at = _mm256_setr_epi32(0, 0x00040004, 0x00080008, 0x000C000C,
                                         0, 0x00040004, 0x00080008, 0x000C000C);
    return _mm256_shuffle_epi8(v, _mm256_add_epi8(at, _mm256_set1_epi32((int)((unsigned)k * 0x10001u))));
}

CB_INLINE void cb_scales_avx2(const uint8_t *planes, struct cb_scales_avx2 *o)
{
    const __m256i six = _mm256_set1_epi8(63), top = _mm256_set1_epi8(48);
    const __m256i p0 = cb_rows32_avx2(planes);
    const __m256i p1 = cb_rows32_avx2(planes + 32);
    const __m256i p2 = cb_rows32_avx2(planes + 64);
    const __m256i sc0 = _mm256_and_si256(p0, six), m0 = _mm256_and_si256(p1, six);
    const __m256i sc4 = _mm256_or_si256(cb_lo4_avx2(p2),
                                        _mm256_and_si256(_mm256_srli_epi16(p0, 2), top));
    const __m256i m4 = _mm256_or_si256(cb_hi4_avx2(p2),
                                       _mm256_and_si256(_mm256_srli_epi16(p1, 2), top));
    o->sc[0] = cb_spread_avx2(sc0, 0);
    o->sc[1] = cb_spread_avx2(sc0, 1);
    o->sc[2] = cb_spread_avx2(sc0, 2);
    o->sc[3] = cb_spread_avx2(sc0, 3);
    o->sc[4] = cb_spread_avx2(sc4, 0);
    o->sc[5] = cb_spread_avx2(sc4, 1);
    o->sc[6] = cb_spread_avx2(sc4, 2);
    o->sc[7] = cb_spread_avx2(sc4, 3);
    o->m[0] = cb_spread_avx2(m0, 0);
    o->m[1] = cb_spread_avx2(m0, 1);
    o->m[2] = cb_spread_avx2(m0, 2);
    o->m[3] = cb_spread_avx2(m0, 3);
    o->m[4] = cb_spread_avx2(m4, 0);
    o->m[5] = cb_spread_avx2(m4, 1);
    o->m[6] = cb_spread_avx2(m4, 2);
    o->m[7] = cb_spread_avx2(m4, 3);
}

/* M = Σ_j m_j·(bsum[2j] + bsum[2j+1]): the pair (m_j, m_j) meets the two sums as they stand. */
CB_INLINE __m256i cb_mins_avx2(const __m256i m[8], const int16_t bsum[16])
{
    __m256i a = _mm256_madd_epi16(m[0], cb_bcast32_avx2(bsum));
    __m256i b = _mm256_madd_epi16(m[1], cb_bcast32_avx2(bsum + 2));
    a = _mm256_add_epi32(a, _mm256_madd_epi16(m[2], cb_bcast32_avx2(bsum + 4)));
    b = _mm256_add_epi32(b, _mm256_madd_epi16(m[3], cb_bcast32_avx2(bsum + 6)));
    a = _mm256_add_epi32(a, _mm256_madd_epi16(m[4], cb_bcast32_avx2(bsum + 8)));
    b = _mm256_add_epi32(b, _mm256_madd_epi16(m[5], cb_bcast32_avx2(bsum + 10)));
    a = _mm256_add_epi32(a, _mm256_madd_epi16(m[6], cb_bcast32_avx2(bsum + 12)));
    b = _mm256_add_epi32(b, _mm256_madd_epi16(m[7], cb_bcast32_avx2(bsum + 14)));
    return _mm256_add_epi32(a, b);
}

/* acc = fma(d·da, S, acc); acc = fma(-(dmin·da), M, acc) */
CB_INLINE __m256 cb_combine_k_avx2(__m256 acc, __m256 d, __m256 dmin, float da, __m256i s,
                                   __m256i m)
{
    const __m256 a = _mm256_set1_ps(da);
    acc = _mm256_fmadd_ps(_mm256_mul_ps(d, a), _mm256_cvtepi32_ps(s), acc);
    return _mm256_fnmadd_ps(_mm256_mul_ps(dmin, a), _mm256_cvtepi32_ps(m), acc);
}

/* s += sum·(scale, scale) */
CB_INLINE __m256i cb_scaled_avx2(__m256i s, __m256i sum, __m256i sc)
{
    return _mm256_add_epi32(s, _mm256_madd_epi16(sum, sc));
}

/* 16 weights of each row (the low or high nibbles of one chunk) times every token. */
#define CB_K_STEPS(W, at)                                                  \
    do {                                                                   \
        const __m256i w0 = W(0);                                           \
        CB_EACH(T, sum[t] = cb_mac_avx2(sum[t], w0, q[t] + (at)));         \
        const __m256i w1 = W(1);                                           \
        CB_EACH(T, sum[t] = cb_mac_avx2(sum[t], w1, q[t] + (at) + 4));     \
        const __m256i w2 = W(2);                                           \
        CB_EACH(T, sum[t] = cb_mac_avx2(sum[t], w2, q[t] + (at) + 8));     \
        const __m256i w3 = W(3);                                           \
        CB_EACH(T, sum[t] = cb_mac_avx2(sum[t], w3, q[t] + (at) + 12));    \
    } while (0)

CB_INLINE void cb_q4_k_tile_avx2(float *const *y, const void *const *x, size_t row,
                                 const uint8_t *w, size_t n_blocks, const int T)
{
    const struct cb_q8_k *a[CB_TILE];
    __m256 acc[CB_TILE];
    CB_EACH(T, a[t] = x[t]; acc[t] = _mm256_setzero_ps());
    for (size_t b = 0; b < n_blocks; b++, w += 1152) {
        const __m256 d = cb_rows16_avx2(w), dmin = cb_rows16_avx2(w + 16);
        struct cb_scales_avx2 f;
        const int8_t *q[CB_TILE];
        __m256i s[CB_TILE];
        cb_scales_avx2(w + CB_AT_SCALES, &f);
        CB_EACH(T, q[t] = a[t][b].q; s[t] = _mm256_setzero_si256());
        for (size_t i = 0; i < 4; i++) {
            const uint8_t *qs = w + CB_AT_FIELDS + 256 * i;
            __m256i v[8], sum[CB_TILE];
            cb_transpose_avx2(qs, v);
            cb_transpose_avx2(qs + 128, v + 4);
#define CB_LOW0(k) cb_lo4_avx2(v[k])
#define CB_LOW1(k) cb_lo4_avx2(v[4 + (k)])
#define CB_HIGH0(k) cb_hi4_avx2(v[k])
#define CB_HIGH1(k) cb_hi4_avx2(v[4 + (k)])
            CB_EACH(T, sum[t] = _mm256_setzero_si256());
            CB_K_STEPS(CB_LOW0, 64 * i);
            CB_K_STEPS(CB_LOW1, 64 * i + 16);
            CB_EACH(T, s[t] = cb_scaled_avx2(s[t], sum[t], f.sc[2 * i]));
            CB_EACH(T, sum[t] = _mm256_setzero_si256());
            CB_K_STEPS(CB_HIGH0, 64 * i + 32);
            CB_K_STEPS(CB_HIGH1, 64 * i + 48);
            CB_EACH(T, s[t] = cb_scaled_avx2(s[t], sum[t], f.sc[2 * i + 1]));
#undef CB_LOW0
#undef CB_LOW1
#undef CB_HIGH0
#undef CB_HIGH1
        }
        CB_EACH(T, acc[t] = cb_combine_k_avx2(acc[t], d, dmin, a[t][b].d, s[t],
                                              cb_mins_avx2(f.m, a[t][b].bsum)));
    }
    CB_EACH(T, cb_store_rows_avx2(y[t] + row, acc[t]));
}

/* h: fifth bits of four weights of each row, one bit a sub-block; bit: the mask of this sub-block,
 * above bit 3, so that min(·, 16) moves the bit to its place. */
CB_INLINE __m256i cb_join5_avx2(__m256i nibbles, __m256i h, __m256i bit)
{
    const __m256i b = _mm256_min_epu8(_mm256_and_si256(h, bit), _mm256_set1_epi8(16));
    return _mm256_or_si256(nibbles, b);
}

/* One 16-byte chunk: half of the sub-blocks 2i (low nibbles) and 2i+1 (high). */
CB_INLINE void cb_q5_k_half_avx2(const uint8_t *qs, const __m256i h[4], __m256i bit,
                                 const int8_t *const *q, size_t at, const __m256i sc[2],
                                 __m256i *s, const int T)
{
    __m256i v[4], sum[CB_TILE];
    cb_transpose_avx2(qs, v);
#define CB_LOW(k) cb_join5_avx2(cb_lo4_avx2(v[k]), h[k], bit)
#define CB_HIGH(k) cb_join5_avx2(cb_hi4_avx2(v[k]), h[k], _mm256_add_epi8(bit, bit))
    CB_EACH(T, sum[t] = _mm256_setzero_si256());
    CB_K_STEPS(CB_LOW, at);
    CB_EACH(T, s[t] = cb_scaled_avx2(s[t], sum[t], sc[0]));
    CB_EACH(T, sum[t] = _mm256_setzero_si256());
    CB_K_STEPS(CB_HIGH, at + 32);
    CB_EACH(T, s[t] = cb_scaled_avx2(s[t], sum[t], sc[1]));
#undef CB_LOW
#undef CB_HIGH
}

CB_INLINE void cb_q5_k_tile_avx2(float *const *y, const void *const *x, size_t row,
                                 const uint8_t *w, size_t n_blocks, const int T)
{
    const struct cb_q8_k *a[CB_TILE];
    __m256 acc[CB_TILE];
    CB_EACH(T, a[t] = x[t]; acc[t] = _mm256_setzero_ps());
    for (size_t b = 0; b < n_blocks; b++, w += 1408) {
        const __m256 d = cb_rows16_avx2(w), dmin = cb_rows16_avx2(w + 16);
        struct cb_scales_avx2 f;
        const int8_t *q[CB_TILE];
        __m256i s[CB_TILE], h[2][8]; /* [0]: bits 0 … 3 moved up to 4 … 7; [1]: bits 4 … 7 */
        cb_scales_avx2(w + CB_AT_SCALES, &f);
        cb_transpose_avx2(w + CB_AT_FIELDS, h[1]);
        cb_transpose_avx2(w + CB_AT_FIELDS + 128, h[1] + 4);
        for (size_t k = 0; k < 8; k++) {
            h[0][k] = _mm256_slli_epi16(h[1][k], 4);
        }
        CB_EACH(T, q[t] = a[t][b].q; s[t] = _mm256_setzero_si256());
        for (size_t i = 0; i < 4; i++) {
            const uint8_t *qs = w + CB_AT_FIELDS + 256 + 256 * i;
            const __m256i bit = _mm256_set1_epi8((i & 1) != 0 ? 0x40 : 0x10);
            const __m256i *hb = h[i / 2];
            cb_q5_k_half_avx2(qs, hb, bit, q, 64 * i, f.sc + 2 * i, s, T);
            cb_q5_k_half_avx2(qs + 128, hb + 4, bit, q, 64 * i + 16, f.sc + 2 * i, s, T);
        }
        CB_EACH(T, acc[t] = cb_combine_k_avx2(acc[t], d, dmin, a[t][b].d, s[t],
                                              cb_mins_avx2(f.m, a[t][b].bsum)));
    }
    CB_EACH(T, cb_store_rows_avx2(y[t] + row, acc[t]));
}

CB_DEFINE_GEMM(q4_k, 256, 144)
CB_DEFINE_GEMM(q5_k, 256, 176)

/* gemm_k.c — products of the 256-block types with Q8_K activations (SSSE3, SSE4.1).
 *
 * Codes stay unsigned for pmaddubsw; pmaddwd multiplies its 16-bit sums by the
 * sub-block's scale and widens them: everything up to S and M is exact. */
#include "sse41.h"

/* pshufb indices: byte i, or 16-bit word i, as eight 16-bit copies. */
CB_INLINE __m128i cb_pick_u8(size_t i)
{
    return _mm_set1_epi16((short)(0x8000u | i));
}

CB_INLINE __m128i cb_pick_i16(size_t i)
{
    return _mm_set1_epi16((short)(2 * i + 256 * (2 * i + 1)));
}

/* Scales and minima of 8 rows, 8 bytes a row, rows 2i and 2i + 1 in vector i. */
struct cb_k_scales {
    __m128i sc[4], m[4];
};

CB_INLINE void cb_k_scales4(const uint8_t *s, __m128i sc[2], __m128i m[2])
{
    const __m128i s0 = cb_load(s), s1 = cb_load(s + 32), s2 = cb_load(s + 64);
    const __m128i m6 = _mm_set1_epi8(63), m4 = _mm_set1_epi8(15), top = _mm_set1_epi8(48);
    const __m128i sc_lo = _mm_and_si128(s0, m6);
    const __m128i m_lo = _mm_and_si128(s1, m6);
    const __m128i sc_hi = _mm_or_si128(_mm_and_si128(s2, m4),
                                       _mm_and_si128(_mm_srli_epi16(s0, 2), top));
    const __m128i m_hi = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(s2, 4), m4),
                                      _mm_and_si128(_mm_srli_epi16(s1, 2), top));
    sc[0] = _mm_unpacklo_epi32(sc_lo, sc_hi);
    sc[1] = _mm_unpackhi_epi32(sc_lo, sc_hi);
    m[0] = _mm_unpacklo_epi32(m_lo, m_hi);
    m[1] = _mm_unpackhi_epi32(m_lo, m_hi);
}

/* Bit b of each byte moved to bit 4. */
CB_INLINE __m128i cb_bit_to_4(__m128i v, int b)
{
    const __m128i s = b < 4 ? _mm_slli_epi16(v, 4 - b) : _mm_srli_epi16(v, b - 4);
    return _mm_and_si128(s, _mm_set1_epi8(16));
}

/* Sub-blocks 2p and 2p + 1 of one row: sc·(sum of w·q), four partial sums.
 * 31·127·4 < 2^15. qh5 is 1 for Q5_K. */
CB_INLINE __m128i cb_pair_k(const uint8_t *qs, const __m128i qh[2], int qh5, int p, const int8_t *q,
                            __m128i sc, size_t base)
{
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i v0 = cb_load(qs), v1 = cb_load(qs + 128);
    __m128i lo0 = _mm_and_si128(v0, mask), lo1 = _mm_and_si128(v1, mask);
    __m128i hi0 = _mm_and_si128(_mm_srli_epi16(v0, 4), mask);
    __m128i hi1 = _mm_and_si128(_mm_srli_epi16(v1, 4), mask);
    if (qh5) {
        lo0 = _mm_or_si128(lo0, cb_bit_to_4(qh[0], 2 * p));
        lo1 = _mm_or_si128(lo1, cb_bit_to_4(qh[1], 2 * p));
        hi0 = _mm_or_si128(hi0, cb_bit_to_4(qh[0], 2 * p + 1));
        hi1 = _mm_or_si128(hi1, cb_bit_to_4(qh[1], 2 * p + 1));
    }
    const __m128i lo = _mm_add_epi16(_mm_maddubs_epi16(lo0, cb_load(q)),
                                     _mm_maddubs_epi16(lo1, cb_load(q + 16)));
    const __m128i hi = _mm_add_epi16(_mm_maddubs_epi16(hi0, cb_load(q + 32)),
                                     _mm_maddubs_epi16(hi1, cb_load(q + 48)));
    const size_t j = base + 2 * (size_t)p;
    return _mm_add_epi32(_mm_madd_epi16(lo, _mm_shuffle_epi8(sc, cb_pick_u8(j))),
                         _mm_madd_epi16(hi, _mm_shuffle_epi8(sc, cb_pick_u8(j + 1))));
}

/* One row of a super-block; base = 8 for odd rows, whose scales are the upper half. */
CB_INLINE __m128i cb_row_k(const uint8_t *sb, int qh5, size_t r, const int8_t *q, __m128i sc,
                           size_t base)
{
    const uint8_t *qs = sb + (qh5 ? 384 : 128) + 16 * r;
    __m128i qh[2] = {_mm_setzero_si128(), _mm_setzero_si128()};
    if (qh5) {
        qh[0] = cb_load(sb + 128 + 16 * r);
        qh[1] = cb_load(sb + 256 + 16 * r);
    }
    const __m128i p0 = cb_pair_k(qs, qh, qh5, 0, q, sc, base);
    const __m128i p1 = cb_pair_k(qs + 256, qh, qh5, 1, q + 64, sc, base);
    const __m128i p2 = cb_pair_k(qs + 512, qh, qh5, 2, q + 128, sc, base);
    const __m128i p3 = cb_pair_k(qs + 768, qh, qh5, 3, q + 192, sc, base);
    return _mm_add_epi32(_mm_add_epi32(p0, p1), _mm_add_epi32(p2, p3));
}

/* One super-block of Q4_K or Q5_K against one activation block. */
CB_INLINE void cb_block_k(const uint8_t *sb, int qh5, const struct cb_q8_k *a, struct cb_row8 *acc)
{
    /* sums of each 32: |bsum[2j] + bsum[2j+1]| <= 4064 */
    const __m128i bsum = _mm_hadd_epi16(cb_load(a->bsum), cb_load(a->bsum + 8));
    struct cb_k_scales k;
    __m128i s[8], m[8];
    cb_k_scales4(sb + 32, k.sc, k.m);
    cb_k_scales4(sb + 48, k.sc + 2, k.m + 2);
    for (size_t r = 0; r < 8; r += 2) {
        s[r] = cb_row_k(sb, qh5, r, a->q, k.sc[r / 2], 0);
        s[r + 1] = cb_row_k(sb, qh5, r + 1, a->q, k.sc[r / 2], 8);
        m[r] = _mm_madd_epi16(_mm_cvtepu8_epi16(k.m[r / 2]), bsum);
        m[r + 1] = _mm_madd_epi16(_mm_unpackhi_epi8(k.m[r / 2], _mm_setzero_si128()), bsum);
    }
    const __m128 da = _mm_set1_ps(a->d);
    const __m128 minus_da = _mm_xor_ps(da, _mm_set1_ps(-0.0f)); /* -(dmin·da) = dmin·(-da) */
    cb_row8_fma(acc, cb_row8_f16(sb), da, _mm_cvtepi32_ps(cb_hsum4(s[0], s[1], s[2], s[3])),
                _mm_cvtepi32_ps(cb_hsum4(s[4], s[5], s[6], s[7])));
    cb_row8_fma(acc, cb_row8_f16(sb + 16), minus_da,
                _mm_cvtepi32_ps(cb_hsum4(m[0], m[1], m[2], m[3])),
                _mm_cvtepi32_ps(cb_hsum4(m[4], m[5], m[6], m[7])));
}

/* Chunk c of a Q6_K row: elements e = 128·(c/4) + 16·(c%4) with scale e/16, and
 * those 64 later. 63·127·2 < 2^15. */
CB_INLINE __m128i cb_chunk_q6_k(const uint8_t *ql, __m128i qh, size_t c, const int8_t *q,
                                __m128i sc)
{
    const __m128i mask = _mm_set1_epi8(15), top = _mm_set1_epi8(48);
    const __m128i v = cb_load(ql + 128 * c);
    const int upper = c % 4 >= 2; /* bits 2, 3 and 6, 7 of qh instead of 0, 1 and 4, 5 */
    const __m128i b_lo = upper ? _mm_slli_epi16(qh, 2) : _mm_slli_epi16(qh, 4);
    const __m128i b_hi = upper ? _mm_srli_epi16(qh, 2) : qh;
    const __m128i lo = _mm_or_si128(_mm_and_si128(v, mask), _mm_and_si128(b_lo, top));
    const __m128i hi = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(v, 4), mask),
                                    _mm_and_si128(b_hi, top));
    const int8_t *e = q + 128 * (c / 4) + 16 * (c % 4);
    const __m128i p_lo = _mm_maddubs_epi16(lo, cb_load(e));
    const __m128i p_hi = _mm_maddubs_epi16(hi, cb_load(e + 64));
    return _mm_add_epi32(_mm_madd_epi16(p_lo, _mm_shuffle_epi8(sc, cb_pick_i16(c % 4))),
                         _mm_madd_epi16(p_hi, _mm_shuffle_epi8(sc, cb_pick_i16(c % 4 + 4))));
}

/* S of one row: sum of sc·(sum of w·q), less 32·(sum of sc·bsum); below 2^29 throughout. */
CB_INLINE __m128i cb_row_q6_k(const uint8_t *sb, size_t r, const struct cb_q8_k *a)
{
    const uint8_t *ql = sb + 656 + 16 * r;
    const uint8_t *qh = sb + 144 + 16 * r;
    const __m128i sc8 = cb_load(sb + 16 + 16 * r);
    const __m128i sc0 = _mm_cvtepi8_epi16(sc8);
    const __m128i sc1 = _mm_cvtepi8_epi16(_mm_srli_si128(sc8, 8));
    const __m128i h0 = cb_load(qh), h1 = cb_load(qh + 128);
    const __m128i h2 = cb_load(qh + 256), h3 = cb_load(qh + 384);
    __m128i s = cb_chunk_q6_k(ql, h0, 0, a->q, sc0);
    s = _mm_add_epi32(s, cb_chunk_q6_k(ql, h1, 1, a->q, sc0));
    s = _mm_add_epi32(s, cb_chunk_q6_k(ql, h0, 2, a->q, sc0));
    s = _mm_add_epi32(s, cb_chunk_q6_k(ql, h1, 3, a->q, sc0));
    s = _mm_add_epi32(s, cb_chunk_q6_k(ql, h2, 4, a->q, sc1));
    s = _mm_add_epi32(s, cb_chunk_q6_k(ql, h3, 5, a->q, sc1));
    s = _mm_add_epi32(s, cb_chunk_q6_k(ql, h2, 6, a->q, sc1));
    s = _mm_add_epi32(s, cb_chunk_q6_k(ql, h3, 7, a->q, sc1));
    const __m128i zero = _mm_add_epi32(_mm_madd_epi16(sc0, cb_load(a->bsum)),
                                       _mm_madd_epi16(sc1, cb_load(a->bsum + 8)));
    return _mm_sub_epi32(s, _mm_slli_epi32(zero, 5));
}

CB_INLINE void cb_block_q6_k(const uint8_t *sb, const struct cb_q8_k *a, struct cb_row8 *acc)
{
    __m128i s[8];
    for (size_t r = 0; r < 8; r++) {
        s[r] = cb_row_q6_k(sb, r, a);
    }
    cb_row8_fma(acc, cb_row8_f16(sb), _mm_set1_ps(a->d),
                _mm_cvtepi32_ps(cb_hsum4(s[0], s[1], s[2], s[3])),
                _mm_cvtepi32_ps(cb_hsum4(s[4], s[5], s[6], s[7])));
}

#define CB_GEMM_K(BLOCK_BYTES, ...)                                                        \
    const uint8_t *group = w;                                                              \
    const size_t n_blocks = n_cols / 256;                                                  \
    for (size_t g = 0; g < n_groups; g++, group += n_blocks * 8 * (BLOCK_BYTES)) {         \
        for (size_t t = 0; t < n_tok; t++) {                                               \
            const struct cb_q8_k *a = x[t];                                                \
            const uint8_t *sb = group;                                                     \
            struct cb_row8 acc = {_mm_setzero_ps(), _mm_setzero_ps()};                     \
            for (size_t b = 0; b < n_blocks; b++, a++, sb += 8 * (BLOCK_BYTES)) {          \
                __VA_ARGS__;                                                               \
            }                                                                              \
            cb_row8_store(y[t] + g * CB_GROUP, acc);                                       \
        }                                                                                  \
    }

void cb_gemm_q4_k_sse41(float *const *y, const void *const *x, size_t n_tok, const void *w,
                        size_t n_groups, size_t n_cols)
{
    CB_GEMM_K(144, cb_block_k(sb, 0, a, &acc))
}

void cb_gemm_q5_k_sse41(float *const *y, const void *const *x, size_t n_tok, const void *w,
                        size_t n_groups, size_t n_cols)
{
    CB_GEMM_K(176, cb_block_k(sb, 1, a, &acc))
}

void cb_gemm_q6_k_sse41(float *const *y, const void *const *x, size_t n_tok, const void *w,
                        size_t n_groups, size_t n_cols)
{
    CB_GEMM_K(210, cb_block_q6_k(sb, a, &acc))
}

/* gemm_q.c — products of the 32-block types with Q8_0 activations (SSSE3, SSE4.1).
 *
 * Codes stay unsigned (0…31) for pmaddubsw, whose pairs then stay below 2^15;
 * the zero point z is taken off as z·sum(q), in exact integers. */
#include "sse41.h"

/* Four partial sums of w·q for 32 codes, 31·127·4 < 2^15 in the 16-bit step. */
CB_INLINE __m128i cb_dot32_u(__m128i lo, __m128i hi, __m128i q0, __m128i q1)
{
    const __m128i s = _mm_add_epi16(_mm_maddubs_epi16(lo, q0), _mm_maddubs_epi16(hi, q1));
    return _mm_madd_epi16(s, _mm_set1_epi16(1));
}

/* Signed weights, -128 included: |w| as unsigned, its sign moved to q (never
 * -128). 128·127·2 < 2^15. */
CB_INLINE __m128i cb_dot16_s(__m128i w, __m128i q)
{
    const __m128i s = _mm_maddubs_epi16(_mm_abs_epi8(w), _mm_sign_epi8(q, w));
    return _mm_madd_epi16(s, _mm_set1_epi16(1));
}

/* Bits 0…15 of v as bytes 0 or 16. */
CB_INLINE __m128i cb_fifth_bits(uint32_t v)
{
    const __m128i spread = _mm_set_epi8(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i bit = _mm_set1_epi64x((long long)0x8040201008040201ull);
    const __m128i x = _mm_shuffle_epi8(_mm_cvtsi32_si128((int)v), spread);
    return _mm_and_si128(_mm_cmpeq_epi8(_mm_and_si128(x, bit), bit), _mm_set1_epi8(16));
}

enum cb_qtype { CB_Q_4_0, CB_Q_4_1, CB_Q_5_0, CB_Q_5_1, CB_Q_8_0 };

/* Partial sums of one row of a super-block; qs and qh at the fields' starts. */
CB_INLINE __m128i cb_row_q(enum cb_qtype type, const uint8_t *qs, const uint8_t *qh, size_t r,
                           __m128i q0, __m128i q1)
{
    const __m128i v = cb_load(qs + 16 * r);
    if (type == CB_Q_8_0) {
        return _mm_add_epi32(cb_dot16_s(v, q0), cb_dot16_s(cb_load(qs + 128 + 16 * r), q1));
    }
    const __m128i mask = _mm_set1_epi8(15);
    __m128i lo = _mm_and_si128(v, mask);
    __m128i hi = _mm_and_si128(_mm_srli_epi16(v, 4), mask);
    if (type == CB_Q_5_0 || type == CB_Q_5_1) {
        const uint32_t bits = cb_load_u32(qh + 4 * r);
        lo = _mm_or_si128(lo, cb_fifth_bits(bits & 0xFFFFu));
        hi = _mm_or_si128(hi, cb_fifth_bits(bits >> 16));
    }
    return cb_dot32_u(lo, hi, q0, q1);
}

/* One super-block against one activation block; type is constant where it is called. */
CB_INLINE void cb_block_q(enum cb_qtype type, const uint8_t *sb, const struct cb_q8_0 *a,
                          struct cb_row8 *acc)
{
    const int has_m = type == CB_Q_4_1 || type == CB_Q_5_1;
    const uint8_t *qh = sb + (has_m ? 32 : 16);
    const uint8_t *qs = type == CB_Q_5_0 || type == CB_Q_5_1 ? qh + 32 : qh;
    const __m128i q0 = cb_load(a->q);
    const __m128i q1 = cb_load(a->q + 16);
    __m128i p[8];
    for (size_t r = 0; r < 8; r++) {
        p[r] = cb_row_q(type, qs, qh, r, q0, q1);
    }
    __m128i lo = cb_hsum4(p[0], p[1], p[2], p[3]);
    __m128i hi = cb_hsum4(p[4], p[5], p[6], p[7]);
    if (type == CB_Q_4_0 || type == CB_Q_5_0) {
        const __m128i z = _mm_set1_epi32(a->sum * (type == CB_Q_4_0 ? 8 : 16));
        lo = _mm_sub_epi32(lo, z);
        hi = _mm_sub_epi32(hi, z);
    }
    const __m128 da = _mm_set1_ps(a->d);
    cb_row8_fma(acc, cb_row8_f16(sb), da, _mm_cvtepi32_ps(lo), _mm_cvtepi32_ps(hi));
    if (has_m) {
        const __m128 sum = _mm_cvtepi32_ps(_mm_set1_epi32(a->sum));
        cb_row8_fma(acc, cb_row8_f16(sb + 16), da, sum, sum);
    }
}

#define CB_GEMM_Q(TYPE, BLOCK_BYTES)                                                       \
    const uint8_t *group = w;                                                              \
    const size_t n_blocks = n_cols / 32;                                                   \
    for (size_t g = 0; g < n_groups; g++, group += n_blocks * 8 * (BLOCK_BYTES)) {         \
        for (size_t t = 0; t < n_tok; t++) {                                               \
            const struct cb_q8_0 *a = x[t];                                                \
            struct cb_row8 acc = {_mm_setzero_ps(), _mm_setzero_ps()};                     \
            for (size_t b = 0; b < n_blocks; b++) {                                        \
                cb_block_q(TYPE, group + b * 8 * (BLOCK_BYTES), a + b, &acc);              \
            }                                                                              \
            cb_row8_store(y[t] + g * CB_GROUP, acc);                                       \
        }                                                                                  \
    }

void cb_gemm_q4_0_sse41(float *const *y, const void *const *x, size_t n_tok, const void *w,
                        size_t n_groups, size_t n_cols)
{
    CB_GEMM_Q(CB_Q_4_0, 18)
}

void cb_gemm_q4_1_sse41(float *const *y, const void *const *x, size_t n_tok, const void *w,
                        size_t n_groups, size_t n_cols)
{
    CB_GEMM_Q(CB_Q_4_1, 20)
}

void cb_gemm_q5_0_sse41(float *const *y, const void *const *x, size_t n_tok, const void *w,
                        size_t n_groups, size_t n_cols)
{
    CB_GEMM_Q(CB_Q_5_0, 22)
}

void cb_gemm_q5_1_sse41(float *const *y, const void *const *x, size_t n_tok, const void *w,
                        size_t n_groups, size_t n_cols)
{
    CB_GEMM_Q(CB_Q_5_1, 24)
}

void cb_gemm_q8_0_sse41(float *const *y, const void *const *x, size_t n_tok, const void *w,
                        size_t n_groups, size_t n_cols)
{
    CB_GEMM_Q(CB_Q_8_0, 34)
}

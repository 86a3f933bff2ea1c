/* sse41.h — helpers of the SSSE3 + SSE4.1 kernels. Forced inline: no symbols. */
#ifndef CB_SSE41_H
#define CB_SSE41_H

#include <smmintrin.h>

#include "../f16.h"
#include "../impl.h"

cb_gemm_fn cb_gemm_f32_sse41, cb_gemm_f16_sse41, cb_gemm_bf16_sse41;
cb_gemm_fn cb_gemm_q4_0_sse41, cb_gemm_q4_1_sse41, cb_gemm_q5_0_sse41, cb_gemm_q5_1_sse41;
cb_gemm_fn cb_gemm_q8_0_sse41, cb_gemm_q4_k_sse41, cb_gemm_q5_k_sse41, cb_gemm_q6_k_sse41;
void cb_quant_q8_0_sse41(struct cb_q8_0 *y, const float *x, size_t n);
void cb_quant_q8_k_sse41(struct cb_q8_k *y, const float *x, size_t n);
void cb_vec_init_sse41(struct cb_kernels *k);
void cb_attn_init_sse41(struct cb_kernels *k);

/* a·b + c rounded once, whatever the operands (fma.c). */
__m128 cb_fma4_exact_sse41(__m128 a, __m128 b, __m128 c);

/* Four fused multiply-adds. The sum in binary64 converts to the right binary32
 * number unless it stands exactly between two of them (its own rounding may have
 * put it there) or the result is subnormal: only then the exact way is taken.
 * 2^-126 has the upper word 0x38100000 in binary64. */
CB_INLINE __m128 cb_fma4(__m128 a, __m128 b, __m128 c)
{
    const __m128d p0 = _mm_mul_pd(_mm_cvtps_pd(a), _mm_cvtps_pd(b));
    const __m128d p1 = _mm_mul_pd(_mm_cvtps_pd(_mm_movehl_ps(a, a)),
                                  _mm_cvtps_pd(_mm_movehl_ps(b, b)));
    const __m128d s0 = _mm_add_pd(p0, _mm_cvtps_pd(c));
    const __m128d s1 = _mm_add_pd(p1, _mm_cvtps_pd(_mm_movehl_ps(c, c)));
    const __m128 f0 = _mm_castpd_ps(s0);
    const __m128 f1 = _mm_castpd_ps(s1);
    const __m128i lo = _mm_castps_si128(_mm_shuffle_ps(f0, f1, _MM_SHUFFLE(2, 0, 2, 0)));
    const __m128i hi = _mm_castps_si128(_mm_shuffle_ps(f0, f1, _MM_SHUFFLE(3, 1, 3, 1)));
    const __m128i tie = _mm_cmpeq_epi32(_mm_slli_epi32(lo, 3), _mm_set1_epi32((int)0x80000000u));
    const __m128i mag = _mm_and_si128(hi, _mm_set1_epi32(0x7FFFFFFF));
    const __m128i tiny = _mm_cmpgt_epi32(_mm_set1_epi32(0x38100000), mag);
    if (__builtin_expect(_mm_movemask_epi8(_mm_or_si128(tie, tiny)) != 0, 0)) {
        return cb_fma4_exact_sse41(a, b, c);
    }
    return _mm_movelh_ps(_mm_cvtpd_ps(s0), _mm_cvtpd_ps(s1));
}

/* Four binary16 in the low halves of 32-bit lanes; no subnormal operand is
 * multiplied, because those take a trap in microcode on many CPUs. */
CB_INLINE __m128 cb_f16x4(__m128i h)
{
    const __m128i em = _mm_and_si128(h, _mm_set1_epi32(0x7FFF));
    const __m128i sign = _mm_slli_epi32(_mm_andnot_si128(_mm_set1_epi32(0x7FFF), h), 16);
    const __m128i bias = _mm_set1_epi32(112 << 23);
    const __m128i inf = _mm_cmpgt_epi32(em, _mm_set1_epi32(0x7BFF));
    const __m128i nan = _mm_cmpgt_epi32(em, _mm_set1_epi32(0x7C00));
    __m128i n = _mm_add_epi32(_mm_slli_epi32(em, 13), bias);
    n = _mm_add_epi32(n, _mm_and_si128(inf, bias));
    n = _mm_or_si128(n, _mm_and_si128(nan, _mm_set1_epi32(0x400000)));
    const __m128 sub = _mm_mul_ps(_mm_cvtepi32_ps(em), _mm_set1_ps(0x1p-24f));
    const __m128i is_sub = _mm_cmpgt_epi32(_mm_set1_epi32(0x400), em);
    n = _mm_blendv_epi8(n, _mm_castps_si128(sub), is_sub);
    return _mm_castsi128_ps(_mm_or_si128(n, sign));
}

/* Four binary16 numbers at any address. */
CB_INLINE __m128 cb_load_f16x4(const uint16_t *p)
{
    return cb_f16x4(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)));
}

CB_INLINE __m128 cb_load_bf16x4(const uint16_t *p)
{
    const __m128i h = _mm_loadl_epi64((const __m128i *)(const void *)p);
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), h));
}

CB_INLINE __m128i cb_load(const void *p) { return _mm_loadu_si128(p); }

/* [sum a, sum b, sum c, sum d] of four int32 each. */
CB_INLINE __m128i cb_hsum4(__m128i a, __m128i b, __m128i c, __m128i d)
{
    const __m128i ab = _mm_add_epi32(_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b));
    const __m128i cd = _mm_add_epi32(_mm_unpacklo_epi32(c, d), _mm_unpackhi_epi32(c, d));
    return _mm_add_epi32(_mm_unpacklo_epi64(ab, cd), _mm_unpackhi_epi64(ab, cd));
}

/* Eight rows' scalars as floats, rows 0…3 and 4…7. */
struct cb_row8 {
    __m128 lo, hi;
};

CB_INLINE struct cb_row8 cb_row8_f16(const uint8_t *p)
{
    const __m128i h = cb_load(p);
    const struct cb_row8 r = {cb_f16x4(_mm_cvtepu16_epi32(h)),
                              cb_f16x4(_mm_unpackhi_epi16(h, _mm_setzero_si128()))};
    return r;
}

/* acc = fma(scale·f, v, acc), the product of scales rounded once. */
CB_INLINE void cb_row8_fma(struct cb_row8 *acc, struct cb_row8 scale, __m128 f, __m128 v_lo,
                           __m128 v_hi)
{
    acc->lo = cb_fma4(_mm_mul_ps(scale.lo, f), v_lo, acc->lo);
    acc->hi = cb_fma4(_mm_mul_ps(scale.hi, f), v_hi, acc->hi);
}

CB_INLINE void cb_row8_store(float *y, struct cb_row8 acc)
{
    _mm_storeu_ps(y, acc.lo);
    _mm_storeu_ps(y + 4, acc.hi);
}

/* The 32 virtual lanes, four to a vector: lane i is element i % 4 of v[i / 4]. */
struct cb_lanes {
    __m128 v[8];
};

CB_INLINE struct cb_lanes cb_lanes_zero(void)
{
    struct cb_lanes l;
    for (int j = 0; j < 8; j++) {
        l.v[j] = _mm_setzero_ps();
    }
    return l;
}

CB_INLINE float cb_lanes_reduce(struct cb_lanes l)
{
    for (int h = 4; h > 0; h /= 2) {
        for (int j = 0; j < h; j++) {
            l.v[j] = _mm_add_ps(l.v[j], l.v[j + h]);
        }
    }
    __m128 s = _mm_add_ps(l.v[0], _mm_movehl_ps(l.v[0], l.v[0]));
    s = _mm_add_ss(s, _mm_shuffle_ps(s, s, 1));
    return _mm_cvtss_f32(s);
}

enum cb_wtype { CB_W_F32, CB_W_F16, CB_W_BF16 };

/* Four widened weights at index i; w is constant where it is called. */
CB_INLINE __m128 cb_w4(const void *a, size_t i, enum cb_wtype w)
{
    if (w == CB_W_F32) {
        return _mm_loadu_ps((const float *)a + i);
    }
    return w == CB_W_F16 ? cb_load_f16x4((const uint16_t *)a + i)
                         : cb_load_bf16x4((const uint16_t *)a + i);
}

CB_INLINE float cb_w1(const void *a, size_t i, enum cb_wtype w)
{
    if (w == CB_W_F32) {
        return ((const float *)a)[i];
    }
    const uint16_t h = ((const uint16_t *)a)[i];
    return w == CB_W_F16 ? cb_f16_to_f32(h) : cb_bf16_to_f32(h);
}

/* dot of determinism.md §2; a has type w. */
CB_INLINE float cb_dot_any(const void *a, const float *b, size_t n, enum cb_wtype w)
{
    struct cb_lanes l = cb_lanes_zero();
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        for (size_t j = 0; j < 8; j++) {
            l.v[j] = cb_fma4(cb_w4(a, i + 4 * j, w), _mm_loadu_ps(b + i + 4 * j), l.v[j]);
        }
    }
    size_t j = 0;
    for (; i + 4 <= n; i += 4, j++) {
        l.v[j] = cb_fma4(cb_w4(a, i, w), _mm_loadu_ps(b + i), l.v[j]);
    }
    if (i < n) {
        float lane[4];
        _mm_storeu_ps(lane, l.v[j]);
        for (size_t k = 0; i + k < n; k++) {
            lane[k] = cb_fmaf(cb_w1(a, i + k, w), b[i + k], lane[k]);
        }
        l.v[j] = _mm_loadu_ps(lane);
    }
    return cb_lanes_reduce(l);
}

#endif

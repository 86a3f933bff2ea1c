/* quant.c — activations to Q8_0 and Q8_K (SSE4.1; determinism.md §3). */
#include <float.h>

#include "sse41.h"

CB_INLINE __m128 cb_abs4(__m128 v)
{
    return _mm_and_ps(v, _mm_castsi128_ps(_mm_set1_epi32(0x7FFFFFFF)));
}

CB_INLINE float cb_absmax(const float *x, size_t n)
{
    __m128 m = _mm_setzero_ps();
    for (size_t i = 0; i < n; i += 4) {
        m = _mm_max_ps(cb_abs4(_mm_loadu_ps(x + i)), m);
    }
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_shuffle_ps(m, m, 1));
    return _mm_cvtss_f32(m);
}

/* 16 codes: rounded by MXCSR's mode, to nearest even. */
CB_INLINE __m128i cb_codes16(const float *x, __m128 f)
{
    const __m128i a = _mm_cvtps_epi32(_mm_mul_ps(_mm_loadu_ps(x), f));
    const __m128i b = _mm_cvtps_epi32(_mm_mul_ps(_mm_loadu_ps(x + 4), f));
    const __m128i c = _mm_cvtps_epi32(_mm_mul_ps(_mm_loadu_ps(x + 8), f));
    const __m128i d = _mm_cvtps_epi32(_mm_mul_ps(_mm_loadu_ps(x + 12), f));
    return _mm_packs_epi16(_mm_packs_epi32(a, b), _mm_packs_epi32(c, d));
}

/* Four partial sums of 16 signed bytes. */
CB_INLINE __m128i cb_sum16(__m128i q)
{
    return _mm_madd_epi16(_mm_maddubs_epi16(_mm_set1_epi8(1), q), _mm_set1_epi16(1));
}

void cb_quant_q8_0_sse41(struct cb_q8_0 *y, const float *x, size_t n)
{
    for (size_t b = 0; b < n / 32; b++, x += 32, y++) {
        const float amax = cb_absmax(x, 32);
        float id = amax > 0.0f ? 127.0f / amax : 0.0f;
        id = id <= FLT_MAX ? id : 0.0f;
        const __m128i q0 = cb_codes16(x, _mm_set1_ps(id));
        const __m128i q1 = cb_codes16(x + 16, _mm_set1_ps(id));
        const __m128i s = _mm_add_epi32(cb_sum16(q0), cb_sum16(q1));
        const __m128i s2 = _mm_add_epi32(s, _mm_srli_si128(s, 8));
        y->d = cb_f16_to_f32(cb_f32_to_f16(amax / 127.0f));
        y->sum = _mm_cvtsi128_si32(_mm_add_epi32(s2, _mm_srli_si128(s2, 4)));
        _mm_storeu_si128((__m128i *)(void *)y->q, q0);
        _mm_storeu_si128((__m128i *)(void *)(y->q + 16), q1);
    }
}

/* The first of 256 values whose magnitude is amax. */
CB_INLINE float cb_first_of(const float *x, float amax)
{
    const __m128 want = _mm_set1_ps(amax);
    for (size_t i = 0; i < 256; i += 4) {
        const int hit = _mm_movemask_ps(_mm_cmpeq_ps(cb_abs4(_mm_loadu_ps(x + i)), want));
        if (hit != 0) {
            return x[i + (size_t)__builtin_ctz((unsigned)hit)];
        }
    }
    return 0.0f;
}

void cb_quant_q8_k_sse41(struct cb_q8_k *y, const float *x, size_t n)
{
    for (size_t b = 0; b < n / 256; b++, x += 256, y++) {
        const float amax = cb_absmax(x, 256);
        const float iscale = amax > 0.0f ? -127.0f / cb_first_of(x, amax) : 0.0f;
        if (!(iscale != 0.0f && iscale <= FLT_MAX && iscale >= -FLT_MAX)) {
            memset(y, 0, sizeof *y);
            continue;
        }
        y->d = 1.0f / iscale;
        for (size_t g = 0; g < 16; g += 4) {
            __m128i q[4];
            for (size_t j = 0; j < 4; j++) {
                q[j] = cb_codes16(x + 16 * (g + j), _mm_set1_ps(iscale));
                _mm_storeu_si128((__m128i *)(void *)(y->q + 16 * (g + j)), q[j]);
            }
            const __m128i s =
                cb_hsum4(cb_sum16(q[0]), cb_sum16(q[1]), cb_sum16(q[2]), cb_sum16(q[3]));
            _mm_storel_epi64((__m128i *)(void *)(y->bsum + g), _mm_packs_epi32(s, s));
        }
    }
}

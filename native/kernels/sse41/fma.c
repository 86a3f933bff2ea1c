/* fma.c — the exact fused multiply-add: round to odd in binary64 (fma.h), two at a time. */
#include "sse41.h"

/* Where the error of the sum is not 0: toward zero first (one step back when the
 * error points there), then the last bit set. The sign of s·e says which way;
 * it neither under- nor overflows, and is NaN, false twice, for infinite s. */
CB_INLINE __m128 cb_fma2_odd(__m128 a, __m128 b, __m128 c)
{
    const __m128d p = _mm_mul_pd(_mm_cvtps_pd(a), _mm_cvtps_pd(b));
    const __m128d z = _mm_cvtps_pd(c);
    const __m128d s = _mm_add_pd(p, z);
    const __m128d t = _mm_sub_pd(s, p);
    const __m128d e = _mm_add_pd(_mm_sub_pd(p, _mm_sub_pd(s, t)), _mm_sub_pd(z, t));
    const __m128d se = _mm_mul_pd(s, e);
    const __m128i back = _mm_castpd_si128(_mm_cmplt_pd(se, _mm_setzero_pd()));
    const __m128i on = _mm_castpd_si128(_mm_cmpgt_pd(se, _mm_setzero_pd()));
    const __m128i sticky = _mm_srli_epi64(_mm_or_si128(back, on), 63);
    const __m128i u = _mm_or_si128(_mm_add_epi64(_mm_castpd_si128(s), back), sticky);
    return _mm_cvtpd_ps(_mm_castsi128_pd(u));
}

__m128 cb_fma4_exact_sse41(__m128 a, __m128 b, __m128 c)
{
    const __m128 lo = cb_fma2_odd(a, b, c);
    const __m128 hi =
        cb_fma2_odd(_mm_movehl_ps(a, a), _mm_movehl_ps(b, b), _mm_movehl_ps(c, c));
    return _mm_movelh_ps(lo, hi);
}

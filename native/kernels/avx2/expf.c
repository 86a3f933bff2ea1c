/* expf.c — softmax and SiLU on the engine's own exponential (AVX2; determinism.md §4). */
#include <math.h>

#include "lanes.h"

/* 2^n for -126 <= n <= 127, from the exponent's bits. */
CB_INLINE __m256 cb_pow2_avx2(__m256i n)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

/* cb_expf, lane by lane. The polynomial runs on a clamped x; the ends are chosen afterwards. */
CB_INLINE __m256 cb_expf_avx2(__m256 x)
{
    const __m256 top = _mm256_set1_ps(88.72283f), bottom = _mm256_set1_ps(-104.0f);
    const __m256 c = _mm256_max_ps(_mm256_min_ps(x, top), bottom);
    const __m256i n = _mm256_cvtps_epi32(_mm256_mul_ps(c, _mm256_set1_ps(1.44269504f)));
    const __m256 nf = _mm256_cvtepi32_ps(n);
    const __m256i n1 = _mm256_srai_epi32(n, 1), n2 = _mm256_sub_epi32(n, n1);
    const __m256 one = _mm256_set1_ps(1.0f);
    __m256 r = _mm256_fmadd_ps(nf, _mm256_set1_ps(-0.693359375f), c);
    __m256 p = _mm256_set1_ps((float)(1.0 / 5040.0));
    r = _mm256_fmadd_ps(nf, _mm256_set1_ps(2.12194440e-4f), r);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps((float)(1.0 / 720.0)));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps((float)(1.0 / 120.0)));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps((float)(1.0 / 24.0)));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps((float)(1.0 / 6.0)));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, one);
    p = _mm256_fmadd_ps(p, r, one);
    p = _mm256_mul_ps(_mm256_mul_ps(p, cb_pow2_avx2(n1)), cb_pow2_avx2(n2));
    p = _mm256_blendv_ps(p, _mm256_set1_ps(INFINITY), _mm256_cmp_ps(x, top, _CMP_GT_OQ));
    p = _mm256_andnot_ps(_mm256_cmp_ps(x, bottom, _CMP_LT_OQ), p);
    return _mm256_blendv_ps(p, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

/* x / (1 + exp(-x)) · u */
CB_INLINE __m256 cb_silu8_avx2(__m256 x, __m256 u)
{
    const __m256 e = cb_expf_avx2(_mm256_xor_ps(x, _mm256_set1_ps(-0.0f)));
    return _mm256_mul_ps(_mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e)), u);
}

void cb_silu_mul_avx2(float *y, const float *gate, const float *up, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(y + i,
                         cb_silu8_avx2(_mm256_loadu_ps(gate + i), _mm256_loadu_ps(up + i)));
    }
    if (i < n) {
        float g[8] = {0}, u[8] = {0};
        memcpy(g, gate + i, (n - i) * sizeof *g);
        memcpy(u, up + i, (n - i) * sizeof *u);
        _mm256_storeu_ps(g, cb_silu8_avx2(_mm256_loadu_ps(g), _mm256_loadu_ps(u)));
        memcpy(y + i, g, (n - i) * sizeof *g);
    }
}

void cb_softmax_avx2(float *x, size_t n)
{
    const __m256 m = _mm256_set1_ps(cb_max_avx2(x, n));
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(x + i, cb_expf_avx2(_mm256_sub_ps(_mm256_loadu_ps(x + i), m)));
    }
    if (i < n) {
        float t[8] = {0};
        memcpy(t, x + i, (n - i) * sizeof *t);
        _mm256_storeu_ps(t, cb_expf_avx2(_mm256_sub_ps(_mm256_loadu_ps(t), m)));
        memcpy(x + i, t, (n - i) * sizeof *t);
    }
    cb_scale_avx2(x, 1.0f / cb_sum_avx2(x, n), n);
}

/* vec.c — sums, norms and element-wise slots (AVX2; determinism.md §2 and §4). */
#include <math.h>

#include "lanes.h"

CB_DEFINE_DOT1(f32, float, cb_widen_f32_avx2)

/* y[i] = f(i) for whole vectors, then the rest by `one`. */
#define CB_MAP(n, vec, one)                      \
    do {                                         \
        size_t i = 0;                            \
        for (; i + 8 <= (n); i += 8) {           \
            vec;                                 \
        }                                        \
        for (; i < (n); i++) {                   \
            one;                                 \
        }                                        \
    } while (0)

float cb_dot_avx2(const float *a, const float *b, size_t n)
{
    return cb_dot1_f32_avx2(a, b, n);
}

float cb_sum_avx2(const float *x, size_t n)
{
    struct cb_lanes_avx2 l = cb_lanes_zero_avx2();
    size_t i = 0;
    for (; i + CB_LANES <= n; i += CB_LANES) {
        __m256 b[4];
        cb_load32_avx2(x + i, b);
        for (int k = 0; k < 4; k++) {
            l.v[k] = _mm256_add_ps(l.v[k], b[k]);
        }
    }
    if (i < n) {
        float t[CB_LANES] = {0};
        memcpy(t, x + i, (n - i) * sizeof *t);
        for (int k = 0; k < 4; k++) {
            const __m256 s = _mm256_add_ps(l.v[k], _mm256_loadu_ps(t + 8 * k));
            l.v[k] = _mm256_blendv_ps(l.v[k], s, cb_below_avx2(n - i, k));
        }
    }
    return cb_lanes_reduce_avx2(&l);
}

/* maxps gives its second operand when either is NaN, so a NaN in x never enters m; x + (x - x)
 * would also catch infinities, hence the compare. The last addition turns -0 into +0. */
float cb_max_avx2(const float *x, size_t n)
{
    __m256 m = _mm256_set1_ps(-INFINITY), nan = _mm256_setzero_ps();
    __m128 m4, n4;
    size_t i = 0;
    float best, bad;
    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        m = _mm256_max_ps(v, m);
        nan = _mm256_or_ps(nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    }
    m4 = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    m4 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
    best = _mm_cvtss_f32(_mm_max_ss(m4, _mm_movehdup_ps(m4)));
    n4 = _mm_or_ps(_mm256_castps256_ps128(nan), _mm256_extractf128_ps(nan, 1));
    bad = _mm_movemask_ps(n4) != 0 ? NAN : 0.0f;
    for (; i < n; i++) {
        best = x[i] > best ? x[i] : best;
        bad = x[i] == x[i] ? bad : x[i];
    }
    return best + bad;
}

void cb_rmsnorm_avx2(float *y, const float *x, const float *w, size_t n, float eps)
{
    const float ss = cb_dot1_f32_avx2(x, x, n);
    const float root = _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(ss / (float)n + eps)));
    const float f = 1.0f / root;
    const __m256 v = _mm256_set1_ps(f);
    if (w != NULL) {
        CB_MAP(n,
               _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), v),
                                                     _mm256_loadu_ps(w + i))),
               y[i] = (x[i] * f) * w[i]);
    } else {
        CB_MAP(n, _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_loadu_ps(x + i), v)),
               y[i] = x[i] * f);
    }
}

void cb_add_avx2(float *y, const float *x, size_t n)
{
    CB_MAP(n,
           _mm256_storeu_ps(y + i, _mm256_add_ps(_mm256_loadu_ps(y + i), _mm256_loadu_ps(x + i))),
           y[i] = y[i] + x[i]);
}

void cb_scale_avx2(float *x, float s, size_t n)
{
    const __m256 v = _mm256_set1_ps(s);
    CB_MAP(n, _mm256_storeu_ps(x + i, _mm256_mul_ps(_mm256_loadu_ps(x + i), v)), x[i] = x[i] * s);
}

void cb_axpy_avx2(float *y, float a, const float *x, size_t n)
{
    const __m256 v = _mm256_set1_ps(a);
    CB_MAP(n,
           _mm256_storeu_ps(y + i, _mm256_fmadd_ps(v, _mm256_loadu_ps(x + i),
                                                   _mm256_loadu_ps(y + i))),
           y[i] = cb_fmaf(a, x[i], y[i]));
}

void cb_f32_to_f16_avx2(uint16_t *y, const float *x, size_t n)
{
    CB_MAP(n,
           _mm_storeu_si128((__m128i *)(void *)(y + i),
                            _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT)),
           y[i] = _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT));
}

void cb_f16_to_f32_avx2(float *y, const uint16_t *x, size_t n)
{
    CB_MAP(n, _mm256_storeu_ps(y + i, cb_widen_f16_avx2(x + i)), y[i] = _cvtsh_ss(x[i]));
}

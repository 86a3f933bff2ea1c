/* vec.c — the vector slots (SSE4.1; determinism.md §2 and §4). */
#include <math.h>

#include "sse41.h"

static float cb_dot_sse41(const float *a, const float *b, size_t n)
{
    return cb_dot_any(a, b, n, CB_W_F32);
}

static float cb_sum_sse41(const float *x, size_t n)
{
    struct cb_lanes l = cb_lanes_zero();
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        for (size_t j = 0; j < 8; j++) {
            l.v[j] = _mm_add_ps(l.v[j], _mm_loadu_ps(x + i + 4 * j));
        }
    }
    float lane[32];
    for (size_t j = 0; j < 8; j++) {
        _mm_storeu_ps(lane + 4 * j, l.v[j]);
    }
    for (size_t j = 0; i + j < n; j++) {
        lane[j] = lane[j] + x[i + j];
    }
    for (size_t j = 0; j < 8; j++) {
        l.v[j] = _mm_loadu_ps(lane + 4 * j);
    }
    return cb_lanes_reduce(l);
}

/* maxps gives its second operand for NaN, so NaN is noted apart. */
static float cb_max_sse41(const float *x, size_t n)
{
    __m128 m = _mm_set1_ps(-INFINITY);
    __m128 nan = _mm_setzero_ps();
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const __m128 v = _mm_loadu_ps(x + i);
        m = _mm_max_ps(v, m);
        nan = _mm_or_ps(nan, _mm_cmpunord_ps(v, v));
    }
    for (; i < n; i++) {
        const __m128 v = _mm_set1_ps(x[i]);
        m = _mm_max_ps(v, m);
        nan = _mm_or_ps(nan, _mm_cmpunord_ps(v, v));
    }
    if (_mm_movemask_ps(nan) != 0) {
        return NAN;
    }
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_shuffle_ps(m, m, 1));
    return _mm_cvtss_f32(m) + 0.0f;
}

static void cb_rmsnorm_sse41(float *y, const float *x, const float *w, size_t n, float eps)
{
    const float ss = cb_dot_sse41(x, x, n);
    const float f = 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(ss / (float)n + eps)));
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const __m128 v = _mm_mul_ps(_mm_loadu_ps(x + i), _mm_set1_ps(f));
        _mm_storeu_ps(y + i, w != NULL ? _mm_mul_ps(v, _mm_loadu_ps(w + i)) : v);
    }
    for (; i < n; i++) {
        y[i] = w != NULL ? (x[i] * f) * w[i] : x[i] * f;
    }
}

static void cb_add_sse41(float *y, const float *x, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        _mm_storeu_ps(y + i, _mm_add_ps(_mm_loadu_ps(y + i), _mm_loadu_ps(x + i)));
    }
    for (; i < n; i++) {
        y[i] = y[i] + x[i];
    }
}

static void cb_scale_sse41(float *x, float s, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        _mm_storeu_ps(x + i, _mm_mul_ps(_mm_loadu_ps(x + i), _mm_set1_ps(s)));
    }
    for (; i < n; i++) {
        x[i] = x[i] * s;
    }
}

static void cb_axpy_sse41(float *y, float a, const float *x, size_t n)
{
    const __m128 a4 = _mm_set1_ps(a);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        _mm_storeu_ps(y + i, cb_fma4(a4, _mm_loadu_ps(x + i), _mm_loadu_ps(y + i)));
    }
    for (; i < n; i++) {
        y[i] = cb_fmaf(a, x[i], y[i]);
    }
}

/* 2^k, -126 <= k <= 127. */
CB_INLINE __m128 cb_pow2x4(__m128i k)
{
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_add_epi32(k, _mm_set1_epi32(127)), 23));
}

/* cb_expf, four at a time: same steps, the ends blended in afterwards. */
CB_INLINE __m128 cb_exp4(__m128 x)
{
    const __m128 hi = _mm_set1_ps(88.72283f), lo = _mm_set1_ps(-104.0f);
    const __m128 c = _mm_min_ps(_mm_max_ps(x, lo), hi);
    const __m128 n = _mm_round_ps(_mm_mul_ps(c, _mm_set1_ps(1.44269504f)),
                                  _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m128 r = cb_fma4(n, _mm_set1_ps(-0.693359375f), c);
    r = cb_fma4(n, _mm_set1_ps(2.12194440e-4f), r);
    __m128 p = _mm_set1_ps(1.0f / 5040.0f);
    p = cb_fma4(p, r, _mm_set1_ps(1.0f / 720.0f));
    p = cb_fma4(p, r, _mm_set1_ps(1.0f / 120.0f));
    p = cb_fma4(p, r, _mm_set1_ps(1.0f / 24.0f));
    p = cb_fma4(p, r, _mm_set1_ps(1.0f / 6.0f));
    p = cb_fma4(p, r, _mm_set1_ps(0.5f));
    p = cb_fma4(p, r, _mm_set1_ps(1.0f));
    p = cb_fma4(p, r, _mm_set1_ps(1.0f));
    const __m128i k = _mm_cvtps_epi32(n);
    const __m128i k1 = _mm_srai_epi32(k, 1);
    p = _mm_mul_ps(_mm_mul_ps(p, cb_pow2x4(k1)), cb_pow2x4(_mm_sub_epi32(k, k1)));
    p = _mm_blendv_ps(p, _mm_set1_ps(INFINITY), _mm_cmpgt_ps(x, hi));
    p = _mm_blendv_ps(p, _mm_setzero_ps(), _mm_cmplt_ps(x, lo));
    return _mm_blendv_ps(p, x, _mm_cmpunord_ps(x, x));
}

static void cb_silu_mul_sse41(float *y, const float *gate, const float *up, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const __m128 g = _mm_loadu_ps(gate + i);
        const __m128 e = cb_exp4(_mm_xor_ps(g, _mm_set1_ps(-0.0f)));
        const __m128 s = _mm_div_ps(g, _mm_add_ps(_mm_set1_ps(1.0f), e));
        _mm_storeu_ps(y + i, _mm_mul_ps(s, _mm_loadu_ps(up + i)));
    }
    for (; i < n; i++) {
        y[i] = cb_siluf(gate[i]) * up[i];
    }
}

static void cb_softmax_sse41(float *x, size_t n)
{
    const float m = cb_max_sse41(x, n);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        _mm_storeu_ps(x + i, cb_exp4(_mm_sub_ps(_mm_loadu_ps(x + i), _mm_set1_ps(m))));
    }
    for (; i < n; i++) {
        x[i] = cb_expf(x[i] - m);
    }
    cb_scale_sse41(x, 1.0f / cb_sum_sse41(x, n), n);
}

static void cb_f16_to_f32_sse41(float *y, const uint16_t *x, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        _mm_storeu_ps(y + i, cb_load_f16x4(x + i));
    }
    for (; i < n; i++) {
        y[i] = cb_f16_to_f32(x[i]);
    }
}

void cb_vec_init_sse41(struct cb_kernels *k)
{
    k->dot = cb_dot_sse41;
    k->sum = cb_sum_sse41;
    k->max = cb_max_sse41;
    k->rmsnorm = cb_rmsnorm_sse41;
    k->add = cb_add_sse41;
    k->scale = cb_scale_sse41;
    k->axpy = cb_axpy_sse41;
    k->silu_mul = cb_silu_mul_sse41;
    k->softmax = cb_softmax_sse41;
    k->f16_to_f32 = cb_f16_to_f32_sse41;
}

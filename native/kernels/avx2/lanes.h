/* lanes.h — the 32 virtual lanes of determinism.md §2 as four registers (AVX2). */
#ifndef CB_AVX2_LANES_H
#define CB_AVX2_LANES_H

#include "avx2.h"

#define CB_LANES 32u

/* Lanes 8k … 8k+7 in v[k]. */
struct cb_lanes_avx2 {
    __m256 v[4];
};

CB_INLINE struct cb_lanes_avx2 cb_lanes_zero_avx2(void)
{
    const __m256 z = _mm256_setzero_ps();
    return (struct cb_lanes_avx2){{z, z, z, z}};
}

/* 16 + 16, 8 + 8, 4 + 4, 2 + 2, 1 + 1. */
CB_INLINE float cb_lanes_reduce_avx2(const struct cb_lanes_avx2 *l)
{
    const __m256 h8 = _mm256_add_ps(_mm256_add_ps(l->v[0], l->v[2]),
                                    _mm256_add_ps(l->v[1], l->v[3]));
    const __m128 h4 = _mm_add_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
    const __m128 h2 = _mm_add_ps(h4, _mm_movehl_ps(h4, h4));
    return _mm_cvtss_f32(_mm_add_ss(h2, _mm_movehdup_ps(h2)));
}

/* All ones in the lanes 8k … 8k+7 that are below n. */
CB_INLINE __m256 cb_below_avx2(size_t n, int k)
{
    const __m256i i = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                       _mm256_set1_epi32(8 * k));
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), i));
}

/* Eight values of each weight type as floats. The pointers carry the type. */
CB_INLINE __m256 cb_widen_f32_avx2(const float *p) { return _mm256_loadu_ps(p); }

CB_INLINE __m256 cb_widen_f16_avx2(const uint16_t *p)
{
    return _mm256_cvtph_ps(cb_load128_avx2(p));
}

CB_INLINE __m256 cb_widen_bf16_avx2(const uint16_t *p)
{
    const __m256i wide = _mm256_cvtepu16_epi32(cb_load128_avx2(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* l = fma(a, b, l) for the last n < 32 elements. Lanes without an element keep their bits: adding
 * 0·0 would turn -0 into +0. a is any widened type of `size` bytes. */
#define CB_LANES_TAIL(widen, type, l, a, b, n)                                                 \
    do {                                                                                       \
        type ta_[CB_LANES] = {0};                                                              \
        float tb_[CB_LANES] = {0};                                                             \
        memcpy(ta_, a, (n) * sizeof(type));                                                    \
        memcpy(tb_, b, (n) * sizeof(float));                                                   \
        for (int k_ = 0; k_ < 4; k_++) {                                                       \
            const __m256 f_ = _mm256_fmadd_ps(widen(ta_ + 8 * k_), _mm256_loadu_ps(tb_ + 8 * k_), \
                                              (l)->v[k_]);                                     \
            (l)->v[k_] = _mm256_blendv_ps((l)->v[k_], f_, cb_below_avx2(n, k_));               \
        }                                                                                      \
    } while (0)

/* 32 products: l += a·b, lane by lane; b already in registers. */
#define CB_LANES_STEP(widen, l, a, b)                                      \
    do {                                                                   \
        (l)->v[0] = _mm256_fmadd_ps(widen(a), (b)[0], (l)->v[0]);          \
        (l)->v[1] = _mm256_fmadd_ps(widen((a) + 8), (b)[1], (l)->v[1]);    \
        (l)->v[2] = _mm256_fmadd_ps(widen((a) + 16), (b)[2], (l)->v[2]);   \
        (l)->v[3] = _mm256_fmadd_ps(widen((a) + 24), (b)[3], (l)->v[3]);   \
    } while (0)

CB_INLINE void cb_load32_avx2(const float *p, __m256 v[4])
{
    v[0] = _mm256_loadu_ps(p);
    v[1] = _mm256_loadu_ps(p + 8);
    v[2] = _mm256_loadu_ps(p + 16);
    v[3] = _mm256_loadu_ps(p + 24);
}

/* Defines cb_dot1_NAME: the row a[n] times x[n]. */
#define CB_DEFINE_DOT1(name, type, widen)                                                        \
    CB_INLINE float cb_dot1_##name##_avx2(const type *a, const float *x, size_t n)               \
    {                                                                                            \
        struct cb_lanes_avx2 l = cb_lanes_zero_avx2();                                           \
        size_t i = 0;                                                                            \
        for (; i + CB_LANES <= n; i += CB_LANES) {                                               \
            __m256 b[4];                                                                         \
            cb_load32_avx2(x + i, b);                                                            \
            CB_LANES_STEP(widen, &l, a + i, b);                                                  \
        }                                                                                        \
        if (i < n) {                                                                             \
            CB_LANES_TAIL(widen, type, &l, a + i, x + i, n - i);                                 \
        }                                                                                        \
        return cb_lanes_reduce_avx2(&l);                                                         \
    }

/* Defines cb_dot2_NAME: the rows a[n] and a[stride …] times x[n]. Eight chains hide the latency
 * of fma. */
#define CB_DEFINE_DOT2(name, type, widen)                                                        \
    CB_INLINE void cb_dot2_##name##_avx2(const type *a, size_t stride, const float *x, size_t n, \
                                         float out[2])                                           \
    {                                                                                            \
        struct cb_lanes_avx2 l = cb_lanes_zero_avx2(), m = l;                                    \
        size_t i = 0;                                                                            \
        for (; i + CB_LANES <= n; i += CB_LANES) {                                               \
            __m256 b[4];                                                                         \
            cb_load32_avx2(x + i, b);                                                            \
            CB_LANES_STEP(widen, &l, a + i, b);                                                  \
            CB_LANES_STEP(widen, &m, a + stride + i, b);                                         \
        }                                                                                        \
        if (i < n) {                                                                             \
            CB_LANES_TAIL(widen, type, &l, a + i, x + i, n - i);                                 \
            CB_LANES_TAIL(widen, type, &m, a + stride + i, x + i, n - i);                        \
        }                                                                                        \
        out[0] = cb_lanes_reduce_avx2(&l);                                                       \
        out[1] = cb_lanes_reduce_avx2(&m);                                                       \
    }

#endif

/* attn.c — one query head against one KV head [n_pos][hd] (AVX2; determinism.md §4). */
#include "lanes.h"

CB_DEFINE_DOT1(f32, float, cb_widen_f32_avx2)
CB_DEFINE_DOT2(f32, float, cb_widen_f32_avx2)
CB_DEFINE_DOT1(f16, uint16_t, cb_widen_f16_avx2)
CB_DEFINE_DOT2(f16, uint16_t, cb_widen_f16_avx2)

#define CB_DEFINE_SCORE(name, type)                                                         \
    void cb_attn_score_##name##_avx2(float *s, const float *q, const type *k, size_t n_pos, \
                                     size_t hd, float scale)                                \
    {                                                                                       \
        size_t p = 0;                                                                       \
        for (; p + 2 <= n_pos; p += 2) {                                                    \
            cb_dot2_##name##_avx2(k + p * hd, hd, q, hd, s + p);                            \
            s[p] = s[p] * scale;                                                            \
            s[p + 1] = s[p + 1] * scale;                                                    \
        }                                                                                   \
        if (p < n_pos) {                                                                    \
            s[p] = cb_dot1_##name##_avx2(k + p * hd, q, hd) * scale;                        \
        }                                                                                   \
    }

CB_DEFINE_SCORE(f32, float)
CB_DEFINE_SCORE(f16, uint16_t)

/* 64, 8 and 1 elements of o at a time stay in registers over all positions, in order. */
#define CB_DEFINE_MIX(name, type, widen, widen1)                                            \
    CB_INLINE void cb_mix_##name##_avx2(float *o, const float *s, const type *v,            \
                                        size_t n_pos, size_t hd, const int n)               \
    {                                                                                       \
        __m256 acc[8];                                                                      \
        for (int j = 0; j < n; j++) {                                                       \
            acc[j] = _mm256_setzero_ps();                                                   \
        }                                                                                   \
        for (size_t p = 0; p < n_pos; p++, v += hd) {                                       \
            const __m256 w = _mm256_set1_ps(s[p]);                                          \
            for (int j = 0; j < n; j++) {                                                   \
                acc[j] = _mm256_fmadd_ps(w, widen(v + 8 * j), acc[j]);                      \
            }                                                                               \
        }                                                                                   \
        for (int j = 0; j < n; j++) {                                                       \
            _mm256_storeu_ps(o + 8 * j, acc[j]);                                            \
        }                                                                                   \
    }                                                                                       \
    void cb_attn_mix_##name##_avx2(float *o, const float *s, const type *v, size_t n_pos,   \
                                   size_t hd)                                               \
    {                                                                                       \
        size_t i = 0;                                                                       \
        for (; i + 64 <= hd; i += 64) {                                                     \
            cb_mix_##name##_avx2(o + i, s, v + i, n_pos, hd, 8);                            \
        }                                                                                   \
        for (; i + 8 <= hd; i += 8) {                                                       \
            cb_mix_##name##_avx2(o + i, s, v + i, n_pos, hd, 1);                            \
        }                                                                                   \
        for (; i < hd; i++) {                                                               \
            float acc = 0.0f;                                                               \
            for (size_t p = 0; p < n_pos; p++) {                                            \
                acc = cb_fmaf(s[p], widen1(v[p * hd + i]), acc);                            \
            }                                                                               \
            o[i] = acc;                                                                     \
        }                                                                                   \
    }

CB_INLINE float cb_same_avx2(float v) { return v; }

CB_DEFINE_MIX(f32, float, cb_widen_f32_avx2, cb_same_avx2)
CB_DEFINE_MIX(f16, uint16_t, cb_widen_f16_avx2, _cvtsh_ss)

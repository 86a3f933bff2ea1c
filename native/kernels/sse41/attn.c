/* attn.c — one query head against one KV head [n_pos][hd] (SSE4.1). */
#include "sse41.h"

static void cb_attn_score_f32_sse41(float *s, const float *q, const float *k, size_t n_pos,
                                    size_t hd, float scale)
{
    for (size_t p = 0; p < n_pos; p++) {
        s[p] = cb_dot_any(k + p * hd, q, hd, CB_W_F32) * scale;
    }
}

static void cb_attn_score_f16_sse41(float *s, const float *q, const uint16_t *k, size_t n_pos,
                                    size_t hd, float scale)
{
    for (size_t p = 0; p < n_pos; p++) {
        s[p] = cb_dot_any(k + p * hd, q, hd, CB_W_F16) * scale;
    }
}

/* Sixteen (then four, then one) elements at a time stay in registers over all
 * positions: o[i] = fma(s[p], v[p][i], o[i]) in order of p. */
CB_INLINE void cb_mix(float *o, const float *s, const void *v, size_t n_pos, size_t hd,
                      enum cb_wtype w)
{
    size_t i = 0;
    for (; i + 16 <= hd; i += 16) {
        __m128 a[4] = {_mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps()};
        for (size_t p = 0; p < n_pos; p++) {
            const __m128 f = _mm_set1_ps(s[p]);
            for (size_t j = 0; j < 4; j++) {
                a[j] = cb_fma4(f, cb_w4(v, p * hd + i + 4 * j, w), a[j]);
            }
        }
        for (size_t j = 0; j < 4; j++) {
            _mm_storeu_ps(o + i + 4 * j, a[j]);
        }
    }
    for (; i + 4 <= hd; i += 4) {
        __m128 a = _mm_setzero_ps();
        for (size_t p = 0; p < n_pos; p++) {
            a = cb_fma4(_mm_set1_ps(s[p]), cb_w4(v, p * hd + i, w), a);
        }
        _mm_storeu_ps(o + i, a);
    }
    for (; i < hd; i++) {
        float a = 0.0f;
        for (size_t p = 0; p < n_pos; p++) {
            a = cb_fmaf(s[p], cb_w1(v, p * hd + i, w), a);
        }
        o[i] = a;
    }
}

static void cb_attn_mix_f32_sse41(float *o, const float *s, const float *v, size_t n_pos,
                                  size_t hd)
{
    cb_mix(o, s, v, n_pos, hd, CB_W_F32);
}

static void cb_attn_mix_f16_sse41(float *o, const float *s, const uint16_t *v, size_t n_pos,
                                  size_t hd)
{
    cb_mix(o, s, v, n_pos, hd, CB_W_F16);
}

void cb_attn_init_sse41(struct cb_kernels *k)
{
    k->attn_score_f32 = cb_attn_score_f32_sse41;
    k->attn_score_f16 = cb_attn_score_f16_sse41;
    k->attn_mix_f32 = cb_attn_mix_f32_sse41;
    k->attn_mix_f16 = cb_attn_mix_f16_sse41;
}

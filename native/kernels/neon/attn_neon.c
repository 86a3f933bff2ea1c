/* attn_neon.c — one query head against a KV head [n_pos][hd]. */
#include "dot_neon.h"
#include "neon.h"

CB_INLINE_NEON void score_neon(enum wide_neon kind, float *s, const float *q, const void *k,
                               size_t n_pos, size_t hd, float scale)
{
    const uint8_t *p = (const uint8_t *)k;
    const size_t stride = hd * wide_bytes_neon(kind);
    size_t i = 0;
    for (; i + 4 <= n_pos; i += 4, p += 4 * stride) {
        const float32x4_t a = dot_fold_neon(kind, p, q, hd);
        const float32x4_t b = dot_fold_neon(kind, p + stride, q, hd);
        const float32x4_t c = dot_fold_neon(kind, p + 2 * stride, q, hd);
        const float32x4_t d = dot_fold_neon(kind, p + 3 * stride, q, hd);
        vst1q_f32(s + i, vmulq_n_f32(lanes_last4_neon(a, b, c, d), scale));
    }
    for (; i < n_pos; i++, p += stride) {
        s[i] = lanes_last_neon(dot_fold_neon(kind, p, q, hd)) * scale;
    }
}

/* 4 * n_quads columns of the head over all positions; n_quads a constant <= 16, so
 * that the outputs stay in registers. v: first of the columns at position 0. */
CB_INLINE_NEON void mix_columns_neon(enum wide_neon kind, float *o, const float *s,
                                     const uint8_t *v, size_t n_pos, size_t stride, size_t n_quads)
{
    float32x4_t acc[16];
    _Pragma("GCC unroll 16")
    for (size_t j = 0; j < n_quads; j++) {
        acc[j] = vdupq_n_f32(0.0f);
    }
    for (size_t p = 0; p < n_pos; p++, v += stride) {
        fetch_neon(v);
        const float w = s[p];
        _Pragma("GCC unroll 16")
        for (size_t j = 0; j < n_quads; j++) {
            acc[j] = vfmaq_n_f32(acc[j], wide_load_neon(kind, v, 4 * j), w);
        }
    }
    _Pragma("GCC unroll 16")
    for (size_t j = 0; j < n_quads; j++) {
        vst1q_f32(o + 4 * j, acc[j]);
    }
}

/* The last 1..3 columns. */
CB_INLINE_NEON void mix_tail_neon(enum wide_neon kind, float *o, const float *s, const uint8_t *v,
                                  size_t n_pos, size_t stride, size_t n)
{
    float32x4_t acc = vdupq_n_f32(0.0f);
    float out[4];
    for (size_t p = 0; p < n_pos; p++, v += stride) {
        acc = vfmaq_n_f32(acc, wide_tail_neon(kind, v, 0, n), s[p]);
    }
    vst1q_f32(out, acc);
    for (size_t i = 0; i < n; i++) {
        o[i] = out[i];
    }
}

CB_INLINE_NEON void mix_neon(enum wide_neon kind, float *o, const float *s, const void *v,
                             size_t n_pos, size_t hd)
{
    const uint8_t *p = (const uint8_t *)v;
    const size_t bytes = wide_bytes_neon(kind), stride = hd * bytes;
    size_t i = 0;
    for (; i + 64 <= hd; i += 64) {
        mix_columns_neon(kind, o + i, s, p + i * bytes, n_pos, stride, 16);
    }
    for (; i + 16 <= hd; i += 16) {
        mix_columns_neon(kind, o + i, s, p + i * bytes, n_pos, stride, 4);
    }
    for (; i + 4 <= hd; i += 4) {
        mix_columns_neon(kind, o + i, s, p + i * bytes, n_pos, stride, 1);
    }
    if (i < hd) {
        mix_tail_neon(kind, o + i, s, p + i * bytes, n_pos, stride, hd - i);
    }
}

void cb_attn_score_f32_neon(float *s, const float *q, const float *k, size_t n_pos, size_t hd,
                            float scale)
{
    score_neon(WIDE_F32, s, q, k, n_pos, hd, scale);
}

void cb_attn_score_f16_neon(float *s, const float *q, const uint16_t *k, size_t n_pos, size_t hd,
                            float scale)
{
    score_neon(WIDE_F16, s, q, k, n_pos, hd, scale);
}

void cb_attn_mix_f32_neon(float *o, const float *s, const float *v, size_t n_pos, size_t hd)
{
    mix_neon(WIDE_F32, o, s, v, n_pos, hd);
}

void cb_attn_mix_f16_neon(float *o, const float *s, const uint16_t *v, size_t n_pos, size_t hd)
{
    mix_neon(WIDE_F16, o, s, v, n_pos, hd);
}

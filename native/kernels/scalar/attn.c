/* attn.c — one query head against one KV head [n_pos][hd] (scalar). */
#include "lanes.h"
#include "scalar.h"

static void cb_attn_score_f32_scalar(float *s, const float *q, const float *k, size_t n_pos,
                                     size_t hd, float scale)
{
    for (size_t p = 0; p < n_pos; p++) {
        s[p] = cb_lanes_dot(q, k + p * hd, hd) * scale;
    }
}

static void cb_attn_score_f16_scalar(float *s, const float *q, const uint16_t *k, size_t n_pos,
                                     size_t hd, float scale)
{
    for (size_t p = 0; p < n_pos; p++) {
        s[p] = cb_lanes_dot_f16(k + p * hd, q, hd) * scale;
    }
}

static void cb_attn_mix_f32_scalar(float *o, const float *s, const float *v, size_t n_pos,
                                   size_t hd)
{
    memset(o, 0, hd * sizeof *o);
    for (size_t p = 0; p < n_pos; p++) {
        for (size_t i = 0; i < hd; i++) {
            o[i] = cb_fmaf(s[p], v[p * hd + i], o[i]);
        }
    }
}

static void cb_attn_mix_f16_scalar(float *o, const float *s, const uint16_t *v, size_t n_pos,
                                   size_t hd)
{
    memset(o, 0, hd * sizeof *o);
    for (size_t p = 0; p < n_pos; p++) {
        for (size_t i = 0; i < hd; i++) {
            o[i] = cb_fmaf(s[p], cb_f16_to_f32(v[p * hd + i]), o[i]);
        }
    }
}

void cb_attn_init_scalar(struct cb_kernels *k)
{
    k->attn_score_f32 = cb_attn_score_f32_scalar;
    k->attn_score_f16 = cb_attn_score_f16_scalar;
    k->attn_mix_f32 = cb_attn_mix_f32_scalar;
    k->attn_mix_f16 = cb_attn_mix_f16_scalar;
}

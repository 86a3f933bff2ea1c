/* float_neon.c — the vector slots (determinism.md §2 and §4). */
#include "dot_neon.h"
#include "neon.h"

float cb_dot_neon(const float *a, const float *b, size_t n)
{
    return lanes_last_neon(dot_fold_neon(WIDE_F32, a, b, n));
}

float cb_sum_neon(const float *x, size_t n)
{
    struct lanes_neon l = lanes_zero_neon();
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        _Pragma("GCC unroll 8")
        for (size_t j = 0; j < 8; j++) {
            l.q[j] = vaddq_f32(l.q[j], vld1q_f32(x + i + 4 * j));
        }
    }
    _Pragma("GCC unroll 8")
    for (size_t j = 0; j < 8; j++, i += 4) {
        if (i + 4 <= n) {
            l.q[j] = vaddq_f32(l.q[j], vld1q_f32(x + i));
        } else if (i < n) {
            const float32x4_t v = vaddq_f32(l.q[j], tail_f32_neon(x + i, n - i));
            l.q[j] = vbslq_f32(tail_mask_neon(n - i), v, l.q[j]);
        }
    }
    return lanes_last_neon(lanes_fold_neon(&l));
}

/* FMAX hands a NaN on; its choice between zeros ends in the + 0. */
float cb_max_neon(const float *x, size_t n)
{
    const float32x4_t low = vdupq_n_f32(-__builtin_inff());
    float32x4_t m0 = low, m1 = low;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        m0 = vmaxq_f32(m0, vld1q_f32(x + i));
        m1 = vmaxq_f32(m1, vld1q_f32(x + i + 4));
    }
    for (; i < n; i++) {
        m0 = vmaxq_f32(m0, vdupq_n_f32(x[i]));
    }
    return vmaxvq_f32(vmaxq_f32(m0, m1)) + 0.0f;
}

void cb_rmsnorm_neon(float *y, const float *x, const float *w, size_t n, float eps)
{
    const float ss = cb_dot_neon(x, x, n);
    const float root = vget_lane_f32(vsqrt_f32(vdup_n_f32(ss / (float)n + eps)), 0);
    const float f = 1.0f / root;
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t v = vmulq_n_f32(vld1q_f32(x + i), f);
        v = w != NULL ? vmulq_f32(v, vld1q_f32(w + i)) : v;
        vst1q_f32(y + i, v);
    }
    for (; i < n; i++) {
        y[i] = w != NULL ? (x[i] * f) * w[i] : x[i] * f;
    }
}

void cb_add_neon(float *y, const float *x, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(y + i, vaddq_f32(vld1q_f32(y + i), vld1q_f32(x + i)));
    }
    for (; i < n; i++) {
        y[i] = y[i] + x[i];
    }
}

void cb_scale_neon(float *x, float s, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(x + i, vmulq_n_f32(vld1q_f32(x + i), s));
    }
    for (; i < n; i++) {
        x[i] = x[i] * s;
    }
}

void cb_axpy_neon(float *y, float a, const float *x, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(y + i, vfmaq_n_f32(vld1q_f32(y + i), vld1q_f32(x + i), a));
    }
    for (; i < n; i++) {
        y[i] = fma1_neon(a, x[i], y[i]);
    }
}

/* 2^n of four lanes, -126 <= n <= 127 */
CB_INLINE_NEON float32x4_t pow2_neon(int32x4_t n)
{
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}

/* cb_expf, four at a time. Outside the range the lanes compute rubbish without
 * trapping and the selects replace it; NaN runs through the arithmetic. */
CB_INLINE_NEON float32x4_t exp4_neon(float32x4_t x)
{
    const int32x4_t n = vcvtnq_s32_f32(vmulq_n_f32(x, 1.44269504f));
    const float32x4_t nf = vcvtq_f32_s32(n);
    float32x4_t r = vfmaq_f32(x, nf, vdupq_n_f32(-0.693359375f));
    r = vfmaq_f32(r, nf, vdupq_n_f32(2.12194440e-4f));
    float32x4_t p = vdupq_n_f32(1.0f / 5040.0f);
    p = vfmaq_f32(vdupq_n_f32(1.0f / 720.0f), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.0f / 120.0f), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.0f / 24.0f), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.0f / 6.0f), p, r);
    p = vfmaq_f32(vdupq_n_f32(0.5f), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.0f), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.0f), p, r);
    const int32x4_t n1 = vshrq_n_s32(n, 1);
    p = vmulq_f32(vmulq_f32(p, pow2_neon(n1)), pow2_neon(vsubq_s32(n, n1)));
    p = vbslq_f32(vcgtq_f32(x, vdupq_n_f32(88.72283f)), vdupq_n_f32(__builtin_inff()), p);
    return vbslq_f32(vcltq_f32(x, vdupq_n_f32(-104.0f)), vdupq_n_f32(0.0f), p);
}

CB_INLINE_NEON float32x4_t silu_mul4_neon(float32x4_t g, float32x4_t u)
{
    const float32x4_t e = vaddq_f32(vdupq_n_f32(1.0f), exp4_neon(vnegq_f32(g)));
    return vmulq_f32(vdivq_f32(g, e), u);
}

CB_INLINE_NEON void store_tail_neon(float *y, float32x4_t v, size_t n)
{
    float out[4];
    vst1q_f32(out, v);
    for (size_t i = 0; i < n; i++) {
        y[i] = out[i];
    }
}

void cb_silu_mul_neon(float *y, const float *gate, const float *up, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(y + i, silu_mul4_neon(vld1q_f32(gate + i), vld1q_f32(up + i)));
    }
    if (i < n) {
        const float32x4_t g = tail_f32_neon(gate + i, n - i);
        store_tail_neon(y + i, silu_mul4_neon(g, tail_f32_neon(up + i, n - i)), n - i);
    }
}

void cb_softmax_neon(float *x, size_t n)
{
    const float32x4_t m = vdupq_n_f32(cb_max_neon(x, n));
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(x + i, exp4_neon(vsubq_f32(vld1q_f32(x + i), m)));
    }
    if (i < n) {
        store_tail_neon(x + i, exp4_neon(vsubq_f32(tail_f32_neon(x + i, n - i), m)), n - i);
    }
    cb_scale_neon(x, 1.0f / cb_sum_neon(x, n), n);
}

void cb_f32_to_f16_neon(uint16_t *y, const float *x, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1_u16(y + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x + i))));
    }
    if (i < n) {
        uint16_t out[4];
        vst1_u16(out, vreinterpret_u16_f16(vcvt_f16_f32(tail_f32_neon(x + i, n - i))));
        for (size_t j = 0; i < n; i++, j++) {
            y[i] = out[j];
        }
    }
}

void cb_f16_to_f32_neon(float *y, const uint16_t *x, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(y + i, wide_load_neon(WIDE_F16, x, i));
    }
    if (i < n) {
        store_tail_neon(y + i, wide_tail_neon(WIDE_F16, x, i, n - i), n - i);
    }
}

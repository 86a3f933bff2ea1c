/* quant_neon.c — activations to Q8_0 and Q8_K (determinism.md §3). */
#include <float.h>

#include "neon.h"
#include "util_neon.h"

/* |x| of 32 values, the largest in each of four lanes */
CB_INLINE_NEON float32x4_t amax32_neon(const float *x)
{
    float32x4_t m = vabsq_f32(vld1q_f32(x));
    _Pragma("GCC unroll 7")
    for (size_t j = 1; j < 8; j++) {
        m = vmaxq_f32(m, vabsq_f32(vld1q_f32(x + 4 * j)));
    }
    return m;
}

/* 16 values times s, rounded to nearest even; only +128 would saturate. */
CB_INLINE_NEON int8x16_t round16_neon(const float *x, float s)
{
    const int32x4_t a = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x), s));
    const int32x4_t b = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 4), s));
    const int32x4_t c = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 8), s));
    const int32x4_t d = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 12), s));
    const int16x8_t lo = vcombine_s16(vqmovn_s32(a), vqmovn_s32(b));
    const int16x8_t hi = vcombine_s16(vqmovn_s32(c), vqmovn_s32(d));
    return vcombine_s8(vqmovn_s16(lo), vqmovn_s16(hi));
}

/* An inverse scale that overflows makes a block of zeros. */
CB_INLINE_NEON float finite_or_zero_neon(float s)
{
    return s <= FLT_MAX && s >= -FLT_MAX ? s : 0.0f;
}

void cb_quant_q8_0_neon(struct cb_q8_0 *y, const float *x, size_t n)
{
    for (size_t b = 0; b < n / 32; b++, x += 32, y++) {
        const float amax = vmaxvq_f32(amax32_neon(x));
        const float id = amax > 0.0f ? finite_or_zero_neon(127.0f / amax) : 0.0f;
        const int8x16_t lo = round16_neon(x, id), hi = round16_neon(x + 16, id);
        const float16x4_t d = vcvt_f16_f32(vdupq_n_f32(amax / 127.0f));
        y->d = vgetq_lane_f32(vcvt_f32_f16(d), 0);
        y->sum = (int32_t)vaddlvq_s8(lo) + (int32_t)vaddlvq_s8(hi);
        vst1q_s8(y->q, lo);
        vst1q_s8(y->q + 16, hi);
    }
}

/* The first of 256 values whose magnitude is amax. */
CB_INLINE_NEON float first_neon(const float *x, float amax)
{
    size_t i = 0;
    while (i < 252 && vmaxvq_u32(vceqq_f32(vabsq_f32(vld1q_f32(x + i)), vdupq_n_f32(amax))) == 0) {
        i += 4;
    }
    for (size_t j = 0; j < 3; j++, i++) {
        if (__builtin_fabsf(x[i]) == amax) {
            break;
        }
    }
    return x[i];
}

void cb_quant_q8_k_neon(struct cb_q8_k *y, const float *x, size_t n)
{
    for (size_t b = 0; b < n / 256; b++, x += 256, y++) {
        float32x4_t m = amax32_neon(x);
        for (size_t i = 32; i < 256; i += 32) {
            m = vmaxq_f32(m, amax32_neon(x + i));
        }
        const float amax = vmaxvq_f32(m);
        const float max = amax > 0.0f ? first_neon(x, amax) : 0.0f;
        const float iscale = amax > 0.0f ? finite_or_zero_neon(-127.0f / max) : 0.0f;
        y->d = iscale < 0.0f || iscale > 0.0f ? 1.0f / iscale : 0.0f;
        for (size_t g = 0; g < 16; g++) {
            const int8x16_t q = round16_neon(x + 16 * g, iscale);
            y->bsum[g] = vaddlvq_s8(q);
            vst1q_s8(y->q + 16 * g, q);
        }
    }
}

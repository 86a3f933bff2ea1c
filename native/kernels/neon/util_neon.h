/* util_neon.h — what the NEON kernels share: products, reductions, lane trees.
 *
 * ARMv8.0-A only: no SDOT, no fp16 arithmetic (the f16<->f32 conversions are
 * base ISA). Overflow proofs: docs/kernels-arm.md. Included by native/kernels/neon only.
 */
#ifndef CB_UTIL_NEON_H
#define CB_UTIL_NEON_H

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

#define CB_INLINE_NEON static inline __attribute__((always_inline))

/* A function of its own: the instruction counts go by symbol. */
#define CB_NOINLINE_NEON static __attribute__((noinline))

/* Loads stay on their side. Without it compilers for out-of-order cores hoist the
 * loads of several quads to the top of an unrolled block and spill them all. */
#define CB_ORDER_NEON() __asm__ volatile("" ::: "memory")

/* Tokens that share one unpacking of the weights in a prefill tile. */
#define CB_TILE_NEON ((size_t)8)

/* How far ahead of the weight stream lines are fetched: about two DRAM latencies
 * of streaming on a Cortex-A53, where pldl1keep gained and pldl2strm lost. */
#define CB_AHEAD_NEON ((uintptr_t)512)

/* PRFM pldl1keep of the line CB_AHEAD bytes after p; never faults, so the end of a matrix is no case. */
CB_INLINE_NEON void fetch_neon(const uint8_t *p)
{
    __builtin_prefetch((const void *)((uintptr_t)p + CB_AHEAD_NEON), 0, 3);
}

/* The lines of p[0 .. n), CB_AHEAD later; n a constant, a multiple of 64. */
CB_INLINE_NEON void fetch_bytes_neon(const uint8_t *p, size_t n)
{
    _Pragma("GCC unroll 8")
    for (size_t i = 0; i < n; i += 64) {
        fetch_neon(p + i);
    }
}

/* ---- integer products: 16 weights x 16 activations into 8 int16 lanes, 2 products a lane ---- */

CB_INLINE_NEON int16x8_t mul16_neon(int8x16_t w, int8x16_t a)
{
    return vmlal_high_s8(vmull_s8(vget_low_s8(w), vget_low_s8(a)), w, a);
}

CB_INLINE_NEON int16x8_t mla16_neon(int16x8_t p, int8x16_t w, int8x16_t a)
{
    return vmlal_high_s8(vmlal_s8(p, vget_low_s8(w), vget_low_s8(a)), w, a);
}

/* Four rows' int16 lanes -> their four totals. The number in the name is how many
 * lanes may be added in int16 before widening. */
CB_INLINE_NEON int32x4_t total4_by4_neon(int16x8_t p0, int16x8_t p1, int16x8_t p2, int16x8_t p3)
{
    return vpaddlq_s16(vpaddq_s16(vpaddq_s16(p0, p1), vpaddq_s16(p2, p3)));
}

CB_INLINE_NEON int32x4_t total4_by2_neon(int16x8_t p0, int16x8_t p1, int16x8_t p2, int16x8_t p3)
{
    return vpaddq_s32(vpaddlq_s16(vpaddq_s16(p0, p1)), vpaddlq_s16(vpaddq_s16(p2, p3)));
}

CB_INLINE_NEON int32x4_t total4_neon(int32x4_t s0, int32x4_t s1, int32x4_t s2, int32x4_t s3)
{
    return vpaddq_s32(vpaddq_s32(s0, s1), vpaddq_s32(s2, s3));
}

/* ---- float ---- */

/* 4 binary16 values, widened exactly (signalling NaNs become quiet). */
CB_INLINE_NEON float32x4_t half4_neon(const void *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
}

CB_INLINE_NEON float fma1_neon(float a, float b, float c)
{
    return vget_lane_f32(vfma_f32(vdup_n_f32(c), vdup_n_f32(a), vdup_n_f32(b)), 0);
}

/* The 32 virtual lanes of determinism.md §2: lane i stands in q[i / 4][i % 4]. */
struct lanes_neon {
    float32x4_t q[8];
};

CB_INLINE_NEON struct lanes_neon lanes_zero_neon(void)
{
    const float32x4_t z = vdupq_n_f32(0.0f);
    const struct lanes_neon l = {{z, z, z, z, z, z, z, z}};
    return l;
}

/* h = 16, 8, 4: what is left are lanes 0..3. */
CB_INLINE_NEON float32x4_t lanes_fold_neon(const struct lanes_neon *l)
{
    const float32x4_t a = vaddq_f32(vaddq_f32(l->q[0], l->q[4]), vaddq_f32(l->q[2], l->q[6]));
    const float32x4_t b = vaddq_f32(vaddq_f32(l->q[1], l->q[5]), vaddq_f32(l->q[3], l->q[7]));
    return vaddq_f32(a, b);
}

/* h = 2, 1 */
CB_INLINE_NEON float lanes_last_neon(float32x4_t v)
{
    const float32x2_t s = vadd_f32(vget_low_f32(v), vget_high_f32(v));
    return vget_lane_f32(vpadd_f32(s, s), 0);
}

/* h = 2, 1 for four vectors at once: the same additions, transposed. */
CB_INLINE_NEON float32x4_t lanes_last4_neon(float32x4_t a, float32x4_t b, float32x4_t c,
                                            float32x4_t d)
{
    const float64x2_t a2 = vreinterpretq_f64_f32(a), b2 = vreinterpretq_f64_f32(b);
    const float64x2_t c2 = vreinterpretq_f64_f32(c), d2 = vreinterpretq_f64_f32(d);
    const float32x4_t ab = vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(a2, b2)),
                                     vreinterpretq_f32_f64(vzip2q_f64(a2, b2)));
    const float32x4_t cd = vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(c2, d2)),
                                     vreinterpretq_f32_f64(vzip2q_f64(c2, d2)));
    return vpaddq_f32(ab, cd);
}

/* All-ones in the first n (1..3) of 4 lanes: a tail must not touch the lanes
 * behind it, because adding +0 would turn a lane of -0 into +0. */
CB_INLINE_NEON uint32x4_t tail_mask_neon(size_t n)
{
    static const uint32_t m[8] = {~0u, ~0u, ~0u, ~0u, 0, 0, 0, 0};
    return vld1q_u32(m + 4 - n);
}

CB_INLINE_NEON float32x4_t tail_f32_neon(const float *p, size_t n)
{
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (size_t i = 0; i < n; i++) {
        v[i] = p[i];
    }
    return vld1q_f32(v);
}

CB_INLINE_NEON uint16x4_t tail_u16_neon(const uint16_t *p, size_t n)
{
    uint16_t v[4] = {0, 0, 0, 0};
    for (size_t i = 0; i < n; i++) {
        v[i] = p[i];
    }
    return vld1_u16(v);
}

#endif

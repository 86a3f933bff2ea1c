/* kblock_neon.h — what Q4_K and Q5_K share in x8c16: 6-bit scales and minimums.
 *
 * The three scale words of the 8 rows stand as three planes of u32[8], so a row
 * is a 32-bit lane and its four bytes are sub-blocks 0..3 (or 4..7).
 */
#ifndef CB_KBLOCK_NEON_H
#define CB_KBLOCK_NEON_H

#include "../kernels.h"
#include "util_neon.h"

/* One quad of rows: byte j of lane r = scale (minimum) of sub-block j, +4 in hi. */
struct kscale_neon {
    uint32x4_t s_lo, s_hi, m_lo, m_hi;
};

CB_INLINE_NEON uint32x4_t bytes_and_neon(uint32x4_t v, uint8_t m)
{
    return vreinterpretq_u32_u8(vandq_u8(vreinterpretq_u8_u32(v), vdupq_n_u8(m)));
}

/* (low & 0x0f) | ((high >> 2) & 0x30), byte by byte; low has nothing above bit 3. */
CB_INLINE_NEON uint32x4_t join6_neon(uint32x4_t low, uint32x4_t high)
{
    const uint8x16_t top = vshrq_n_u8(vreinterpretq_u8_u32(high), 2);
    return vreinterpretq_u32_u8(vbslq_u8(vdupq_n_u8(0x30), top, vreinterpretq_u8_u32(low)));
}

/* p: the scale planes of the super-block; quad 0 = rows 0..3, 1 = rows 4..7. */
CB_INLINE_NEON struct kscale_neon kscale_neon(const uint8_t *p, size_t quad)
{
    const uint32x4_t w0 = vreinterpretq_u32_u8(vld1q_u8(p + 16 * quad));
    const uint32x4_t w1 = vreinterpretq_u32_u8(vld1q_u8(p + 32 + 16 * quad));
    const uint8x16_t w2 = vld1q_u8(p + 64 + 16 * quad);
    struct kscale_neon k;
    k.s_lo = bytes_and_neon(w0, 0x3f);
    k.m_lo = bytes_and_neon(w1, 0x3f);
    k.s_hi = join6_neon(bytes_and_neon(vreinterpretq_u32_u8(w2), 0x0f), w0);
    k.m_hi = join6_neon(vreinterpretq_u32_u8(vshrq_n_u8(w2, 4)), w1);
    return k;
}

/* Scales of sub-block j (0..7, a constant) as one int32 a row. */
CB_INLINE_NEON int32x4_t kscale_at_neon(const struct kscale_neon *k, unsigned j)
{
    const uint32x4_t v = j < 4 ? k->s_lo : k->s_hi;
    const uint32x4_t byte = vdupq_n_u32(0xff);
    switch (j & 3) {
    case 0: return vreinterpretq_s32_u32(vandq_u32(v, byte));
    case 1: return vreinterpretq_s32_u32(vandq_u32(vshrq_n_u32(v, 8), byte));
    case 2: return vreinterpretq_s32_u32(vandq_u32(vshrq_n_u32(v, 16), byte));
    default: return vreinterpretq_s32_u32(vshrq_n_u32(v, 24));
    }
}

/* Scales or minimums as int16 pairs a row: sub-blocks (0,2), (1,3), (4,6), (5,7). */
struct kpair_neon {
    int16x8_t m[4];
};

CB_INLINE_NEON struct kpair_neon kpair_neon(uint32x4_t bytes_lo, uint32x4_t bytes_hi)
{
    const uint16x8_t lo = vreinterpretq_u16_u32(bytes_lo), hi = vreinterpretq_u16_u32(bytes_hi);
    const uint16x8_t even = vdupq_n_u16(0xff);
    struct kpair_neon r;
    r.m[0] = vreinterpretq_s16_u16(vandq_u16(lo, even));
    r.m[1] = vreinterpretq_s16_u16(vshrq_n_u16(lo, 8));
    r.m[2] = vreinterpretq_s16_u16(vandq_u16(hi, even));
    r.m[3] = vreinterpretq_s16_u16(vshrq_n_u16(hi, 8));
    return r;
}

/* Activation sums over 32 in the same pairs, repeated for every row. */
struct ksum_neon {
    int16x8_t b[4];
};

CB_INLINE_NEON struct ksum_neon ksum_neon(const struct cb_q8_k *x)
{
    const int16x8_t s = vpaddq_s16(vld1q_s16(x->bsum), vld1q_s16(x->bsum + 8));
    const int32x4_t e = vreinterpretq_s32_s16(vuzp1q_s16(s, s));
    const int32x4_t o = vreinterpretq_s32_s16(vuzp2q_s16(s, s));
    struct ksum_neon r;
    r.b[0] = vreinterpretq_s16_s32(vdupq_laneq_s32(e, 0));
    r.b[1] = vreinterpretq_s16_s32(vdupq_laneq_s32(o, 0));
    r.b[2] = vreinterpretq_s16_s32(vdupq_laneq_s32(e, 1));
    r.b[3] = vreinterpretq_s16_s32(vdupq_laneq_s32(o, 1));
    return r;
}

/* Sum over the sub-blocks of m * b, for four rows; with the minimums this is M.
 * |m * b| <= 63 * 4064, 8 of them: far inside int32, also times 16. */
CB_INLINE_NEON int32x4_t kpair_total_neon(const struct kpair_neon *m, const struct ksum_neon *b)
{
    int32x4_t lo = vmull_s16(vget_low_s16(m->m[0]), vget_low_s16(b->b[0]));
    int32x4_t hi = vmull_high_s16(m->m[0], b->b[0]);
    lo = vmlal_s16(lo, vget_low_s16(m->m[1]), vget_low_s16(b->b[1]));
    hi = vmlal_high_s16(hi, m->m[1], b->b[1]);
    lo = vmlal_s16(lo, vget_low_s16(m->m[2]), vget_low_s16(b->b[2]));
    hi = vmlal_high_s16(hi, m->m[2], b->b[2]);
    lo = vmlal_s16(lo, vget_low_s16(m->m[3]), vget_low_s16(b->b[3]));
    hi = vmlal_high_s16(hi, m->m[3], b->b[3]);
    return vpaddq_s32(lo, hi);
}

/* M of the quad of a super-block whose scale planes begin at p. */
CB_INLINE_NEON int32x4_t kmin_sum_neon(const uint8_t *p, size_t quad, const struct cb_q8_k *x)
{
    const struct kscale_neon k = kscale_neon(p, quad);
    const struct kpair_neon m = kpair_neon(k.m_lo, k.m_hi);
    const struct ksum_neon b = ksum_neon(x);
    return kpair_total_neon(&m, &b);
}

/* acc = fma(d*da, S, acc); acc = fma(-(dmin*da), M, acc) */
CB_INLINE_NEON float32x4_t kblock_add_neon(float32x4_t acc, float32x4_t d, float32x4_t dmin,
                                           float da, int32x4_t s, int32x4_t m)
{
    acc = vfmaq_f32(acc, vmulq_n_f32(d, da), vcvtq_f32_s32(s));
    return vfmsq_f32(acc, vmulq_n_f32(dmin, da), vcvtq_f32_s32(m));
}

/* What a prefill tile keeps of a super-block's head. */
struct kblock_neon {
    int32x4_t sc[2][8]; /* [quad][sub-block] */
    struct kpair_neon sp[2], m[2];
    float32x4_t d[2], dmin[2];
};

/* w: a super-block that begins d f16[8], dmin f16[8], three scale planes */
CB_INLINE_NEON void kblock_load_neon(struct kblock_neon *k, const uint8_t *w)
{
    _Pragma("GCC unroll 2")
    for (size_t h = 0; h < 2; h++) {
        const struct kscale_neon s = kscale_neon(w + 32, h);
        _Pragma("GCC unroll 8")
        for (unsigned j = 0; j < 8; j++) {
            k->sc[h][j] = kscale_at_neon(&s, j);
        }
        k->sp[h] = kpair_neon(s.s_lo, s.s_hi);
        k->m[h] = kpair_neon(s.m_lo, s.m_hi);
        k->d[h] = half4_neon(w + 8 * h);
        k->dmin[h] = half4_neon(w + 16 + 8 * h);
    }
}

CB_INLINE_NEON void kblock_finish_neon(float32x4_t acc[2], const struct kblock_neon *k,
                                       const struct cb_q8_k *x, const int32x4_t s[2])
{
    const struct ksum_neon b = ksum_neon(x);
    const int32x4_t m0 = kpair_total_neon(&k->m[0], &b), m1 = kpair_total_neon(&k->m[1], &b);
    acc[0] = kblock_add_neon(acc[0], k->d[0], k->dmin[0], x->d, s[0], m0);
    acc[1] = kblock_add_neon(acc[1], k->d[1], k->dmin[1], x->d, s[1], m1);
}

/* Four rows' 64 columns of one pair of sub-blocks: lo[h], hi[h] hold columns
 * 16h .. 16h+15 of the even and of the odd sub-block. */
struct kquad_neon {
    int8x16_t lo[2][4], hi[2][4];
};

CB_INLINE_NEON void kprod_neon(int16x8_t p[4], const int8x16_t w[2][4], int8x16_t a0, int8x16_t a1)
{
    p[0] = mul16_neon(w[0][0], a0);
    p[1] = mul16_neon(w[0][1], a0);
    p[2] = mul16_neon(w[0][2], a0);
    p[3] = mul16_neon(w[0][3], a0);
    p[0] = mla16_neon(p[0], w[1][0], a1);
    p[1] = mla16_neon(p[1], w[1][1], a1);
    p[2] = mla16_neon(p[2], w[1][2], a1);
    p[3] = mla16_neon(p[3], w[1][3], a1);
}

#endif

/* gemm_q6k_neon.c — Q6_K x Q8_K, x8c16: weights 0..63, the -32 taken out through bsum.
 *
 * Columns go by half chunk e (0, 1) of each 32: for e, a row needs its qh chunks e
 * and 2+e, its ql chunks e, 2+e, 4+e, 6+e; these give the eight groups of 16 with
 * index g = e, e+2, e+4 ... e+14, so a row's scales are the even (odd) bytes of its 16.
 * 2 products an int16 lane are <= 16002; two lanes added <= 32004.
 */
#include "neon.h"
#include "util_neon.h"

#define Q6K_BYTES ((size_t)(8 * 210))
#define Q6K_SCALES ((size_t)16)
#define Q6K_QH ((size_t)144)
#define Q6K_QL ((size_t)656)

/* 128 columns of a row: w[k] = group e + 2k */
struct q6row_neon {
    int8x16_t w[8];
};

CB_INLINE_NEON int8x16_t q6k_join_neon(uint8x16_t nibble, uint8x16_t high)
{
    return vreinterpretq_s8_u8(vbslq_u8(vdupq_n_u8(0x30), high, nibble));
}

/* qh, ql: chunk e of the row */
CB_INLINE_NEON struct q6row_neon q6k_unpack_neon(const uint8_t *qh, const uint8_t *ql)
{
    const uint8x16_t m = vdupq_n_u8(0x0f);
    struct q6row_neon r;
    _Pragma("GCC unroll 2")
    for (size_t h = 0; h < 2; h++) {
        const uint8x16_t b = vld1q_u8(qh + 256 * h);
        const uint8x16_t c0 = vld1q_u8(ql + 512 * h), c1 = vld1q_u8(ql + 512 * h + 256);
        r.w[4 * h] = q6k_join_neon(vandq_u8(c0, m), vshlq_n_u8(b, 4));
        r.w[4 * h + 1] = q6k_join_neon(vandq_u8(c1, m), vshlq_n_u8(b, 2));
        r.w[4 * h + 2] = q6k_join_neon(vshrq_n_u8(c0, 4), b);
        r.w[4 * h + 3] = q6k_join_neon(vshrq_n_u8(c1, 4), vshrq_n_u8(b, 2));
    }
    return r;
}

/* A row's 8 scales for this e as int16, from its 16 bytes. */
CB_INLINE_NEON int16x8_t q6k_scales_neon(const uint8_t *p, size_t e)
{
    const int16x8_t v = vreinterpretq_s16_u8(vld1q_u8(p));
    return e == 0 ? vshrq_n_s16(vshlq_n_s16(v, 8), 8) : vshrq_n_s16(v, 8);
}

/* 128 activations of this e: a[k] = group e + 2k */
struct q6act_neon {
    int8x16_t a[8];
};

CB_INLINE_NEON struct q6act_neon q6k_act_neon(const struct cb_q8_k *x, size_t e)
{
    struct q6act_neon r;
    _Pragma("GCC unroll 8")
    for (size_t k = 0; k < 8; k++) {
        r.a[k] = vld1q_s8(x->q + 16 * e + 32 * k);
    }
    return r;
}

/* Adds a row's 128 columns to s. */
CB_INLINE_NEON int32x4_t q6k_dot_neon(int32x4_t s, const struct q6row_neon *r,
                                      const struct q6act_neon *a, int16x8_t sc)
{
    int16x8_t p[4];
    _Pragma("GCC unroll 4")
    for (size_t k = 0; k < 4; k++) {
        p[k] = mul16_neon(r->w[k], a->a[k]);
    }
    s = vmlaq_s32(s, total4_by2_neon(p[0], p[1], p[2], p[3]), vmovl_s16(vget_low_s16(sc)));
    _Pragma("GCC unroll 4")
    for (size_t k = 0; k < 4; k++) {
        p[k] = mul16_neon(r->w[4 + k], a->a[4 + k]);
    }
    return vmlaq_s32(s, total4_by2_neon(p[0], p[1], p[2], p[3]), vmovl_high_s16(sc));
}

/* -16 * bsum of the 8 groups of this e: |bsum| <= 2032, so it fits int16. */
CB_INLINE_NEON int16x8_t q6k_bsum_neon(const struct cb_q8_k *x, size_t e)
{
    const int16x8_t lo = vld1q_s16(x->bsum), hi = vld1q_s16(x->bsum + 8);
    return vmulq_n_s16(e == 0 ? vuzp1q_s16(lo, hi) : vuzp2q_s16(lo, hi), -16);
}

/* s += -32 * scale * bsum: the doubling multiply brings the other 2. It saturates
 * only at (-32768)^2, which b excludes, and the sum stays below 2^31. */
CB_INLINE_NEON int32x4_t q6k_fold_neon(int32x4_t s, int16x8_t sc, int16x8_t b)
{
    return vqdmlal_high_s16(vqdmlal_s16(s, vget_low_s16(sc), vget_low_s16(b)), sc, b);
}

/* One row's 128 columns; w: the super-block, row 0..7 */
CB_INLINE_NEON int32x4_t q6k_row_neon(int32x4_t s, const uint8_t *w, size_t row, size_t e,
                                      const struct q6act_neon *a, int16x8_t b)
{
    const uint8_t *qh = w + Q6K_QH + 128 * e + 16 * row, *ql = w + Q6K_QL + 128 * e + 16 * row;
    const struct q6row_neon q = q6k_unpack_neon(qh, ql);
    const int16x8_t sc = q6k_scales_neon(w + Q6K_SCALES + 16 * row, e);
    return q6k_fold_neon(q6k_dot_neon(s, &q, a, sc), sc, b);
}

/* S of four rows, one token */
CB_INLINE_NEON int32x4_t q6k_quad_neon(const uint8_t *w, size_t quad, const struct cb_q8_k *x)
{
    const int32x4_t z = vdupq_n_s32(0);
    int32x4_t s[4] = {z, z, z, z};
    _Pragma("GCC unroll 2")
    for (size_t e = 0; e < 2; e++) {
        const int16x8_t b = q6k_bsum_neon(x, e);
        const struct q6act_neon a = q6k_act_neon(x, e);
        _Pragma("GCC unroll 4")
        for (size_t r = 0; r < 4; r++) {
            s[r] = q6k_row_neon(s[r], w, 4 * quad + r, e, &a, b);
        }
    }
    return total4_neon(s[0], s[1], s[2], s[3]);
}

CB_NOINLINE_NEON void q6k_decode_neon(float *y, const struct cb_q8_k *x, const uint8_t *w,
                                      size_t n_blocks)
{
    float32x4_t acc0 = vdupq_n_f32(0.0f), acc1 = acc0;
    for (size_t b = 0; b < n_blocks; b++, w += Q6K_BYTES, x++) {
        fetch_bytes_neon(w, 512);
        fetch_bytes_neon(w + 512, 512);
        fetch_bytes_neon(w + 1024, 512);
        fetch_bytes_neon(w + 1536, 192);
        const float32x4_t s0 = vcvtq_f32_s32(q6k_quad_neon(w, 0, x));
        acc0 = vfmaq_f32(acc0, vmulq_n_f32(half4_neon(w), x->d), s0);
        const float32x4_t s1 = vcvtq_f32_s32(q6k_quad_neon(w, 1, x));
        acc1 = vfmaq_f32(acc1, vmulq_n_f32(half4_neon(w + 8), x->d), s1);
    }
    vst1q_f32(y, acc0);
    vst1q_f32(y + 4, acc1);
}

/* 2 .. CB_TILE_NEON tokens: each unpacked pair of rows serves all of them. */
CB_NOINLINE_NEON void q6k_tile_neon(float *const *y, const void *const *x, size_t n_tok,
                                    const uint8_t *w, size_t n_blocks, size_t row)
{
    float32x4_t acc[CB_TILE_NEON][2];
    int32x4_t s[CB_TILE_NEON][8];
    int16x8_t fold[CB_TILE_NEON][2];
    for (size_t t = 0; t < n_tok; t++) {
        acc[t][0] = acc[t][1] = vdupq_n_f32(0.0f);
    }
    for (size_t b = 0; b < n_blocks; b++, w += Q6K_BYTES) {
        fetch_bytes_neon(w, 512);
        fetch_bytes_neon(w + 512, 512);
        fetch_bytes_neon(w + 1024, 512);
        fetch_bytes_neon(w + 1536, 192);
        for (size_t t = 0; t < n_tok; t++) {
            fold[t][0] = q6k_bsum_neon((const struct cb_q8_k *)x[t] + b, 0);
            fold[t][1] = q6k_bsum_neon((const struct cb_q8_k *)x[t] + b, 1);
            _Pragma("GCC unroll 8")
            for (size_t r = 0; r < 8; r++) {
                s[t][r] = vdupq_n_s32(0);
            }
        }
        for (size_t e = 0; e < 2; e++) {
            for (size_t r = 0; r < 8; r += 2) {
                const uint8_t *qh = w + Q6K_QH + 128 * e + 16 * r;
                const uint8_t *ql = w + Q6K_QL + 128 * e + 16 * r;
                const struct q6row_neon q0 = q6k_unpack_neon(qh, ql);
                const struct q6row_neon q1 = q6k_unpack_neon(qh + 16, ql + 16);
                const int16x8_t sc0 = q6k_scales_neon(w + Q6K_SCALES + 16 * r, e);
                const int16x8_t sc1 = q6k_scales_neon(w + Q6K_SCALES + 16 * r + 16, e);
                for (size_t t = 0; t < n_tok; t++) {
                    const struct q6act_neon a = q6k_act_neon((const struct cb_q8_k *)x[t] + b, e);
                    int32x4_t *st = s[t] + r;
                    st[0] = q6k_fold_neon(q6k_dot_neon(st[0], &q0, &a, sc0), sc0, fold[t][e]);
                    st[1] = q6k_fold_neon(q6k_dot_neon(st[1], &q1, &a, sc1), sc1, fold[t][e]);
                }
            }
        }
        const float32x4_t d0 = half4_neon(w), d1 = half4_neon(w + 8);
        for (size_t t = 0; t < n_tok; t++) {
            const float da = ((const struct cb_q8_k *)x[t])[b].d;
            const int32x4_t s0 = total4_neon(s[t][0], s[t][1], s[t][2], s[t][3]);
            const int32x4_t s1 = total4_neon(s[t][4], s[t][5], s[t][6], s[t][7]);
            acc[t][0] = vfmaq_f32(acc[t][0], vmulq_n_f32(d0, da), vcvtq_f32_s32(s0));
            acc[t][1] = vfmaq_f32(acc[t][1], vmulq_n_f32(d1, da), vcvtq_f32_s32(s1));
        }
    }
    for (size_t t = 0; t < n_tok; t++) {
        vst1q_f32(y[t] + row, acc[t][0]);
        vst1q_f32(y[t] + row + 4, acc[t][1]);
    }
}

void cb_gemm_q6_k_neon(float *const *y, const void *const *x, size_t n_tok, const void *w,
                       size_t n_groups, size_t n_cols)
{
    const uint8_t *p = (const uint8_t *)w;
    const size_t n_blocks = n_cols / 256;
    for (size_t g = 0; g < n_groups; g++, p += n_blocks * Q6K_BYTES) {
        for (size_t t = 0; t < n_tok;) {
            const size_t left = n_tok - t, n = left < CB_TILE_NEON ? left : CB_TILE_NEON;
            if (n == 1) {
                q6k_decode_neon(y[t] + 8 * g, (const struct cb_q8_k *)x[t], p, n_blocks);
            } else {
                q6k_tile_neon(y + t, x + t, n, p, n_blocks, 8 * g);
            }
            t += n;
        }
    }
}

/* gemm_q5k_neon.c — Q5_K x Q8_K, x8c16: Q4_K with a fifth bit from two chunks of qh.
 *
 * Weights stand as w - 16 (-16..15): 16 products stay within +-32512, so four lanes
 * may be added in int16. The 16 comes back as 16 * sum of scale * activation sum.
 */
#include "kblock_neon.h"
#include "neon.h"

#define Q5K_BYTES ((size_t)(8 * 176))
#define Q5K_SCALES ((size_t)32)
#define Q5K_QH ((size_t)128)
#define Q5K_QS ((size_t)384)

/* qh: chunk 0 of the quad's first row; qs: its chunk 2*pair. Bit `2*pair` of qh
 * belongs to the even sub-block, the next one to the odd. Where the bit is clear the
 * weight is nibble | 0xf0, which is what SRI makes of the mask. */
CB_INLINE_NEON struct kquad_neon q5k_unpack_neon(const uint8_t *qh, const uint8_t *qs, size_t pair)
{
    const uint8x16_t even = vdupq_n_u8((uint8_t)(1u << (2 * pair)));
    const uint8x16_t odd = vdupq_n_u8((uint8_t)(2u << (2 * pair)));
    struct kquad_neon q;
    _Pragma("GCC unroll 4")
    for (size_t r = 0; r < 4; r++) {
        _Pragma("GCC unroll 2")
        for (size_t h = 0; h < 2; h++) {
            const uint8x16_t c = vld1q_u8(qs + 128 * h + 16 * r);
            const uint8x16_t b = vmvnq_u8(vld1q_u8(qh + 128 * h + 16 * r));
            const uint8x16_t lo = vsriq_n_u8(vtstq_u8(b, even), vshlq_n_u8(c, 4), 4);
            const uint8x16_t hi = vsriq_n_u8(vtstq_u8(b, odd), c, 4);
            q.lo[h][r] = vreinterpretq_s8_u8(lo);
            q.hi[h][r] = vreinterpretq_s8_u8(hi);
        }
    }
    return q;
}

/* s += scale * (sum over 32 columns) of four rows, for both sub-blocks of a pair; a: 64 activations */
CB_INLINE_NEON int32x4_t q5k_pair_neon(int32x4_t s, const struct kquad_neon *q, const int8_t *a,
                                       int32x4_t sc_lo, int32x4_t sc_hi)
{
    int16x8_t p[4];
    kprod_neon(p, q->lo, vld1q_s8(a), vld1q_s8(a + 16));
    s = vmlaq_s32(s, total4_by4_neon(p[0], p[1], p[2], p[3]), sc_lo);
    kprod_neon(p, q->hi, vld1q_s8(a + 32), vld1q_s8(a + 48));
    return vmlaq_s32(s, total4_by4_neon(p[0], p[1], p[2], p[3]), sc_hi);
}

/* What w - 16 left out of S: 16 * sum of scale * activation sum */
CB_INLINE_NEON int32x4_t q5k_fold_neon(const struct kpair_neon *scales, const struct ksum_neon *b)
{
    return vshlq_n_s32(kpair_total_neon(scales, b), 4);
}

CB_NOINLINE_NEON void q5k_decode_neon(float *y, const struct cb_q8_k *x, const uint8_t *w,
                                      size_t n_blocks)
{
    float32x4_t acc0 = vdupq_n_f32(0.0f), acc1 = acc0;
    for (size_t b = 0; b < n_blocks; b++, w += Q5K_BYTES, x++) {
        fetch_bytes_neon(w, Q5K_QS);
        const int32x4_t m0 = kmin_sum_neon(w + Q5K_SCALES, 0, x);
        const int32x4_t m1 = kmin_sum_neon(w + Q5K_SCALES, 1, x);
        CB_ORDER_NEON();
        const struct kscale_neon k0 = kscale_neon(w + Q5K_SCALES, 0);
        const struct kscale_neon k1 = kscale_neon(w + Q5K_SCALES, 1);
        const struct ksum_neon bs = ksum_neon(x);
        const struct kpair_neon p0 = kpair_neon(k0.s_lo, k0.s_hi);
        const struct kpair_neon p1 = kpair_neon(k1.s_lo, k1.s_hi);
        int32x4_t s0 = q5k_fold_neon(&p0, &bs), s1 = q5k_fold_neon(&p1, &bs);
        _Pragma("GCC unroll 4")
        for (unsigned j = 0; j < 4; j++) {
            const uint8_t *p = w + Q5K_QS + 256 * (size_t)j;
            const int8_t *a = x->q + 64 * (size_t)j;
            fetch_bytes_neon(p, 256);
            struct kquad_neon q = q5k_unpack_neon(w + Q5K_QH, p, j);
            s0 = q5k_pair_neon(s0, &q, a, kscale_at_neon(&k0, 2 * j),
                               kscale_at_neon(&k0, 2 * j + 1));
            CB_ORDER_NEON();
            q = q5k_unpack_neon(w + Q5K_QH + 64, p + 64, j);
            s1 = q5k_pair_neon(s1, &q, a, kscale_at_neon(&k1, 2 * j),
                               kscale_at_neon(&k1, 2 * j + 1));
            CB_ORDER_NEON();
        }
        acc0 = kblock_add_neon(acc0, half4_neon(w), half4_neon(w + 16), x->d, s0, m0);
        acc1 = kblock_add_neon(acc1, half4_neon(w + 8), half4_neon(w + 24), x->d, s1, m1);
    }
    vst1q_f32(y, acc0);
    vst1q_f32(y + 4, acc1);
}

/* 2 .. CB_TILE_NEON tokens */
CB_NOINLINE_NEON void q5k_tile_neon(float *const *y, const void *const *x, size_t n_tok,
                                    const uint8_t *w, size_t n_blocks, size_t row)
{
    float32x4_t acc[CB_TILE_NEON][2];
    int32x4_t s[CB_TILE_NEON][2];
    for (size_t t = 0; t < n_tok; t++) {
        acc[t][0] = acc[t][1] = vdupq_n_f32(0.0f);
    }
    for (size_t b = 0; b < n_blocks; b++, w += Q5K_BYTES) {
        struct kblock_neon k;
        kblock_load_neon(&k, w);
        for (size_t t = 0; t < n_tok; t++) {
            const struct ksum_neon bs = ksum_neon((const struct cb_q8_k *)x[t] + b);
            s[t][0] = q5k_fold_neon(&k.sp[0], &bs);
            s[t][1] = q5k_fold_neon(&k.sp[1], &bs);
        }
        for (size_t j = 0; j < 4; j++) {
            for (size_t h = 0; h < 2; h++) {
                const uint8_t *p = w + Q5K_QS + 256 * j + 64 * h;
                fetch_bytes_neon(p + 64 * h, 128);
                const struct kquad_neon q = q5k_unpack_neon(w + Q5K_QH + 64 * h, p, j);
                const int32x4_t c0 = k.sc[h][2 * j], c1 = k.sc[h][2 * j + 1];
                for (size_t t = 0; t < n_tok; t++) {
                    const struct cb_q8_k *xt = (const struct cb_q8_k *)x[t] + b;
                    s[t][h] = q5k_pair_neon(s[t][h], &q, xt->q + 64 * j, c0, c1);
                }
            }
        }
        for (size_t t = 0; t < n_tok; t++) {
            kblock_finish_neon(acc[t], &k, (const struct cb_q8_k *)x[t] + b, s[t]);
        }
    }
    for (size_t t = 0; t < n_tok; t++) {
        vst1q_f32(y[t] + row, acc[t][0]);
        vst1q_f32(y[t] + row + 4, acc[t][1]);
    }
}

void cb_gemm_q5_k_neon(float *const *y, const void *const *x, size_t n_tok, const void *w,
                       size_t n_groups, size_t n_cols)
{
    const uint8_t *p = (const uint8_t *)w;
    const size_t n_blocks = n_cols / 256;
    for (size_t g = 0; g < n_groups; g++, p += n_blocks * Q5K_BYTES) {
        for (size_t t = 0; t < n_tok;) {
            const size_t left = n_tok - t, n = left < CB_TILE_NEON ? left : CB_TILE_NEON;
            if (n == 1) {
                q5k_decode_neon(y[t] + 8 * g, (const struct cb_q8_k *)x[t], p, n_blocks);
            } else {
                q5k_tile_neon(y + t, x + t, n, p, n_blocks, 8 * g);
            }
            t += n;
        }
    }
}

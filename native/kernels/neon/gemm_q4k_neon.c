/* gemm_q4k_neon.c — Q4_K x Q8_K, x8c16: a row is a register, four rows share a scale vector.
 *
 * Per quad of rows and sub-block of 32: 4 products an int16 lane (<= 7620), added
 * over 4 lanes while still int16 (<= 30480), widened, times the 6-bit scale in int32.
 */
#include "kblock_neon.h"
#include "neon.h"

#define Q4K_BYTES ((size_t)(8 * 144)) /* a super-block: 8 rows x 256 columns */
#define Q4K_SCALES ((size_t)32)
#define Q4K_QS ((size_t)128)

/* p: chunk 2*pair of the quad's first row */
CB_INLINE_NEON struct kquad_neon q4k_unpack_neon(const uint8_t *p)
{
    const uint8x16_t m = vdupq_n_u8(0x0f);
    struct kquad_neon q;
    _Pragma("GCC unroll 4")
    for (size_t r = 0; r < 4; r++) {
        const uint8x16_t c0 = vld1q_u8(p + 16 * r), c1 = vld1q_u8(p + 128 + 16 * r);
        q.lo[0][r] = vreinterpretq_s8_u8(vandq_u8(c0, m));
        q.hi[0][r] = vreinterpretq_s8_u8(vshrq_n_u8(c0, 4));
        q.lo[1][r] = vreinterpretq_s8_u8(vandq_u8(c1, m));
        q.hi[1][r] = vreinterpretq_s8_u8(vshrq_n_u8(c1, 4));
    }
    return q;
}

/* s += scale * (sum over 32 columns) of four rows, for both sub-blocks of a pair; a: 64 activations */
CB_INLINE_NEON int32x4_t q4k_pair_neon(int32x4_t s, const struct kquad_neon *q, const int8_t *a,
                                       int32x4_t sc_lo, int32x4_t sc_hi)
{
    int16x8_t p[4];
    kprod_neon(p, q->lo, vld1q_s8(a), vld1q_s8(a + 16));
    s = vmlaq_s32(s, total4_by4_neon(p[0], p[1], p[2], p[3]), sc_lo);
    kprod_neon(p, q->hi, vld1q_s8(a + 32), vld1q_s8(a + 48));
    return vmlaq_s32(s, total4_by4_neon(p[0], p[1], p[2], p[3]), sc_hi);
}

/* One token: one stream of weights, everything in registers. */
CB_NOINLINE_NEON void q4k_decode_neon(float *y, const struct cb_q8_k *x, const uint8_t *w,
                                      size_t n_blocks)
{
    float32x4_t acc0 = vdupq_n_f32(0.0f), acc1 = acc0;
    for (size_t b = 0; b < n_blocks; b++, w += Q4K_BYTES, x++) {
        fetch_bytes_neon(w, 128);
        const int32x4_t m0 = kmin_sum_neon(w + Q4K_SCALES, 0, x);
        const int32x4_t m1 = kmin_sum_neon(w + Q4K_SCALES, 1, x);
        CB_ORDER_NEON();
        const struct kscale_neon k0 = kscale_neon(w + Q4K_SCALES, 0);
        const struct kscale_neon k1 = kscale_neon(w + Q4K_SCALES, 1);
        int32x4_t s0 = vdupq_n_s32(0), s1 = s0;
        _Pragma("GCC unroll 4")
        for (unsigned j = 0; j < 4; j++) {
            const uint8_t *p = w + Q4K_QS + 256 * (size_t)j;
            fetch_bytes_neon(p, 128);
            struct kquad_neon q = q4k_unpack_neon(p);
            s0 = q4k_pair_neon(s0, &q, x->q + 64 * (size_t)j, kscale_at_neon(&k0, 2 * j),
                               kscale_at_neon(&k0, 2 * j + 1));
            fetch_bytes_neon(p + 128, 128);
            CB_ORDER_NEON();
            q = q4k_unpack_neon(p + 64);
            s1 = q4k_pair_neon(s1, &q, x->q + 64 * (size_t)j, kscale_at_neon(&k1, 2 * j),
                               kscale_at_neon(&k1, 2 * j + 1));
            CB_ORDER_NEON();
        }
        acc0 = kblock_add_neon(acc0, half4_neon(w), half4_neon(w + 16), x->d, s0, m0);
        acc1 = kblock_add_neon(acc1, half4_neon(w + 8), half4_neon(w + 24), x->d, s1, m1);
    }
    vst1q_f32(y, acc0);
    vst1q_f32(y + 4, acc1);
}

/* n_tok <= CB_TILE_NEON tokens: each unpacked quad serves all of them. y[t] + row: 8 outputs. */
CB_NOINLINE_NEON void q4k_tile_neon(float *const *y, const void *const *x, size_t n_tok,
                                    const uint8_t *w, size_t n_blocks, size_t row)
{
    float32x4_t acc[CB_TILE_NEON][2];
    int32x4_t s[CB_TILE_NEON][2];
    for (size_t t = 0; t < n_tok; t++) {
        acc[t][0] = acc[t][1] = vdupq_n_f32(0.0f);
    }
    for (size_t b = 0; b < n_blocks; b++, w += Q4K_BYTES) {
        struct kblock_neon k;
        kblock_load_neon(&k, w);
        for (size_t t = 0; t < n_tok; t++) {
            s[t][0] = s[t][1] = vdupq_n_s32(0);
        }
        for (size_t j = 0; j < 4; j++) {
            for (size_t h = 0; h < 2; h++) {
                const uint8_t *p = w + Q4K_QS + 256 * j + 64 * h;
                fetch_bytes_neon(p + 64 * h, 128);
                const struct kquad_neon q = q4k_unpack_neon(p);
                const int32x4_t c0 = k.sc[h][2 * j], c1 = k.sc[h][2 * j + 1];
                for (size_t t = 0; t < n_tok; t++) {
                    const struct cb_q8_k *xt = (const struct cb_q8_k *)x[t] + b;
                    s[t][h] = q4k_pair_neon(s[t][h], &q, xt->q + 64 * j, c0, c1);
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

void cb_gemm_q4_k_neon(float *const *y, const void *const *x, size_t n_tok, const void *w,
                       size_t n_groups, size_t n_cols)
{
    const uint8_t *p = (const uint8_t *)w;
    const size_t n_blocks = n_cols / 256;
    for (size_t g = 0; g < n_groups; g++, p += n_blocks * Q4K_BYTES) {
        for (size_t t = 0; t < n_tok;) {
            const size_t left = n_tok - t, n = left < CB_TILE_NEON ? left : CB_TILE_NEON;
            if (n == 1) {
                q4k_decode_neon(y[t] + 8 * g, (const struct cb_q8_k *)x[t], p, n_blocks);
            } else {
                q4k_tile_neon(y + t, x + t, n, p, n_blocks, 8 * g);
            }
            t += n;
        }
    }
}

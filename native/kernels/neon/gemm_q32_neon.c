/* gemm_q32_neon.c — the types with blocks of 32 (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0) x Q8_0, x8c16.
 *
 * One body, compiled per type: `kind` is a constant everywhere. Nibbles stay
 * unsigned (Q4_0's 8 comes out through the activation sum), five-bit weights stand
 * as w - 16 (Q5_1's 16 goes back in through the sum). Lanes added in int16: 4
 * (16 products, <= 30480 and >= -32512), for Q8_0 none (2 products, <= 32512
 * because q never is -128).
 */
#include "neon.h"
#include "util_neon.h"

enum q32_kind { Q32_4_0, Q32_4_1, Q32_5_0, Q32_5_1, Q32_8_0 };

CB_INLINE_NEON size_t q32_bytes_neon(enum q32_kind kind)
{
    switch (kind) {
    case Q32_4_0: return 8 * 18;
    case Q32_4_1: return 8 * 20;
    case Q32_5_0: return 8 * 22;
    case Q32_5_1: return 8 * 24;
    default: return 8 * 34;
    }
}

/* Four rows of a block: columns 0..15 in lo, 16..31 in hi. */
struct q32_neon {
    int8x16_t lo[4], hi[4];
};

/* Byte i becomes 0xff where bit i of a row's 32 is *clear*. In: 4 rows of u32. Each
 * byte is repeated 8 times by three interleavings, then tested against its own bit. */
CB_INLINE_NEON void q32_clear_neon(uint8x16_t lo[4], uint8x16_t hi[4], uint8x16_t v)
{
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
    const uint8x16_t n = vmvnq_u8(v);
    const uint8x16_t two[2] = {vzip1q_u8(n, n), vzip2q_u8(n, n)};
    _Pragma("GCC unroll 4")
    for (size_t r = 0; r < 4; r++) {
        const uint8x16_t t = two[r / 2];
        const uint8x16_t four = r % 2 == 0 ? vzip1q_u8(t, t) : vzip2q_u8(t, t);
        lo[r] = vtstq_u8(vzip1q_u8(four, four), bit);
        hi[r] = vtstq_u8(vzip2q_u8(four, four), bit);
    }
}

CB_INLINE_NEON struct q32_neon q32_nibbles_neon(const uint8_t *qs)
{
    struct q32_neon q;
    _Pragma("GCC unroll 4")
    for (size_t r = 0; r < 4; r++) {
        const uint8x16_t c = vld1q_u8(qs + 16 * r);
        q.lo[r] = vreinterpretq_s8_u8(vandq_u8(c, vdupq_n_u8(0x0f)));
        q.hi[r] = vreinterpretq_s8_u8(vshrq_n_u8(c, 4));
    }
    return q;
}

/* Five bits as w - 16, -16..15: the nibble where the fifth bit is set, nibble | 0xf0
 * where it is clear, which is what SRI makes of the mask. */
CB_INLINE_NEON struct q32_neon q32_fives_neon(const uint8_t *qh, const uint8_t *qs)
{
    struct q32_neon q;
    uint8x16_t lo[4], hi[4];
    q32_clear_neon(lo, hi, vld1q_u8(qh));
    _Pragma("GCC unroll 4")
    for (size_t r = 0; r < 4; r++) {
        const uint8x16_t c = vld1q_u8(qs + 16 * r);
        q.lo[r] = vreinterpretq_s8_u8(vsriq_n_u8(lo[r], vshlq_n_u8(c, 4), 4));
        q.hi[r] = vreinterpretq_s8_u8(vsriq_n_u8(hi[r], c, 4));
    }
    return q;
}

/* w: the super-block; rows 4*quad .. 4*quad+3 */
CB_INLINE_NEON struct q32_neon q32_unpack_neon(enum q32_kind kind, const uint8_t *w, size_t quad)
{
    switch (kind) {
    case Q32_4_0: return q32_nibbles_neon(w + 16 + 64 * quad);
    case Q32_4_1: return q32_nibbles_neon(w + 32 + 64 * quad);
    case Q32_5_0: return q32_fives_neon(w + 16 + 16 * quad, w + 48 + 64 * quad);
    case Q32_5_1: return q32_fives_neon(w + 32 + 16 * quad, w + 64 + 64 * quad);
    default: break;
    }
    struct q32_neon q;
    _Pragma("GCC unroll 4")
    for (size_t r = 0; r < 4; r++) {
        q.lo[r] = vld1q_s8((const int8_t *)w + 16 + 64 * quad + 16 * r);
        q.hi[r] = vld1q_s8((const int8_t *)w + 144 + 64 * quad + 16 * r);
    }
    return q;
}

CB_INLINE_NEON int32x4_t q32_total8_neon(const struct q32_neon *q, int8x16_t a0, int8x16_t a1)
{
    int32x4_t s[4];
    _Pragma("GCC unroll 4")
    for (size_t r = 0; r < 4; r++) {
        s[r] = vpaddlq_s16(mul16_neon(q->lo[r], a0));
    }
    _Pragma("GCC unroll 4")
    for (size_t r = 0; r < 4; r++) {
        s[r] = vpadalq_s16(s[r], mul16_neon(q->hi[r], a1));
    }
    return total4_neon(s[0], s[1], s[2], s[3]);
}

/* S of four rows */
CB_INLINE_NEON int32x4_t q32_total_neon(enum q32_kind kind, const struct q32_neon *q,
                                        const struct cb_q8_0 *x)
{
    const int8x16_t a0 = vld1q_s8(x->q), a1 = vld1q_s8(x->q + 16);
    if (kind == Q32_8_0) {
        return q32_total8_neon(q, a0, a1);
    }
    int16x8_t p[4];
    _Pragma("GCC unroll 4")
    for (size_t r = 0; r < 4; r++) {
        p[r] = mul16_neon(q->lo[r], a0);
    }
    _Pragma("GCC unroll 4")
    for (size_t r = 0; r < 4; r++) {
        p[r] = mla16_neon(p[r], q->hi[r], a1);
    }
    const int32x4_t s = total4_by4_neon(p[0], p[1], p[2], p[3]);
    switch (kind) {
    case Q32_4_0: return vsubq_s32(s, vdupq_n_s32(8 * x->sum));
    case Q32_5_1: return vaddq_s32(s, vdupq_n_s32(16 * x->sum));
    default: return s;
    }
}

/* acc = fma(dw*da, S, acc); with minimums also acc = fma(mw*da, sum, acc) */
CB_INLINE_NEON float32x4_t q32_add_neon(enum q32_kind kind, float32x4_t acc, const uint8_t *w,
                                        size_t quad, const struct cb_q8_0 *x, int32x4_t s)
{
    acc = vfmaq_f32(acc, vmulq_n_f32(half4_neon(w + 8 * quad), x->d), vcvtq_f32_s32(s));
    if (kind == Q32_4_1 || kind == Q32_5_1) {
        const float32x4_t m = vmulq_n_f32(half4_neon(w + 16 + 8 * quad), x->d);
        acc = vfmaq_f32(acc, m, vdupq_n_f32((float)x->sum));
    }
    return acc;
}

CB_INLINE_NEON void q32_decode_neon(enum q32_kind kind, float *y, const struct cb_q8_0 *x,
                                    const uint8_t *w, size_t n_blocks)
{
    float32x4_t acc0 = vdupq_n_f32(0.0f), acc1 = acc0;
    for (size_t b = 0; b < n_blocks; b++, w += q32_bytes_neon(kind), x++) {
        fetch_bytes_neon(w, q32_bytes_neon(kind) & ~(size_t)15);
        const struct q32_neon q0 = q32_unpack_neon(kind, w, 0);
        acc0 = q32_add_neon(kind, acc0, w, 0, x, q32_total_neon(kind, &q0, x));
        const struct q32_neon q1 = q32_unpack_neon(kind, w, 1);
        acc1 = q32_add_neon(kind, acc1, w, 1, x, q32_total_neon(kind, &q1, x));
    }
    vst1q_f32(y, acc0);
    vst1q_f32(y + 4, acc1);
}

/* 2 .. CB_TILE_NEON tokens: the 16 unpacked registers of a block serve all of them. */
CB_INLINE_NEON void q32_tile_neon(enum q32_kind kind, float *const *y, const void *const *x,
                                  size_t n_tok, const uint8_t *w, size_t n_blocks, size_t row)
{
    float32x4_t acc[CB_TILE_NEON][2];
    for (size_t t = 0; t < n_tok; t++) {
        acc[t][0] = acc[t][1] = vdupq_n_f32(0.0f);
    }
    for (size_t b = 0; b < n_blocks; b++, w += q32_bytes_neon(kind)) {
        fetch_bytes_neon(w, q32_bytes_neon(kind) & ~(size_t)15);
        const struct q32_neon q0 = q32_unpack_neon(kind, w, 0);
        const struct q32_neon q1 = q32_unpack_neon(kind, w, 1);
        for (size_t t = 0; t < n_tok; t++) {
            const struct cb_q8_0 *xt = (const struct cb_q8_0 *)x[t] + b;
            acc[t][0] = q32_add_neon(kind, acc[t][0], w, 0, xt, q32_total_neon(kind, &q0, xt));
            acc[t][1] = q32_add_neon(kind, acc[t][1], w, 1, xt, q32_total_neon(kind, &q1, xt));
        }
    }
    for (size_t t = 0; t < n_tok; t++) {
        vst1q_f32(y[t] + row, acc[t][0]);
        vst1q_f32(y[t] + row + 4, acc[t][1]);
    }
}

#define Q32_GEMM(NAME, KIND)                                                                      \
    CB_NOINLINE_NEON void NAME##_decode_neon(float *y, const struct cb_q8_0 *x, const uint8_t *w, \
                                             size_t n_blocks)                                     \
    {                                                                                             \
        q32_decode_neon(KIND, y, x, w, n_blocks);                                                 \
    }                                                                                             \
    CB_NOINLINE_NEON void NAME##_tile_neon(float *const *y, const void *const *x, size_t n_tok,   \
                                           const uint8_t *w, size_t n_blocks, size_t row)         \
    {                                                                                             \
        q32_tile_neon(KIND, y, x, n_tok, w, n_blocks, row);                                       \
    }                                                                                             \
    void cb_gemm_##NAME##_neon(float *const *y, const void *const *x, size_t n_tok,               \
                               const void *w, size_t n_groups, size_t n_cols)                     \
    {                                                                                             \
        const uint8_t *p = (const uint8_t *)w;                                                    \
        const size_t n_blocks = n_cols / 32;                                                      \
        for (size_t g = 0; g < n_groups; g++, p += n_blocks * q32_bytes_neon(KIND)) {             \
            for (size_t t = 0; t < n_tok;) {                                                      \
                const size_t left = n_tok - t, n = left < CB_TILE_NEON ? left : CB_TILE_NEON;     \
                if (n == 1) {                                                                     \
                    NAME##_decode_neon(y[t] + 8 * g, (const struct cb_q8_0 *)x[t], p, n_blocks);  \
                } else {                                                                          \
                    NAME##_tile_neon(y + t, x + t, n, p, n_blocks, 8 * g);                        \
                }                                                                                 \
                t += n;                                                                           \
            }                                                                                     \
        }                                                                                         \
    }

Q32_GEMM(q4_0, Q32_4_0)
Q32_GEMM(q4_1, Q32_4_1)
Q32_GEMM(q5_0, Q32_5_0)
Q32_GEMM(q5_1, Q32_5_1)
Q32_GEMM(q8_0, Q32_8_0)

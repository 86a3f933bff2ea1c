/* unpack.h — one row of one x8c16 super-block as plain integers (docs/format.md).
 *
 * sb: the super-block (8 · block_bytes bytes), r: row 0…7 in it. Bit positions
 * inside the blocks are ggml's. Forced inline: no symbols.
 */
#ifndef CB_SCALAR_UNPACK_H
#define CB_SCALAR_UNPACK_H

#include <stddef.h>

#include "../f16.h"

/* Field offsets in a super-block, bytes. */
#define CB_AT_D 0u        /* d f16[8], in every type */
#define CB_AT_M 16u       /* m f16[8]: Q4_1, Q5_1; dmin: Q4_K, Q5_K */
#define CB_AT_Q8_0_QS 16u
#define CB_AT_Q4_0_QS 16u
#define CB_AT_Q4_1_QS 32u
#define CB_AT_Q5_0_QH 16u
#define CB_AT_Q5_0_QS 48u
#define CB_AT_Q5_1_QH 32u
#define CB_AT_Q5_1_QS 64u
#define CB_AT_K_SCALES 32u /* Q4_K, Q5_K */
#define CB_AT_Q4_K_QS 128u
#define CB_AT_Q5_K_QH 128u
#define CB_AT_Q5_K_QS 384u
#define CB_AT_Q6_K_SCALES 16u
#define CB_AT_Q6_K_QH 144u
#define CB_AT_Q6_K_QL 656u

CB_INLINE float cb_row_d(const uint8_t *sb, size_t r)
{
    return cb_f16_to_f32(cb_load_u16(sb + CB_AT_D + 2 * r));
}

CB_INLINE float cb_row_m(const uint8_t *sb, size_t r)
{
    return cb_f16_to_f32(cb_load_u16(sb + CB_AT_M + 2 * r));
}

/* Chunk c (16 bytes) of row r of a field that starts at byte `at`. */
CB_INLINE const uint8_t *cb_chunk(const uint8_t *sb, size_t at, size_t c, size_t r)
{
    return sb + at + (c * 8 + r) * 16;
}

/* w[32], less zero point z; qh = the 32 fifth bits or 0. */
CB_INLINE void cb_unpack_nibbles(const uint8_t *qs, uint32_t qh, int z, int8_t w[32])
{
    for (size_t i = 0; i < 16; i++) {
        const int lo = (qs[i] & 15) | (int)(((qh >> i) & 1u) << 4);
        const int hi = (qs[i] >> 4) | (int)(((qh >> (i + 16)) & 1u) << 4);
        w[i] = (int8_t)(lo - z);
        w[i + 16] = (int8_t)(hi - z);
    }
}

CB_INLINE void cb_unpack_q4_0(const uint8_t *sb, size_t r, int8_t w[32])
{
    cb_unpack_nibbles(cb_chunk(sb, CB_AT_Q4_0_QS, 0, r), 0, 8, w);
}

CB_INLINE void cb_unpack_q4_1(const uint8_t *sb, size_t r, int8_t w[32])
{
    cb_unpack_nibbles(cb_chunk(sb, CB_AT_Q4_1_QS, 0, r), 0, 0, w);
}

CB_INLINE void cb_unpack_q5_0(const uint8_t *sb, size_t r, int8_t w[32])
{
    const uint32_t qh = cb_load_u32(sb + CB_AT_Q5_0_QH + 4 * r);
    cb_unpack_nibbles(cb_chunk(sb, CB_AT_Q5_0_QS, 0, r), qh, 16, w);
}

CB_INLINE void cb_unpack_q5_1(const uint8_t *sb, size_t r, int8_t w[32])
{
    const uint32_t qh = cb_load_u32(sb + CB_AT_Q5_1_QH + 4 * r);
    cb_unpack_nibbles(cb_chunk(sb, CB_AT_Q5_1_QS, 0, r), qh, 0, w);
}

CB_INLINE void cb_unpack_q8_0(const uint8_t *sb, size_t r, int8_t w[32])
{
    memcpy(w, cb_chunk(sb, CB_AT_Q8_0_QS, 0, r), 16);
    memcpy(w + 16, cb_chunk(sb, CB_AT_Q8_0_QS, 1, r), 16);
}

/* The 8 scales and 8 minima (6 bits each) of a Q4_K or Q5_K row. */
CB_INLINE void cb_unpack_k_scales(const uint8_t *sb, size_t r, uint8_t sc[8], uint8_t m[8])
{
    const uint8_t *s0 = sb + CB_AT_K_SCALES + 4 * r;
    const uint8_t *s1 = s0 + 32;
    const uint8_t *s2 = s0 + 64;
    for (size_t j = 0; j < 4; j++) {
        sc[j] = s0[j] & 63;
        m[j] = s1[j] & 63;
        sc[4 + j] = (uint8_t)((s2[j] & 15) | ((s0[j] >> 2) & 48));
        m[4 + j] = (uint8_t)((s2[j] >> 4) | ((s1[j] >> 2) & 48));
    }
}

CB_INLINE void cb_unpack_q4_k(const uint8_t *sb, size_t r, int8_t w[256])
{
    for (size_t c = 0; c < 8; c++) {
        const uint8_t *qs = cb_chunk(sb, CB_AT_Q4_K_QS, c, r);
        int8_t *lo = w + 64 * (c / 2) + 16 * (c % 2);
        for (size_t i = 0; i < 16; i++) {
            lo[i] = (int8_t)(qs[i] & 15);
            lo[i + 32] = (int8_t)(qs[i] >> 4);
        }
    }
}

CB_INLINE void cb_unpack_q5_k(const uint8_t *sb, size_t r, int8_t w[256])
{
    for (size_t c = 0; c < 8; c++) {
        const uint8_t *qs = cb_chunk(sb, CB_AT_Q5_K_QS, c, r);
        const uint8_t *qh = cb_chunk(sb, CB_AT_Q5_K_QH, c % 2, r);
        const unsigned bit = (unsigned)(c / 2) * 2;
        int8_t *lo = w + 64 * (c / 2) + 16 * (c % 2);
        for (size_t i = 0; i < 16; i++) {
            lo[i] = (int8_t)((qs[i] & 15) | (((qh[i] >> bit) & 1) << 4));
            lo[i + 32] = (int8_t)((qs[i] >> 4) | (((qh[i] >> (bit + 1)) & 1) << 4));
        }
    }
}

/* w - 32; chunk c of ql holds elements 128·(c/4) + 16·(c%4) and those 64 later. */
CB_INLINE void cb_unpack_q6_k(const uint8_t *sb, size_t r, int8_t w[256])
{
    for (size_t c = 0; c < 8; c++) {
        const uint8_t *ql = cb_chunk(sb, CB_AT_Q6_K_QL, c, r);
        const uint8_t *qh = cb_chunk(sb, CB_AT_Q6_K_QH, 2 * (c / 4) + c % 2, r);
        const unsigned shift = (unsigned)(c % 4) / 2 * 2;
        int8_t *lo = w + 128 * (c / 4) + 16 * (c % 4);
        for (size_t i = 0; i < 16; i++) {
            lo[i] = (int8_t)(((ql[i] & 15) | (((qh[i] >> shift) & 3) << 4)) - 32);
            lo[i + 64] = (int8_t)(((ql[i] >> 4) | (((qh[i] >> (shift + 4)) & 3) << 4)) - 32);
        }
    }
}

CB_INLINE int8_t cb_q6_k_scale(const uint8_t *sb, size_t r, size_t g)
{
    return (int8_t)sb[CB_AT_Q6_K_SCALES + 16 * r + g];
}

#endif

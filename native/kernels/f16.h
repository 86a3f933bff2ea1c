/* f16.h — exact conversions between binary16, bfloat16 and binary32 in integers.
 *
 * NaN becomes quiet and keeps its sign and the upper payload bits: what F16C
 * and ARMv8 do.
 */
#ifndef CB_F16_H
#define CB_F16_H

#include "fma.h"

/* Every binary16 number is a binary32 number: exact. */
CB_INLINE float cb_f16_to_f32(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t exp = (uint32_t)(h >> 10) & 31u;
    const uint32_t man = (uint32_t)h & 0x3FFu;
    if (exp == 31u) {
        const uint32_t quiet = man != 0 ? 0x400000u : 0u;
        return cb_f32_from_bits(sign | 0x7F800000u | quiet | (man << 13));
    }
    if (exp == 0u) { /* zero and subnormal: man · 2^-24, exact */
        const float mag = (float)(int32_t)man * 0x1p-24f;
        return cb_f32_from_bits(sign | cb_f32_bits(mag));
    }
    return cb_f32_from_bits(sign | ((exp + 112u) << 23) | (man << 13));
}

/* Round to nearest, ties to even; overflow to infinity. */
CB_INLINE uint16_t cb_f32_to_f16(float x)
{
    const uint32_t u = cb_f32_bits(x);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t a = u & 0x7FFFFFFFu;
    if (a > 0x7F800000u) {
        return (uint16_t)(sign | 0x7E00u | ((a >> 13) & 0x3FFu));
    }
    if (a >= 0x477FF000u) { /* >= 65520 rounds to infinity */
        return (uint16_t)(sign | 0x7C00u);
    }
    if (a >= 0x38800000u) { /* normal: >= 2^-14 */
        const uint32_t odd = (a >> 13) & 1u;
        return (uint16_t)(sign | ((a - 0x38000000u + 0xFFFu + odd) >> 13));
    }
    if (a <= 0x33000000u) { /* <= 2^-25 rounds to zero (the tie goes to even) */
        return (uint16_t)sign;
    }
    const uint32_t shift = 126u - (a >> 23); /* 14 … 24 */
    const uint32_t man = (a & 0x7FFFFFu) | 0x800000u;
    const uint32_t half = (1u << (shift - 1u)) - 1u;
    const uint32_t odd = (man >> shift) & 1u;
    return (uint16_t)(sign | ((man + half + odd) >> shift));
}

CB_INLINE float cb_bf16_to_f32(uint16_t h)
{
    return cb_f32_from_bits((uint32_t)h << 16);
}

/* Little-endian loads from bytes of any alignment. */
CB_INLINE uint16_t cb_load_u16(const void *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

CB_INLINE uint32_t cb_load_u32(const void *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

#endif

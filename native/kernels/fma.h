/* fma.h — one fused multiply-add with one rounding, on every CPU (determinism.md §1).
 *
 * Everything here is forced inline, so a file's copy carries that file's
 * instruction set and no symbol of its own.
 */
#ifndef CB_FMA_H
#define CB_FMA_H

#include <stdint.h>
#include <string.h>

#define CB_INLINE static inline __attribute__((always_inline))

CB_INLINE uint32_t cb_f32_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

CB_INLINE float cb_f32_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* a·b + c without the instruction. The product of two binary32 numbers is exact
 * in binary64 (48 bits of 53, and no exponent leaves the range). 2Sum gives the
 * error of the sum; where there is one and the sum's last bit is even, the odd
 * neighbour on the error's side is taken: round to odd. 53 >= 24 + 2 bits make
 * the last conversion round as if it saw the exact sum (Boldo and Melquiond,
 * "Emulation of a FMA and correctly rounded sums", 2008), subnormal results
 * included. An infinite or NaN sum has a NaN error and falls through. */
CB_INLINE float cb_fmaf_soft(float a, float b, float c)
{
    const double p = (double)a * (double)b;
    const double z = (double)c;
    const double s = p + z;
    const double t = s - p;
    const double e = (p - (s - t)) + (z - t);
    uint64_t u;
    double r;
    memcpy(&u, &s, sizeof u);
    if ((e > 0.0 || e < 0.0) && (u & 1u) == 0) {
        u = ((e > 0.0) == (s > 0.0)) ? u + 1 : u - 1;
    }
    memcpy(&r, &u, sizeof r);
    return (float)r;
}

CB_INLINE float cb_fmaf(float a, float b, float c)
{
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return cb_fmaf_soft(a, b, c);
#endif
}

#endif

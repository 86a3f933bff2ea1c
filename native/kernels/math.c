/* math.c — elementary functions that give the same bits in every build.
 *
 * cb_expf is determinism.md §4 to the letter. The others work in binary64 with
 * + - * / and integer operations on the exponent only: no fma, no libm. Their
 * error bounds are measured by tests/unit/test_kernel_math.py against 50-digit arithmetic.
 */
#include <math.h>

#include "fma.h"
#include "kernels.h"

/* 1.5·2^23 and 1.5·2^52: adding and subtracting rounds to an integer, ties to even. */
#define CB_ROUND_F 12582912.0f
#define CB_ROUND_D 6755399441055744.0

/* 2^n, -126 <= n <= 127. */
static float cb_pow2f(int32_t n)
{
    return cb_f32_from_bits((uint32_t)(n + 127) << 23);
}

/* Argument reduction by n·ln2 in two parts (the first exact), Taylor to degree 7
 * on |r| <= ln2/2, after Cody and Waite, "Software Manual for the Elementary
 * Functions", 1980. <= 2 ulp; subnormal results are rounded once more. */
float cb_expf(float x)
{
    if (x != x) {
        return x;
    }
    if (x > 88.72283f) {
        return INFINITY;
    }
    if (x < -104.0f) {
        return 0.0f;
    }
    const float n = (x * 1.44269504f + CB_ROUND_F) - CB_ROUND_F;
    float r = cb_fmaf(n, -0.693359375f, x);
    r = cb_fmaf(n, 2.12194440e-4f, r);
    float p = 1.0f / 5040.0f;
    p = cb_fmaf(p, r, 1.0f / 720.0f);
    p = cb_fmaf(p, r, 1.0f / 120.0f);
    p = cb_fmaf(p, r, 1.0f / 24.0f);
    p = cb_fmaf(p, r, 1.0f / 6.0f);
    p = cb_fmaf(p, r, 0.5f);
    p = cb_fmaf(p, r, 1.0f);
    p = cb_fmaf(p, r, 1.0f);
    const int32_t k = (int32_t)n;
    const int32_t k1 = k >> 1;
    return (p * cb_pow2f(k1)) * cb_pow2f(k - k1);
}

float cb_siluf(float x)
{
    return x / (1.0f + cb_expf(-x));
}

float cb_sigmoidf(float x)
{
    return 1.0f / (1.0f + cb_expf(-x));
}

static uint64_t cb_f64_bits(double x)
{
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static double cb_f64_from_bits(uint64_t u)
{
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* 2^n, -1022 <= n <= 1023. */
static double cb_pow2d(int64_t n)
{
    return cb_f64_from_bits((uint64_t)(n + 1023) << 52);
}

/* ln 2 in two parts: the first has 32 trailing zero bits, so that k·hi is exact
 * for |k| < 2^20 (fdlibm's split). */
#define CB_LN2_HI 0x1.62e42feep-1
#define CB_LN2_LO 0x1.a39ef35793c76p-33

/* x = 2^k·m with m in [sqrt(1/2), sqrt(2)); log m = 2·atanh(s), s = (m-1)/(m+1),
 * by its series to s^23 (|s| <= 0.1716: the rest is below 2^-60). Relative
 * error <= 2^-51. 0 gives -inf, a negative number NaN. */
double cb_log(double x)
{
    if (!(x > 0.0)) {
        return x == 0.0 ? -(double)INFINITY : (double)NAN;
    }
    int64_t k = 0;
    if (x < 0x1p-1022) {
        x *= 0x1p54;
        k = -54;
    }
    uint64_t u = cb_f64_bits(x);
    if (u >> 52 == 0x7FF) {
        return x;
    }
    k += (int64_t)(u >> 52) - 1023;
    double m = cb_f64_from_bits((u & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        k += 1;
    }
    const double f = m - 1.0;
    const double s = f / (m + 1.0);
    const double z = s * s;
    double p = 1.0 / 23.0;
    for (int i = 21; i >= 3; i -= 2) {
        p = p * z + 1.0 / (double)i;
    }
    /* log m = 2s + 2s·z·p, and 2s = f - s·f keeps the leading term exact */
    const double tail = s * (2.0 * (z * p) - f);
    return (double)k * CB_LN2_HI + (f + (tail + (double)k * CB_LN2_LO));
}

/* r = x - k·ln2, Taylor to degree 13 on |r| <= ln2/2 (the rest is below 2^-57).
 * Relative error <= 2^-51; subnormal results are rounded once more. */
double cb_exp(double x)
{
    if (x != x) {
        return x;
    }
    if (x > 709.782712893384) {
        return (double)INFINITY;
    }
    if (x < -745.2) {
        return 0.0;
    }
    const double n = (x * 1.4426950408889634 + CB_ROUND_D) - CB_ROUND_D;
    const double r = (x - n * CB_LN2_HI) - n * CB_LN2_LO;
    double p = 1.0;
    for (int i = 13; i >= 1; i--) {
        p = p * (r / (double)i) + 1.0;
    }
    const int64_t k = (int64_t)n;
    const int64_t k1 = k / 2;
    return (p * cb_pow2d(k1)) * cb_pow2d(k - k1);
}

/* Relative error about |num/den·log(base)|·2^-52. */
double cb_pow_inv(double base, double num, double den)
{
    return cb_exp(-(cb_log(base) * num / den));
}

/* x - k·(pi/2) with pi/2 in parts of 22 bits, so that each k·part is exact for
 * |k| < 2^31; 2Sum collects what the differences round off. 142 bits in all
 * leave more than 2^-30 relative accuracy for the worst double below 2^31. */
static double cb_reduce_pio2(double x, double k)
{
    static const double part[6] = {0x1.921fbp+0,  0x1.5110bp-22, 0x1.1846980p-44,
                                   0x1.3198ap-69, 0x1.701b8p-92, 0x1.cd129p-115};
    double hi = x;
    double lo = 0.0;
    for (int i = 0; i < 6; i++) {
        const double a = hi;
        const double b = -(k * part[i]);
        const double s = a + b;
        const double t = s - a;
        lo += (a - (s - t)) + (b - t);
        hi = s;
    }
    return hi + lo;
}

/* Taylor on |r| <= pi/4 to degree 15 and 16 (the rest is below 2^-50), in
 * binary64, rounded once: |error| <= 0.51 ulp of float. */
void cb_sincos(double x, float *s, float *c)
{
    const double k = (x * 0.6366197723675814 + CB_ROUND_D) - CB_ROUND_D;
    const double r = cb_reduce_pio2(x, k);
    const double z = -(r * r);
    double ps = 1.0;
    double pc = 1.0;
    for (int i = 14; i >= 2; i -= 2) {
        ps = ps * (z / (double)(i * (i + 1))) + 1.0;
    }
    for (int i = 15; i >= 1; i -= 2) {
        pc = pc * (z / (double)(i * (i + 1))) + 1.0;
    }
    ps *= r;
    const float fs = (float)ps;
    const float fc = (float)pc;
    switch ((int64_t)k & 3) {
    case 0: *s = fs; *c = fc; break;
    case 1: *s = fc; *c = -fs; break;
    case 2: *s = -fs; *c = -fc; break;
    default: *s = -fc; *c = fs; break;
    }
}

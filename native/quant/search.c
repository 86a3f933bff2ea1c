/* search.c — block normalisation and the two searches (search.h says how and why). */
#include "search.h"

/* Starts: the extreme value goes to (end of the range) + j/10, j in these bounds. A step of 0.1
 * instead of 0.3 lowers the error by less than 0.5 % and takes three times as long. */
#define CB_SYM_FROM (-12)
#define CB_SYM_TO 9
#define CB_OFF_FROM (-9)
#define CB_OFF_TO 12
#define CB_STEP 3

static int cb_exponent(float v) /* of a positive number, subnormals too */
{
    int e = (int)(cb_f32_bits(v) >> 23) - 127;
    if (e == -127) {
        e = (int)(cb_f32_bits(v * 0x1p64f) >> 23) - 127 - 64;
    }
    return e;
}

static double cb_pow2(int e) /* 2^e, |e| <= 1000 */
{
    const uint64_t u = (uint64_t)(e + 1023) << 52;
    double d;
    memcpy(&d, &u, sizeof d);
    return d;
}

float cb_scaled(float v, int e)
{
    return (float)((double)v * cb_pow2(e));
}

static float cb_largest(const float *x, size_t n)
{
    float m = 0.0f;
    for (size_t i = 0; i < n; i++) {
        const float a = x[i] < 0.0f ? -x[i] : x[i];
        m = a > m ? a : m;
    }
    return m;
}

void cb_block_load(struct cb_block *b, const float *x, const float *importance, size_t n)
{
    const float amax = cb_largest(x, n);
    const float wmax = importance != NULL ? cb_largest(importance, n) : 0.0f;
    const double k = cb_pow2(amax > 0.0f ? -cb_exponent(amax) : 0);
    const double kw = cb_pow2(wmax > 0.0f ? -cb_exponent(wmax) : 0);
    b->n = n;
    b->exp = amax > 0.0f ? cb_exponent(amax) : 0;
    for (size_t i = 0; i < n; i++) {
        b->x[i] = (float)((double)x[i] * k);
        b->w[i] = wmax > 0.0f ? (float)((double)importance[i] * kw) : 1.0f;
    }
}

struct cb_stored cb_store_f16(float v, int exp)
{
    struct cb_stored s;
    s.h = cb_f32_to_f16(cb_scaled(v, exp));
    if ((s.h & 0x7FFFu) > 0x7BFFu) {
        s.h = (uint16_t)((s.h & 0x8000u) | 0x7BFFu);
    }
    s.v = cb_scaled(cb_f16_to_f32(s.h), -exp);
    return s;
}

struct cb_stored cb_store_step(float largest, float steps, int exp)
{
    struct cb_stored s = cb_store_f16(largest / steps, exp);
    const float ratio = largest * cb_inv(s.v);
    const float mag = steps < 0.0f ? -steps : steps;
    if (largest != 0.0f && (s.v == 0.0f || (ratio < 0.0f ? -ratio : ratio) > mag + 0.5f) &&
        (s.h & 0x7FFFu) < 0x7BFFu) {
        s.h++;
        s.v = cb_scaled(cb_f16_to_f32(s.h), -exp);
    }
    return s;
}

/* Σ w·x·q and Σ w·q² for q = nearest(x·inv). */
static void cb_fit_scale(const float *x, const float *w, size_t n, float inv, float lo, float hi,
                         float *sxq, float *sqq)
{
    float a[CB_QL] = {0.0f}, b[CB_QL] = {0.0f};
    for (size_t i = 0; i < n; i += CB_QL) {
        for (size_t k = 0; k < CB_QL; k++) {
            const float q = cb_near(cb_clampf(x[i + k] * inv, lo, hi));
            const float wq = w[i + k] * q;
            a[k] += wq * x[i + k];
            b[k] += wq * q;
        }
    }
    *sxq = cb_lane_sum(a);
    *sqq = cb_lane_sum(b);
}

/* At the fitted scale the error is Σwx² - (Σwxq)²/Σwq²: the largest last term wins. */
float cb_search_scale(const float *x, const float *w, size_t n, float lo, float hi)
{
    float max = 0.0f, amax = 0.0f, best = 0.0f, scale = 0.0f;
    for (size_t i = 0; i < n; i++) {
        const float a = x[i] < 0.0f ? -x[i] : x[i];
        if (a > amax) {
            amax = a;
            max = x[i];
        }
    }
    if (amax < 1e-15f) { /* far below the block's largest: any stored scale is 0 */
        return 0.0f;
    }
    for (int sign = 0; sign < 2; sign++) { /* the extreme value at lo, then at hi */
        const float end = sign == 0 ? lo : hi;
        for (int j = CB_SYM_FROM; j <= CB_SYM_TO; j += CB_STEP) {
            float sxq, sqq;
            const float to = sign == 0 ? end - 0.1f * (float)j : end + 0.1f * (float)j;
            cb_fit_scale(x, w, n, to / max, lo, hi, &sxq, &sqq);
            if (sqq > 0.0f && sxq * sxq > best * sqq) {
                best = sxq * sxq / sqq;
                scale = sxq / sqq;
            }
        }
    }
    return scale;
}

/* Sums of q over a block for the fit with offset. */
struct cb_sums {
    float q, qq, xq;
};

static struct cb_sums cb_sums_offset(const float *x, const float *w, size_t n, float inv, float add,
                                     float hi)
{
    float a[CB_QL] = {0.0f}, b[CB_QL] = {0.0f}, c[CB_QL] = {0.0f};
    for (size_t i = 0; i < n; i += CB_QL) {
        for (size_t k = 0; k < CB_QL; k++) {
            const float q = cb_near(cb_clampf(x[i + k] * inv + add, 0.0f, hi));
            const float wq = w[i + k] * q;
            a[k] += wq;
            b[k] += wq * q;
            c[k] += wq * x[i + k];
        }
    }
    return (struct cb_sums){cb_lane_sum(a), cb_lane_sum(b), cb_lane_sum(c)};
}

void cb_search_offset(const float *x, const float *w, size_t n, float hi, int m_max_0, float *d,
                      float *m)
{
    float lo_x = x[0], hi_x = x[0], sw[CB_QL] = {0.0f}, sx[CB_QL] = {0.0f};
    for (size_t i = 0; i < n; i++) {
        lo_x = x[i] < lo_x ? x[i] : lo_x;
        hi_x = x[i] > hi_x ? x[i] : hi_x;
        sw[i % CB_QL] += w[i];
        sx[i % CB_QL] += w[i] * x[i];
    }
    lo_x = m_max_0 && lo_x > 0.0f ? 0.0f : lo_x;
    *d = 0.0f;
    *m = lo_x;
    const float range = hi_x - lo_x;
    if (!(range > 1e-15f)) {
        return;
    }
    *d = range / hi;
    const float w0 = cb_lane_sum(sw), x0 = cb_lane_sum(sx);
    float best = 0.0f; /* Σwx² less the error */
    int first = 1;
    for (int j = CB_OFF_FROM; j <= CB_OFF_TO; j += CB_STEP) {
        const float inv = (hi + 0.1f * (float)j) / range;
        const struct cb_sums s = cb_sums_offset(x, w, n, inv, -lo_x * inv, hi);
        const float det = w0 * s.qq - s.q * s.q;
        float fd, fm;
        if (!(det > 0.0f)) {
            continue;
        }
        fd = (w0 * s.xq - x0 * s.q) / det;
        fm = (s.qq * x0 - s.q * s.xq) / det;
        if (m_max_0 && fm > 0.0f) {
            fm = 0.0f;
            fd = s.xq / s.qq;
        }
        const float gain = fm == 0.0f ? fd * s.xq : fd * s.xq + fm * x0;
        if (first || gain > best) {
            first = 0;
            best = gain;
            *d = fd;
            *m = fm;
        }
    }
}

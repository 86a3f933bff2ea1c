/* quant.c — activations to Q8_0 and Q8_K (scalar; determinism.md §3).
 *
 * A block so small that its inverse scale overflows (largest magnitude below
 * about 3.7e-37) counts as zero: q = 0, and d = 0 comes out anyway.
 */
#include <float.h>

#include "../f16.h"
#include "scalar.h"

/* Round to nearest even for |v| < 2^22: the sum drops the fraction, its low bits are the integer. */
CB_INLINE int32_t cb_rne(float v)
{
    const uint32_t u = cb_f32_bits(v + 12582912.0f);
    return (int32_t)(u & 0x7FFFFFu) - 0x400000;
}

CB_INLINE float cb_absf(float v)
{
    return cb_f32_from_bits(cb_f32_bits(v) & 0x7FFFFFFFu);
}

void cb_quant_q8_0_scalar(struct cb_q8_0 *y, const float *x, size_t n)
{
    for (size_t b = 0; b < n / 32; b++, x += 32, y++) {
        float amax = 0.0f;
        for (size_t i = 0; i < 32; i++) {
            const float a = cb_absf(x[i]);
            amax = a > amax ? a : amax;
        }
        float id = amax > 0.0f ? 127.0f / amax : 0.0f;
        id = id <= FLT_MAX ? id : 0.0f;
        y->d = cb_f16_to_f32(cb_f32_to_f16(amax / 127.0f));
        y->sum = 0;
        for (size_t i = 0; i < 32; i++) {
            y->q[i] = (int8_t)cb_rne(x[i] * id);
            y->sum += y->q[i];
        }
    }
}

void cb_quant_q8_k_scalar(struct cb_q8_k *y, const float *x, size_t n)
{
    for (size_t b = 0; b < n / 256; b++, x += 256, y++) {
        float amax = 0.0f;
        float max = 0.0f;
        for (size_t i = 0; i < 256; i++) {
            const float a = cb_absf(x[i]);
            if (a > amax) {
                amax = a;
                max = x[i];
            }
        }
        const float iscale = amax > 0.0f ? -127.0f / max : 0.0f;
        if (!(iscale != 0.0f && cb_absf(iscale) <= FLT_MAX)) {
            memset(y, 0, sizeof *y);
            continue;
        }
        y->d = 1.0f / iscale;
        for (size_t g = 0; g < 16; g++) {
            int32_t sum = 0;
            for (size_t i = 16 * g; i < 16 * g + 16; i++) {
                const int32_t q = cb_rne(iscale * x[i]);
                y->q[i] = (int8_t)(q < 127 ? q : 127);
                sum += y->q[i];
            }
            y->bsum[g] = (int16_t)sum;
        }
    }
}

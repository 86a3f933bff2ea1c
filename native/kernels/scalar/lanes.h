/* lanes.h — the 32 virtual lanes of determinism.md §2. Forced inline: no symbols. */
#ifndef CB_SCALAR_LANES_H
#define CB_SCALAR_LANES_H

#include <stddef.h>

#include "../f16.h"

#define CB_LANES 32u

CB_INLINE float cb_lanes_reduce(float lane[CB_LANES])
{
    for (size_t h = CB_LANES / 2; h > 0; h /= 2) {
        for (size_t j = 0; j < h; j++) {
            lane[j] = lane[j] + lane[j + h];
        }
    }
    return lane[0];
}

CB_INLINE float cb_lanes_dot(const float *a, const float *b, size_t n)
{
    float lane[CB_LANES] = {0.0f};
    for (size_t i = 0; i < n; i++) {
        lane[i % CB_LANES] = cb_fmaf(a[i], b[i], lane[i % CB_LANES]);
    }
    return cb_lanes_reduce(lane);
}

CB_INLINE float cb_lanes_dot_f16(const uint16_t *a, const float *b, size_t n)
{
    float lane[CB_LANES] = {0.0f};
    for (size_t i = 0; i < n; i++) {
        lane[i % CB_LANES] = cb_fmaf(cb_f16_to_f32(a[i]), b[i], lane[i % CB_LANES]);
    }
    return cb_lanes_reduce(lane);
}

CB_INLINE float cb_lanes_dot_bf16(const uint16_t *a, const float *b, size_t n)
{
    float lane[CB_LANES] = {0.0f};
    for (size_t i = 0; i < n; i++) {
        lane[i % CB_LANES] = cb_fmaf(cb_bf16_to_f32(a[i]), b[i], lane[i % CB_LANES]);
    }
    return cb_lanes_reduce(lane);
}

CB_INLINE float cb_lanes_sum(const float *x, size_t n)
{
    float lane[CB_LANES] = {0.0f};
    for (size_t i = 0; i < n; i++) {
        lane[i % CB_LANES] = lane[i % CB_LANES] + x[i];
    }
    return cb_lanes_reduce(lane);
}

#endif

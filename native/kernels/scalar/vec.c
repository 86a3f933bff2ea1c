/* vec.c — the vector slots (scalar; determinism.md §2 and §4). */
#include <math.h>

#include "lanes.h"
#include "scalar.h"

static float cb_dot_scalar(const float *a, const float *b, size_t n)
{
    return cb_lanes_dot(a, b, n);
}

static float cb_sum_scalar(const float *x, size_t n)
{
    return cb_lanes_sum(x, n);
}

/* The addition turns -0 into +0, and makes the result NaN if any element was. */
static float cb_max_scalar(const float *x, size_t n)
{
    float m = -INFINITY;
    float nan = 0.0f;
    for (size_t i = 0; i < n; i++) {
        m = x[i] > m ? x[i] : m;
        nan = x[i] == x[i] ? nan : x[i];
    }
    return m + nan;
}

static void cb_rmsnorm_scalar(float *y, const float *x, const float *w, size_t n, float eps)
{
    const float ss = cb_lanes_dot(x, x, n);
    const float f = 1.0f / sqrtf(ss / (float)n + eps);
    for (size_t i = 0; i < n; i++) {
        y[i] = w != NULL ? (x[i] * f) * w[i] : x[i] * f;
    }
}

static void cb_add_scalar(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        y[i] = y[i] + x[i];
    }
}

static void cb_scale_scalar(float *x, float s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = x[i] * s;
    }
}

static void cb_axpy_scalar(float *y, float a, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        y[i] = cb_fmaf(a, x[i], y[i]);
    }
}

static void cb_silu_mul_scalar(float *y, const float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        y[i] = cb_siluf(gate[i]) * up[i];
    }
}

static void cb_softmax_scalar(float *x, size_t n)
{
    const float m = cb_max_scalar(x, n);
    for (size_t i = 0; i < n; i++) {
        x[i] = cb_expf(x[i] - m);
    }
    const float inv = 1.0f / cb_lanes_sum(x, n);
    for (size_t i = 0; i < n; i++) {
        x[i] = x[i] * inv;
    }
}

static void cb_f32_to_f16_scalar(uint16_t *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        y[i] = cb_f32_to_f16(x[i]);
    }
}

static void cb_f16_to_f32_scalar(float *y, const uint16_t *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        y[i] = cb_f16_to_f32(x[i]);
    }
}

void cb_vec_init_scalar(struct cb_kernels *k)
{
    k->dot = cb_dot_scalar;
    k->sum = cb_sum_scalar;
    k->max = cb_max_scalar;
    k->rmsnorm = cb_rmsnorm_scalar;
    k->add = cb_add_scalar;
    k->scale = cb_scale_scalar;
    k->axpy = cb_axpy_scalar;
    k->silu_mul = cb_silu_mul_scalar;
    k->softmax = cb_softmax_scalar;
    k->f32_to_f16 = cb_f32_to_f16_scalar;
    k->f16_to_f32 = cb_f16_to_f32_scalar;
}

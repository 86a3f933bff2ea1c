/* quant.c — types, checks, and the loops over rows. */
#include "quant.h"

#include <float.h>

#include "search.h"

struct cb_quant_type {
    uint32_t type;
    const char *name;
    uint32_t block, bytes;
    double limit; /* largest magnitude that the type's scales and offsets reach */
    cb_quant_row_fn *quantise;
    cb_dequant_row_fn *dequantise;
};

#define CB_H 65504.0 /* the largest finite binary16 */

static const struct cb_quant_type TYPES[] = {
    {CB_F32, "F32", 1, 4, (double)FLT_MAX, cb_quant_row_f32, cb_deq_f32},
    {CB_F16, "F16", 1, 2, 0x1.ffdffep15, cb_quant_row_f16, cb_deq_f16},
    {CB_BF16, "BF16", 1, 2, 0x1.fefffep127, cb_quant_row_bf16, cb_deq_bf16},
    {CB_Q4_0, "Q4_0", 32, 18, CB_H * 8, cb_quant_row_q4_0, cb_deq_q4_0},
    {CB_Q4_1, "Q4_1", 32, 20, CB_H, cb_quant_row_q4_1, cb_deq_q4_1},
    {CB_Q5_0, "Q5_0", 32, 22, CB_H * 16, cb_quant_row_q5_0, cb_deq_q5_0},
    {CB_Q5_1, "Q5_1", 32, 24, CB_H, cb_quant_row_q5_1, cb_deq_q5_1},
    {CB_Q8_0, "Q8_0", 32, 34, CB_H * 127, cb_quant_row_q8_0, cb_deq_q8_0},
    {CB_Q4_K, "Q4_K", 256, 144, CB_H * 63, cb_quant_row_q4_k, cb_deq_q4_k},
    {CB_Q5_K, "Q5_K", 256, 176, CB_H * 63, cb_quant_row_q5_k, cb_deq_q5_k},
    {CB_Q6_K, "Q6_K", 256, 210, CB_H * 32 * 127, cb_quant_row_q6_k, cb_deq_q6_k},
};

static const struct cb_quant_type *cb_find(uint32_t type)
{
    for (size_t i = 0; i < sizeof TYPES / sizeof TYPES[0]; i++) {
        if (TYPES[i].type == type) {
            return &TYPES[i];
        }
    }
    return NULL;
}

uint64_t cb_row_bytes(uint32_t type, uint64_t n_cols)
{
    const struct cb_quant_type *t = cb_find(type);
    if (t == NULL || n_cols == 0 || n_cols % t->block != 0 || n_cols > SIZE_MAX / 4 ||
        n_cols / t->block > UINT64_MAX / t->bytes) {
        return 0;
    }
    return n_cols / t->block * t->bytes;
}

/* The type, or NULL with err set when the shape, or the size of the blocks, does not fit. */
static const struct cb_quant_type *cb_check(uint32_t type, uint64_t n_rows, uint64_t n_cols,
                                            uint64_t bytes, struct cb_err *err)
{
    const struct cb_quant_type *t = cb_find(type);
    const uint64_t row = cb_row_bytes(type, n_cols);
    if (t == NULL) {
        (void)cb_fail(err, CB_EINVAL, "type %u is not one that can be quantised", type);
        return NULL;
    }
    if (row == 0) {
        (void)cb_fail(err, CB_EINVAL, "rows of %llu weights cannot be %s: not a multiple of %u",
                      (unsigned long long)n_cols, t->name, t->block);
        return NULL;
    }
    if (n_rows > SIZE_MAX / row || n_rows * row != bytes ||
        n_rows > SIZE_MAX / sizeof(float) / n_cols) {
        (void)cb_fail(err, CB_EINVAL, "%llu rows of %llu %s weights do not make %llu bytes",
                      (unsigned long long)n_rows, (unsigned long long)n_cols, t->name,
                      (unsigned long long)bytes);
        return NULL;
    }
    return t;
}

static int cb_check_values(const struct cb_quant_type *t, const float *x, uint64_t n_rows,
                           uint64_t n_cols, struct cb_err *err)
{
    for (uint64_t r = 0; r < n_rows; r++, x += n_cols) {
        for (uint64_t c = 0; c < n_cols; c++) {
            const double a = x[c] < 0.0f ? -(double)x[c] : (double)x[c];
            if (a <= t->limit) {
                continue;
            }
            return cb_fail(err, CB_ENUMERIC, "row %llu, column %llu: %s",
                           (unsigned long long)r, (unsigned long long)c,
                           x[c] != x[c]                ? "not a number"
                           : a > (double)FLT_MAX ? "infinite"
                                                      : "too large for this type's scales");
        }
    }
    return CB_OK;
}

static int cb_check_importance(const float *w, uint64_t n_cols, struct cb_err *err)
{
    for (uint64_t c = 0; w != NULL && c < n_cols; c++) {
        if (!(w[c] >= 0.0f && w[c] <= FLT_MAX)) {
            return cb_fail(err, CB_ENUMERIC, "importance of column %llu is not a finite number >= 0",
                           (unsigned long long)c);
        }
    }
    return CB_OK;
}

int cb_quantise_rows(uint32_t type, const float *x, uint64_t n_rows, uint64_t n_cols,
                     const float *importance_or_NULL, void *out, uint64_t out_bytes,
                     struct cb_err *err)
{
    const struct cb_quant_type *t = cb_check(type, n_rows, n_cols, out_bytes, err);
    uint8_t *to = out;
    if (t == NULL) {
        return CB_EINVAL;
    }
    int rc = cb_check_importance(importance_or_NULL, n_cols, err);
    if (rc == CB_OK) {
        rc = cb_check_values(t, x, n_rows, n_cols, err);
    }
    if (rc != CB_OK) {
        return rc;
    }
    for (uint64_t r = 0; r < n_rows; r++) {
        t->quantise(x + r * n_cols, importance_or_NULL, (size_t)n_cols, to);
        to += cb_row_bytes(type, n_cols);
    }
    return CB_OK;
}

int cb_dequantise_rows(uint32_t type, const void *in, uint64_t in_bytes, uint64_t n_rows,
                       uint64_t n_cols, float *out, struct cb_err *err)
{
    const struct cb_quant_type *t = cb_check(type, n_rows, n_cols, in_bytes, err);
    const uint8_t *from = in;
    if (t == NULL) {
        return CB_EINVAL;
    }
    for (uint64_t r = 0; r < n_rows; r++) {
        t->dequantise(from, (size_t)n_cols, out + r * n_cols);
        from += cb_row_bytes(type, n_cols);
    }
    return CB_OK;
}

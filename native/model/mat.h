/* mat.h — matrices in the engine's layout and products with them. */
#ifndef CB_MAT_H
#define CB_MAT_H

#include <stdint.h>

#include "core/arena.h"
#include "core/pool.h"
#include "kernels/kernels.h"

struct cb_mat {
    const uint8_t *data;   /* NULL = absent */
    uint32_t type;
    uint32_t rows, cols;
    uint32_t groups;       /* ceil(rows / CB_GROUP) */
    uint64_t group_bytes;
};

struct cb_ffn {
    struct cb_mat gate, up, down; /* [ff][d], [ff][d], [d][ff] */
};

/* One set of input rows in every form that some weight type wants. */
struct cb_acts {
    const float *f32;      /* [n][stride], set by cb_acts_prepare */
    uint64_t stride;       /* floats a row of f32 */
    uint8_t *q8_0, *q8_k;  /* [cap][q8_0_bytes], [cap][q8_k_bytes] */
    uint64_t q8_0_bytes, q8_k_bytes;
};

void cb_mat_init(struct cb_mat *m, uint32_t type, uint32_t rows, uint32_t cols, const void *data);
static inline uint32_t cb_pad_group(uint32_t rows)
{
    return (rows + CB_GROUP - 1u) / CB_GROUP * CB_GROUP;
}

/* Room for n rows of at most cols values. */
void cb_acts_take(struct cb_acts *a, struct cb_arena *arena, uint64_t n, uint32_t cols);

/* Bit set of enum cb_act that a matrix wants; 0 for an absent one. */
uint32_t cb_mat_wants(const struct cb_mat *m);

/* Quantises rows [lo, hi) of x [..][stride], cols used, into the wanted forms.
 * Returns 0, or 1 + a row that is not finite: a quantised one would hide that. */
uint64_t cb_acts_prepare(struct cb_acts *a, const struct cb_kernels *kern, uint32_t wants,
                     const float *x, uint64_t stride, uint32_t cols, uint64_t lo, uint64_t hi);
/* Row i in the form that type wants. */
const void *cb_acts_row(const struct cb_acts *a, uint32_t type, uint64_t i);

/* y[i][g0*8 …) for row groups [g0, g1) of m, tokens y[0..n), inputs x[0..n). */
void cb_mat_groups(const struct cb_mat *m, const struct cb_kernels *kern, float *const *y,
                   const void *const *x, uint32_t n, uint64_t g0, uint64_t g1);

/* One product of a job: rows 0 … n-1 of `in` times m, to y [n][y_stride]. */
struct cb_product {
    const struct cb_mat *m;
    float *y;
    uint64_t y_stride;
};

/* Runs up to 3 products of the same n input rows on the pool, rows of the
 * matrices split over the threads. */
void cb_products(struct cb_pool *pool, const struct cb_kernels *kern, const struct cb_acts *in,
                 uint32_t n, const struct cb_product *p, uint32_t n_product);

#endif

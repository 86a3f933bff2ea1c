/* mat.c — see mat.h. */
#include "model/mat.h"

#include <math.h>
#include <stddef.h>

#include "model/engine.h"

void cb_mat_init(struct cb_mat *m, uint32_t type, uint32_t rows, uint32_t cols, const void *data)
{
    *m = (struct cb_mat){data, type, rows, cols, cb_pad_group(rows) / CB_GROUP,
                         cb_mat_bytes(type, CB_GROUP, cols)};
}

void cb_acts_take(struct cb_acts *a, struct cb_arena *arena, uint64_t n, uint32_t cols)
{
    uint64_t cols32 = ((uint64_t)cols + 31) & ~UINT64_C(31);
    uint64_t cols256 = ((uint64_t)cols + 255) & ~UINT64_C(255);
    a->q8_0_bytes = cb_act_bytes(CB_ACT_Q8_0, (size_t)cols32);
    a->q8_k_bytes = cb_act_bytes(CB_ACT_Q8_K, (size_t)cols256);
    a->q8_0 = cb_arena_take(arena, CB_L_ACT, n, a->q8_0_bytes);
    a->q8_k = cb_arena_take(arena, CB_L_ACT, n, a->q8_k_bytes);
}

uint32_t cb_mat_wants(const struct cb_mat *m)
{
    return m->data == NULL ? 0 : 1u << cb_type_info(m->type)->act;
}

uint64_t cb_acts_prepare(struct cb_acts *a, const struct cb_kernels *kern, uint32_t wants,
                         const float *x, uint64_t stride, uint32_t cols, uint64_t lo, uint64_t hi)
{
    uint64_t bad = 0;
    wants &= 1u << CB_ACT_Q8_0 | 1u << CB_ACT_Q8_K;
    for (uint64_t i = lo; i < hi && wants != 0; i++) {
        const float *row = x + i * stride;
        if (!isfinite(kern->dot(row, row, cols)))
            bad = i + 1;
        if (wants & 1u << CB_ACT_Q8_0)
            kern->quant_q8_0((struct cb_q8_0 *)(void *)(a->q8_0 + i * a->q8_0_bytes), row, cols);
        if (wants & 1u << CB_ACT_Q8_K)
            kern->quant_q8_k((struct cb_q8_k *)(void *)(a->q8_k + i * a->q8_k_bytes), row, cols);
    }
    return bad;
}

const void *cb_acts_row(const struct cb_acts *a, uint32_t type, uint64_t i)
{
    switch (cb_type_info(type)->act) {
    case CB_ACT_Q8_0:
        return a->q8_0 + i * a->q8_0_bytes;
    case CB_ACT_Q8_K:
        return a->q8_k + i * a->q8_k_bytes;
    default:
        return a->f32 + i * a->stride;
    }
}

void cb_mat_groups(const struct cb_mat *m, const struct cb_kernels *kern, float *const *y,
                   const void *const *x, uint32_t n, uint64_t g0, uint64_t g1)
{
    float *at[CB_BATCH_MAX];
    if (g0 >= g1 || n == 0)
        return;
    for (uint32_t i = 0; i < n; i++)
        at[i] = y[i] + g0 * CB_GROUP;
    kern->gemm[m->type](at, x, n, m->data + g0 * m->group_bytes, (size_t)(g1 - g0), m->cols);
}

/* Below this, waking the pool (2 to 5 us) costs more than it saves: most
 * routers in decode. */
#define CB_SMALL_PRODUCT 65536u

struct products_job {
    const struct cb_kernels *kern;
    const struct cb_acts *in;
    uint32_t n;
    const struct cb_product *p;
    uint32_t n_product;
};

static void products_part(void *arg, uint32_t thread, uint32_t n_threads)
{
    const struct products_job *job = arg;
    float *y[CB_BATCH_MAX];
    const void *x[CB_BATCH_MAX];
    for (uint32_t k = 0; k < job->n_product; k++) {
        const struct cb_product *p = &job->p[k];
        uint64_t g0, g1;
        cb_share(p->m->groups, thread, n_threads, &g0, &g1);
        for (uint32_t i = 0; i < job->n; i++) {
            y[i] = p->y + i * p->y_stride;
            x[i] = cb_acts_row(job->in, p->m->type, i);
        }
        cb_mat_groups(p->m, job->kern, y, x, job->n, g0, g1);
    }
}

void cb_products(struct cb_pool *pool, const struct cb_kernels *kern, const struct cb_acts *in,
                 uint32_t n, const struct cb_product *p, uint32_t n_product)
{
    struct products_job job = {kern, in, n, p, n_product};
    uint64_t work = 0; /* multiply-adds */
    for (uint32_t i = 0; i < n_product; i++)
        work += (uint64_t)n * p[i].m->rows * p[i].m->cols;
    if (work < CB_SMALL_PRODUCT)
        products_part(&job, 0, 1);
    else
        cb_pool_run(pool, products_part, &job);
}

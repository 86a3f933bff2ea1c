/* ffn.c — the feed-forward half of a layer: dense, or routed experts with an
 * optional shared expert.
 *
 * All FFNs at work in a layer are "segments" over a common table of rows, so
 * decode of 8 experts costs as many barriers as a dense FFN, and prefill reads
 * each expert once per chunk. Every thread takes its slice of every matrix:
 * the load is even whatever the routing. Outputs land at t*K + rank and are
 * added in rank order, so order of work never changes bits. */
#include <string.h>

#include "core/os.h"
#include "model/forward.h"
#include "router/router.h"

struct ffn_job {
    struct cb_engine *e;
    uint32_t n_seg, n_row;
    uint32_t mid_wants;
};

/* gate and up for this thread's rows of every FFN, then silu(gate) * up there. */
static void gate_up_part(void *arg, uint32_t thread, uint32_t n_threads)
{
    const struct ffn_job *job = arg;
    struct cb_engine *e = job->e;
    struct cb_work *w = &e->w;
    const void *x[CB_BATCH_MAX];
    float *y[CB_BATCH_MAX];
    for (uint32_t s = 0; s < job->n_seg; s++) {
        const struct cb_segment *seg = &w->seg[s];
        const struct cb_mat *const mats[2] = {&seg->ffn->gate, &seg->ffn->up};
        float *const to[2] = {w->gate, w->up};
        uint64_t g0, g1;
        cb_share(mats[0]->groups, thread, n_threads, &g0, &g1);
        if (g0 == g1)
            continue;
        for (int k = 0; k < 2; k++) {
            for (uint32_t i = 0; i < seg->n; i++) {
                x[i] = cb_acts_row(&w->in, mats[k]->type, w->row_token[seg->first + i]);
                y[i] = to[k] + (size_t)(seg->first + i) * w->ff;
            }
            cb_mat_groups(mats[k], &e->kern, y, x, seg->n, g0, g1);
        }
        for (uint32_t i = 0; i < seg->n; i++) {
            size_t at = (size_t)(seg->first + i) * w->ff + g0 * CB_GROUP;
            e->kern.silu_mul(w->gate + at, w->gate + at, w->up + at, (g1 - g0) * CB_GROUP);
        }
    }
}

static void mid_prepare_part(void *arg, uint32_t thread, uint32_t n_threads)
{
    const struct ffn_job *job = arg;
    struct cb_work *w = &job->e->w;
    uint64_t lo, hi;
    cb_share(job->n_row, thread, n_threads, &lo, &hi);
    for (uint32_t s = 0; s < job->n_seg; s++) {
        const struct cb_segment *seg = &w->seg[s];
        uint64_t a = seg->first > lo ? seg->first : lo;
        uint64_t b = seg->first + seg->n < hi ? seg->first + seg->n : hi;
        if (a < b)
            cb_acts_prepare(&w->mid, &job->e->kern, job->mid_wants, w->gate, w->ff,
                            seg->ffn->down.cols, a, b);
    }
}

static void down_part(void *arg, uint32_t thread, uint32_t n_threads)
{
    const struct ffn_job *job = arg;
    struct cb_engine *e = job->e;
    struct cb_work *w = &e->w;
    const void *x[CB_BATCH_MAX];
    float *y[CB_BATCH_MAX];
    uint32_t d = cb_pad_group(e->m.n_embd);
    for (uint32_t s = 0; s < job->n_seg; s++) {
        const struct cb_segment *seg = &w->seg[s];
        const struct cb_mat *down = &seg->ffn->down;
        uint64_t g0, g1;
        cb_share(down->groups, thread, n_threads, &g0, &g1);
        for (uint32_t i = 0; i < seg->n; i++) {
            x[i] = cb_acts_row(&w->mid, down->type, seg->first + i);
            y[i] = w->out + (size_t)w->row_out[seg->first + i] * d;
        }
        cb_mat_groups(down, &e->kern, y, x, seg->n, g0, g1);
    }
}

static void run_segments(struct cb_chunk *c, uint32_t n_seg, uint32_t n_row)
{
    struct cb_engine *e = c->e;
    struct ffn_job job = {e, n_seg, n_row, e->layer[c->il].mid_wants};
    cb_pool_run(&e->pool, gate_up_part, &job);
    e->w.mid.f32 = e->w.gate;
    e->w.mid.stride = e->w.ff;
    if (n_row > 1)
        cb_pool_run(&e->pool, mid_prepare_part, &job);
    else
        mid_prepare_part(&job, 0, 1);
    cb_pool_run(&e->pool, down_part, &job);
}

/* A segment over all tokens: a dense FFN or the shared expert. */
static void whole_segment(struct cb_chunk *c, struct cb_segment *seg, const struct cb_ffn *ffn,
                          uint32_t first, uint32_t out)
{
    *seg = (struct cb_segment){ffn, first, c->n};
    for (uint32_t t = 0; t < c->n; t++) {
        c->e->w.row_token[first + t] = t;
        c->e->w.row_out[first + t] = out + t;
    }
}

/* Router logits and choice for every token; adds to the layer's routing time. */
static int route_chunk(struct cb_chunk *c)
{
    struct cb_engine *e = c->e;
    struct cb_work *w = &e->w;
    const struct cb_layer *l = &e->layer[c->il];
    uint32_t K = e->m.n_used, pad = cb_pad_group(e->m.n_expert);
    const struct cb_product p = {&l->router, w->route, pad};
    uint64_t start = cb_os_now_ns();
    cb_products(&e->pool, &e->kern, &w->in, c->n, &p, 1);
    for (uint32_t t = 0; t < c->n; t++)
        if (cb_route(&e->m, &e->kern, w->route + (size_t)t * pad, w->chosen + (size_t)t * K,
                     w->weight + (size_t)t * K) != 0)
            return -1;
    uint32_t moe = c->il - e->m.n_dense_layer;
    e->route_ns[moe] += cb_os_now_ns() - start;
    e->counters.routes += c->n;
    memcpy(e->last_experts + (size_t)moe * K, w->chosen + (size_t)(c->n - 1) * K, K * 4);
    memcpy(e->last_weights + (size_t)moe * K, w->weight + (size_t)(c->n - 1) * K, K * 4);
    return 0;
}

/* One segment per expert in use, its (token, rank) rows in token order. */
static uint32_t expert_segments(struct cb_chunk *c)
{
    struct cb_engine *e = c->e;
    struct cb_work *w = &e->w;
    uint32_t n_pair = c->n * e->m.n_used, n_seg = 0, row = 0;
    for (uint32_t x = 0; x < e->m.n_expert; x++) {
        uint32_t first = row;
        for (uint32_t p = 0; p < n_pair; p++)
            if (w->chosen[p] == (int32_t)x) {
                w->row_token[row] = p / e->m.n_used;
                w->row_out[row++] = p;
            }
        if (row > first)
            w->seg[n_seg++] = (struct cb_segment){
                cb_expert(&e->experts, c->il - e->m.n_dense_layer, x), first, row - first};
    }
    return n_seg;
}

int cb_ffn_layer(struct cb_chunk *c)
{
    struct cb_engine *e = c->e;
    const struct cb_layer *l = &e->layer[c->il];
    if (l->router.data == NULL) {
        whole_segment(c, &e->w.seg[0], &l->ffn, 0, 0);
        run_segments(c, 1, c->n);
        return 0;
    }
    if (route_chunk(c) != 0)
        return -1;
    uint32_t n_seg = expert_segments(c), n_row = c->n * e->m.n_used;
    if (l->shexp.gate.data != NULL) {
        whole_segment(c, &e->w.seg[n_seg++], &l->shexp, n_row, n_row);
        n_row += c->n;
    }
    run_segments(c, n_seg, n_row);
    return 0;
}

void cb_ffn_combine(const struct cb_chunk *c, uint32_t t, float *y)
{
    const struct cb_engine *e = c->e;
    const struct cb_work *w = &e->w;
    const struct cb_layer *l = &e->layer[c->il];
    uint32_t n = e->m.n_embd, d = cb_pad_group(n), K = e->m.n_used;
    if (l->router.data == NULL) {
        memcpy(y, w->out + (size_t)t * d, n * sizeof *y);
        return;
    }
    memset(y, 0, n * sizeof *y);
    for (uint32_t r = 0; r < K; r++)
        e->kern.axpy(y, w->weight[(size_t)t * K + r], w->out + ((size_t)t * K + r) * d, n);
    if (l->shexp.gate.data == NULL)
        return;
    const float *shared = w->out + ((size_t)c->n * K + t) * d;
    if (l->shexp_router == NULL)
        e->kern.add(y, shared, n);
    else
        e->kern.axpy(y, cb_sigmoidf(e->kern.dot(l->shexp_router, w->xn + (size_t)t * d, n)),
                     shared, n);
}

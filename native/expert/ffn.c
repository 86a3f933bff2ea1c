/* ffn.c — the feed-forward half of a layer: dense, or routed experts with an
 * optional shared expert.
 *
 * FFNs at work together are "segments" over a common table of rows, so decode of
 * 8 resident experts costs as many barriers as a dense FFN, and prefill reads
 * each expert once a chunk. Every thread takes its slice of every matrix: the
 * load is even whatever the routing. What is resident is computed first, the
 * rest in waves as it arrives from storage. Outputs land at t*K + rank and are
 * added in rank order, so neither waves nor threads change bits. */
#include <string.h>

#include "core/os.h"
#include "expert/fault.h"
#include "model/forward.h"
#include "offload/offload.h"
#include "router/router.h"

#define NO_EXPERT UINT32_MAX

struct ffn_job {
    struct cb_chunk *c;
    struct cb_engine *e;
    uint32_t n_seg, n_row;
    uint32_t mid_wants;
};

/* One thread's slice of one segment: what a fault in its weights interrupts. */
struct slice {
    struct cb_engine *e;
    struct cb_segment *seg;
    uint32_t thread, n_threads;
};

/* gate and up for this thread's rows, then silu(gate) * up there. */
static void gate_up_slice(void *arg)
{
    const struct slice *c = arg;
    struct cb_engine *e = c->e;
    struct cb_work *w = &e->w;
    const struct cb_segment *seg = c->seg;
    const struct cb_mat *const mats[2] = {&seg->ffn.gate, &seg->ffn.up};
    float *const to[2] = {w->gate, w->up};
    const void *x[CB_BATCH_MAX];
    float *y[CB_BATCH_MAX];
    uint64_t g0, g1;
    cb_share(mats[0]->groups, c->thread, c->n_threads, &g0, &g1);
    for (int k = 0; k < 2; k++) {
        for (uint32_t i = 0; i < seg->n; i++) {
            x[i] = cb_acts_row(&w->in, mats[k]->type, w->row_token[seg->first + i]);
            y[i] = to[k] + (size_t)(seg->first + i) * w->ff;
        }
        cb_mat_groups(mats[k], &e->kern, y, x, seg->n, g0, g1);
    }
    for (uint32_t i = 0; i < seg->n && g0 < g1; i++) {
        size_t at = (size_t)(seg->first + i) * w->ff + g0 * CB_GROUP;
        e->kern.silu_mul(w->gate + at, w->gate + at, w->up + at, (g1 - g0) * CB_GROUP);
    }
}

static void down_slice(void *arg)
{
    const struct slice *c = arg;
    struct cb_work *w = &c->e->w;
    const struct cb_segment *seg = c->seg;
    const struct cb_mat *down = &seg->ffn.down;
    const void *x[CB_BATCH_MAX];
    float *y[CB_BATCH_MAX];
    uint32_t d = cb_pad_group(c->e->rel->m.n_embd);
    uint64_t g0, g1;
    cb_share(down->groups, c->thread, c->n_threads, &g0, &g1);
    for (uint32_t i = 0; i < seg->n; i++) {
        x[i] = cb_acts_row(&w->mid, down->type, seg->first + i);
        y[i] = w->out + (size_t)w->row_out[seg->first + i] * d;
    }
    cb_mat_groups(down, &c->e->kern, y, x, seg->n, g0, g1);
}

static void guarded(const struct ffn_job *job, cb_guarded_fn *fn, uint32_t thread,
                    uint32_t n_threads)
{
    for (uint32_t s = 0; s < job->n_seg; s++) {
        struct slice slice = {job->e, &job->e->w.seg[s], thread, n_threads};
        if (slice.seg->expert == NO_EXPERT)
            fn(&slice); /* a fault there is nobody's to answer for: it ends the process */
        else if (cb_guard(fn, &slice) != 0)
            atomic_store(&slice.seg->failed, 1);
    }
}

static void gate_up_part(void *arg, uint32_t thread, uint32_t n_threads)
{
    guarded(arg, gate_up_slice, thread, n_threads);
}

static void down_part(void *arg, uint32_t thread, uint32_t n_threads)
{
    guarded(arg, down_slice, thread, n_threads);
}

/* Quantises this thread's share of the segments' middle rows. */
static void mid_prepare_part(void *arg, uint32_t thread, uint32_t n_threads)
{
    const struct ffn_job *job = arg;
    struct cb_work *w = &job->e->w;
    uint64_t lo, hi, at = 0; /* rows counted over the segments of this wave */
    cb_share(job->n_row, thread, n_threads, &lo, &hi);
    for (uint32_t s = 0; s < job->n_seg; at += w->seg[s++].n) {
        const struct cb_segment *seg = &w->seg[s];
        uint64_t a = at > lo ? at : lo, b = at + seg->n < hi ? at + seg->n : hi;
        if (a >= b || atomic_load(&seg->failed))
            continue;
        uint64_t bad = cb_acts_prepare(&w->mid, &job->e->kern, job->mid_wants, w->gate, w->ff,
                                       seg->ffn.down.cols, seg->first + (a - at),
                                       seg->first + (b - at));
        if (bad != 0)
            job->c->bad = w->row_token[bad - 1] + 1;
    }
}

static void run_segments(struct cb_chunk *c, uint32_t n_seg)
{
    struct cb_engine *e = c->e;
    struct ffn_job job = {c, e, n_seg, 0, e->rel->layer[c->il].mid_wants};
    for (uint32_t s = 0; s < n_seg; s++)
        job.n_row += e->w.seg[s].n;
    cb_pool_run(&e->pool, gate_up_part, &job);
    e->w.mid.f32 = e->w.gate;
    e->w.mid.stride = e->w.ff;
    if (job.n_row > 1)
        cb_pool_run(&e->pool, mid_prepare_part, &job);
    else
        mid_prepare_part(&job, 0, 1);
    cb_pool_run(&e->pool, down_part, &job);
}

/* A segment over all tokens: a dense FFN or the shared expert. */
static void whole_segment(struct cb_chunk *c, struct cb_segment *seg, const struct cb_ffn *ffn,
                          uint32_t first, uint32_t out)
{
    seg->ffn = *ffn;
    seg->first = first;
    seg->n = c->n;
    seg->expert = NO_EXPERT;
    atomic_store(&seg->failed, 0);
    for (uint32_t t = 0; t < c->n; t++) {
        c->e->w.row_token[first + t] = t;
        c->e->w.row_out[first + t] = out + t;
    }
}

/* ---- routing ------------------------------------------------------------ */

static uint32_t moe_layer(const struct cb_chunk *c)
{
    return c->il - c->e->rel->m.n_dense_layer;
}

/* Unhealthy experts of this layer, or NULL when there is none to pass over. */
static const uint8_t *excluded(struct cb_chunk *c)
{
    struct cb_engine *e = c->e;
    if (e->opt.on_bad != CB_BAD_NEXT ||
        !cb_store_unhealthy(&e->store, moe_layer(c), e->w.exclude))
        return NULL;
    return e->w.exclude;
}

static void count_route(struct cb_engine *e, uint32_t t, const struct cb_route *r)
{
    struct cb_counters *n = &e->counters;
    struct cb_lossy *mine = &e->lossy[e->w.place[t].seq];
    int extra = r->n > e->rel->m.n_used;
    n->routes++;
    n->recomputed += (uint64_t)r->recomputed;
    n->degraded += (uint64_t)r->passed_over;
    mine->degraded += (uint64_t)r->passed_over;
    n->extra += (uint64_t)extra;
    mine->extra += (uint64_t)extra;
}

/* Chooses from the logits in w.route; these are kept for another round, since
 * an expert may turn out unhealthy. */
static int choose(struct cb_chunk *c, struct cb_err *err)
{
    struct cb_engine *e = c->e;
    struct cb_work *w = &e->w;
    const struct cb_layer *l = &e->rel->layer[c->il];
    uint32_t K = e->used_max, E = e->rel->m.n_expert, d = cb_pad_group(e->rel->m.n_embd);
    const struct cb_router router = {(const float *)(const void *)l->router.data, l->router_norm,
                                     excluded(c)};
    for (uint32_t t = 0; t < c->n; t++) {
        struct cb_route r;
        int32_t *chosen = w->chosen + (size_t)t * K;
        memcpy(w->guess, w->route + (size_t)t * cb_pad_group(E), E * sizeof *w->guess);
        int rc = cb_route(&e->rel->m, &e->kern, &router, w->guess, w->xn + (size_t)t * d,
                          e->opt.extra_expert != 0, e->opt.extra_below, w->guess_chosen,
                          w->guess_weight, &r);
        if (rc == -2)
            return cb_fail(err, CB_EEXPERT, "layer %u: fewer healthy experts are left than a token "
                           "uses", c->il);
        if (rc != 0)
            return cb_fail(err, CB_ENUMERIC, "layer %u: a router logit is not a finite number "
                           "(position %u)", c->il, w->place[t].pos);
        for (uint32_t k = 0; k < K; k++) {
            chosen[k] = k < r.n ? w->guess_chosen[k] : -1;
            w->weight[(size_t)t * K + k] = k < r.n ? w->guess_weight[k] : 0.0f;
        }
        count_route(e, t, &r);
    }
    return 0;
}

/* Router logits, then the choice; adds to the layer's routing time. */
static int route_chunk(struct cb_chunk *c, struct cb_err *err)
{
    struct cb_engine *e = c->e;
    struct cb_work *w = &e->w;
    const struct cb_layer *l = &e->rel->layer[c->il];
    const struct cb_product p = {&l->router, w->route, cb_pad_group(e->rel->m.n_expert)};
    uint64_t start = cb_os_now_ns();
    cb_products(&e->pool, &e->kern, &w->in, c->n, &p, 1);
    int rc = choose(c, err);
    e->route_ns[moe_layer(c)] += cb_os_now_ns() - start;
    return rc;
}

static void keep_last_route(struct cb_chunk *c)
{
    struct cb_engine *e = c->e;
    uint32_t used = e->rel->m.n_used, K = e->used_max;
    size_t to = (size_t)moe_layer(c) * used, from = (size_t)(c->n - 1) * K;
    memcpy(e->last_experts + to, e->w.chosen + from, used * sizeof *e->last_experts);
    memcpy(e->last_weights + to, e->w.weight + from, used * sizeof *e->last_weights);
}

/* Guesses the next layer's experts from this layer's residual (stale by one
 * FFN) and lets idle storage read them. Decode only: prefill wants nearly all. */
static void look_ahead(struct cb_chunk *c)
{
    struct cb_engine *e = c->e;
    struct cb_work *w = &e->w;
    struct cb_route r;
    uint32_t next = c->il + 1, d = e->rel->m.n_embd, E = e->rel->m.n_expert;
    if (c->n != 1 || e->store.ahead_off || e->store.n_slot == 0 ||
        (uint64_t)e->store.n_slot == (uint64_t)e->store.n_layer * E ||
        next >= e->rel->m.n_layer)
        return;
    const struct cb_layer *l = &e->rel->layer[next];
    const struct cb_router router = {(const float *)(const void *)l->router.data, l->router_norm,
                                     NULL};
    /* w.proj is free until the FFN outputs are combined. */
    e->kern.rmsnorm(w->proj, w->x, l->ffn_norm, d, e->rel->m.norm_eps);
    const struct cb_acts in = {w->proj, d, NULL, NULL, 0, 0};
    const struct cb_product p = {&l->router, w->guess, cb_pad_group(E)};
    cb_products(&e->pool, &e->kern, &in, 1, &p, 1);
    if (cb_route(&e->rel->m, &e->kern, &router, w->guess, w->proj, 0, 0.0f, w->guess_chosen,
                 w->guess_weight, &r) == 0)
        cb_store_ahead(&e->store, moe_layer(c) + 1, w->guess_chosen, r.n);
}

/* ---- experts in waves --------------------------------------------------- */

/* w.distinct: the experts in use, ascending; w.row_first: where their (token,
 * rank) rows begin, in token order. */
static uint32_t distinct_experts(struct cb_chunk *c)
{
    struct cb_engine *e = c->e;
    struct cb_work *w = &e->w;
    uint32_t K = e->used_max, n_pair = c->n * K, n = 0, row = 0;
    for (uint32_t x = 0; x < e->rel->m.n_expert; x++) {
        uint32_t first = row;
        for (uint32_t p = 0; p < n_pair; p++)
            if (w->chosen[p] == (int32_t)x) {
                w->row_token[row] = p / K;
                w->row_out[row++] = p;
            }
        if (row > first) {
            w->row_first[n] = first;
            w->distinct[n++] = x;
        }
    }
    w->row_first[n] = row;
    return n;
}

/* on_miss = zeros: what is not resident counts as nothing this time. missing:
 * those experts, to be read for the next; returns how many distinct are left. */
static uint32_t leave_out_misses(struct cb_chunk *c, uint32_t n, int32_t *missing,
                                 uint32_t *n_missing)
{
    struct cb_engine *e = c->e;
    struct cb_work *w = &e->w;
    *n_missing = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (cb_store_resident(&e->store, moe_layer(c), w->distinct[i]))
            continue;
        missing[(*n_missing)++] = (int32_t)w->distinct[i];
        for (uint32_t p = 0; p < c->n * e->used_max; p++)
            if (w->chosen[p] == (int32_t)w->distinct[i]) {
                w->chosen[p] = -1;
                e->counters.zeros++;
                e->lossy[w->place[p / e->used_max].seq].zeros++;
            }
    }
    return *n_missing > 0 ? distinct_experts(c) : n;
}

/* The distinct experts that this machine computes, as indices into w.distinct. */
struct picks {
    uint32_t n;
    uint32_t at[CB_MAX_EXPERT];
};

/* Puts what is ready into segments; wait: at least one. Returns how many, or
 * CB_EEXPERT. */
static int gather(struct cb_chunk *c, const struct picks *p, uint32_t n_seg, uint32_t *index,
                  struct cb_err *err)
{
    struct cb_work *w = &c->e->w;
    for (;;) {
        uint32_t i;
        struct cb_segment *seg = &w->seg[n_seg];
        int rc = cb_store_ready(&c->e->store, n_seg == 0, &i, &seg->ffn, err);
        if (rc <= 0)
            return rc < 0 ? rc : (int)n_seg;
        uint32_t at = p->at[i];
        seg->first = w->row_first[at];
        seg->n = w->row_first[at + 1] - seg->first;
        seg->expert = w->distinct[at];
        atomic_store(&seg->failed, 0);
        index[n_seg++] = i;
    }
}

/* Gives the wave's experts back; CB_EEXPERT when one of them faulted. */
static int finish_wave(struct cb_chunk *c, uint32_t n_seg, const uint32_t *index,
                       struct cb_err *err)
{
    struct cb_engine *e = c->e;
    int rc = 0;
    for (uint32_t s = 0; s < n_seg; s++) {
        const struct cb_segment *seg = &e->w.seg[s];
        if (seg->expert == NO_EXPERT)
            continue;
        cb_store_done(&e->store, index[s]);
        if (!atomic_load(&seg->failed))
            continue;
        cb_store_mark_bad(&e->store, moe_layer(c), seg->expert, "a memory fault in its weights");
        rc = cb_store_bad(&e->store, moe_layer(c), seg->expert, err);
    }
    return rc;
}

/* Asks the store for them; reads of what is missing start. */
static void want(struct cb_chunk *c, const struct picks *p)
{
    uint32_t list[CB_MAX_EXPERT];
    for (uint32_t i = 0; i < p->n; i++)
        list[i] = c->e->w.distinct[p->at[i]];
    cb_store_want(&c->e->store, moe_layer(c), list, p->n);
}

/* The wave's time, for the offload scheduler. A shared expert counts for as
 * many as it is wide. */
static void note_wave(struct cb_chunk *c, uint32_t n_seg, uint64_t ns)
{
    const struct cb_manifest *m = &c->e->rel->m;
    uint32_t n = 0, rows = 0;
    double width = 0.0;
    for (uint32_t s = 0; s < n_seg; s++) {
        const struct cb_segment *seg = &c->e->w.seg[s];
        int shared = seg->expert == NO_EXPERT;
        n += !shared;
        rows += shared ? 0 : seg->n;
        width += shared ? (double)m->n_shexp_ff / m->n_expert_ff : 1.0;
    }
    if (n > 0)
        cb_offload_note_here(c->e->offload, (rows + n - 1) / n, (double)ns / width);
}

/* What was wanted, and the shared expert with the first wave, in waves. */
static int run_wanted(struct cb_chunk *c, const struct picks *p, const struct cb_ffn *shared,
                      struct cb_err *err)
{
    struct cb_engine *e = c->e;
    uint32_t index[CB_MAX_EXPERT + 1], done = 0, K = e->used_max;
    int rc = 0;
    while (rc == 0 && (done < p->n || shared != NULL)) {
        uint32_t n_seg = 0;
        if (shared != NULL) {
            whole_segment(c, &e->w.seg[n_seg++], shared, c->n * K, c->n * K);
            shared = NULL;
        }
        rc = gather(c, p, n_seg, index, err);
        if (rc < 0)
            break;
        n_seg = (uint32_t)rc;
        for (uint32_t s = 0; s < n_seg; s++)
            done += e->w.seg[s].expert != NO_EXPERT;
        uint64_t start = e->offload != NULL ? cb_os_now_ns() : 0;
        run_segments(c, n_seg);
        if (e->offload != NULL)
            note_wave(c, n_seg, cb_os_now_ns() - start);
        rc = finish_wave(c, n_seg, index, err);
    }
    cb_store_end(&e->store);
    return rc;
}

static void pick(struct picks *p, const uint8_t *flag, uint8_t value, uint32_t n)
{
    p->n = 0;
    for (uint32_t i = 0; i < n; i++)
        if (flag[i] == value)
            p->at[p->n++] = i;
}

/* All experts of the layer, the shared one too. What goes over the link is sent
 * first and waited for last; what does not come back is computed here. */
static int run_experts(struct cb_chunk *c, struct cb_err *err)
{
    struct cb_engine *e = c->e;
    const struct cb_layer *l = &e->rel->layer[c->il];
    uint32_t n = distinct_experts(c), n_missing = 0;
    int32_t missing[CB_MAX_EXPERT];
    uint8_t remote[CB_MAX_EXPERT] = {0};
    struct picks mine;
    if (e->opt.on_miss == CB_MISS_ZEROS)
        n = leave_out_misses(c, n, missing, &n_missing);
    if (e->offload != NULL)
        cb_offload_send(e->offload, c, n, remote);
    pick(&mine, remote, 0, n);
    want(c, &mine);
    cb_store_fetch(&e->store, moe_layer(c), missing, n_missing);
    look_ahead(c);
    int rc = run_wanted(c, &mine, l->shexp.gate.data != NULL ? &l->shexp : NULL, err);
    if (e->offload == NULL)
        return rc;
    if (rc != 0) {
        cb_offload_cancel(e->offload);
        return rc;
    }
    if (cb_offload_wait(e->offload, c, n, remote) == 0)
        return 0;
    pick(&mine, remote, 1, n);
    want(c, &mine);
    return run_wanted(c, &mine, NULL, err);
}

int cb_ffn_rows(struct cb_engine *e, uint32_t il, uint32_t n_token, const struct cb_ffn_row *row,
                uint32_t n_row, struct cb_err *err)
{
    struct cb_chunk c = {e, n_token, il, 0};
    struct cb_work *w = &e->w;
    struct picks all = {0, {0}};
    for (uint32_t i = 0; i < n_row; i++) {
        if (i == 0 || row[i].expert != row[i - 1].expert) {
            w->row_first[all.n] = i;
            w->distinct[all.n] = row[i].expert;
            all.at[all.n] = all.n;
            all.n++;
        }
        w->row_token[i] = row[i].token;
        w->row_out[i] = i;
    }
    w->row_first[all.n] = n_row;
    w->in.f32 = w->xn;
    w->in.stride = cb_pad_group(e->rel->m.n_embd);
    want(&c, &all);
    return run_wanted(&c, &all, NULL, err);
}

int cb_ffn_layer(struct cb_chunk *c, struct cb_err *err)
{
    struct cb_engine *e = c->e;
    const struct cb_layer *l = &e->rel->layer[c->il];
    if (l->router.data == NULL) {
        whole_segment(c, &e->w.seg[0], &l->ffn, 0, 0);
        run_segments(c, 1);
        return 0;
    }
    int rc = route_chunk(c, err);
    if (rc == 0)
        rc = run_experts(c, err);
    /* Each round marks at least one expert unhealthy, so this ends. */
    while (rc == CB_EEXPERT && e->opt.on_bad == CB_BAD_NEXT) {
        if ((rc = choose(c, err)) == 0)
            rc = run_experts(c, err);
        else
            break;
    }
    if (rc == 0)
        keep_last_route(c);
    return rc;
}

void cb_ffn_combine(const struct cb_chunk *c, uint32_t t, float *y)
{
    const struct cb_engine *e = c->e;
    const struct cb_work *w = &e->w;
    const struct cb_layer *l = &e->rel->layer[c->il];
    uint32_t n = e->rel->m.n_embd, d = cb_pad_group(n), K = e->used_max;
    if (l->router.data == NULL) {
        memcpy(y, w->out + (size_t)t * d, n * sizeof *y);
        return;
    }
    memset(y, 0, n * sizeof *y);
    for (uint32_t p = t * K; p < (t + 1) * K; p++)
        if (w->chosen[p] >= 0)
            e->kern.axpy(y, w->weight[p], w->out + (size_t)p * d, n);
    if (l->shexp.gate.data == NULL)
        return;
    const float *shared = w->out + ((size_t)c->n * K + t) * d;
    if (l->shexp_router == NULL)
        e->kern.add(y, shared, n);
    else
        e->kern.axpy(y, cb_sigmoidf(e->kern.dot(l->shexp_router, w->xn + (size_t)t * d, n)),
                     shared, n);
}

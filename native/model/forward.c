/* forward.c — see forward.h. One pre-norm transformer with the features of
 * docs/format.md; what a family lacks is a NULL pointer or a scale of 1. */
#include "model/forward.h"

#include <math.h>
#include <string.h>

#include "core/os.h"
#include "router/router.h"

void cb_rows_run(struct cb_chunk *c, cb_pool_fn *fn)
{
    if (c->n > 1)
        cb_pool_run(&c->e->pool, fn, c);
    else
        fn(c, 0, 1);
}

/* ---- once --------------------------------------------------------------- */

static uint32_t ffn_in_wants(const struct cb_ffn *f)
{
    return cb_mat_wants(&f->gate) | cb_mat_wants(&f->up);
}

/* Activation forms that the release's FFNs want, layer by layer: of every
 * expert, since a layer may mix types. */
static void note_wants(const struct cb_engine *e)
{
    const struct cb_manifest *m = &e->rel->m;
    for (uint32_t il = 0; il < m->n_layer; il++) {
        struct cb_layer *l = &e->rel->layer[il];
        l->in_wants = ffn_in_wants(&l->ffn) | ffn_in_wants(&l->shexp);
        l->mid_wants = cb_mat_wants(&l->ffn.down) | cb_mat_wants(&l->shexp.down);
        for (uint32_t x = 0; l->router.data != NULL && x < m->n_expert; x++) {
            const struct cb_record *r = cb_store_record(&e->store, il - m->n_dense_layer, x);
            l->in_wants |= 1u << cb_type_info(r->part_type[0])->act |
                           1u << cb_type_info(r->part_type[1])->act;
            l->mid_wants |= 1u << cb_type_info(r->part_type[2])->act;
        }
        if (l->router.data != NULL)
            cb_router_norms(l->router_norm, (const float *)(const void *)l->router.data,
                            m->n_expert, m->n_embd);
    }
}

int cb_forward_prepare(struct cb_engine *e, struct cb_err *err)
{
    const struct cb_manifest *m = &e->rel->m;
    for (uint32_t i = 0; i < m->rope_dim / 2; i++) {
        double f = cb_pow_inv(m->rope_base, 2.0 * i, (double)m->rope_dim) * m->rope_scale;
        if (e->rel->rope_freqs != NULL)
            f /= (double)e->rel->rope_freqs[i];
        if (!(fabs(f) * e->opt.ctx < 0x1p31)) /* cb_sincos reduces angles below that; NaN too */
            return cb_fail(err, CB_EFORMAT, "the RoPE angle of dimension %u is out of range: "
                           "rope_base, rope_scale or rope_freqs is wrong", 2 * i);
        e->w.inv_freq[i] = f;
    }
    note_wants(e);
    return 0;
}

/* ---- the rows of a chunk between products ------------------------------- */

/* Rows [row, row + n): embeddings and the RoPE angles of their positions. */
static void embed_rows(struct cb_chunk *c, const int32_t *tokens, uint32_t row, uint32_t n_row)
{
    struct cb_engine *e = c->e;
    const struct cb_mat *table = &e->rel->token_embd;
    uint32_t n = e->rel->m.n_embd, d = cb_pad_group(n), half = e->rel->m.rope_dim / 2;
    for (uint32_t t = row; t < row + n_row; t++) {
        uint32_t id = (uint32_t)tokens[t - row];
        float *x = e->w.x + (size_t)t * d;
        cb_dequant_row(table->type, table->data + id / CB_GROUP * table->group_bytes,
                       id % CB_GROUP, n, x);
        if (e->rel->m.embd_scale != 1.0f)
            e->kern.scale(x, e->rel->m.embd_scale, n);
        for (uint32_t i = 0; i < half; i++)
            cb_sincos((double)e->w.place[t].pos * e->w.inv_freq[i],
                      &e->w.rope_sin[(size_t)t * cb_pad_group(half) + i],
                      &e->w.rope_cos[(size_t)t * cb_pad_group(half) + i]);
    }
}

/* w.xn = norm(w.x) for row t, and its quantised forms in w.in; notes a row that
 * is not finite. */
static void norm_row(struct cb_chunk *c, uint64_t t, const float *weight, uint32_t wants)
{
    struct cb_engine *e = c->e;
    uint32_t n = e->rel->m.n_embd, d = cb_pad_group(n);
    e->kern.rmsnorm(e->w.xn + t * d, e->w.x + t * d, weight, n, e->rel->m.norm_eps);
    if (cb_acts_prepare(&e->w.in, &e->kern, wants, e->w.xn, d, n, t, t + 1) != 0)
        c->bad = (uint32_t)t + 1;
}

/* x += resid_scale * branch; notes a row that is not finite any more. */
static void add_branch(struct cb_chunk *c, uint64_t t, float *branch)
{
    struct cb_engine *e = c->e;
    uint32_t n = e->rel->m.n_embd, d = cb_pad_group(n);
    float *x = e->w.x + t * d;
    if (e->rel->m.resid_scale != 1.0f)
        e->kern.scale(branch, e->rel->m.resid_scale, n);
    e->kern.add(x, branch, n);
    if (!isfinite(e->kern.dot(x, x, n)))
        c->bad = (uint32_t)t + 1;
}

static void before_attention(void *arg, uint32_t thread, uint32_t n_threads)
{
    struct cb_chunk *c = arg;
    const struct cb_layer *l = &c->e->rel->layer[c->il];
    uint64_t lo, hi;
    cb_share(c->n, thread, n_threads, &lo, &hi);
    for (uint64_t t = lo; t < hi; t++)
        norm_row(c, t, l->attn_norm,
                 cb_mat_wants(&l->q) | cb_mat_wants(&l->k) | cb_mat_wants(&l->v));
}

static void before_ffn(void *arg, uint32_t thread, uint32_t n_threads)
{
    struct cb_chunk *c = arg;
    struct cb_engine *e = c->e;
    const struct cb_layer *l = &e->rel->layer[c->il];
    uint32_t d = cb_pad_group(e->rel->m.n_embd);
    uint64_t lo, hi;
    cb_share(c->n, thread, n_threads, &lo, &hi);
    for (uint64_t t = lo; t < hi; t++) {
        float *proj = e->w.proj + t * d;
        if (l->o_bias != NULL)
            e->kern.add(proj, l->o_bias, e->rel->m.n_embd);
        add_branch(c, t, proj);
        norm_row(c, t, l->ffn_norm, l->in_wants);
    }
}

static void after_ffn(void *arg, uint32_t thread, uint32_t n_threads)
{
    struct cb_chunk *c = arg;
    uint32_t d = cb_pad_group(c->e->rel->m.n_embd);
    uint64_t lo, hi;
    cb_share(c->n, thread, n_threads, &lo, &hi);
    for (uint64_t t = lo; t < hi; t++) {
        float *proj = c->e->w.proj + t * d;
        cb_ffn_combine(c, (uint32_t)t, proj);
        add_branch(c, t, proj);
    }
}

static void input_is_xn(struct cb_engine *e)
{
    e->w.in.f32 = e->w.xn;
    e->w.in.stride = cb_pad_group(e->rel->m.n_embd);
}

/* ---- chunks ------------------------------------------------------------- */

static int not_finite(const struct cb_chunk *c, const char *where, struct cb_err *err)
{
    return cb_fail(err, CB_ENUMERIC, "layer %u: %s is not a finite number (position %u)", c->il,
                   where, c->e->w.place[c->bad > 0 ? c->bad - 1 : 0].pos);
}

/* Copies the chosen experts [n][n_used] of this layer; an extra one is left out. */
static void copy_chosen(const struct cb_chunk *c, int32_t *to)
{
    uint32_t used = c->e->rel->m.n_used, K = c->e->used_max;
    for (uint32_t t = 0; t < c->n; t++)
        memcpy(to + (size_t)t * used, c->e->w.chosen + (size_t)t * K, used * sizeof *to);
}

static int run_layers(struct cb_chunk *c, int32_t *experts, uint64_t layer_stride,
                      struct cb_err *err)
{
    struct cb_engine *e = c->e;
    int rc;
    for (c->il = 0; c->il < e->rel->m.n_layer; c->il++) {
        atomic_store(&e->watch.layer, c->il);
        input_is_xn(e);
        cb_rows_run(c, before_attention);
        cb_attention(c);
        input_is_xn(e);
        cb_rows_run(c, before_ffn);
        if (c->bad != 0)
            return not_finite(c, "the attention output", err);
        if ((rc = cb_ffn_layer(c, err)) != 0)
            return rc;
        cb_rows_run(c, after_ffn);
        if (c->bad != 0)
            return not_finite(c, "the FFN output", err);
        if (experts != NULL && c->il >= e->rel->m.n_dense_layer && e->rel->m.n_expert > 0)
            copy_chosen(c, experts + (c->il - e->rel->m.n_dense_layer) * layer_stride);
    }
    return 0;
}

/* Logits of rows [from, from + n), n <= CB_LOGIT_TILE, into w.logits. */
static int head_rows(struct cb_chunk *c, uint32_t from, uint32_t n, struct cb_err *err)
{
    struct cb_engine *e = c->e;
    struct cb_work *w = &e->w;
    uint32_t d = cb_pad_group(e->rel->m.n_embd), V = cb_pad_group(e->rel->m.n_vocab);
    struct cb_acts in = w->in;
    input_is_xn(e);
    for (uint32_t t = from; t < from + n; t++)
        norm_row(c, t, e->rel->output_norm, cb_mat_wants(&e->rel->output));
    if (c->bad != 0)
        return cb_fail(err, CB_ENUMERIC, "the final norm is not a finite number (row %u)",
                       c->bad - 1);
    in.f32 = w->xn + (size_t)from * d;
    in.stride = d;
    in.q8_0 += from * in.q8_0_bytes;
    in.q8_k += from * in.q8_k_bytes;
    const struct cb_product p = {&e->rel->output, w->logits, V};
    cb_products(&e->pool, &e->kern, &in, n, &p, 1);
    for (uint32_t i = 0; i < n && e->rel->m.logit_scale != 1.0f; i++)
        e->kern.scale(w->logits + (size_t)i * V, 1.0f / e->rel->m.logit_scale, e->rel->m.n_vocab);
    w->last_logits = w->logits + (size_t)(n - 1) * V;
    return 0;
}

static int chunk_logits(struct cb_chunk *c, uint32_t done, int last, cb_logits_fn *fn, void *ud,
                        struct cb_err *err)
{
    struct cb_engine *e = c->e;
    uint32_t V = cb_pad_group(e->rel->m.n_vocab);
    int rc = 0;
    if (fn == NULL)
        return last ? head_rows(c, c->n - 1, 1, err) : 0;
    for (uint32_t t = 0; rc == 0 && t < c->n; t += CB_LOGIT_TILE) {
        uint32_t n = c->n - t < CB_LOGIT_TILE ? c->n - t : CB_LOGIT_TILE;
        rc = head_rows(c, t, n, err);
        for (uint32_t i = 0; rc == 0 && i < n; i++)
            fn(ud, done + t + i, e->w.logits + (size_t)i * V);
    }
    return rc;
}

static int check_tokens(const struct cb_engine *e, uint32_t seq, const int32_t *tokens,
                        uint32_t n, struct cb_err *err)
{
    if (n == 0)
        return cb_fail(err, CB_EINVAL, "no tokens to run");
    if (n > e->opt.ctx - e->pos[seq])
        return cb_fail(err, CB_ECONTEXT,
                       "%u tokens at position %u do not fit in the context of %u", n, e->pos[seq],
                       e->opt.ctx);
    for (uint32_t i = 0; i < n; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= e->rel->m.n_vocab)
            return cb_fail(err, CB_EINVAL, "token %u is %d, outside the vocabulary of %u", i,
                           tokens[i], e->rel->m.n_vocab);
    return 0;
}

/* Rows [row, row + n) of the chunk are the next n tokens of a sequence. */
static void place_rows(struct cb_engine *e, uint32_t row, uint32_t seq, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        e->w.place[row + i] = (struct cb_place){seq, e->pos[seq] + i};
}

static void count_tokens(struct cb_engine *e, uint32_t n, int prefill, uint64_t ns)
{
    *(prefill ? &e->counters.ns_prefill : &e->counters.ns_decode) += ns;
    *(prefill ? &e->counters.tokens_prefill : &e->counters.tokens_decode) += n;
}

int cb_forward(struct cb_engine *e, const int32_t *tokens, uint32_t n, cb_logits_fn *fn, void *ud,
               int32_t *experts, struct cb_err *err)
{
    int rc = check_tokens(e, 0, tokens, n, err);
    if (rc != 0)
        return rc;
    uint64_t start = cb_os_now_ns();
    uint32_t K = e->rel->m.n_used;
    memset(e->route_ns, 0, e->store.n_layer * sizeof *e->route_ns);
    for (uint32_t done = 0; done < n;) {
        struct cb_chunk c = {e, n - done < e->opt.batch ? n - done : e->opt.batch, 0, 0};
        atomic_store(&e->watch.began_ns, cb_os_now_ns());
        place_rows(e, 0, 0, c.n);
        embed_rows(&c, tokens + done, 0, c.n);
        rc = run_layers(&c, experts != NULL ? experts + (uint64_t)done * K : NULL,
                        (uint64_t)n * K, err);
        atomic_store(&e->watch.began_ns, 0);
        if (rc != 0)
            return rc;
        if ((rc = chunk_logits(&c, done, done + c.n == n, fn, ud, err)) != 0)
            return rc;
        done += c.n;
        e->pos[0] += c.n;
    }
    count_tokens(e, n, n > 1, cb_os_now_ns() - start);
    return 0;
}

/* ---- several sequences --------------------------------------------------- */

static int check_steps(const struct cb_engine *e, const struct cb_step *step, uint32_t n_step,
                       uint32_t *n_row, struct cb_err *err)
{
    uint64_t rows = 0, seen = 0;
    if (n_step == 0 || n_step > e->opt.sequences)
        return cb_fail(err, CB_EINVAL, "%u steps for %u sequences", n_step, e->opt.sequences);
    for (uint32_t i = 0; i < n_step; i++) {
        if (step[i].seq >= e->opt.sequences || (seen & UINT64_C(1) << step[i].seq) != 0)
            return cb_fail(err, CB_EINVAL, "sequence %u stands twice or does not exist",
                           step[i].seq);
        seen |= UINT64_C(1) << step[i].seq;
        int rc = check_tokens(e, step[i].seq, step[i].tokens, step[i].n, err);
        if (rc != 0)
            return rc;
        rows += step[i].n;
    }
    if (rows > e->opt.batch)
        return cb_fail(err, CB_EINVAL, "%llu tokens in one step; the batch is %u",
                       (unsigned long long)rows, e->opt.batch);
    *n_row = (uint32_t)rows;
    return 0;
}

/* The last row of each step moves to row 0, 1, … (never past itself), then one
 * product gives everybody's logits. */
static int step_logits(struct cb_chunk *c, struct cb_step *step, uint32_t n_step,
                       struct cb_err *err)
{
    struct cb_engine *e = c->e;
    uint32_t d = cb_pad_group(e->rel->m.n_embd), V = cb_pad_group(e->rel->m.n_vocab), last = 0;
    for (uint32_t i = 0; i < n_step; i++) {
        last += step[i].n;
        memmove(e->w.x + (size_t)i * d, e->w.x + (size_t)(last - 1) * d, d * sizeof(float));
    }
    int rc = head_rows(c, 0, n_step, err);
    for (uint32_t i = 0; rc == 0 && i < n_step; i++) {
        const struct cb_lossy *lossy = &e->lossy[step[i].seq];
        step[i].degraded = lossy->degraded;
        step[i].zeros = lossy->zeros;
        step[i].extra = lossy->extra;
        step[i].logits = e->w.logits + (size_t)i * V;
        e->pos[step[i].seq] += step[i].n;
    }
    return rc;
}

int cb_run(struct cb_engine *e, struct cb_step *step, uint32_t n_step, struct cb_err *err)
{
    uint32_t n_row = 0, row = 0;
    int rc = check_steps(e, step, n_step, &n_row, err);
    if (rc != 0)
        return rc;
    uint64_t start = cb_os_now_ns();
    struct cb_chunk c = {e, n_row, 0, 0};
    memset(e->route_ns, 0, e->store.n_layer * sizeof *e->route_ns);
    memset(e->lossy, 0, sizeof e->lossy);
    atomic_store(&e->watch.began_ns, start);
    for (uint32_t i = 0; i < n_step; row += step[i++].n) {
        place_rows(e, row, step[i].seq, step[i].n);
        embed_rows(&c, step[i].tokens, row, step[i].n);
    }
    rc = run_layers(&c, NULL, 0, err);
    atomic_store(&e->watch.began_ns, 0);
    if (rc != 0)
        return rc;
    if ((rc = step_logits(&c, step, n_step, err)) != 0)
        return rc;
    count_tokens(e, n_row, n_row > n_step, cb_os_now_ns() - start);
    return 0;
}

void cb_seq_reset(struct cb_engine *e, uint32_t seq)
{
    if (seq < e->opt.sequences)
        e->pos[seq] = 0;
}

uint32_t cb_seq_position(const struct cb_engine *e, uint32_t seq)
{
    return seq < e->opt.sequences ? e->pos[seq] : 0;
}

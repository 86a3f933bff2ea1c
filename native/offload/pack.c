/* pack.c — which experts of a layer go, and the EXEC frames that they go in. */
#if !defined(_WIN32)
#include "offload/internal.h"

#include <string.h>

#include "model/forward.h"

/* ---- what goes ---------------------------------------------------------- */

static uint32_t wants_of(const struct cb_chunk *c, uint32_t expert)
{
    const struct cb_record *r =
        cb_store_record(&c->e->store, c->il - c->e->rel->m.n_dense_layer, expert);
    return 1u << cb_type_info(r->part_type[0])->act | 1u << cb_type_info(r->part_type[1])->act;
}

static void describe(struct cb_offload *o, const struct cb_chunk *c, uint32_t n,
                     struct cb_sched_layer *l)
{
    const struct cb_engine *e = c->e;
    const struct cb_manifest *m = &e->rel->m;
    uint32_t layer = c->il - m->n_dense_layer;
    memset(l, 0, sizeof *l);
    for (uint32_t i = 0; i < n; i++)
        o->rows[i] = e->w.row_first[i + 1] - e->w.row_first[i];
    cb_store_missing(&c->e->store, layer, e->w.distinct, n, o->missing, l->read);
    l->n = n;
    l->rows = o->rows;
    l->missing = o->missing;
    l->shared = m->n_expert_ff > 0 ? (double)m->n_shexp_ff / m->n_expert_ff : 0.0;
    l->shared_rows = c->n;
    l->row_up = CB_EXEC_ROW;
    l->row_down = (uint64_t)m->n_embd * 4;
    l->token_up = cb_exec_token_bytes(wants_of(c, e->w.distinct[0]), m->n_embd);
    l->tokens = c->n;
    l->frame = 3 * CB_FRAME_EXTRA + CB_EXEC_HEAD + CB_RESULT_HEAD + 8;
}

uint32_t cb_off_choose(struct cb_offload *o, const struct cb_chunk *c, uint32_t n, double *expect,
                       double *alone)
{
    struct cb_sched_layer l;
    describe(o, c, n, &l);
    cb_sched_order(&l, o->order);
    *alone = cb_sched_time(&o->sched, &l, o->order, 0, expect);
    if (o->forced < 0)
        return cb_sched_split(&o->sched, &l, o->order, expect);
    o->share_left += n * (uint32_t)o->forced;
    uint32_t k = o->share_left / 100;
    o->share_left %= 100;
    k = k < n ? k : n;
    (void)cb_sched_time(&o->sched, &l, o->order, k, expect);
    return k;
}

/* ---- frames of a layer -------------------------------------------------- */

struct pack {
    struct cb_offload *o;
    const struct cb_chunk *c;
    uint32_t forms;
    uint64_t token_bytes;
};

/* Tokens of expert i's rows that the frame does not have yet; mark puts them in. */
static uint32_t new_tokens(const struct pack *p, uint32_t i, uint32_t n_token, int mark)
{
    const struct cb_work *w = &p->c->e->w;
    uint32_t fresh = 0;
    for (uint32_t r = w->row_first[i]; r < w->row_first[i + 1]; r++)
        if (p->o->token_at[w->row_token[r]] == UINT16_MAX) {
            if (mark)
                p->o->token_at[w->row_token[r]] = (uint16_t)(n_token + fresh);
            fresh++;
        }
    return fresh;
}

static int fits(const struct pack *p, uint32_t rows, uint32_t tokens)
{
    const struct cb_offload *o = p->o;
    uint32_t most = o->me.max_payload < o->peer.max_payload ? o->me.max_payload
                                                            : o->peer.max_payload;
    return rows <= o->peer.max_row && tokens <= o->peer.max_token && rows <= UINT16_MAX &&
           tokens < UINT16_MAX && cb_exec_acts_at(rows) + tokens * p->token_bytes <= most;
}

static void put_acts(const struct pack *p, uint8_t *to)
{
    const struct cb_work *w = &p->c->e->w;
    uint32_t d = p->o->me.n_embd;
    for (uint32_t t = 0; t < p->c->n; t++) {
        uint8_t *at = to + p->o->token_at[t] * p->token_bytes;
        if (p->o->token_at[t] == UINT16_MAX)
            continue;
        const uint8_t *const from[] = {(const uint8_t *)(w->in.f32 + t * w->in.stride),
                                       w->in.q8_0 + t * w->in.q8_0_bytes,
                                       w->in.q8_k + t * w->in.q8_k_bytes};
        for (uint32_t act = CB_ACT_F32; act <= CB_ACT_Q8_K; act++) {
            if (!(p->forms & 1u << act))
                continue;
            size_t n = cb_act_bytes((enum cb_act)act, d);
            memcpy(at, from[act], n);
            at += n;
        }
    }
}

static void put_rows(const struct pack *p, uint8_t *to, uint32_t i, uint32_t at)
{
    struct cb_offload *o = p->o;
    const struct cb_work *w = &p->c->e->w;
    for (uint32_t r = w->row_first[i]; r < w->row_first[i + 1]; r++, at++) {
        uint32_t out = w->row_out[r];
        cb_exec_put_row(to, at, w->distinct[i], o->token_at[w->row_token[r]], w->weight[out]);
        o->row[o->job.n_row + at] = (struct cb_offload_row){i, out, 0};
    }
}

/* One EXEC of the experts from *from on, as many as fit; those that do not fit
 * even alone stay here. Returns 0 when nothing more can be sent. */
static int put_exec(const struct pack *p, uint32_t n, uint32_t *from, uint8_t *remote)
{
    struct cb_offload *o = p->o;
    struct cb_exec x = {o->exec_index + 1, p->c->il, 0, 0, p->forms, NULL, NULL};
    uint32_t first = *from, end = first;
    if (o->job.n_exec == CB_OFFLOAD_EXECS || (int32_t)(o->limit - x.index) < 0)
        return 0;
    memset(o->token_at, 0xff, p->c->n * sizeof *o->token_at);
    for (; end < n; end++) {
        if (!remote[end])
            continue;
        uint32_t rows = x.n_row + o->rows[end], tokens = x.n_token + new_tokens(p, end, 0, 0);
        if (!fits(p, rows, tokens)) {
            if (x.n_row > 0)
                break;
            remote[end] = 0;
            continue;
        }
        (void)new_tokens(p, end, x.n_token, 1);
        x.n_row = rows;
        x.n_token = tokens;
    }
    *from = end;
    uint32_t len = (uint32_t)(cb_exec_acts_at(x.n_row) + x.n_token * p->token_bytes);
    uint8_t *to = x.n_row > 0 ? cb_off_room(o, len) : NULL;
    if (to == NULL) {
        memset(remote + first, 0, end - first);
        return x.n_row == 0;
    }
    cb_exec_put_head(to, &x);
    for (uint32_t i = first, at = 0; i < end; i++)
        if (remote[i]) {
            put_rows(p, to, i, at);
            at += o->rows[i];
        }
    put_acts(p, to + cb_exec_acts_at(x.n_row));
    o->job.exec[o->job.n_exec++] =
        (struct cb_offload_sent){cb_off_put(o, CB_FRAME_EXEC, 0, len), o->job.n_row, x.n_row, 0};
    o->exec_index++;
    o->job.n_row += x.n_row;
    o->job.bytes += len + (uint64_t)x.n_row * o->me.n_embd * 4;
    return 1;
}

void cb_off_send_all(struct cb_offload *o, const struct cb_chunk *c, uint32_t n, uint8_t *remote)
{
    struct pack p = {o, c, 0, 0};
    uint32_t from = 0;
    memset(&o->job, 0, sizeof o->job);
    for (uint32_t i = 0; i < n; i++)
        if (remote[i])
            p.forms |= wants_of(c, c->e->w.distinct[i]);
    p.token_bytes = cb_exec_token_bytes(p.forms, o->me.n_embd);
    while (from < n && put_exec(&p, n, &from, remote))
        ;
    memset(remote + from, 0, n - from);
}

void cb_off_send_trial(struct cb_offload *o, const struct cb_chunk *c)
{
    const struct cb_work *w = &c->e->w;
    struct cb_exec x = {o->exec_index + 1, c->il, 1, 1, wants_of(c, w->distinct[0]), NULL, NULL};
    struct pack p = {o, c, x.forms, cb_exec_token_bytes(x.forms, o->me.n_embd)};
    uint32_t len = (uint32_t)(cb_exec_acts_at(1) + p.token_bytes);
    uint8_t *to = cb_off_room(o, len);
    if (to == NULL)
        return;
    memset(&o->job, 0, sizeof o->job);
    memset(o->token_at, 0xff, c->n * sizeof *o->token_at);
    o->token_at[w->row_token[0]] = 0;
    cb_exec_put_head(to, &x);
    cb_exec_put_row(to, 0, w->distinct[0], 0, w->weight[w->row_out[0]]);
    put_acts(&p, to + cb_exec_acts_at(1));
    o->row[0] = (struct cb_offload_row){0, w->row_out[0], 0};
    o->job.exec[0] = (struct cb_offload_sent){cb_off_put(o, CB_FRAME_EXEC, 0, len), 0, 1, 0};
    o->exec_index++;
    o->job.n_exec = o->job.n_row = 1;
    o->job.bytes = len + (uint64_t)o->me.n_embd * 4;
    o->job.trial = 1;
}
#else
typedef int cb_offload_pack_is_empty_here;
#endif

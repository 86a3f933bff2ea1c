/* client.c — the computing thread's side: set-up, sending, waiting. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include "offload/internal.h"

#include <stdio.h>
#include <string.h>

#include "core/os.h"
#include "core/pool.h"
#include "model/forward.h"

#define MS UINT64_C(1000000)
#define PAYLOAD_CAP (1u << 20)
#define DEADLINE_LEAST (50 * MS)
#define DEADLINE_MOST (2000 * MS)
#define TRIAL_DEADLINE (2000 * MS)
#define STARVED (200 * MS)        /* without credit, until it is asked for */
#define TRIAL_EVERY 256u          /* layers: a module may go wrong later */
#define GOOD_LAYERS 64u           /* in time, until pauses begin small again */

/* ---- set-up ------------------------------------------------------------- */

int cb_offload_check(const struct cb_options *opt, const struct cb_manifest *m, struct cb_err *err)
{
    struct cb_link_addr a;
    if (opt->offload == NULL)
        return 0;
    if (opt->offload_force > 101)
        return cb_fail(err, CB_EINVAL, "offload: a share of %u percent", opt->offload_force - 1);
    if (cb_manifest_moe_layers(m) == 0)
        return cb_fail(err, CB_EINVAL, "offload: a dense model has no experts to send away");
    return cb_link_parse(&a, opt->offload, err);
}

void cb_offload_layout(struct cb_offload **to, struct cb_arena *a, const struct cb_engine *e)
{
    const struct cb_manifest *m = &e->rel->m;
    uint64_t T = e->opt.batch, R = T * e->used_max;
    uint64_t payload = cb_offload_payload(m->n_embd, T, R);
    payload = payload < PAYLOAD_CAP ? payload : PAYLOAD_CAP;
    uint64_t rx_cap = CB_FRAMES_CAP(payload);
    uint64_t tx_cap = 2 * (payload + CB_FRAME_EXTRA) + 2 * CB_OFFLOAD_PING;
    struct cb_offload *o = cb_arena_take(a, CB_L_ACT, 1, sizeof *o);
    uint8_t *rx = cb_arena_take(a, CB_L_ACT, rx_cap, 1);
    uint8_t *tx = cb_arena_take(a, CB_L_ACT, tx_cap, 1);
    struct cb_offload_row *row = cb_arena_take(a, CB_L_ACT, R, sizeof *row);
    uint16_t *token_at = cb_arena_take(a, CB_L_ACT, T, sizeof *token_at);
    uint32_t *order = cb_arena_take(a, CB_L_ACT, m->n_expert, sizeof *order);
    uint32_t *rows = cb_arena_take(a, CB_L_ACT, m->n_expert, sizeof *rows);
    uint8_t *missing = cb_arena_take(a, CB_L_ACT, m->n_expert, 1);
    float *trial = cb_arena_take(a, CB_L_ACT, m->n_embd, sizeof *trial);
    a->line[CB_L_STACKS] += CB_SMALL_STACK;
    *to = o;
    if (a->base == NULL || a->overflow)
        return;
    o->tx = tx;
    o->tx_cap = (uint32_t)tx_cap;
    o->row = row;
    o->token_at = token_at;
    o->order = order;
    o->rows = rows;
    o->missing = missing;
    o->trial = trial;
    o->me.max_payload = (uint32_t)payload;
    cb_frames_init(&o->rx, rx, (uint32_t)rx_cap, (uint32_t)payload);
}

static uint8_t hex_digit(char c)
{
    return (uint8_t)(c >= 'a' ? c - 'a' + 10 : c - '0');
}

/* What HELLO says of the model in use. */
static void identify(struct cb_offload *o, const struct cb_manifest *m)
{
    struct cb_hello *h = &o->me;
    h->protocol = CB_OFFLOAD_PROTOCOL;
    h->role = CB_HELLO_BOARD;
    memcpy(h->model_id, m->model_id, 16);
    memset(h->golden, 0, sizeof h->golden);
    for (int i = 0; i < 32 && strlen(m->golden) == 64; i++)
        h->golden[i] = (uint8_t)(hex_digit(m->golden[2 * i]) << 4 | hex_digit(m->golden[2 * i + 1]));
    h->n_layer = m->n_layer;
    h->first_layer = m->n_dense_layer;
    h->n_embd = m->n_embd;
    h->n_expert = m->n_expert;
    h->n_used = m->n_used;
    h->n_expert_ff = m->n_expert_ff;
    snprintf(h->who, sizeof h->who, "colibri %s %.15s", CB_VERSION, o->e->kern.isa);
}

static int start_thread(struct cb_offload *o, struct cb_err *err)
{
    pthread_attr_t attr;
    pthread_mutex_init(&o->mutex, NULL);
    cb_cond_init(&o->arrived);
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, CB_SMALL_STACK);
    o->opened = pthread_create(&o->thread, &attr, cb_off_thread, o) == 0;
    pthread_attr_destroy(&attr);
    if (o->opened)
        return 0;
    pthread_mutex_destroy(&o->mutex);
    pthread_cond_destroy(&o->arrived);
    return cb_fail(err, CB_EIO, "starting the offload thread");
}

int cb_offload_open(struct cb_engine *e, struct cb_err *err)
{
    struct cb_offload *o = e->offload;
    if (o == NULL)
        return 0;
    o->e = e;
    o->link.fd = o->wake[0] = o->wake[1] = -1;
    int rc = cb_link_parse(&o->addr, e->opt.offload, err);
    if (rc == 0)
        rc = cb_wake_open(o->wake, err);
    if (rc != 0)
        return rc;
    o->forced = e->opt.offload_force > 0 ? (int)e->opt.offload_force - 1 : -1;
    o->deadline_ns = (uint64_t)e->opt.offload_deadline_ms * MS;
    /* Unlike the last process's, so that answers to that one are nobody's here. */
    o->seq = (uint32_t)(cb_os_now_ns() >> 10) | 1u;
    identify(o, &e->rel->m);
    if ((rc = start_thread(o, err)) != 0)
        return rc;
    uint64_t until = cb_os_now_ns() + 1000 * MS;
    pthread_mutex_lock(&o->mutex);
    while (o->tries == 0 && cb_os_now_ns() < until)
        cb_cond_wait_until(&o->arrived, &o->mutex, until);
    pthread_mutex_unlock(&o->mutex);
    return 0;
}

void cb_offload_close(struct cb_offload *o)
{
    if (o == NULL)
        return;
    if (o->opened) {
        pthread_mutex_lock(&o->mutex);
        o->stop = 1;
        cb_wake_up(o->wake);
        pthread_mutex_unlock(&o->mutex);
        pthread_join(o->thread, NULL);
        pthread_mutex_destroy(&o->mutex);
        pthread_cond_destroy(&o->arrived);
        o->opened = 0;
    }
    if (o->e != NULL) /* opened at all */
        cb_wake_close(o->wake);
}

void cb_offload_model_changed(struct cb_engine *e)
{
    struct cb_offload *o = e->offload;
    if (o == NULL)
        return;
    pthread_mutex_lock(&o->mutex);
    identify(o, &e->rel->m);
    o->state = CB_OFFLOAD_DOWN;
    o->again = 1;
    o->tx_at = o->tx_end = 0;
    o->retry_ns = cb_os_now_ns();
    o->pause_ns = 0;
    cb_wake_up(o->wake);
    pthread_mutex_unlock(&o->mutex);
}

void cb_offload_pause(struct cb_engine *e, int on)
{
    if (e->offload != NULL)
        e->offload->paused = on;
}

void cb_offload_counters(struct cb_offload *o, struct cb_counters *to)
{
    pthread_mutex_lock(&o->mutex);
    const struct cb_counters *n = &o->n;
    to->offload_experts = n->offload_experts;
    to->offload_bytes_out = n->offload_bytes_out;
    to->offload_bytes_in = n->offload_bytes_in;
    to->ns_offload_wait = n->ns_offload_wait;
    to->offload_connects = n->offload_connects;
    to->offload_local = n->offload_local;
    to->offload_late = n->offload_late;
    to->offload_dropped = n->offload_dropped;
    to->offload_cut = n->offload_cut;
    to->offload_crc = o->rx.bad_crc;
    to->offload_garbage = o->rx.garbage;
    to->offload_gaps = o->rx.gaps;
    to->offload_refused = n->offload_refused;
    to->offload_errors = n->offload_errors;
    to->offload_wrong = n->offload_wrong;
    pthread_mutex_unlock(&o->mutex);
}

void cb_engine_offload(const struct cb_engine *e, struct cb_offload_info *info)
{
    static const char *const names[] = {"down", "up", "demoted"};
    struct cb_offload *o = e->offload;
    memset(info, 0, sizeof *info);
    if (o == NULL) {
        snprintf(info->state, sizeof info->state, "off");
        return;
    }
    pthread_mutex_lock(&o->mutex);
    snprintf(info->state, sizeof info->state, "%s", names[o->state]);
    memcpy(info->why, o->why, sizeof info->why);
    memcpy(info->who, o->peer.who, sizeof info->who);
    info->latency_ns = (uint64_t)o->sched.latency;
    info->bytes_s = o->sched.byte > 0.0 ? (uint64_t)(1e9 / o->sched.byte) : 0;
    info->expert_here_ns = (uint64_t)cb_cost_of(o->sched.here, 1);
    info->expert_there_ns = (uint64_t)cb_cost_of(o->sched.there, 1);
    pthread_mutex_unlock(&o->mutex);
}

/* ---- sending ------------------------------------------------------------- */

/* Giving up costs what the layer takes alone: to wait as long again is never more
 * than twice too long. */
static uint64_t deadline_after(const struct cb_offload *o, double expect, double alone)
{
    if (o->deadline_ns != 0)
        return o->deadline_ns;
    if (o->job.trial)
        return TRIAL_DEADLINE;
    uint64_t ns = (uint64_t)(4.0 * expect) + 20 * MS, wait = (uint64_t)(expect + alone);
    ns = ns > wait ? ns : wait;
    uint64_t most = (uint64_t)(1.5 * expect) + DEADLINE_MOST;
    return ns < DEADLINE_LEAST ? DEADLINE_LEAST : ns > most ? most : ns;
}

static uint32_t count(const uint8_t *flag, uint32_t n)
{
    uint32_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += flag[i];
    return sum;
}

/* Whether the module allows another EXEC. When it has not for a while, the CREDITs
 * were lost: PINGs, as after a demotion, ask anew. */
static int has_credit(struct cb_offload *o)
{
    uint64_t now = cb_os_now_ns();
    if ((int32_t)(o->limit - o->exec_index) > 0) {
        o->starved_ns = 0;
        return 1;
    }
    if (o->starved_ns == 0)
        o->starved_ns = now;
    if (now - o->starved_ns > STARVED)
        cb_off_demote(o, "the module gives no credit");
    return 0;
}

uint32_t cb_offload_send(struct cb_offload *o, const struct cb_chunk *c, uint32_t n,
                         uint8_t *remote)
{
    double expect = 0.0, alone = 0.0;
    uint32_t k = 0;
    memset(remote, 0, n);
    pthread_mutex_lock(&o->mutex);
    o->job.active = 0;
    int ready = n > 0 && o->state == CB_OFFLOAD_UP && o->tx_at == o->tx_end && has_credit(o);
    int trial = ready && o->trial_due;
    if (trial)
        cb_off_send_trial(o, c);
    else if (ready && !o->paused)
        k = cb_off_choose(o, c, n, &expect, &alone);
    for (uint32_t i = 0; i < k; i++)
        remote[o->order[i]] = 1;
    if (k > 0)
        cb_off_send_all(o, c, n, remote);
    if ((trial || k > 0) && o->job.n_row > 0) {
        o->job.active = 1;
        o->job.left = o->job.n_row;
        o->job.n_item = count(remote, n);
        o->job.sent_ns = cb_os_now_ns();
        o->job.deadline_ns = o->job.sent_ns + deadline_after(o, expect, alone);
        cb_off_flush(o);
        if (o->tx_at < o->tx_end)
            cb_wake_up(o->wake); /* to wait for room */
    }
    k = o->job.active ? o->job.n_item : 0;
    pthread_mutex_unlock(&o->mutex);
    return k;
}

/* ---- what came ---------------------------------------------------------- */

/* The layer's times into the averages. */
static void learn(struct cb_offload *o)
{
    const struct cb_offload_job *j = &o->job;
    double busy = 0.0, total = (double)(j->done_ns - j->sent_ns);
    uint32_t items = j->trial ? 1 : j->n_item;
    for (uint32_t i = 0; i < j->n_exec; i++)
        busy += j->exec[i].busy_us * 1e3;
    busy = busy < total ? busy : total; /* it cannot have worked longer than it took */
    cb_cost_note(o->sched.there, (j->n_row + items - 1) / items, busy / items);
    double link = total - busy - o->sched.latency;
    if (j->bytes >= 4096 && !j->trial)
        cb_average(&o->sched.byte, link > 1.0 ? link / (double)j->bytes : 0.01);
}

static int same_row(const float *a, const float *b, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) /* all NaNs count as equal (docs/determinism.md) */
        if (memcmp(&a[i], &b[i], sizeof *a) != 0 && (a[i] == a[i] || b[i] == b[i]))
            return 0;
    return 1;
}

/* A module that computes other bits is not asked again until it greets anew,
 * and then it is tried again before it is trusted. */
static void judge_trial(struct cb_offload *o, const struct cb_chunk *c)
{
    const float *mine = c->e->w.out + (size_t)o->row[0].out * cb_pad_group(o->me.n_embd);
    o->trial_due = 0;
    o->untried = 0;
    if (same_row(o->trial, mine, o->me.n_embd))
        return;
    o->n.offload_wrong++;
    o->trial_due = 1;
    o->pause_ns = DEADLINE_MOST * 4;
    cb_off_demote(o, "the module computes other bits");
}

/* What has to be computed here after all. */
static uint32_t leave(struct cb_offload *o, uint8_t *remote, uint32_t n)
{
    memset(remote, 0, n);
    for (uint32_t i = 0; i < o->job.n_row && !o->job.trial; i++)
        if (!o->row[i].done)
            remote[o->row[i].item] = 1;
    uint32_t k = count(remote, n);
    o->n.offload_local += k;
    if (!o->job.failed) {
        o->n.offload_late++;
        cb_off_demote(o, "the module did not answer in time");
    } else {
        cb_off_demote(o, NULL);
    }
    return k;
}

uint32_t cb_offload_wait(struct cb_offload *o, const struct cb_chunk *c, uint32_t n,
                         uint8_t *remote)
{
    uint32_t k = 0;
    pthread_mutex_lock(&o->mutex);
    struct cb_offload_job *j = &o->job;
    if (!j->active) {
        pthread_mutex_unlock(&o->mutex);
        memset(remote, 0, n);
        return 0;
    }
    uint64_t start = cb_os_now_ns();
    while (j->left > 0 && !j->failed && cb_os_now_ns() < j->deadline_ns)
        cb_cond_wait_until(&o->arrived, &o->mutex, j->deadline_ns);
    o->n.ns_offload_wait += cb_os_now_ns() - start;
    if (j->left > 0) {
        k = leave(o, remote, n);
    } else {
        memset(remote, 0, n);
        learn(o);
        if (j->trial)
            judge_trial(o, c);
        else
            o->trial_due = ++o->untried >= TRIAL_EVERY;
        if (!j->trial && ++o->good >= GOOD_LAYERS)
            o->pause_ns = 0;
    }
    o->n.offload_experts += j->trial ? 0 : j->n_item - k;
    j->active = 0;
    pthread_mutex_unlock(&o->mutex);
    return k;
}

void cb_offload_cancel(struct cb_offload *o)
{
    pthread_mutex_lock(&o->mutex);
    o->job.active = 0;
    pthread_mutex_unlock(&o->mutex);
}

void cb_offload_note_here(struct cb_offload *o, uint32_t rows, double ns)
{
    pthread_mutex_lock(&o->mutex);
    cb_cost_note(o->sched.here, rows, ns);
    pthread_mutex_unlock(&o->mutex);
}
#else
typedef int cb_offload_client_is_empty_here;
#endif

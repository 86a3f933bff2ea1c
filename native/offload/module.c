/* module.c — see module.h. One thread: read, compute, answer. The board reads
 * while it writes, so a blocked answer here cannot lock both up; a board that
 * stops reading for WRITE_MS is gone. */
#if !defined(_WIN32)
#include "offload/module.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/os.h"
#include "model/forward.h"
#include "offload/frame.h"
#include "offload/link.h"

#define WINDOW 16u
#define WRITE_MS 10000
#define LOOK_MS 200   /* how often stop is asked */
#define STALE_MS 1000 /* a half frame this old is dropped */
#define IDLE_MS 2000  /* a board this quiet makes room for one that waits */

struct module {
    struct cb_engine *e;
    const struct cb_module_options *opt;
    struct cb_module_stats *stats;
    struct cb_hello me;
    struct cb_link link;
    struct cb_frames rx;
    uint8_t *tx;              /* one frame */
    struct cb_ffn_row *row;   /* [max_row] */
    uint32_t seq, index;      /* next frame's; last EXEC seen */
    int listening;            /* socket on which the next board waits, or -1 */
    int greeted, broken;
    uint64_t arrived_ns;      /* when the EXEC at work was whole */
};

static void note(const struct module *m, const char *what)
{
    if (m->opt->note != NULL)
        m->opt->note(m->opt->ud, what);
}

/* ---- frames out --------------------------------------------------------- */

static int stopped(const struct module *m)
{
    return m->opt->stop != NULL && m->opt->stop(m->opt->ud);
}

static void send_frame(struct module *m, enum cb_frame_type type, uint32_t ref, uint32_t len)
{
    uint32_t n = cb_frame_seal(m->tx, type, m->seq++, ref, len), at = 0;
    uint64_t until = cb_os_now_ns() + (uint64_t)WRITE_MS * 1000000u;
    while (!m->broken && at < n) {
        long done = cb_link_write(&m->link, m->tx + at, n - at);
        at += done > 0 ? (uint32_t)done : 0;
        if (done == 0)
            (void)cb_link_wait(&m->link, CB_LINK_WRITE, -1, LOOK_MS);
        if (done < 0 || stopped(m) || cb_os_now_ns() > until)
            m->broken = at < n;
    }
    m->stats->bytes_out += at;
}

static uint8_t *payload(struct module *m)
{
    return m->tx + CB_FRAME_HEAD;
}

static void send_error(struct module *m, uint32_t ref, uint32_t code, const char *text)
{
    size_t n = strlen(text);
    n = n < 200 ? n : 200;
    cb_put16(payload(m), code);
    cb_put16(payload(m) + 2, 0);
    memcpy(payload(m) + 4, text, n);
    send_frame(m, CB_FRAME_ERROR, ref, (uint32_t)n + 4);
}

/* ---- frames in ---------------------------------------------------------- */

static void refuse(struct module *m, uint32_t ref, uint32_t code, int question)
{
    char text[160];
    if (!question) {
        m->greeted = 0;
        m->stats->refused++;
        snprintf(text, sizeof text, "refused: the board has %s", cb_offload_code_name(code));
        note(m, text);
    }
    snprintf(text, sizeof text, "this is %.63s, protocol %u", m->e->rel->m.name,
             CB_OFFLOAD_PROTOCOL);
    send_error(m, ref, code, text);
}

static void on_hello(struct module *m, const struct cb_frame *f)
{
    static const uint8_t nobody[16]; /* as a model id: which model is here? */
    struct cb_hello board;
    struct cb_err err = {0, ""};
    char text[160];
    if (cb_hello_get(&board, f->payload, f->len, &err) != 0) {
        m->greeted = 0;
        send_error(m, f->seq, CB_OFF_MALFORMED, err.msg);
        return;
    }
    uint32_t code = cb_hello_differs(&m->me, &board);
    if (code != CB_OFF_OK) {
        refuse(m, f->seq, code, code == CB_OFF_MODEL && memcmp(board.model_id, nobody, 16) == 0);
        return;
    }
    m->index = 0;
    m->greeted = 1;
    cb_hello_put(payload(m), &m->me);
    send_frame(m, CB_FRAME_HELLO, f->seq, CB_HELLO_BYTES);
    snprintf(text, sizeof text, "greeted: %s", board.who);
    note(m, text);
}

static float float_at(const uint8_t *p)
{
    float v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Sum of n quants; *low gets whether a -128 is among them, which no board makes
 * and the kernels rely on. */
static int32_t sum_of(const int8_t *q, uint32_t n, int *low)
{
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += q[i];
        *low |= q[i] == INT8_MIN;
    }
    return sum;
}

/* Whether a form holds what a quantiser makes: the kernels compute with the sums. */
static int sound(const uint8_t *p, uint32_t act, size_t bytes)
{
    int bad = 0;
    if (act == CB_ACT_F32)
        for (size_t i = 0; i < bytes; i += 4)
            bad |= !isfinite(float_at(p + i));
    if (act == CB_ACT_Q8_0)
        for (size_t i = 0; i < bytes; i += sizeof(struct cb_q8_0)) {
            struct cb_q8_0 b;
            memcpy(&b, p + i, sizeof b);
            bad |= !isfinite(b.d) || sum_of(b.q, 32, &bad) != b.sum;
        }
    if (act == CB_ACT_Q8_K)
        for (size_t i = 0; i < bytes; i += sizeof(struct cb_q8_k)) {
            struct cb_q8_k b;
            memcpy(&b, p + i, sizeof b);
            bad |= !isfinite(b.d);
            for (uint32_t k = 0; k < 16; k++)
                bad |= sum_of(b.q + 16 * k, 16, &bad) != b.bsum[k];
        }
    return !bad;
}

/* The activations into w.xn and w.in. */
static int take_acts(struct module *m, const struct cb_exec *x, struct cb_err *err)
{
    struct cb_work *w = &m->e->w;
    uint32_t n = m->me.n_embd;
    const uint8_t *p = x->acts;
    for (uint32_t t = 0; t < x->n_token; t++) {
        uint8_t *const to[] = {(uint8_t *)(w->xn + (size_t)t * cb_pad_group(n)),
                               w->in.q8_0 + t * w->in.q8_0_bytes, w->in.q8_k + t * w->in.q8_k_bytes};
        for (uint32_t act = CB_ACT_F32; act <= CB_ACT_Q8_K; act++) {
            if (!(x->forms & 1u << act))
                continue;
            size_t bytes = cb_act_bytes((enum cb_act)act, n);
            if (!sound(p, act, bytes))
                return cb_fail(err, CB_EFORMAT, "token %u: no quantiser makes this", t);
            memcpy(to[act], p, bytes);
            p += bytes;
        }
    }
    return 0;
}

/* Rows with experts of this layer, activations in every form that they want. */
static int take_rows(struct module *m, const struct cb_exec *x, struct cb_err *err)
{
    const struct cb_manifest *mf = &m->e->rel->m;
    if (x->layer < mf->n_dense_layer || x->layer >= mf->n_layer)
        return cb_fail(err, CB_EFORMAT, "layer %u has no experts", x->layer);
    if (x->n_row > m->me.max_row || x->n_token > m->me.max_token)
        return cb_fail(err, CB_EFORMAT, "%u rows of %u tokens; at most %u of %u", x->n_row,
                       x->n_token, m->me.max_row, m->me.max_token);
    for (uint32_t i = 0; i < x->n_row; i++) {
        cb_exec_row(x, i, &m->row[i].expert, &m->row[i].token);
        const struct cb_record *r = cb_store_record(&m->e->store, x->layer - mf->n_dense_layer,
                                                    m->row[i].expert);
        uint32_t wants = 1u << cb_type_info(r->part_type[0])->act |
                         1u << cb_type_info(r->part_type[1])->act;
        if ((wants & ~x->forms) != 0)
            return cb_fail(err, CB_EFORMAT, "expert %u wants forms %u, there are %u",
                           m->row[i].expert, wants, x->forms);
    }
    return take_acts(m, x, err);
}

static void send_rows(struct module *m, uint32_t ref, uint32_t n_row)
{
    uint32_t d = m->me.n_embd, stride = cb_pad_group(d);
    uint32_t most = (m->me.max_payload - CB_RESULT_HEAD) / (d * 4);
    for (uint32_t first = 0; first < n_row && !m->broken;) {
        uint32_t n = n_row - first < most ? n_row - first : most;
        uint64_t us = (cb_os_now_ns() - m->arrived_ns) / 1000;
        uint8_t *p = payload(m);
        memset(p, 0, CB_RESULT_HEAD);
        cb_put16(p, first);
        cb_put16(p + 2, n);
        cb_put32(p + 4, us < UINT32_MAX ? (uint32_t)us : UINT32_MAX);
        for (uint32_t i = 0; i < n; i++)
            memcpy(p + CB_RESULT_HEAD + (size_t)i * d * 4,
                   m->e->w.out + (size_t)(first + i) * stride, (size_t)d * 4);
        send_frame(m, CB_FRAME_RESULT, ref, CB_RESULT_HEAD + n * d * 4);
        first += n;
    }
}

static void send_credit(struct module *m, uint32_t ref)
{
    cb_put32(payload(m), m->index + WINDOW);
    send_frame(m, CB_FRAME_CREDIT, ref, 4);
}

static void on_exec(struct module *m, const struct cb_frame *f)
{
    struct cb_exec x;
    struct cb_err err = {0, ""};
    if (!m->greeted) {
        send_error(m, f->seq, CB_OFF_STATE, "EXEC before HELLO");
        return;
    }
    m->arrived_ns = cb_os_now_ns();
    int rc = cb_exec_get(&x, f, m->me.n_embd, m->me.n_expert, &err);
    if (rc == 0)
        rc = take_rows(m, &x, &err);
    if (rc == 0) {
        m->index = (int32_t)(x.index - m->index) > 0 ? x.index : m->index;
        rc = cb_ffn_rows(m->e, x.layer, x.n_token, m->row, x.n_row, &err);
    }
    m->stats->execs++;
    m->stats->ns_busy += cb_os_now_ns() - m->arrived_ns;
    if (rc != 0) {
        m->stats->failed++;
        send_error(m, f->seq, rc == CB_EEXPERT ? CB_OFF_EXPERT : CB_OFF_MALFORMED, err.msg);
        return;
    }
    m->stats->rows += x.n_row;
    send_rows(m, f->seq, x.n_row);
    send_credit(m, f->seq);
}

static void on_ping(struct module *m, const struct cb_frame *f)
{
    if (f->len > m->me.max_payload - 4) {
        send_error(m, f->seq, CB_OFF_TOO_LARGE, "PING");
        return;
    }
    cb_put32(payload(m), m->index + WINDOW);
    memcpy(payload(m) + 4, f->payload, f->len);
    send_frame(m, CB_FRAME_PONG, f->seq, f->len + 4);
}

static void on_frame(struct module *m, const struct cb_frame *f)
{
    switch (f->type) {
    case CB_FRAME_HELLO:
        on_hello(m, f);
        break;
    case CB_FRAME_EXEC:
        on_exec(m, f);
        break;
    case CB_FRAME_PING:
        on_ping(m, f);
        break;
    default:
        send_error(m, f->seq, CB_OFF_STATE, "not for a module");
    }
}

/* Bytes before HELLO that are no frame, on a socket, which loses none: no board
 * (a browser, say, that a page made send a frame inside of something else). */
static int stray(const struct module *m, uint64_t garbage_before)
{
    return m->listening >= 0 && !m->greeted && m->rx.garbage != garbage_before;
}

/* One connection, until it ends or stop. */
static void serve_link(struct module *m)
{
    uint64_t heard = cb_os_now_ns(), before = m->stats->bytes_in, garbage = m->rx.garbage;
    m->greeted = m->broken = 0;
    cb_frames_reset(&m->rx);
    while (!m->broken && !stopped(m)) {
        struct cb_frame f;
        uint32_t room;
        uint8_t *to = cb_frames_room(&m->rx, &room);
        long n = cb_link_read(&m->link, to, room);
        if (n < 0)
            break;
        if (n == 0) {
            uint64_t quiet_ms = (cb_os_now_ns() - heard) / 1000000u;
            if (quiet_ms > STALE_MS)
                cb_frames_reset(&m->rx);
            int next = quiet_ms > IDLE_MS ? m->listening : -1;
            if (cb_link_wait(&m->link, CB_LINK_READ, next, LOOK_MS) & CB_LINK_WOKEN)
                break; /* a board that lost its power never says so */
            continue;
        }
        heard = cb_os_now_ns();
        m->stats->bytes_in += (uint64_t)n;
        cb_frames_took(&m->rx, (uint32_t)n);
        while (!m->broken && cb_frames_next(&m->rx, &f)) {
            m->broken = stray(m, garbage);
            if (!m->broken)
                on_frame(m, &f);
        }
        m->broken |= stray(m, garbage);
    }
    m->stats->crc = m->rx.bad_crc;
    m->stats->garbage = m->rx.garbage;
    cb_link_close(&m->link);
    if (m->stats->bytes_in > before)
        note(m, "gone");
}

/* ---- set-up ------------------------------------------------------------- */

static uint8_t hex_digit(char c)
{
    return (uint8_t)(c >= 'a' ? c - 'a' + 10 : c - '0');
}

static int identify(struct module *m, struct cb_err *err)
{
    const struct cb_manifest *mf = &m->e->rel->m;
    struct cb_hello *h = &m->me;
    uint64_t rows = (uint64_t)m->e->opt.batch * m->e->used_max;
    uint64_t bytes = cb_offload_payload(mf->n_embd, m->e->opt.batch, rows);
    if (cb_manifest_moe_layers(mf) == 0)
        return cb_fail(err, CB_EINVAL, "%s has no experts to compute for others", mf->name);
    if (strlen(mf->golden) != 64)
        return cb_fail(err, CB_EGOLDEN, "%s promises no golden; convert it again", mf->name);
    memset(h, 0, sizeof *h);
    h->protocol = CB_OFFLOAD_PROTOCOL;
    h->role = CB_HELLO_MODULE;
    memcpy(h->model_id, mf->model_id, 16);
    for (int i = 0; i < 32; i++)
        h->golden[i] = (uint8_t)(hex_digit(mf->golden[2 * i]) << 4 |
                                 hex_digit(mf->golden[2 * i + 1]));
    h->n_layer = mf->n_layer;
    h->first_layer = mf->n_dense_layer;
    h->n_embd = mf->n_embd;
    h->n_expert = mf->n_expert;
    h->n_used = mf->n_used;
    h->n_expert_ff = mf->n_expert_ff;
    h->max_payload = (uint32_t)(bytes < CB_FRAME_PAYLOAD_MAX ? bytes : CB_FRAME_PAYLOAD_MAX);
    h->window = WINDOW;
    h->max_token = m->e->opt.batch;
    h->max_row = (uint32_t)rows;
    snprintf(h->who, sizeof h->who, "colibri %s %.15s", CB_VERSION, m->e->kern.isa);
    return 0;
}

/* Sleeps without a clock of its own: nothing is readable on no descriptor. */
static void pause_ms(int ms)
{
    const struct cb_link none = {.fd = -1};
    (void)cb_link_wait(&none, 0, -1, ms);
}

static int serve_device(struct module *m, struct cb_err *err)
{
    struct cb_link_addr a;
    int rc = cb_link_parse(&a, m->opt->device, err);
    if (rc == 0 && a.kind != CB_LINK_TTY)
        rc = cb_fail(err, CB_EINVAL, "--device wants a serial device; %s goes with --listen",
                     m->opt->device);
    if (rc == 0 && (rc = cb_link_dial(&m->link, &a, -1, 0, err)) == 0)
        note(m, "listening");
    while (rc == 0) {
        m->stats->connections++;
        serve_link(m);
        if (m->opt->once || stopped(m))
            break;
        do /* unplugged: it may come back */
            pause_ms(LOOK_MS);
        while (!stopped(m) && cb_link_dial(&m->link, &a, -1, 0, NULL) != 0);
        if (m->link.fd < 0)
            break;
    }
    return rc;
}

static int serve_socket(struct module *m, struct cb_err *err)
{
    struct cb_link_addr a;
    int rc = cb_link_parse(&a, m->opt->listen, err);
    if (rc == 0)
        rc = cb_link_listen(&m->listening, &a, err);
    if (rc == 0)
        note(m, "listening");
    while (rc == 0 && !stopped(m)) {
        rc = cb_link_accept(&m->link, m->listening, LOOK_MS, err);
        if (rc <= 0)
            continue;
        rc = 0;
        m->stats->connections++;
        serve_link(m);
        if (m->opt->once)
            break;
    }
    cb_link_unlisten(m->listening, &a);
    return rc;
}

int cb_module_serve(struct cb_engine *e, const struct cb_module_options *opt,
                    struct cb_module_stats *stats, struct cb_err *err)
{
    struct module m;
    memset(&m, 0, sizeof m);
    memset(stats, 0, sizeof *stats);
    m.e = e;
    m.opt = opt;
    m.stats = stats;
    m.link.fd = m.listening = -1;
    m.seq = 1;
    int rc = identify(&m, err);
    if (rc != 0)
        return rc;
    uint64_t rx = CB_FRAMES_CAP(m.me.max_payload), tx = (uint64_t)m.me.max_payload + CB_FRAME_EXTRA;
    uint64_t rows = (uint64_t)m.me.max_row * sizeof *m.row, bytes = rows + rx + tx;
    uint8_t *block = cb_os_map(bytes, 0, err);
    if (block == NULL)
        return CB_EIO;
    m.row = (struct cb_ffn_row *)(void *)block;
    m.tx = block + rows;
    cb_frames_init(&m.rx, block + rows + tx, (uint32_t)rx, m.me.max_payload);
    rc = opt->device != NULL ? serve_device(&m, err) : serve_socket(&m, err);
    cb_os_unmap(block, bytes);
    return rc;
}
#else
typedef int cb_module_is_empty_here;
#endif

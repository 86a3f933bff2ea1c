/* io.c — the thread that owns the link: connect, greet, measure, read; when it
 * fails, a pause that doubles, and again. The mutex is held except in poll. */
#if !defined(_WIN32)
#include "offload/internal.h"

#include <stdio.h>
#include <string.h>

#include "core/os.h"
#include "model/engine.h"

#define MS UINT64_C(1000000)
#define CONNECT_MS 2000
#define ANSWER_MS 2000u        /* for HELLO and PING */
#define PAUSE_FIRST (100 * MS)
#define PAUSE_MOST (10000 * MS)
#define PAUSE_REFUSED (2000 * MS)
#define READ_ROUNDS 16         /* reads before others get a turn */

/* ---- frames out --------------------------------------------------------- */

uint8_t *cb_off_room(struct cb_offload *o, uint32_t len)
{
    if (o->tx_at == o->tx_end)
        o->tx_at = o->tx_end = 0;
    if (o->tx_cap - o->tx_end < CB_FRAME_EXTRA || o->tx_cap - o->tx_end - CB_FRAME_EXTRA < len)
        return NULL;
    return o->tx + o->tx_end + CB_FRAME_HEAD;
}

uint32_t cb_off_put(struct cb_offload *o, enum cb_frame_type type, uint32_t ref, uint32_t len)
{
    uint32_t seq = o->seq++;
    o->seq += o->seq == 0;
    o->tx_end += cb_frame_seal(o->tx + o->tx_end, type, seq, ref, len);
    return seq;
}

static void lost(struct cb_offload *o, const char *why);

void cb_off_flush(struct cb_offload *o)
{
    while (o->tx_at < o->tx_end) {
        long n = cb_link_write(&o->link, o->tx + o->tx_at, o->tx_end - o->tx_at);
        if (n == 0)
            return;
        if (n < 0) {
            lost(o, "the link ended while writing");
            return;
        }
        o->tx_at += (uint32_t)n;
        o->n.offload_bytes_out += (uint64_t)n;
    }
}

/* ---- trouble ------------------------------------------------------------ */

static void pause_longer(struct cb_offload *o, uint64_t least)
{
    o->pause_ns = o->pause_ns < least ? least : o->pause_ns * 2;
    if (o->pause_ns > PAUSE_MOST)
        o->pause_ns = PAUSE_MOST;
    o->retry_ns = cb_os_now_ns() + o->pause_ns;
    o->good = 0;
}

static void fail_job(struct cb_offload *o)
{
    if (o->job.active)
        o->job.failed = 1;
    pthread_cond_broadcast(&o->arrived);
}

static void hang_up(struct cb_offload *o, const char *why, uint64_t least_pause)
{
    /* The descriptor goes when the thread is out of poll: it closes it there. */
    o->state = CB_OFFLOAD_DOWN;
    o->again = 1;
    o->tx_at = o->tx_end = 0;
    snprintf(o->why, sizeof o->why, "%.150s", why);
    pause_longer(o, least_pause);
    fail_job(o);
    cb_wake_up(o->wake);
}

static void lost(struct cb_offload *o, const char *why)
{
    if (o->again)
        return;
    o->n.offload_cut++;
    hang_up(o, why, PAUSE_FIRST);
}

void cb_off_demote(struct cb_offload *o, const char *why)
{
    if (o->state != CB_OFFLOAD_UP)
        return;
    o->state = CB_OFFLOAD_DEMOTED;
    if (why != NULL)
        snprintf(o->why, sizeof o->why, "%.150s", why);
    pause_longer(o, PAUSE_FIRST);
    cb_wake_up(o->wake);
}

/* ---- frames in ---------------------------------------------------------- */

static struct cb_offload_sent *find_exec(struct cb_offload *o, uint32_t seq)
{
    for (uint32_t i = 0; o->job.active && i < o->job.n_exec; i++)
        if (o->job.exec[i].seq == seq)
            return &o->job.exec[i];
    return NULL;
}

static float *place(struct cb_offload *o, const struct cb_offload_row *row)
{
    if (o->job.trial)
        return o->trial;
    return o->e->w.out + (size_t)row->out * cb_pad_group(o->me.n_embd);
}

/* Whether n little-endian float32 are numbers that an FFN may add to a residual:
 * an infinity, or squares that sum to one, would fail the whole token, so a
 * module's are not believed before they were computed here as well. Below 2^40 a
 * hundred layers of them stay far from there; no trained model comes near. */
static int usable(const uint8_t *p, size_t n)
{
    uint32_t top = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t e = (uint32_t)(p[4 * i + 3] & 0x7f) << 1 | p[4 * i + 2] >> 7;
        top = e > top ? e : top;
    }
    return top < 127 + 40;
}

/* Its numbers are wrong: it is tried again before it is trusted again. */
static void distrust(struct cb_offload *o, const char *why)
{
    o->n.offload_wrong++;
    o->trial_due = 1;
    o->pause_ns = PAUSE_MOST / 2; /* doubled now */
    fail_job(o);
    cb_off_demote(o, why);
}

static void on_result(struct cb_offload *o, const struct cb_frame *f)
{
    struct cb_result r;
    struct cb_err err;
    struct cb_offload_sent *x = find_exec(o, f->ref);
    if (x == NULL) {
        o->n.offload_dropped++; /* after its deadline */
        return;
    }
    if (cb_result_get(&r, f, o->me.n_embd, &err) != 0 || r.first >= x->n || r.n > x->n - r.first) {
        o->n.offload_errors++;
        return;
    }
    if (!usable(r.rows, (size_t)r.n * o->me.n_embd)) {
        distrust(o, "the module returns what no expert does");
        return;
    }
    x->busy_us = r.busy_us;
    uint32_t before = o->job.left;
    for (uint32_t i = 0; i < r.n; i++) {
        struct cb_offload_row *row = &o->row[x->first + r.first + i];
        memcpy(place(o, row), r.rows + (size_t)i * o->me.n_embd * 4, (size_t)o->me.n_embd * 4);
        o->job.left -= !row->done;
        row->done = 1;
    }
    o->n.offload_dropped += o->job.left == before; /* rows that had come already */
    if (o->job.left == 0 && before > 0) {
        o->job.done_ns = cb_os_now_ns();
        pthread_cond_broadcast(&o->arrived);
    }
}

static void on_error(struct cb_offload *o, const struct cb_frame *f)
{
    char text[129];
    uint32_t code = f->len >= 4 ? cb_get16(f->payload) : CB_OFF_MALFORMED;
    uint32_t n = f->len > 4 ? f->len - 4 : 0;
    n = n < sizeof text - 1 ? n : (uint32_t)sizeof text - 1;
    for (uint32_t i = 0; i < n; i++) {
        uint8_t c = f->payload[4 + i];
        text[i] = c >= 32 && c < 127 ? (char)c : '?';
    }
    text[n] = '\0';
    snprintf(o->why, sizeof o->why, "the module says: %s: %s", cb_offload_code_name(code), text);
    o->n.offload_errors++;
    if (o->await != 0 && f->ref == o->await) {
        o->await_got = CB_FRAME_ERROR;
        o->await_code = code;
    } else if (find_exec(o, f->ref) != NULL) {
        fail_job(o);
    }
}

static void on_limit(struct cb_offload *o, const struct cb_frame *f)
{
    if (f->len >= 4 && (int32_t)(cb_get32(f->payload) - o->limit) > 0)
        o->limit = cb_get32(f->payload);
}

static void on_frame(struct cb_offload *o, const struct cb_frame *f)
{
    int asked = o->await != 0 && f->ref == o->await && f->type == o->await_type;
    switch (f->type) {
    case CB_FRAME_HELLO:
        if (asked && cb_hello_get(&o->peer, f->payload, f->len, NULL) == 0)
            o->await_got = CB_FRAME_HELLO;
        o->n.offload_errors += !asked;
        break;
    case CB_FRAME_PONG:
        on_limit(o, f);
        if (asked)
            o->await_got = CB_FRAME_PONG;
        break;
    case CB_FRAME_CREDIT:
        on_limit(o, f);
        break;
    case CB_FRAME_RESULT:
        on_result(o, f);
        break;
    case CB_FRAME_ERROR:
        on_error(o, f);
        break;
    default:
        o->n.offload_errors++;
    }
}

static void read_some(struct cb_offload *o)
{
    struct cb_frame f;
    for (int i = 0; i < READ_ROUNDS && !o->again; i++) {
        uint32_t room;
        uint8_t *to = cb_frames_room(&o->rx, &room);
        long n = cb_link_read(&o->link, to, room);
        if (n < 0)
            lost(o, "the module went away");
        if (n <= 0)
            return;
        o->n.offload_bytes_in += (uint64_t)n;
        cb_frames_took(&o->rx, (uint32_t)n);
        while (cb_frames_next(&o->rx, &f))
            on_frame(o, &f);
    }
}

/* Moves bytes both ways; waits at most until until_ns for something to do. */
static void pump(struct cb_offload *o, uint64_t until_ns)
{
    uint64_t now = cb_os_now_ns();
    uint64_t ms = until_ns > now ? (until_ns - now + MS - 1) / MS : 0;
    int timeout = until_ns == UINT64_MAX ? -1 : ms > 60000 ? 60000 : (int)ms;
    int want = CB_LINK_READ | (o->tx_at < o->tx_end ? CB_LINK_WRITE : 0);
    pthread_mutex_unlock(&o->mutex);
    int got = cb_link_wait(&o->link, want, o->wake[0], timeout);
    pthread_mutex_lock(&o->mutex);
    if (got & CB_LINK_WOKEN)
        cb_wake_clear(o->wake);
    if (!o->again && (got & CB_LINK_WRITE))
        cb_off_flush(o);
    if (!o->again && (got & CB_LINK_READ))
        read_some(o);
}

/* Sends what was put with this seq and waits for an answer of this type, or an
 * ERROR: which it was, 0 = none. */
static uint32_t answer(struct cb_offload *o, uint32_t seq, enum cb_frame_type type)
{
    uint64_t until = cb_os_now_ns() + ANSWER_MS * MS;
    o->await = seq;
    o->await_type = type;
    o->await_got = 0;
    cb_off_flush(o);
    while (o->await_got == 0 && !o->again && !o->stop && cb_os_now_ns() < until)
        pump(o, until);
    o->await = 0;
    return o->again ? 0 : o->await_got;
}

/* ---- greeting and measuring --------------------------------------------- */

/* Round trip of a PING with n bytes, ns; 0 = no answer. */
static uint64_t ping(struct cb_offload *o, uint32_t n)
{
    uint8_t *p = cb_off_room(o, n);
    if (p == NULL)
        return 0;
    memset(p, 0x5a, n);
    uint64_t start = cb_os_now_ns();
    return answer(o, cb_off_put(o, CB_FRAME_PING, 0, n), CB_FRAME_PONG) == CB_FRAME_PONG
               ? cb_os_now_ns() - start
               : 0;
}

static void refuse(struct cb_offload *o, uint32_t code)
{
    char why[160];
    if (code == CB_OFF_VERSION)
        snprintf(why, sizeof why, "the module speaks protocol version %u, not %u",
                 o->peer.protocol, CB_OFFLOAD_PROTOCOL);
    else
        snprintf(why, sizeof why, "the module has %s", cb_offload_code_name(code));
    o->n.offload_refused++;
    hang_up(o, why, PAUSE_REFUSED);
}

static int greet(struct cb_offload *o)
{
    uint8_t *p = cb_off_room(o, CB_HELLO_BYTES);
    if (p == NULL)
        return 0;
    cb_hello_put(p, &o->me);
    uint32_t got = answer(o, cb_off_put(o, CB_FRAME_HELLO, 0, CB_HELLO_BYTES), CB_FRAME_HELLO);
    if (got == CB_FRAME_ERROR && o->await_code <= CB_OFF_GEOMETRY) {
        char why[160];
        snprintf(why, sizeof why, "%s", o->why);
        o->n.offload_refused++;
        hang_up(o, why, PAUSE_REFUSED);
        return 0;
    }
    if (got != CB_FRAME_HELLO) {
        if (!o->again && !o->stop)
            hang_up(o, "the module does not answer HELLO", PAUSE_FIRST);
        return 0;
    }
    uint32_t differs = cb_hello_differs(&o->me, &o->peer);
    uint64_t row = CB_RESULT_HEAD + (uint64_t)o->me.n_embd * 4;
    if (differs == CB_OFF_OK && (o->peer.window == 0 || o->peer.max_payload < row))
        differs = CB_OFF_TOO_LARGE;
    if (differs != CB_OFF_OK) {
        refuse(o, differs);
        return 0;
    }
    o->exec_index = 0;
    o->limit = o->peer.window < INT32_MAX ? o->peer.window : INT32_MAX; /* compared as signed */
    o->starved_ns = 0;
    return 1;
}

/* Latency from small PINGs, bandwidth from larger ones as long as they are quick. */
static int measure(struct cb_offload *o)
{
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < 4; i++) {
        uint64_t t = ping(o, 0);
        if (t == 0)
            return 0;
        best = t < best ? t : best;
    }
    o->sched.latency = (double)best;
    for (uint32_t n = 1024; n <= CB_OFFLOAD_PING && n <= o->peer.max_payload - 16; n *= 4) {
        uint64_t t = ping(o, n);
        if (t == 0)
            return 0;
        double byte = t > best ? (double)(t - best) / (2.0 * n) : 0.01;
        o->sched.byte = byte;
        if (t > 200 * MS)
            break;
    }
    return 1;
}

static void connect_now(struct cb_offload *o)
{
    struct cb_err err = {0, ""};
    struct cb_link link;
    pthread_mutex_unlock(&o->mutex);
    int rc = cb_link_dial(&link, &o->addr, o->wake[0], CONNECT_MS, &err);
    pthread_mutex_lock(&o->mutex);
    if (rc != 0) {
        snprintf(o->why, sizeof o->why, "%.150s", err.msg);
        pause_longer(o, PAUSE_FIRST);
        return;
    }
    o->link = link;
    o->again = 0;
    cb_frames_reset(&o->rx);
    o->tx_at = o->tx_end = 0;
    if (!greet(o))
        return;
    if (!measure(o)) {
        if (!o->again && !o->stop)
            hang_up(o, "the module does not answer PING", PAUSE_FIRST);
        return;
    }
    o->n.offload_connects++;
    o->trial_due = 1;
    o->state = CB_OFFLOAD_UP;
}

/* A demoted link proves itself by PINGs; what was on the way is long dropped. */
static void recover(struct cb_offload *o)
{
    if (measure(o))
        o->state = CB_OFFLOAD_UP;
    else if (!o->again && !o->stop)
        lost(o, "the module does not answer any more");
}

/* Closing a serial device may wait for it: not with the mutex held. */
static void close_link(struct cb_offload *o)
{
    struct cb_link link = o->link;
    o->link.fd = -1;
    pthread_mutex_unlock(&o->mutex);
    cb_link_close(&link);
    pthread_mutex_lock(&o->mutex);
}

void *cb_off_thread(void *arg)
{
    struct cb_offload *o = arg;
    pthread_mutex_lock(&o->mutex);
    while (!o->stop) {
        if (o->again && o->link.fd >= 0)
            close_link(o);
        uint64_t now = cb_os_now_ns();
        if (o->link.fd < 0 && now >= o->retry_ns) {
            connect_now(o);
            o->tries++;
            pthread_cond_broadcast(&o->arrived);
        } else if (o->state == CB_OFFLOAD_DEMOTED && now >= o->retry_ns) {
            recover(o);
        } else {
            pump(o, o->state == CB_OFFLOAD_UP ? UINT64_MAX : o->retry_ns);
        }
    }
    close_link(o);
    pthread_mutex_unlock(&o->mutex);
    return NULL;
}
#else
typedef int cb_offload_io_is_empty_here;
#endif

/* conn.c — one connection: bytes in, requests, bytes out, and its time-outs. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/os.h"
#include "serve/server.h"

#define SECOND UINT64_C(1000000000)
#define LINGER_NS (2 * SECOND)

static void enter(struct cb_conn *c, enum cb_conn_state state)
{
    c->state = state;
    c->t_state = c->t_moved = cb_os_now_ns();
}

void cb_conn_open(struct cb_server *s, struct cb_conn *c, int fd, int local)
{
    s->m.accepted++;
    c->fd = fd;
    c->local = local;
    c->n_in = 0;
    c->out.n = c->sent = 0;
    c->out.full = 0;
    c->fixed = NULL;
    c->n_fixed = 0;
    c->req = NULL;
    c->chunked = c->keep = c->blank = 0;
    enter(c, CB_CONN_HEAD);
    c->t_busy = c->t_state;
}

/* A request whose client is gone goes on only until the worker sees that;
 * the server's sweep frees the slot then. */
void cb_conn_close(struct cb_server *s, struct cb_conn *c)
{
    if (c->req != NULL) {
        s->m.cancelled++;
        c->req->orphan = 1;
        cb_queue_cancel(s, c->req);
        c->req = NULL;
    }
    close(c->fd);
    c->fd = -1;
    c->state = CB_CONN_FREE;
}

/* The client is told why and can read it before the connection goes: data that
 * it still sends is read and dropped for a while. */
static void linger(struct cb_server *s, struct cb_conn *c)
{
    if (shutdown(c->fd, SHUT_WR) != 0) {
        cb_conn_close(s, c);
        return;
    }
    enter(c, CB_CONN_LINGER);
}

static void answer_refusal(struct cb_server *s, struct cb_conn *c, int status, const char *why)
{
    struct cb_refusal no;
    c->keep = 0;
    c->endpoint = CB_EP_OTHER;
    c->http.method = CB_HTTP_GET; /* with a body */
    s->m.malformed += status != 408; /* that is counted among the timeouts */
    cb_refuse(&no, status, "bad_request", NULL, "%s", why);
    cb_reply_refusal(s, c, &no);
    enter(c, CB_CONN_ANSWER);
}

/* The request is taken in: what follows it is the next one's. */
static void consume(struct cb_conn *c)
{
    uint32_t n = c->http.bytes + (uint32_t)c->http.length;
    n = n < c->n_in ? n : c->n_in;
    memmove(c->in, c->in + n, c->n_in - n);
    c->n_in -= n;
}

/* One empty line before a request is no mistake (RFC 9112, 2.2) and no beginning
 * of one either: no clock runs for it. The parser refuses a second one. */
static void skip_blank(struct cb_conn *c)
{
    if (c->blank || c->n_in < 2 || memcmp(c->in, "\r\n", 2) != 0)
        return;
    c->blank = 1;
    c->n_in -= 2;
    memmove(c->in, c->in + 2, c->n_in);
}

static void head(struct cb_server *s, struct cb_conn *c)
{
    const char *why = "";
    skip_blank(c);
    if (c->n_in == 0)
        return;
    int rc = cb_http_parse(&c->http, c->in, c->n_in, &why);
    if (rc == 0)
        return;
    if (rc < 0) {
        answer_refusal(s, c, -rc, why);
        return;
    }
    if (cb_route_head(s, c) != 0) {
        if (c->keep)
            consume(c);
        enter(c, CB_CONN_ANSWER);
        return;
    }
    if (c->http.expect_continue && c->http.minor == 1 && c->n_in < c->http.bytes + c->http.length)
        cb_buf_str(&c->out, "HTTP/1.1 100 Continue\r\n\r\n");
    enter(c, CB_CONN_BODY);
}

static void body(struct cb_server *s, struct cb_conn *c)
{
    if (c->n_in < c->http.bytes + c->http.length)
        return;
    enter(c, CB_CONN_ANSWER);
    cb_route_request(s, c);
    consume(c);
}

static int out_empty(const struct cb_conn *c)
{
    return c->sent == c->out.n && c->n_fixed == 0;
}

/* The answer is out: the slot is free again, the next request may come. */
static void finish(struct cb_server *s, struct cb_conn *c)
{
    int computed = c->req != NULL;
    s->m.answers[c->endpoint][c->status / 100 < 6 ? c->status / 100 : 0]++;
    if (computed) {
        struct cb_req *r = c->req;
        c->req = NULL;
        cb_metrics_end(s, r, r->refusal.status != 0 ? r->refusal.status : c->status);
        cb_queue_free(s, r);
    }
    c->chunked = c->blank = 0;
    if (!c->keep || s->draining)
        linger(s, c);
    else
        enter(c, CB_CONN_HEAD);
    if (computed)
        c->t_busy = c->t_state;
}

static int send_some(struct cb_server *s, struct cb_conn *c, const char *p, size_t n, size_t *done)
{
    ssize_t k = send(c->fd, p, n, MSG_NOSIGNAL);
    if (k > 0) {
        *done = (size_t)k;
        c->t_moved = cb_os_now_ns();
        return 1;
    }
    if (k < 0 && errno == EINTR)
        return 1;
    if (k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return 0;
    cb_conn_close(s, c);
    return 0;
}

void cb_conn_write(struct cb_server *s, struct cb_conn *c)
{
    size_t done = 0;
    while (c->fd >= 0 && c->sent < c->out.n) {
        if (!send_some(s, c, c->out.p + c->sent, c->out.n - c->sent, &done))
            break;
        c->sent += done;
        done = 0;
    }
    if (c->fd >= 0 && c->sent > 0) {
        memmove(c->out.p, c->out.p + c->sent, c->out.n - c->sent);
        c->out.n -= c->sent;
        c->sent = 0;
    }
    while (c->fd >= 0 && c->out.n == 0 && c->n_fixed > 0) {
        if (!send_some(s, c, c->fixed, c->n_fixed, &done))
            break;
        c->fixed += done;
        c->n_fixed -= done;
        done = 0;
    }
}

static void answer(struct cb_server *s, struct cb_conn *c)
{
    int whole = c->req == NULL || cb_pump(s, c);
    if (c->out.full) { /* cannot be: the steps fit the buffer */
        cb_log_say(s->log, "error", "overflow", "an answer did not fit its buffer");
        cb_conn_close(s, c);
        return;
    }
    cb_conn_write(s, c);
    if (c->state == CB_CONN_ANSWER && whole && out_empty(c))
        finish(s, c);
}

/* Everything that can be done without waiting; pipelined requests one by one. */
void cb_conn_progress(struct cb_server *s, struct cb_conn *c)
{
    int again;
    do {
        again = 0;
        if (c->state == CB_CONN_HEAD && c->n_in > 0)
            head(s, c);
        if (c->state == CB_CONN_BODY)
            body(s, c);
        if (c->state == CB_CONN_BODY)
            cb_conn_write(s, c); /* 100 Continue */
        if (c->state == CB_CONN_ANSWER) {
            answer(s, c);
            again = c->state == CB_CONN_HEAD && c->n_in > 0;
        }
    } while (again);
}

void cb_conn_read(struct cb_server *s, struct cb_conn *c)
{
    char drop[4096];
    int dropping = c->state == CB_CONN_LINGER;
    size_t room = dropping ? sizeof drop : c->in_cap - c->n_in;
    if (room == 0)
        return;
    ssize_t n = recv(c->fd, dropping ? drop : c->in + c->n_in, room, 0);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return;
    if (n <= 0) { /* also a half-closed one: who waits for an answer keeps both halves */
        cb_conn_close(s, c);
        return;
    }
    if (dropping)
        return;
    if (c->state == CB_CONN_HEAD && c->n_in == 0) {
        enter(c, CB_CONN_HEAD); /* the clock of this request */
        c->t_busy = c->t_state;
    }
    c->n_in += (uint32_t)n;
}

short cb_conn_events(const struct cb_conn *c)
{
    short events = 0;
    if (c->req != NULL) /* else it would only keep poll() from waiting */
        events |= POLLRDHUP;
    if (c->state == CB_CONN_LINGER || c->n_in < c->in_cap)
        events |= POLLIN;
    if (!out_empty(c))
        events |= POLLOUT;
    return events;
}

/* now was taken before this turn's work: a clock that began in it has run for nothing. */
static uint64_t passed(uint64_t since, uint64_t now)
{
    return now > since ? now - since : 0;
}

/* A reader that stands still, or that takes a few bytes at a time for ever: what
 * a request holds is freed --io-timeout after its deadline at the latest. */
static int too_slow(const struct cb_server *s, const struct cb_conn *c, uint64_t now)
{
    uint64_t io = s->opt.io_s * SECOND;
    if (out_empty(c))
        return 0;
    return passed(c->t_moved, now) > io || passed(c->t_state, now) > s->opt.deadline_s * SECOND + io;
}

void cb_conn_tick(struct cb_server *s, struct cb_conn *c, uint64_t now)
{
    uint64_t io = s->opt.io_s * SECOND, idle = s->opt.idle_s * SECOND;
    if (c->state == CB_CONN_LINGER && passed(c->t_state, now) > LINGER_NS) {
        cb_conn_close(s, c);
    } else if (c->state == CB_CONN_HEAD && c->n_in == 0) {
        if (passed(c->t_state, now) > idle || s->draining)
            cb_conn_close(s, c);
    } else if (c->state == CB_CONN_HEAD || c->state == CB_CONN_BODY) {
        if (passed(c->t_state, now) > io) {
            s->m.timeouts++;
            answer_refusal(s, c, 408, "the request did not come in time");
            cb_conn_progress(s, c);
        }
    } else if (c->state == CB_CONN_ANSWER && too_slow(s, c, now)) {
        s->m.timeouts++;
        cb_conn_close(s, c);
    }
}
#else
typedef int cb_serve_conn_is_posix;
#endif

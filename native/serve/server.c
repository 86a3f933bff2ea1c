/* server.c — the loop around poll(): connections, signals, clocks. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "core/os.h"
#include "serve/server.h"

#define SECOND UINT64_C(1000000000)
#define BACKLOG 64
#define TICK_MS 200
#define IDLE_MS 1000 /* nobody is connected: a board may sleep */
#define SLOW_NS (2 * SECOND)     /* who sends or reads slower may have to make room */
#define ACCEPT_PAUSE_NS (SECOND / 5)
#define SOCKET_BYTES (64 * 1024) /* of the kernel's, one way: a slow reader costs no more */

/* ---- new connections ---------------------------------------------------- */

/* Whether bytes lie in the kernel's buffer: they are a request, too. */
static int has_bytes(const struct cb_conn *c)
{
    char byte;
    return recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

/* How readily a connection gives up its place: idle ones first, then those whose
 * requests have been arriving, or whose answers have been read, for longer than an
 * honest client takes; 0 = never: nothing is taken from who waits for tokens. */
static int rank_place(const struct cb_conn *c, uint64_t now)
{
    if (c->state == CB_CONN_LINGER)
        return 2;
    if (c->state == CB_CONN_HEAD && c->n_in == 0)
        return has_bytes(c) ? 0 : 2;
    if (c->req != NULL)
        return 0;
    return now > c->t_busy && now - c->t_busy > SLOW_NS;
}

static struct cb_conn *free_place(struct cb_server *s)
{
    for (uint32_t i = 0; i < s->opt.connections; i++)
        if (s->conn[i].state == CB_CONN_FREE)
            return &s->conn[i];
    return NULL;
}

/* The place of the connection that has waited longest, or NULL. */
static struct cb_conn *make_place(struct cb_server *s)
{
    struct cb_conn *best = NULL;
    uint64_t now = cb_os_now_ns(), best_since = 0;
    int best_rank = 0;
    for (uint32_t i = 0; i < s->opt.connections; i++) {
        struct cb_conn *c = &s->conn[i];
        int rank = rank_place(c, now);
        uint64_t since = rank == 2 ? c->t_state : c->t_busy;
        if (rank > best_rank || (rank > 0 && rank == best_rank && since < best_since)) {
            best = c;
            best_rank = rank;
            best_since = since;
        }
    }
    if (best_rank == 1)
        s->m.timeouts++;
    if (best != NULL)
        cb_conn_close(s, best);
    return best;
}

/* Unread bytes would make of close() a reset, which takes the answer with it. */
static void turn_away(struct cb_server *s, int fd)
{
    char drop[4096];
    static const char text[] = "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
                               "Content-Length: 0\r\nConnection: close\r\n\r\n";
    s->m.turned_away++;
    for (int i = 0; i < 8 && recv(fd, drop, sizeof drop, MSG_DONTWAIT) > 0; i++) {
    }
    (void)send(fd, text, sizeof text - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(fd);
}

static void take_connections(struct cb_server *s, int which)
{
    for (int n = 0; n < BACKLOG; n++) {
        int on = 1, bytes = SOCKET_BYTES;
        int fd = accept4(s->listen_fd[which], NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) { /* no descriptor, no memory: the socket stays readable meanwhile */
            if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
                s->t_accept = cb_os_now_ns() + ACCEPT_PAUSE_NS;
            return;
        }
        struct cb_conn *c = free_place(s);
        if (c == NULL)
            c = make_place(s);
        if (c == NULL) {
            turn_away(s, fd);
            continue;
        }
        (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
        if (which == 0)
            (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        cb_conn_open(s, c, fd, which == 1);
    }
}

/* ---- signals ------------------------------------------------------------ */

static void begin_drain(struct cb_server *s)
{
    s->draining = 1;
    s->t_drain = cb_os_now_ns();
    cb_notify_stopping(&s->notify);
    cb_log_say(s->log, "info", "stopping", "running requests are finished, others refused");
    for (int i = 0; i < 2; i++) {
        if (s->listen_fd[i] < 0)
            continue;
        if (i == 1)
            cb_serve_leave_unix(s);
        close(s->listen_fd[i]);
        s->listen_fd[i] = -1;
    }
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < s->n_req; i++) {
        struct cb_req *r = &s->req[i];
        if (r->state != CB_REQ_QUEUED)
            continue;
        cb_refuse(&r->refusal, 503, "stopping", NULL, "the service is about to stop");
        r->t_end = s->t_drain;
        r->state = CB_REQ_DONE;
    }
    pthread_mutex_unlock(&s->lock);
}

static void take_signals(struct cb_server *s)
{
    struct signalfd_siginfo info;
    while (read(s->signal_fd, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGHUP) {
            cb_reload(s);
        } else if (s->signals++ == 0) {
            begin_drain(s);
        }
    }
}

/* ---- the clock ---------------------------------------------------------- */

/* Requests whose clients left and that the worker has let go. */
static void sweep(struct cb_server *s)
{
    for (uint32_t i = 0; i < s->n_req; i++) {
        struct cb_req *r = &s->req[i];
        if (!r->orphan)
            continue;
        pthread_mutex_lock(&s->lock);
        int over = r->state == CB_REQ_DONE;
        pthread_mutex_unlock(&s->lock);
        if (!over)
            continue;
        r->orphan = 0;
        cb_metrics_end(s, r, 499);
        cb_queue_free(s, r);
    }
}

static void take_speed(struct cb_server *s, uint64_t now)
{
    char text[160];
    struct cb_load l;
    if (now - s->t_speed < 5 * SECOND)
        return;
    pthread_mutex_lock(&s->lock);
    uint64_t n = s->m.tokens_answer;
    pthread_mutex_unlock(&s->lock);
    s->speed = (double)(n - s->tok_speed) * 1e9 / (double)(now - s->t_speed);
    s->tok_speed = n;
    s->t_speed = now;
    cb_queue_load(s, &l);
    snprintf(text, sizeof text, "%u computed, %u waiting, %.2f tokens/s", l.active, l.queued, s->speed);
    cb_notify_status(&s->notify, text);
}

/* 1 = all that ran is answered. */
static int drained(struct cb_server *s, uint64_t now)
{
    struct cb_load l;
    cb_queue_load(s, &l);
    if (now - s->t_drain > s->opt.drain_s * SECOND) {
        cb_log_say(s->log, "warning", "cut_off", "the limit for running requests has passed");
        return 1;
    }
    if (l.active + l.draining + l.queued > 0)
        return 0;
    for (uint32_t i = 0; i < s->opt.connections; i++)
        if (s->conn[i].state == CB_CONN_ANSWER)
            return 0;
    return 1;
}

/* ---- the loop ----------------------------------------------------------- */

/* *ms: how long nothing can become due. */
static nfds_t fill_poll(struct cb_server *s, int *ms)
{
    nfds_t n = 0;
    int paused = s->t_accept > cb_os_now_ns();
    *ms = paused ? TICK_MS : IDLE_MS;
    s->pfd[n++] = (struct pollfd){s->signal_fd, POLLIN, 0};
    s->pfd[n++] = (struct pollfd){s->wake_fd[0], POLLIN, 0};
    for (int i = 0; i < 2; i++)
        s->pfd[n++] = (struct pollfd){paused ? -1 : s->listen_fd[i], POLLIN, 0};
    for (uint32_t i = 0; i < s->opt.connections; i++) {
        const struct cb_conn *c = &s->conn[i];
        s->pfd[n++] = (struct pollfd){c->fd, c->fd >= 0 ? cb_conn_events(c) : (short)0, 0};
        if (c->fd >= 0 || s->draining)
            *ms = TICK_MS;
    }
    return n;
}

static void serve_connection(struct cb_server *s, struct cb_conn *c, short got, uint64_t now)
{
    if (got & POLLIN)
        cb_conn_read(s, c);
    if (c->fd >= 0 && (got & POLLOUT))
        cb_conn_write(s, c);
    if (c->fd >= 0)
        cb_conn_progress(s, c);
    if (c->fd >= 0 && (got & (POLLERR | POLLHUP | POLLNVAL)))
        cb_conn_close(s, c);
    else if (c->fd >= 0 && (got & POLLRDHUP) && c->state == CB_CONN_ANSWER && c->req != NULL)
        cb_conn_close(s, c);
    if (c->fd >= 0)
        cb_conn_tick(s, c, now);
}

static void turn(struct cb_server *s)
{
    char drop[256];
    struct timespec pause = {0, 50 * 1000 * 1000};
    int ms = 0;
    nfds_t n = fill_poll(s, &ms);
    if (poll(s->pfd, n, ms) < 0 && errno != EINTR)
        nanosleep(&pause, NULL); /* out of memory, perhaps: not in a tight loop */
    uint64_t now = cb_os_now_ns();
    while (read(s->wake_fd[0], drop, sizeof drop) == (ssize_t)sizeof drop) {
    }
    if (s->pfd[0].revents != 0)
        take_signals(s);
    for (uint32_t i = 0; i < s->opt.connections; i++)
        if (s->conn[i].fd >= 0 && s->pfd[4 + i].fd == s->conn[i].fd)
            serve_connection(s, &s->conn[i], s->pfd[4 + i].revents, now);
    for (int i = 0; i < 2; i++)
        if (s->listen_fd[i] >= 0 && s->pfd[2 + i].revents != 0)
            take_connections(s, i);
    sweep(s);
    take_speed(s, now);
}

static int open_signals(struct cb_server *s, struct cb_err *err)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    s->signal_fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    return s->signal_fd >= 0 ? CB_OK : cb_fail(err, CB_EIO, "signalfd: %s", strerror(errno));
}

static void say_ready(struct cb_server *s)
{
    struct cb_line l;
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    unsigned port = 0;
    if (s->listen_fd[0] >= 0 && getsockname(s->listen_fd[0], (struct sockaddr *)&a, &n) == 0)
        port = ntohs(a.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)(void *)&a)->sin6_port
                                             : ((struct sockaddr_in *)(void *)&a)->sin_port);
    cb_line_begin(&l, s->log, "info", "ready");
    cb_line_str(&l, "model", s->info.name);
    cb_line_str(&l, "golden", s->info.golden);
    cb_line_str(&l, "listen", s->opt.listen);
    cb_line_u64(&l, "port", port);
    if (s->opt.unix_path != NULL)
        cb_line_str(&l, "unix", s->opt.unix_path);
    cb_line_u64(&l, "sequences", s->opt.sequences);
    cb_line_u64(&l, "capacity", s->n_req);
    cb_line_u64(&l, "server_bytes", s->block_bytes);
    cb_line_u64(&l, "pid", (uint64_t)getpid());
    cb_line_end(&l);
    cb_notify_ready(&s->notify);
}

static int begin(struct cb_server *s, struct cb_err *err)
{
    cb_engine_info(s->e, &s->info);
    if (s->info.batch < s->opt.sequences)
        return cb_fail(err, CB_EINVAL, "--batch %u is less than --sequences %u", s->info.batch,
                       s->opt.sequences);
    int rc = open_signals(s, err);
    if (rc == CB_OK)
        rc = cb_worker_start(s, err);
    if (rc < 0)
        return rc;
    for (int i = 0; i < 2; i++)
        if (s->listen_fd[i] >= 0 && listen(s->listen_fd[i], BACKLOG) != 0) {
            rc = cb_fail(err, CB_EIO, "cannot listen: %s", strerror(errno));
            (void)cb_worker_stop(s); /* it has nothing to do */
            return rc;
        }
    cb_notify_open(&s->notify, s->opt.beat_fd);
    s->t_speed = cb_os_now_ns();
    cb_selfcheck_start(s, s->t_speed);
    say_ready(s);
    return CB_OK;
}

static int is_swapping(struct cb_server *s)
{
    pthread_mutex_lock(&s->lock);
    int yes = s->swapping;
    pthread_mutex_unlock(&s->lock);
    return yes;
}

int cb_serve_run(struct cb_server *s, struct cb_engine *e, const struct cb_ledger *ledger,
                 struct cb_err *err)
{
    s->e = e;
    s->ledger = *ledger;
    int rc = begin(s, err);
    if (rc < 0)
        return rc;
    for (;;) {
        turn(s);
        uint64_t now = cb_os_now_ns();
        if (s->signals > 1)
            return CB_SERVE_KILLED;
        if (s->draining && drained(s, now))
            break;
        if (cb_selfcheck(s, now)) {
            cb_log_say(s->log, "error", "giving_up", "the engine made no progress in three checks");
            return CB_SERVE_STUCK;
        }
    }
    if (is_swapping(s)) { /* reading a model may take minutes, and nobody needs it any more */
        cb_log_say(s->log, "info", "stopped", "a release was being loaded");
        return CB_SERVE_LEFT;
    }
    if (cb_worker_stop(s) != 0) {
        cb_log_say(s->log, "error", "giving_up", "the engine's thread does not end");
        return CB_SERVE_STUCK;
    }
    cb_log_say(s->log, "info", "stopped", NULL);
    return CB_SERVE_DRAINED;
}
#else
typedef int cb_serve_server_is_posix;
#endif

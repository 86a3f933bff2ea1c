/* supervise.c — a parent that starts the service again, for machines without a
 * service manager. It does nothing else, so that it has no reason to fail. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/os.h"
#include "serve/log.h"
#include "serve/notify.h"
#include "serve/serve.h"

#define SECOND UINT64_C(1000000000)
#define SETTLED_NS (60 * SECOND)  /* ready for that long: the next fall is a first one */
#define BACK_OFF_MAX_S 30u
#define STOP_MORE_NS (15 * SECOND) /* after the last beat: joining, closing */
#define AT_ONCE_NS (2 * SECOND)

struct parent {
    const struct cb_supervise *opt;
    struct cb_log log;
    _Atomic uint32_t log_lost;
    struct cb_notify notify;
    sigset_t set;
    int signal_fd, beat_fd;
    pid_t child;
    int ready, stopping, hung;
    uint64_t t_beat, t_ready;
    uint64_t t_kill; /* told twice to stop: the child has until then; 0 = for ever */
};

static void die_with_parent(pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        _exit(1);
}

static int start(struct parent *p)
{
    int fd[2];
    pid_t self = getpid();
    p->child = 0;
    p->ready = p->hung = 0;
    if (pipe2(fd, O_CLOEXEC | O_NONBLOCK) != 0)
        return -1;
    p->child = fork();
    if (p->child == 0) {
        die_with_parent(self);
        (void)setpgid(0, 0); /* a terminal's Ctrl-C reaches the parent alone, who passes it on */
        close(fd[0]);
        close(p->signal_fd);
        cb_notify_close(&p->notify);
        cb_log_close(&p->log);
        p->opt->child(p->opt->arg, fd[1]);
        _exit(1);
    }
    close(fd[1]);
    if (p->child < 0) {
        close(fd[0]);
        return -1;
    }
    p->beat_fd = fd[0];
    return 0;
}

/* Passed on to the manager above, if there is one. */
static void take_beats(struct parent *p)
{
    char buf[64];
    ssize_t n = read(p->beat_fd, buf, sizeof buf);
    for (ssize_t i = 0; i < n; i++) {
        p->t_beat = cb_os_now_ns();
        if (buf[i] == CB_BEAT_READY) {
            p->ready = 1;
            p->t_ready = p->t_beat;
            cb_notify_ready(&p->notify);
        } else if (buf[i] == CB_BEAT_ALIVE) {
            cb_notify_beat(&p->notify);
        } else if (buf[i] == CB_BEAT_STOPPING) {
            p->stopping = 1;
            cb_notify_stopping(&p->notify);
        }
    }
}

static void take_signals(struct parent *p)
{
    struct signalfd_siginfo info;
    while (read(p->signal_fd, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGCHLD)
            continue;
        if (p->stopping && info.ssi_signo != SIGHUP && p->t_kill == 0)
            p->t_kill = cb_os_now_ns() + AT_ONCE_NS;
        p->stopping |= info.ssi_signo != SIGHUP;
        if (p->child > 0)
            kill(p->child, (int)info.ssi_signo);
    }
}

static void wait_some(struct parent *p, int ms)
{
    struct pollfd fd[2] = {{p->signal_fd, POLLIN, 0}, {p->beat_fd, POLLIN, 0}};
    (void)poll(fd, 2, ms);
    if (fd[1].revents & POLLIN)
        take_beats(p);
    if (fd[0].revents & POLLIN)
        take_signals(p);
    if ((fd[1].revents & (POLLHUP | POLLIN)) == POLLHUP) { /* its last words are read */
        close(p->beat_fd);
        p->beat_fd = -1;
    }
}

/* Without a beat for so long it hangs. One that is told to stop beats as long as it
 * computes, and then has a little to do. */
static uint64_t silence(const struct parent *p)
{
    return p->opt->watchdog_s * SECOND + (p->stopping ? STOP_MORE_NS : 0);
}

/* Until the child is gone; returns its wait status. */
static int mind(struct parent *p)
{
    int status = 0;
    for (;;) {
        pid_t got = waitpid(p->child, &status, WNOHANG);
        if (got == p->child || (got < 0 && errno == ECHILD))
            break;
        wait_some(p, 200);
        cb_notify_again(&p->notify);
        uint64_t now = cb_os_now_ns();
        if (!p->hung && ((p->ready && now - p->t_beat > silence(p)) ||
                         (p->t_kill != 0 && now > p->t_kill))) {
            p->hung = 1;
            cb_log_say(p->log, "error", "no_beat", "the service makes no progress: it is killed");
            kill(p->child, SIGKILL);
        }
    }
    if (p->beat_fd >= 0)
        close(p->beat_fd);
    p->beat_fd = -1;
    p->child = 0;
    return status;
}

static int exit_status(int status)
{
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

static void say_restart(const struct parent *p, int status, uint32_t falls, uint32_t wait_s)
{
    struct cb_line l;
    cb_line_begin(&l, p->log, "error", "restart");
    cb_line_u64(&l, "exit_status", (uint64_t)exit_status(status));
    cb_line_u64(&l, "falls", falls);
    cb_line_u64(&l, "give_up", p->opt->give_up);
    cb_line_u64(&l, "wait_s", wait_s);
    cb_line_end(&l);
}

/* Statuses that another start cannot change: usage, model, budget, golden. */
static int is_final(int status)
{
    return WIFEXITED(status) && WEXITSTATUS(status) >= 2 && WEXITSTATUS(status) <= 5;
}

#define NOT_STARTED (1 << 8) /* as wait() says of exit status 1 */

static int keep_up(struct parent *p)
{
    uint32_t falls = 0;
    for (;;) {
        int status = NOT_STARTED;
        if (start(p) == 0)
            status = mind(p);
        else /* no memory, no descriptor: that may pass */
            cb_log_say(p->log, "error", "fork", strerror(errno));
        if (p->stopping || (WIFEXITED(status) && WEXITSTATUS(status) == 0))
            return exit_status(status);
        if (is_final(status) && !p->ready)
            return exit_status(status);
        if (p->ready && cb_os_now_ns() - p->t_ready > SETTLED_NS)
            falls = 0;
        if (++falls >= p->opt->give_up) {
            say_restart(p, status, falls, 0);
            cb_log_say(p->log, "error", "gave_up", "it fell too often in a row");
            return CB_SUPERVISE_GAVE_UP;
        }
        uint32_t wait_s = falls > 5 ? BACK_OFF_MAX_S : 1u << (falls - 1);
        say_restart(p, status, falls, wait_s);
        for (uint64_t end = cb_os_now_ns() + wait_s * SECOND; cb_os_now_ns() < end && !p->stopping;)
            wait_some(p, 100);
        if (p->stopping)
            return 0;
    }
}

int cb_supervise(const struct cb_supervise *s)
{
    struct parent p;
    memset(&p, 0, sizeof p);
    p.opt = s;
    cb_log_open(&p.log, s->log_fd, s->log_json, &p.log_lost);
    cb_log_bound(&p.log, (uint64_t)s->log_mib << 20);
    signal(SIGPIPE, SIG_IGN); /* a journal that is gone is no reason to stop, nor a full one */
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGCHLD, SIG_DFL); /* ignored by who started it, ends would not be seen */
    p.beat_fd = -1;
    sigemptyset(&p.set);
    sigaddset(&p.set, SIGTERM);
    sigaddset(&p.set, SIGINT);
    sigaddset(&p.set, SIGHUP);
    sigaddset(&p.set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &p.set, NULL);
    p.signal_fd = signalfd(-1, &p.set, SFD_NONBLOCK | SFD_CLOEXEC);
    if (p.signal_fd < 0)
        return 1;
    cb_notify_open(&p.notify, -1);
    int status = keep_up(&p);
    cb_notify_close(&p.notify);
    cb_log_close(&p.log);
    close(p.signal_fd);
    return status;
}
#else
typedef int cb_serve_supervise_is_posix;
#endif

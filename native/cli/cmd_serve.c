/* cmd_serve.c — `colibri serve`: answers over HTTP until it is told to stop.
 *
 * Order: options, tokens and sockets (cheap mistakes show first), the plan with
 * the service's own buffers, the engine, its golden, then the first answer. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#endif
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "core/os.h"
#include "serve/log.h"
#include "serve/serve.h"
#include "serve_options.h"
#include "sys.h"
#if !defined(_WIN32)
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>
#endif

enum { EXIT_STUCK = 7 }; /* three self-checks failed; 8 = the supervisor gave up */

/* The engine gets what the service's buffers leave of the budget; the ledger
 * that comes back holds both. */
static int plan(struct serve *v, struct cb_ledger *ledger, struct cb_err *err)
{
    struct cb_options *o = &v->model.opt;
    struct cb_info info;
    memset(&info, 0, sizeof info);
    int rc = cb_plan(o, ledger, &info, err);
    if (rc < 0 && rc != CB_EBUDGET)
        return rc;
    cb_serve_sizes(&v->opt, o, &info);
    uint64_t mine = cb_serve_bytes(&v->opt), limit = o->budget;
    if (limit == 0) { /* as the engine does: a twentieth is left to the machine */
        uint64_t available = cb_os_mem_available();
        limit = available == UINT64_MAX ? 0 : available - available / 20;
    }
    if (limit != 0 && !v->model.over_budget)
        o->budget = limit > mine ? limit - mine : 1;
    rc = cb_plan(o, ledger, &info, err);
    ledger->bytes[CB_L_SERVER] = mine;
    ledger->total += mine;
    ledger->budget = ledger->budget != 0 ? ledger->budget + mine : 0;
    if (rc == CB_EBUDGET)
        return cb_fail(err, CB_EBUDGET, "the plan needs %.1f MiB, %.1f MiB of it for connections and "
                       "requests; %.1f MiB may be taken", (double)ledger->total / 1048576.0,
                       (double)mine / 1048576.0, (double)limit / 1048576.0);
    return rc;
}

#if !defined(_WIN32)
/* Started with one of them closed, the next file that is opened would get its
 * number, and lines for the journal would go there. */
static void fill_standard_files(void)
{
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            (void)open("/dev/null", O_RDWR);
}

/* A pipe that nobody reads any more is full at some time: what is printed with
 * stdio would wait for ever. */
static int journal_takes(void)
{
    struct pollfd p = {2, POLLOUT, 0};
    return poll(&p, 1, 0) == 1 && (p.revents & POLLOUT) != 0;
}

static void block_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a journal in a file at its limit */
}

/* While the model is loaded nobody reads the blocked signals: this thread ends
 * the process for them, until SIGUSR2 sends it away. */
static void *guard_load(void *arg)
{
    sigset_t set;
    int sig = 0;
    (void)arg;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGUSR2);
    if (sigwait(&set, &sig) == 0 && sig != SIGUSR2)
        _exit(128 + sig);
    return NULL;
}

static void say_refused(const struct serve *v, const struct cb_err *err)
{
    struct cb_log log;
    cb_log_open(&log, v->opt.log_fd, v->opt.log_json, NULL);
    cb_log_say(log, "error", "options_refused", err->msg);
    cb_log_close(&log);
}

/* --token-deadline, from the engine's watchdog. */
static void say_slow(void *ud, uint32_t layer, int32_t expert, uint64_t ms)
{
    const struct serve *v = ud;
    struct cb_log log;
    struct cb_line l;
    cb_log_open(&log, v->opt.log_fd, v->opt.log_json, NULL);
    cb_line_begin(&l, log, "warning", "slow_token");
    cb_line_u64(&l, "layer", layer);
    if (expert >= 0)
        cb_line_u64(&l, "expert", (uint64_t)expert);
    cb_line_u64(&l, "ms", ms);
    cb_line_end(&l);
    cb_log_close(&log);
}

static void print_start(const struct serve *v, const struct cb_engine *e, const struct cb_ledger *l)
{
    char mine[32], all[32];
    if (v->log_json || !journal_takes()) /* of JSON lines only: "ready" says it there */
        return;
    cli_print_start(stderr, e, &v->model);
    fprintf(stderr, "server %s for %u connections and %u requests; with it %s in all\n",
            cli_size(l->bytes[CB_L_SERVER], mine), v->opt.connections ? v->opt.connections : 32,
            v->opt.sequences + (v->opt.queue ? v->opt.queue : 8), cli_size(l->total, all));
}

static int load(struct serve *v, struct cb_engine **e, const struct cb_ledger *l, struct cb_err *err)
{
    pthread_t guard;
    char hex[65];
    uint64_t ns = 0;
    int guarded = pthread_create(&guard, NULL, guard_load, NULL) == 0;
    int rc = cb_engine_open(&v->model.opt, e, err);
    if (rc == CB_OK) {
        print_start(v, *e, l);
        rc = cli_golden(*e, hex, &ns, err);
    }
    if (guarded) {
        pthread_kill(guard, SIGUSR2);
        pthread_join(guard, NULL);
    }
    return rc;
}
#else
static void block_signals(void)
{
}

static void fill_standard_files(void)
{
}

static int journal_takes(void)
{
    return 1;
}

static void say_refused(const struct serve *v, const struct cb_err *err)
{
    (void)v, (void)err;
}

static void say_slow(void *ud, uint32_t layer, int32_t expert, uint64_t ms)
{
    (void)ud, (void)layer, (void)expert, (void)ms;
}

static int load(struct serve *v, struct cb_engine **e, const struct cb_ledger *l, struct cb_err *err)
{
    (void)v, (void)e, (void)l;
    return cb_fail(err, CB_EUNSUPPORTED, "serve is not available on Windows");
}
#endif

static int say_error(const struct serve *v, const struct cb_err *err)
{
    return journal_takes() ? cli_error(&v->args, err) : cli_exit_status(err->code);
}

/* After a thread that cannot be joined nothing may be torn down. */
static void leave_stuck(void)
{
    fflush(NULL);
    _Exit(EXIT_STUCK);
}

static int serve_once(struct serve *v)
{
    struct cb_err err = {0, ""};
    struct cb_ledger ledger;
    struct cb_server *s = NULL;
    struct cb_engine *e = NULL;
    int status = EXIT_OK;
    block_signals();
    v->model.opt.on_stuck = say_slow;
    v->model.opt.stuck_ud = v;
    int rc = plan(v, &ledger, &err);
    if (rc < 0)
        return say_error(v, &err);
    rc = cb_serve_open(&v->opt, &s, &err);
    if (rc == CB_OK)
        rc = load(v, &e, &ledger, &err);
    if (rc == CB_OK)
        rc = cb_serve_run(s, e, &ledger, &err);
    if (rc == CB_SERVE_STUCK)
        leave_stuck();
    if (rc == CB_SERVE_KILLED)
        _Exit(EXIT_TERMINATED);
    if (rc == CB_SERVE_LEFT)
        _Exit(EXIT_OK);
    if (rc < 0)
        status = say_error(v, &err);
    cb_serve_close(s);
    cb_engine_close(e);
    return status;
}

/* A child reads the options again: what has changed since holds from now on. */
static void child(void *arg, int beat_fd)
{
    struct serve *v = arg;
    struct cb_err err = {0, ""};
    if (v->options != NULL && serve_options_again(v, &err) == CB_OK)
        v = v->other;
    else if (v->options != NULL)
        say_refused(v, &err);
    v->opt.beat_fd = beat_fd;
    exit(serve_once(v));
}

int verb_serve(int argc, char **argv)
{
    static struct serve both[2]; /* static: zeroed, and off the stack */
    struct serve *v = &both[0];
    struct cb_err err = {0, ""};
    int status = EXIT_OK;
    fill_standard_files();
    v->other = &both[1];
    both[1].other = v;
    v->argc = argc;
    v->argv = argv;
    serve_options_table(v);
    if (cli_args_finish(&v->args, argc, argv, &status))
        return status;
    if (serve_options_take(v, &err) < 0)
        return cli_error(&v->args, &err);
    if (!v->supervise_flag)
        return serve_once(v);
    struct cb_supervise sup = {v->give_up, v->watchdog_s, 2, v->opt.log_json, v->opt.log_mib, child, v};
    return cb_supervise(&sup);
}

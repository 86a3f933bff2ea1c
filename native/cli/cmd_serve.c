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
#include "serve/serve.h"
#include "sys.h"
#if !defined(_WIN32)
#include <pthread.h>
#include <unistd.h>
#endif

enum { EXIT_STUCK = 7 }; /* three self-checks failed; 8 = the supervisor gave up */

struct serve {
    struct cli_args args;
    struct cli_model model;
    struct cb_serve_options opt;
    struct arg_list hosts;
    const char *listen;
    uint32_t log_json, give_up, watchdog_s;
    int supervise_flag;
};

static void set_up_args(struct serve *v)
{
    struct cb_serve_options *o = &v->opt;
    cli_args_begin(&v->args, "serve", "Answers over HTTP: an OpenAI-like API, /health, /metrics, a page.");
    v->listen = "127.0.0.1:8080";
    v->hosts.max = CB_SERVE_HOSTS;
    v->give_up = 5;
    v->watchdog_s = 60;
    const struct arg access[] = {
        {.group = "Access", .name = "--listen", .kind = ARG_TEXT, .out = &v->listen, .meta = "ADDR:PORT",
         .help = "default 127.0.0.1:8080; none = only --unix"},
        {.name = "--unix", .kind = ARG_TEXT, .out = &o->unix_path, .meta = "PATH",
         .help = "a Unix socket; its permissions decide who may ask"},
        {.name = "--token-file", .kind = ARG_TEXT, .out = &o->token_file, .meta = "FILE",
         .help = "bearer tokens, one a line; needed beyond loopback"},
        {.name = "--allow-host", .kind = ARG_LIST, .out = &v->hosts, .meta = "NAME",
         .help = "a name that the Host header may hold; up to 16 times"},
    };
    const struct arg limits[] = {
        {.group = "Limits", .name = "--sequences", .kind = ARG_U32, .out = &v->model.opt.sequences,
         .lo = 1, .hi = CB_SEQ_MAX, .meta = "N", .help = "requests computed together (default 1)"},
        {.name = "--queue", .kind = ARG_U32, .out = &o->queue, .lo = 1, .hi = 1024, .meta = "N",
         .help = "requests that may wait beside those (default 8)"},
        {.name = "--connections", .kind = ARG_U32, .out = &o->connections, .lo = 1, .hi = 1024,
         .meta = "N", .help = "open at once (default 32)"},
        {.name = "--body", .kind = ARG_U32, .out = &o->body_bytes, .lo = 1024, .hi = 1 << 24,
         .meta = "BYTES", .help = "longest request (default 16 a context token, 64 KiB to 1 MiB)"},
        {.name = "--deadline", .kind = ARG_U32, .out = &o->deadline_s, .lo = 1, .hi = 86400,
         .meta = "S", .help = "of a request from its arrival (default 600)"},
        {.name = "--io-timeout", .kind = ARG_U32, .out = &o->io_s, .lo = 1, .hi = 3600, .meta = "S",
         .help = "for a request to arrive, for a stalled reader (default 20)"},
        {.name = "--idle-timeout", .kind = ARG_U32, .out = &o->idle_s, .lo = 1, .hi = 86400,
         .meta = "S", .help = "of a connection without a request (default 60)"},
        {.name = "--drain", .kind = ARG_U32, .out = &o->drain_s, .lo = 1, .hi = 86400, .meta = "S",
         .help = "for running requests after SIGTERM (default 30)"},
        {.group = "Staying up", .name = "--health-interval", .kind = ARG_U32, .out = &o->health_s,
         .lo = 1, .hi = 3600, .meta = "S",
         .help = "between self-checks; three that fail end it with status 7 (default 30)"},
        {.name = "--supervise", .kind = ARG_FLAG, .out = &v->supervise_flag, .flag_value = 1,
         .help = "a parent process starts it again; for machines without a service manager"},
        {.name = "--give-up", .kind = ARG_U32, .out = &v->give_up, .lo = 1, .hi = 1000, .meta = "N",
         .help = "falls in a row after which --supervise ends with status 8 (default 5)"},
        {.name = "--watchdog", .kind = ARG_U32, .out = &v->watchdog_s, .lo = 2, .hi = 3600,
         .meta = "S", .help = "without progress before --supervise kills it (default 60)"},
        {.name = "--log", .kind = ARG_CHOICE, .out = &v->log_json, .meta = "text|json",
         .help = "form of the lines on stderr (default text)"},
    };
    cli_model_args(&v->args, &v->model);
    cli_args_add(&v->args, access, sizeof access / sizeof access[0]);
    cli_args_add(&v->args, limits, sizeof limits / sizeof limits[0]);
}

static int check_words(struct serve *v, struct cb_err *err)
{
    struct cb_serve_options *o = &v->opt;
    o->listen = strcmp(v->listen, "none") == 0 ? "" : v->listen;
    o->n_host = v->hosts.n;
    for (uint32_t i = 0; i < v->hosts.n; i++)
        o->host[i] = v->hosts.item[i];
    o->log_fd = 2;
    o->log_json = v->log_json != 0;
    o->model_dir = v->model.opt.model_dir;
    o->hot_swap = v->model.hot_swap;
    o->beat_fd = -1;
    uint32_t batch = v->model.opt.batch ? v->model.opt.batch : 32;
    if (v->model.opt.sequences > batch)
        return cb_fail(err, CB_EINVAL, "--sequences %u needs --batch of at least as much, not %u",
                       v->model.opt.sequences, batch);
    return CB_OK;
}

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

static void print_start(const struct serve *v, const struct cb_engine *e, const struct cb_ledger *l)
{
    char mine[32], all[32];
    if (v->log_json) /* a journal of JSON lines only: "ready" says it there */
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

static int load(struct serve *v, struct cb_engine **e, const struct cb_ledger *l, struct cb_err *err)
{
    (void)v, (void)e, (void)l;
    return cb_fail(err, CB_EUNSUPPORTED, "serve is not available on Windows");
}
#endif

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
    int rc = plan(v, &ledger, &err);
    if (rc < 0)
        return cli_error(&v->args, &err);
    rc = cb_serve_open(&v->opt, &s, &err);
    if (rc == CB_OK)
        rc = load(v, &e, &ledger, &err);
    if (rc == CB_OK)
        rc = cb_serve_run(s, e, &ledger, &err);
    if (rc == CB_SERVE_STUCK)
        leave_stuck();
    if (rc == CB_SERVE_KILLED)
        _Exit(EXIT_TERMINATED);
    if (rc < 0)
        status = cli_error(&v->args, &err);
    cb_serve_close(s);
    cb_engine_close(e);
    return status;
}

static void child(void *arg, int beat_fd)
{
    struct serve *v = arg;
    v->opt.beat_fd = beat_fd;
    exit(serve_once(v));
}

int verb_serve(int argc, char **argv)
{
    static struct serve serve; /* static: zeroed, and off the stack */
    struct serve *v = &serve;
    struct cb_err err = {0, ""};
    int status = EXIT_OK;
    set_up_args(v);
    if (cli_args_finish(&v->args, argc, argv, &status))
        return status;
    int rc = cli_model_check(&v->model, &err);
    if (rc == CB_OK)
        rc = check_words(v, &err);
    if (rc < 0)
        return cli_error(&v->args, &err);
    if (!v->supervise_flag)
        return serve_once(v);
    struct cb_supervise sup = {v->give_up, v->watchdog_s, 2, v->opt.log_json, child, v};
    return cb_supervise(&sup);
}

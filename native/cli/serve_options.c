/* serve_options.c — see serve_options.h. */
#include "serve_options.h"

#include <stdlib.h>
#include <string.h>

#include "core/os.h"

void serve_options_table(struct serve *v)
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
        {.name = "--log-max", .kind = ARG_U32, .out = &o->log_mib, .lo = 1, .hi = 65536, .meta = "MIB",
         .help = "when stderr is a file: beyond this it keeps its later half only"},
    };
    const struct arg file[] = {
        {.group = "File", .name = "--options", .kind = ARG_TEXT, .out = &v->options, .meta = "FILE",
         .help = "all of the above, one \"name value\" a line; words here win"},
    };
    cli_model_args(&v->args, &v->model);
    cli_args_add(&v->args, access, sizeof access / sizeof access[0]);
    cli_args_add(&v->args, limits, sizeof limits / sizeof limits[0]);
    v->n_lines = v->args.n;
    cli_args_add(&v->args, file, sizeof file / sizeof file[0]);
}

static cb_serve_reload_fn reload;

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
    o->reload = v->options != NULL ? reload : NULL;
    o->reload_ud = v;
    uint32_t batch = v->model.opt.batch ? v->model.opt.batch : 32;
    if (v->model.opt.sequences > batch)
        return cb_fail(err, CB_EINVAL, "--sequences %u needs --batch of at least as much, not %u",
                       v->model.opt.sequences, batch);
    return CB_OK;
}

/* ---- the file ----------------------------------------------------------- */

static int read_lines(struct serve *v, struct cb_err *err)
{
    struct cb_os_file f;
    int rc = cb_os_open(&f, v->options, err);
    if (rc < 0)
        return cb_fail(err, CB_EINVAL, "--options %.150s: no such file, or none to read", v->options);
    size_t n = (size_t)(f.size <= SERVE_OPTIONS_BYTES ? f.size : 0);
    rc = f.size > SERVE_OPTIONS_BYTES
             ? cb_fail(err, CB_EINVAL, "--options %.150s: more than %u bytes", v->options,
                       SERVE_OPTIONS_BYTES)
             : cb_os_pread(&f, v->text, n, 0, err);
    cb_os_close(&f);
    return rc < 0 ? rc : args_lines(v->args.arg, v->n_lines, v->text, n, v->options, err);
}

/* FNV-1a of a value, to see whether it is another one. */
static uint64_t add_bytes(uint64_t hash, const void *p, size_t n)
{
    const unsigned char *byte = p;
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ byte[i]) * UINT64_C(1099511628211);
    return hash;
}

static uint64_t add_text(uint64_t hash, const char *text)
{
    return text == NULL ? hash + 1 : add_bytes(hash, text, strlen(text) + 1);
}

static uint64_t mark_of(const struct arg *a)
{
    uint64_t hash = UINT64_C(14695981039346656037);
    const struct arg_list *list = a->out;
    switch (a->kind) {
    case ARG_TEXT:
        return add_text(hash, *(const char *const *)a->out);
    case ARG_LIST:
        for (uint32_t i = 0; i < list->n; i++)
            hash = add_text(hash, list->item[i]);
        return hash;
    case ARG_U64:
    case ARG_SIZE:
        return add_bytes(hash, a->out, 8);
    default:
        return add_bytes(hash, a->out, 4);
    }
}

int serve_options_take(struct serve *v, struct cb_err *err)
{
    int rc = v->options != NULL ? read_lines(v, err) : CB_OK;
    for (size_t i = 0; i < v->n_lines; i++) /* before anything is derived from them */
        v->mark[i] = mark_of(&v->args.arg[i]);
    if (rc == CB_OK)
        rc = cli_model_check(&v->model, err);
    return rc == CB_OK ? check_words(v, err) : rc;
}

int serve_options_again(struct serve *v, struct cb_err *err)
{
    struct serve *w = v->other;
    int status = 0;
    memset(w, 0, sizeof *w);
    w->other = v;
    w->argc = v->argc;
    w->argv = v->argv;
    serve_options_table(w);
    if (cli_args_finish(&w->args, w->argc, w->argv, &status))
        return cb_fail(err, CB_EINVAL, "the words of the command line were right before");
    return serve_options_take(w, err);
}

/* ---- again, while it runs ----------------------------------------------- */

/* Those that need no memory and no other process; the service takes them over. */
static int is_live(const char *name)
{
    static const char *const live[] = {"--allow-host", "--queue", "--body", "--deadline", "--drain",
                                       "--io-timeout", "--idle-timeout", "--health-interval"};
    for (size_t i = 0; i < sizeof live / sizeof live[0]; i++)
        if (strcmp(name, live[i]) == 0)
            return 1;
    return 0;
}

static int reload(void *ud, struct cb_serve_options *fresh, char *names, size_t n,
                  struct cb_err *err)
{
    struct serve *v = ud, *w = v->other;
    struct cb_serve_options *o = fresh;
    size_t at = 0;
    int rc = serve_options_again(v, err);
    if (rc < 0)
        return rc;
    *o = w->opt;
    names[0] = '\0';
    for (size_t i = 0; i < v->n_lines; i++) {
        const char *name = v->args.arg[i].name + 2;
        size_t len = strlen(name);
        if (v->mark[i] == w->mark[i] || is_live(v->args.arg[i].name) || at + len + 2 > n)
            continue;
        if (at > 0)
            names[at++] = ' ';
        memcpy(names + at, name, len + 1);
        at += len;
    }
    return CB_OK;
}

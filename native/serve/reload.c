/* reload.c — what SIGHUP reads again: tokens, options, weights. */
#if !defined(_WIN32)
#include <string.h>

#include "core/os.h"
#include "serve/server.h"

static void read_tokens(struct cb_server *s)
{
    struct cb_tokens fresh;
    struct cb_err err;
    if (s->opt.token_file == NULL)
        return;
    if (cb_tokens_read(&fresh, s->opt.token_file, &err) == CB_OK) {
        s->tokens = fresh;
        cb_log_say(s->log, "info", "tokens_read", NULL);
    } else {
        cb_log_say(s->log, "error", "tokens_kept", err.msg);
    }
}

/* ---- options ------------------------------------------------------------ */

/* A number within what was taken at the start; beyond, its name joins the list. */
static uint32_t within(uint32_t want, uint32_t reserved, const char *name, struct cb_buf *names)
{
    if (want <= reserved)
        return want;
    cb_buf_fmt(names, names->n > 0 ? " %s" : "%s", name);
    return reserved;
}

static void copy_hosts(struct cb_server *s, const struct cb_serve_options *o)
{
    for (uint32_t i = 0; i < o->n_host; i++) {
        memcpy(s->host_text[i], o->host[i], strlen(o->host[i]) + 1);
        s->opt.host[i] = s->host_text[i];
    }
    s->opt.n_host = o->n_host;
}

/* Those that need no memory. The worker reads some, under the lock. */
static void apply(struct cb_server *s, const struct cb_serve_options *o, struct cb_buf *names)
{
    struct cb_serve_options *mine = &s->opt;
    pthread_mutex_lock(&s->lock);
    mine->queue = within(o->queue, s->n_req - mine->sequences, "queue", names);
    mine->body_bytes = within(o->body_bytes, s->body_room, "body", names);
    mine->deadline_s = o->deadline_s;
    mine->io_s = o->io_s;
    mine->idle_s = o->idle_s;
    mine->drain_s = o->drain_s;
    mine->health_s = o->health_s;
    copy_hosts(s, o);
    pthread_mutex_unlock(&s->lock);
}

static void read_options(struct cb_server *s)
{
    char restart[1024] = "";
    struct cb_serve_options fresh;
    struct cb_err err;
    struct cb_line l;
    if (s->opt.reload == NULL)
        return;
    int rc = s->opt.reload(s->opt.reload_ud, &fresh, restart, sizeof restart - 16, &err);
    if (rc == CB_OK)
        rc = cb_serve_hosts_check(&fresh, &err);
    if (rc < 0) {
        cb_log_say(s->log, "error", "options_refused", err.msg);
        return;
    }
    struct cb_buf names = {restart, strlen(restart), sizeof restart, 0};
    fresh.ctx = s->opt.ctx;
    cb_serve_defaults(&fresh);
    apply(s, &fresh, &names);
    cb_log_say(s->log, "info", "options_read", NULL);
    if (names.n == 0)
        return;
    restart[names.n < sizeof restart ? names.n : sizeof restart - 1] = '\0';
    cb_line_begin(&l, s->log, "warning", "options_need_restart");
    cb_line_str(&l, "options", restart);
    cb_line_end(&l);
}

/* ---- weights ------------------------------------------------------------ */

static void want_swap(struct cb_server *s)
{
    if (!s->opt.hot_swap) {
        cb_log_say(s->log, "warning", "swap_refused", "started without --hot-swap");
        return;
    }
    cb_log_say(s->log, "info", "swap_wanted", "running requests are finished first");
    pthread_mutex_lock(&s->lock);
    s->swap_wanted = 1;
    cb_worker_wake(s);
    pthread_mutex_unlock(&s->lock);
}

void cb_reload(struct cb_server *s)
{
    read_tokens(s);
    read_options(s);
    want_swap(s);
}
#else
typedef int cb_serve_reload_is_posix;
#endif

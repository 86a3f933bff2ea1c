/* server.h — the inside of struct cb_server. */
#ifndef CB_SERVE_SERVER_H
#define CB_SERVE_SERVER_H

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#include "core/arena.h"
#include "core/json.h"
#include "model/chat.h"
#include "serve/access.h"
#include "serve/buf.h"
#include "serve/http.h"
#include "serve/log.h"
#include "serve/metrics.h"
#include "serve/notify.h"
#include "serve/page.h"
#include "serve/request.h"
#include "serve/serve.h"

#define CB_OUT_BYTES 32768u    /* of one connection, on their way out */
#define CB_STEP_ROOM 4608u     /* the most that one step of an answer appends */
#define CB_JSON_TOKENS 8192u   /* values of a request, at least */
#define CB_WORKER_STACK (1u << 20)
#define CB_TOKEN_SHOWN 256u    /* bytes of one token in logprobs */

/* How far an answer is written out. */
struct cb_pump {
    int phase;
    uint32_t tok, tok_end;     /* tokens written; where this event's end */
    uint32_t text, text_end;   /* bytes of text, likewise */
    int lp_stage;              /* inside of a logprobs object */
    uint32_t lp_tok, lp_top;
    uint32_t char_at, chars;   /* characters in text[0..char_at) */
    uint64_t t_said;           /* last word to a client that waits for its first token */
    uint32_t said;             /* prompt tokens told then */
};

enum cb_conn_state { CB_CONN_FREE, CB_CONN_HEAD, CB_CONN_BODY, CB_CONN_ANSWER, CB_CONN_LINGER };

struct cb_conn {
    enum cb_conn_state state;
    int fd;
    int local;                 /* by the Unix socket: file permissions decide */
    char *in;                  /* [CB_HTTP_HEAD_MAX + body_bytes] */
    uint32_t n_in, in_cap;
    int blank;                 /* an empty line before the next request was passed over */
    struct cb_http http;
    enum cb_endpoint endpoint;
    int status;                /* of the answer under way */
    struct cb_buf out;         /* [CB_OUT_BYTES] */
    size_t sent;               /* of out */
    const char *fixed;         /* a constant body that follows out */
    size_t n_fixed;
    int keep, chunked;
    struct cb_req *req;
    struct cb_pump pump;
    uint64_t t_state, t_moved; /* when this state began; when bytes last went out */
    uint64_t t_busy;           /* since when it has had something to do, answers of tokens aside */
};

struct cb_server {
    struct cb_serve_options opt;   /* defaults filled in; SIGHUP may change some, under the lock */
    char host_text[CB_SERVE_HOSTS][CB_SERVE_HOST_BYTES]; /* opt.host after a SIGHUP */
    struct cb_engine *e;           /* the worker's */
    struct cb_info info;           /* changes with a swap, under the lock */
    struct cb_ledger ledger;
    struct cb_chat chat;           /* of the release in use, under the lock */
    uint32_t release;
    struct cb_tokens tokens;
    struct cb_log log;
    _Atomic uint32_t log_lost;
    struct cb_notify notify;
    struct cb_metrics m;
    uint64_t t_open, created;

    pthread_t worker;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct cb_req *req;            /* [n_req] */
    uint32_t n_req, text_cap, body_room;
    uint64_t next_number;
    struct cb_req *seq_req[CB_SEQ_MAX]; /* the worker's: who holds which KV cache */
    struct cb_step step[CB_SEQ_MAX];
    struct cb_counters counters;   /* copy, under the lock; unhealthy: of the release in use */
    uint64_t unhealthy_gone;       /* the worker's: experts that failed in other releases */
    uint32_t *heat;                /* [n_moe_layer][n_expert], under the lock */
    int stop, draining, swap_wanted, swapping;
    uint64_t t_swap;
    _Atomic uint64_t progress;     /* raised by the worker: a step, or an idle second */

    double speed;                  /* tokens of answers a second, lately */
    uint64_t t_speed, tok_speed;   /* when it was last taken, and the tokens then */
    int listen_fd[2];              /* TCP, Unix; -1 = none */
    int lock_fd;                   /* held as long as the Unix socket is ours; -1 = none */
    int wake_fd[2], signal_fd;
    struct cb_conn *conn;          /* [opt.connections] */
    struct pollfd *pfd;            /* [opt.connections + 4] */
    struct cb_json_tok *json;      /* [n_json] */
    uint32_t n_json;
    void *stack;
    uint64_t beat_progress, t_beat, health_progress, t_health;
    uint32_t health_failed;
    uint64_t t_drain, t_accept;    /* t_accept: no new connections before */
    int signals;                   /* SIGTERM and SIGINT seen */
    void *block;
    uint64_t block_bytes;
};

/* setup.c */
void cb_serve_defaults(struct cb_serve_options *o);
int cb_serve_hosts_check(const struct cb_serve_options *o, struct cb_err *err);

void cb_serve_leave_unix(struct cb_server *s); /* nobody can connect there any more */

/* reload.c */
void cb_reload(struct cb_server *s);

/* worker.c */
int cb_worker_start(struct cb_server *s, struct cb_err *err);
int cb_worker_stop(struct cb_server *s); /* -1: it does not end */
void cb_worker_wake(struct cb_server *s); /* under the lock */

/* queue.c: all take the lock themselves */
struct cb_req *cb_queue_slot(struct cb_server *s); /* FILLING, or NULL: the queue is full */
void cb_queue_put(struct cb_server *s, struct cb_req *r);
void cb_queue_free(struct cb_server *s, struct cb_req *r);
void cb_queue_cancel(struct cb_server *s, struct cb_req *r);
uint32_t cb_queue_wait_s(struct cb_server *s); /* a guess for Retry-After */
struct cb_load {
    uint32_t queued, active, draining; /* requests; draining = done, not yet written out */
    uint32_t prompt_done, prompt_total; /* of prompts under way */
};
void cb_queue_load(struct cb_server *s, struct cb_load *l);

/* api.c: reads a body into r->ask and r->text. 0, or -1 with *no filled. */
int cb_api_read(struct cb_server *s, struct cb_req *r, int chat, const char *body, size_t n,
                struct cb_refusal *no);
void cb_refuse(struct cb_refusal *no, int status, const char *code, const char *param,
               const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 5, 6)))
#endif
    ;

/* answer.c */
void cb_pump_start(struct cb_pump *p);
/* Appends what can be said now; 1 = the answer is complete. */
int cb_pump(struct cb_server *s, struct cb_conn *c);
/* logprobs.c: one step of the logprobs object of tokens [lp_tok, end); 1 = closed. */
int cb_logprobs_step(struct cb_conn *c, uint32_t end);
/* sse.c */
void cb_event_begin(struct cb_buf *b);
void cb_event_end(struct cb_buf *b);
void cb_event_done(struct cb_buf *b);
void cb_event_comment(struct cb_buf *b, const char *text);
void cb_chunk_begin(struct cb_buf *b, size_t *at);
void cb_chunk_end(struct cb_buf *b, size_t at);

/* route.c */
void cb_route_request(struct cb_server *s, struct cb_conn *c);
void cb_reply_head(struct cb_conn *c, int status, const char *type, const char *extra);
void cb_reply_text(struct cb_server *s, struct cb_conn *c, int status, const char *type,
                   const char *body, size_t n, const char *extra);
void cb_reply_refusal(struct cb_server *s, struct cb_conn *c, const struct cb_refusal *no);
/* What is known after the head: access, path, length. 0 = read the body. */
int cb_route_head(struct cb_server *s, struct cb_conn *c);

/* status.c */
void cb_status_health(struct cb_server *s, struct cb_buf *b, int *status);
void cb_status_json(struct cb_server *s, struct cb_buf *b);
void cb_status_metrics(struct cb_server *s, struct cb_buf *b);
/* Counts and logs a request that is over. */
void cb_metrics_end(struct cb_server *s, const struct cb_req *r, int status);

/* conn.c */
void cb_conn_open(struct cb_server *s, struct cb_conn *c, int fd, int local);
void cb_conn_close(struct cb_server *s, struct cb_conn *c);
void cb_conn_read(struct cb_server *s, struct cb_conn *c);
void cb_conn_write(struct cb_server *s, struct cb_conn *c);
void cb_conn_tick(struct cb_server *s, struct cb_conn *c, uint64_t now);
void cb_conn_progress(struct cb_server *s, struct cb_conn *c);
short cb_conn_events(const struct cb_conn *c);

/* watch.c */
void cb_selfcheck_start(struct cb_server *s, uint64_t now);
int cb_selfcheck(struct cb_server *s, uint64_t now); /* 1 = stuck for good */

#endif

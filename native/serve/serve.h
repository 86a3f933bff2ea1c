/* serve.h — `colibri serve`: HTTP in front of an engine.
 *
 * One thread polls all connections, one thread owns the engine. All buffers are
 * mapped in cb_serve_open(); nothing is allocated afterwards. docs/service.md
 * says what clients see. POSIX only: elsewhere every call is CB_EUNSUPPORTED. */
#ifndef CB_SERVE_H
#define CB_SERVE_H

#include <stdint.h>

#include "colibri.h"

#define CB_SERVE_HOSTS 16u
#define CB_SERVE_HOST_BYTES 256u /* of one of their names, with its NUL */

struct cb_serve_options;
/* Reads the options again into *fresh, whose texts must last until the next call.
 * names[0..n) gets the changed ones that only a restart can heed, with blanks
 * between. Negative, *err says why: they are kept as they are. */
typedef int cb_serve_reload_fn(void *ud, struct cb_serve_options *fresh, char *names, size_t n,
                               struct cb_err *err);

/* Zero is the default where one is named. */
struct cb_serve_options {
    const char *listen;      /* "127.0.0.1:8080", "[::1]:8080"; "" = no TCP; NULL = the default */
    const char *unix_path;   /* NULL = no Unix socket */
    const char *token_file;  /* bearer tokens, one a line; NULL = no token asked for */
    const char *host[CB_SERVE_HOSTS]; /* names in the Host header beside localhost and addresses */
    uint32_t n_host;
    uint32_t connections;    /* 0 = 32 */
    uint32_t queue;          /* requests that wait or drain beside those computed; 0 = 8 */
    uint32_t body_bytes;     /* longest request body; 0 = 16 a context token, 64 KiB to 1 MiB */
    uint32_t deadline_s;     /* of a request, from its arrival; 0 = 600 */
    uint32_t io_s;           /* a header, a body, a stalled write; 0 = 20 */
    uint32_t idle_s;         /* a kept connection without a request; 0 = 60 */
    uint32_t drain_s;        /* after SIGTERM; 0 = 30 */
    uint32_t health_s;       /* between two checks of itself; 0 = 30 */
    int log_fd;
    int log_json;
    uint32_t log_mib;        /* a log file is shortened beyond so many MiB; 0 = never */
    int beat_fd;             /* a supervisor's pipe, -1 = none */
    int hot_swap;            /* SIGHUP may call cb_swap */
    const char *model_dir;   /* what SIGHUP opens again */
    cb_serve_reload_fn *reload; /* SIGHUP: other options; NULL = there are none to read */
    void *reload_ud;
    uint32_t sequences, ctx, n_moe_layer, n_expert, text_bytes; /* the engine's; see cb_serve_sizes */
};

/* Fills the sizes from the engine's options and plan. */
void cb_serve_sizes(struct cb_serve_options *o, const struct cb_options *engine,
                    const struct cb_info *info);

/* Bytes of the one mapping that the service takes: the ledger's "server" line. */
uint64_t cb_serve_bytes(const struct cb_serve_options *o);

struct cb_server;

/* Maps the buffers, reads the tokens and binds the sockets, so that what is
 * wrong shows before a model is loaded. Nobody is answered yet. */
int cb_serve_open(const struct cb_serve_options *o, struct cb_server **out, struct cb_err *err);
void cb_serve_close(struct cb_server *s); /* NULL is fine */

/* How a service ended. */
enum cb_serve_end {
    CB_SERVE_DRAINED = 0, /* SIGTERM or SIGINT, all answered or the limit passed */
    CB_SERVE_KILLED = 1,  /* a second such signal */
    CB_SERVE_STUCK = 2,   /* three self-checks failed: the engine's thread cannot be joined */
    CB_SERVE_LEFT = 3     /* as DRAINED, but the engine's thread is still loading a release */
};
/* Answers until it ends; the golden has been checked. ledger has the server's
 * line. SIGTERM, SIGINT, SIGHUP must be blocked in every thread. Returns an
 * enum cb_serve_end or a negative code. After CB_SERVE_STUCK and
 * CB_SERVE_LEFT nothing may be closed; only _exit() is left. */
int cb_serve_run(struct cb_server *s, struct cb_engine *e, const struct cb_ledger *ledger,
                 struct cb_err *err);

/* Runs child(arg, beat_fd) in a process of its own and starts it again with
 * back-off when it ends badly or its beats stop. watchdog_s: seconds without a
 * beat once it was ready. Returns the exit status for the parent. */
struct cb_supervise {
    uint32_t give_up;     /* bad ends in a row; one that was ready for 60 s starts the count anew */
    uint32_t watchdog_s;
    int log_fd, log_json;
    uint32_t log_mib;     /* as in cb_serve_options */
    void (*child)(void *arg, int beat_fd); /* does not return: it ends its process */
    void *arg;
};
int cb_supervise(const struct cb_supervise *s);
#define CB_SUPERVISE_GAVE_UP 8

#endif

/* offload.h — the engine's side of the link: sends experts of a layer to a
 * module, takes their rows back, and never depends on it.
 *
 * One thread owns the link: it connects, greets, measures, reads, and tries
 * again with growing pauses. The computing thread sends a layer's rows before
 * it computes its own experts, and waits for the rest at most until a deadline;
 * what has not come by then it computes itself. A row lands at the place that
 * the same row computed here would have, so the sum never knows.
 *
 * Windows has the stubs of offload_win.c. */
#ifndef CB_OFFLOAD_H
#define CB_OFFLOAD_H

#include <pthread.h>
#include <stdint.h>

#include "core/arena.h"
#include "offload/frame.h"
#include "offload/link.h"
#include "offload/sched.h"

struct cb_engine;
struct cb_chunk;
struct cb_manifest;

#define CB_OFFLOAD_EXECS 8u   /* frames of one layer at most */
#define CB_OFFLOAD_PING 16384u

enum cb_offload_state { CB_OFFLOAD_DOWN, CB_OFFLOAD_UP, CB_OFFLOAD_DEMOTED };

struct cb_offload_row {
    uint32_t item, out;       /* index among the distinct experts; row of w.out */
    int done;
};
struct cb_offload_sent {
    uint32_t seq, first, n;   /* rows [first, first + n) of the job */
    uint32_t busy_us;         /* the module's own time, from its last RESULT */
};

/* What one layer has on the way. */
struct cb_offload_job {
    int active, failed, trial;
    uint32_t n_exec, n_row, left, n_item;
    uint64_t bytes;           /* both ways */
    uint64_t sent_ns, done_ns, deadline_ns;
    struct cb_offload_sent exec[CB_OFFLOAD_EXECS];
};

struct cb_offload {
    struct cb_engine *e;
    struct cb_link_addr addr;
    int forced;               /* percent of the experts instead of the cost model, -1 = no */
    uint32_t share_left;      /* of the percent, carried to the next layer */
    uint64_t deadline_ns;     /* fixed one, 0 = from the prediction */
    int paused;               /* the golden is at work: only a trial may go */

    struct cb_hello me, peer;
    struct cb_frames rx;
    uint8_t *tx;              /* [tx_cap]; bytes [tx_at, tx_end) wait */
    uint32_t tx_cap, tx_at, tx_end;
    uint32_t seq;             /* of the next frame; never 0 */
    uint32_t exec_index, limit; /* EXECs sent since HELLO; how many the module allows */
    uint64_t starved_ns;      /* since when it allows none, 0 = it does */
    struct cb_offload_row *row; /* [batch * used] */
    uint16_t *token_at;       /* [batch] place of a token in the frame being made */
    uint32_t *order, *rows;   /* [n_expert] scratch of the scheduler */
    uint8_t *missing;         /* [n_expert] */
    float *trial;             /* [n_embd] one row computed twice */
    int trial_due;            /* after each HELLO and every so many layers */
    uint32_t untried;         /* layers since the last one */

    struct cb_offload_job job;
    struct cb_sched sched;

    pthread_mutex_t mutex;    /* all that follows, link and job */
    pthread_cond_t arrived;   /* rows came, the link ended, or it is up */
    pthread_t thread;
    int wake[2];
    int opened, stop, again;  /* again: the model changed, greet anew */
    struct cb_link link;
    enum cb_offload_state state;
    uint64_t retry_ns, pause_ns; /* when to try next; the pause after that */
    uint32_t good;            /* layers in time since the last trouble */
    uint32_t tries;           /* finished attempts to connect */
    uint32_t await;           /* ref that the thread waits for, 0 = none */
    enum cb_frame_type await_type; /* the answer that it wants */
    uint32_t await_got, await_code;
    struct cb_counters n;     /* its offload_ fields */
    char why[160];            /* the last trouble */
};

/* Checks opt.offload; 0 also when there is none. */
int cb_offload_check(const struct cb_options *opt, const struct cb_manifest *m,
                     struct cb_err *err);
/* Takes *o and its buffers; e->opt is resolved, e->used_max known. */
void cb_offload_layout(struct cb_offload **o, struct cb_arena *a, const struct cb_engine *e);
/* Starts the thread and waits up to a second for its first attempt. */
int cb_offload_open(struct cb_engine *e, struct cb_err *err);
void cb_offload_close(struct cb_offload *o);
/* e->rel is another release: the link has to prove that it has it too. */
void cb_offload_model_changed(struct cb_engine *e);
void cb_offload_pause(struct cb_engine *e, int on);
void cb_offload_counters(struct cb_offload *o, struct cb_counters *to);

/* Decides which of the n distinct experts in w.distinct go, and sends them all:
 * remote[i] = 1. Returns how many. */
uint32_t cb_offload_send(struct cb_offload *o, const struct cb_chunk *c, uint32_t n,
                         uint8_t *remote);
/* Waits for what was sent, at most until the deadline. remote[i] = 1 stays for
 * those that have to be computed here after all; returns how many. After it no
 * row arrives any more. */
uint32_t cb_offload_wait(struct cb_offload *o, const struct cb_chunk *c, uint32_t n,
                         uint8_t *remote);
/* Gives up on what was sent: the layer failed. */
void cb_offload_cancel(struct cb_offload *o);
/* One expert of about rows rows took ns here. */
void cb_offload_note_here(struct cb_offload *o, uint32_t rows, double ns);

#endif

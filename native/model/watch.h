/* watch.h — the watchdog: notices a token that takes longer than its deadline.
 *
 * Progress is tokens, not liveness: the forward pass notes when a token (or
 * prefill chunk) began and which layer it is in; a thread looks every 50 ms. */
#ifndef CB_WATCH_H
#define CB_WATCH_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "colibri.h"

struct cb_store;

struct cb_watch {
    _Atomic uint64_t began_ns;  /* of the token at work; 0 = idle */
    _Atomic uint32_t layer;
    _Atomic int stop;
    uint64_t deadline_ns;
    uint64_t told_ns;           /* began_ns of the token last reported */
    cb_stuck_fn fn;
    void *ud;
    struct cb_store *store;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    int running;
};

/* Starts the thread when opt asks for a deadline. */
int cb_watch_open(struct cb_watch *w, const struct cb_options *opt, struct cb_store *store,
                  struct cb_err *err);
void cb_watch_close(struct cb_watch *w);

#endif

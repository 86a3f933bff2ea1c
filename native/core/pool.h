/* pool.h — the engine's own thread pool.
 *
 * cb_pool_run() calls fn(arg, i, n) once on each of n threads, the caller being
 * thread 0, and returns when all are done. Workers spin a little, then sleep.
 * Created at start; nothing is allocated by a run. */
#ifndef CB_POOL_H
#define CB_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "colibri.h"

#define CB_POOL_MAX 64u
/* Bytes a worker, touched at start; bytes a reader or the watchdog. A sanitizer's
 * thread data lies there too and needs more. */
#ifndef CB_POOL_STACK
#define CB_POOL_STACK (512u * 1024u)
#endif
#ifndef CB_SMALL_STACK
#define CB_SMALL_STACK (128u * 1024u)
#endif

/* A condition for timed waits by the clock of cb_os_now_ns, which nobody sets. */
void cb_cond_init(pthread_cond_t *cond);
/* Waits until a time of cb_os_now_ns at most; the mutex is held. */
void cb_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t ns);

typedef void cb_pool_fn(void *arg, uint32_t thread, uint32_t n_threads);

struct cb_pool {
    uint32_t n;            /* threads, caller included */
    uint32_t spin;         /* polls before sleeping */
    pthread_t thread[CB_POOL_MAX];
    struct cb_pool_slot {
        struct cb_pool *pool;
        uint32_t index;
    } slot[CB_POOL_MAX];
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
    _Atomic uint32_t epoch;   /* raised once a run */
    _Atomic uint32_t pending; /* workers still in this run */
    _Atomic int stop;
    cb_pool_fn *fn;
    void *arg;
};

int cb_pool_open(struct cb_pool *p, uint32_t n, struct cb_err *err);
void cb_pool_close(struct cb_pool *p);
void cb_pool_run(struct cb_pool *p, cb_pool_fn *fn, void *arg);

/* Thread i's share of n items: [*lo, *hi). */
static inline void cb_share(uint64_t n, uint32_t i, uint32_t n_threads, uint64_t *lo, uint64_t *hi)
{
    *lo = n * i / n_threads;
    *hi = n * (i + 1u) / n_threads;
}

void cb_touch_stack(void); /* makes the stack that a worker may use resident */

#endif

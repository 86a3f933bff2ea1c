/* pool.c — see pool.h. */
#define _GNU_SOURCE /* pthread_condattr_setclock */
#include "pool.h"

#include <string.h>
#include <time.h>

#include "os.h"

#if defined(_WIN32)
/* winpthreads waits by the wall clock only: as long from now. */
void cb_cond_init(pthread_cond_t *cond)
{
    pthread_cond_init(cond, NULL);
}

static struct timespec clock_of(uint64_t ns)
{
    struct timespec t;
    uint64_t now = cb_os_now_ns(), left = ns > now ? ns - now : 0;
    clock_gettime(CLOCK_REALTIME, &t);
    left += (uint64_t)t.tv_nsec;
    t.tv_sec += (time_t)(left / 1000000000u);
    t.tv_nsec = (long)(left % 1000000000u);
    return t;
}
#else
void cb_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &clock);
    pthread_condattr_destroy(&clock);
}

static struct timespec clock_of(uint64_t ns)
{
    return (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
}
#endif

void cb_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t ns)
{
    struct timespec until = clock_of(ns);
    pthread_cond_timedwait(cond, mutex, &until);
}

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void cb_touch_stack(void)
{
    volatile unsigned char page[CB_POOL_STACK / 2];
    for (size_t i = 0; i < sizeof page; i += 1024)
        page[i] = 0;
    page[sizeof page - 1] = page[0];
}

/* Waits until *word != old: polls first, then sleeps on the condition. */
static void wait_change(struct cb_pool *p, pthread_cond_t *cond, _Atomic uint32_t *word,
                        uint32_t old, int until_zero)
{
    for (uint32_t i = 0; i < p->spin; i++) {
        uint32_t v = atomic_load_explicit(word, memory_order_acquire);
        if (until_zero ? v == 0 : v != old)
            return;
        relax();
    }
    pthread_mutex_lock(&p->mutex);
    for (;;) {
        uint32_t v = atomic_load_explicit(word, memory_order_acquire);
        if (until_zero ? v == 0 : v != old)
            break;
        pthread_cond_wait(cond, &p->mutex);
    }
    pthread_mutex_unlock(&p->mutex);
}

static void *worker(void *arg)
{
    struct cb_pool_slot *slot = arg;
    struct cb_pool *p = slot->pool;
    uint32_t seen = 0;
    cb_touch_stack();
    for (;;) {
        wait_change(p, &p->wake, &p->epoch, seen, 0);
        seen = atomic_load_explicit(&p->epoch, memory_order_acquire);
        if (atomic_load_explicit(&p->stop, memory_order_acquire))
            return NULL;
        p->fn(p->arg, slot->index, p->n);
        if (atomic_fetch_sub_explicit(&p->pending, 1, memory_order_acq_rel) == 1) {
            pthread_mutex_lock(&p->mutex);
            pthread_cond_signal(&p->done);
            pthread_mutex_unlock(&p->mutex);
        }
    }
}

static void raise_epoch(struct cb_pool *p)
{
    pthread_mutex_lock(&p->mutex);
    atomic_fetch_add_explicit(&p->epoch, 1, memory_order_release);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
}

int cb_pool_open(struct cb_pool *p, uint32_t n, struct cb_err *err)
{
    memset(p, 0, sizeof *p);
    if (n < 1 || n > CB_POOL_MAX)
        return cb_fail(err, CB_EINVAL, "threads must be 1 to %u, not %u", CB_POOL_MAX, n);
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->wake, NULL);
    pthread_cond_init(&p->done, NULL);
    /* More threads than cores: spinning would only take the others' time. */
    p->spin = n <= cb_os_physical_cores() ? 4000 : 0;
    p->n = 1;
    cb_touch_stack();
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, CB_POOL_STACK);
    for (uint32_t i = 1; i < n; i++) {
        p->slot[i] = (struct cb_pool_slot){p, i};
        if (pthread_create(&p->thread[i], &attr, worker, &p->slot[i]) != 0) {
            pthread_attr_destroy(&attr);
            cb_pool_close(p);
            return cb_fail(err, CB_EIO, "starting thread %u of %u", i + 1, n);
        }
        p->n = i + 1;
    }
    pthread_attr_destroy(&attr);
    return 0;
}

void cb_pool_close(struct cb_pool *p)
{
    if (p->n == 0)
        return;
    atomic_store_explicit(&p->stop, 1, memory_order_release);
    raise_epoch(p);
    for (uint32_t i = 1; i < p->n; i++)
        pthread_join(p->thread[i], NULL);
    pthread_mutex_destroy(&p->mutex);
    pthread_cond_destroy(&p->wake);
    pthread_cond_destroy(&p->done);
    p->n = 0;
}

void cb_pool_run(struct cb_pool *p, cb_pool_fn *fn, void *arg)
{
    if (p->n == 1) {
        fn(arg, 0, 1);
        return;
    }
    p->fn = fn;
    p->arg = arg;
    atomic_store_explicit(&p->pending, p->n - 1, memory_order_release);
    raise_epoch(p);
    fn(arg, 0, p->n);
    wait_change(p, &p->done, &p->pending, 0, 1);
}

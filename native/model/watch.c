/* watch.c — see watch.h. */
#include "model/watch.h"

#include "core/os.h"
#include "core/pool.h"
#include "expert/store.h"

#define PERIOD_NS 50000000u

static void look(struct cb_watch *w)
{
    uint64_t began = atomic_load(&w->began_ns), now = cb_os_now_ns();
    if (began == 0 || began == w->told_ns || now < began || now - began < w->deadline_ns)
        return;
    w->told_ns = began;
    cb_store_count_stuck(w->store);
    if (w->fn != NULL)
        w->fn(w->ud, atomic_load(&w->layer), atomic_load(&w->store->waiting_for),
              (now - began) / 1000000u);
}

static void *watch(void *arg)
{
    struct cb_watch *w = arg;
    pthread_mutex_lock(&w->mutex);
    while (!atomic_load(&w->stop)) {
        cb_cond_wait_until(&w->cond, &w->mutex, cb_os_now_ns() + PERIOD_NS);
        look(w);
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

int cb_watch_open(struct cb_watch *w, const struct cb_options *opt, struct cb_store *store,
                  struct cb_err *err)
{
    pthread_attr_t attr;
    w->deadline_ns = (uint64_t)opt->token_deadline_ms * 1000000u;
    w->fn = opt->on_stuck;
    w->ud = opt->stuck_ud;
    w->store = store;
    if (w->deadline_ns == 0)
        return 0;
    pthread_mutex_init(&w->mutex, NULL);
    cb_cond_init(&w->cond);
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, CB_SMALL_STACK);
    w->running = pthread_create(&w->thread, &attr, watch, w) == 0;
    pthread_attr_destroy(&attr);
    return w->running ? 0 : cb_fail(err, CB_EIO, "starting the watchdog thread");
}

void cb_watch_close(struct cb_watch *w)
{
    if (!w->running)
        return;
    pthread_mutex_lock(&w->mutex);
    atomic_store(&w->stop, 1);
    pthread_cond_signal(&w->cond);
    pthread_mutex_unlock(&w->mutex);
    pthread_join(w->thread, NULL);
    pthread_mutex_destroy(&w->mutex);
    pthread_cond_destroy(&w->cond);
    w->running = 0;
}

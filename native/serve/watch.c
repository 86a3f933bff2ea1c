/* watch.c — is the engine's thread alive? Beats for a service manager follow its
 * progress; three failed checks in a row end the process. */
#if !defined(_WIN32)
#include "core/os.h"
#include "serve/server.h"

#define FAILURES 3u
#define SWAP_NS (UINT64_C(600) * 1000000000) /* loading a release may take that long */

void cb_selfcheck_start(struct cb_server *s, uint64_t now)
{
    s->t_beat = s->t_health = now;
    s->beat_progress = s->health_progress = atomic_load(&s->progress);
    s->health_failed = 0;
}

/* A hot swap reads a model: no token can come meanwhile. */
static int is_swapping(struct cb_server *s, uint64_t now)
{
    pthread_mutex_lock(&s->lock);
    int yes = s->swapping && now - s->t_swap < SWAP_NS;
    pthread_mutex_unlock(&s->lock);
    return yes;
}

static void beat(struct cb_server *s, uint64_t now)
{
    uint64_t p = atomic_load(&s->progress);
    if (s->notify.interval_ns == 0 || now - s->t_beat < s->notify.interval_ns)
        return;
    s->t_beat = now;
    if (p != s->beat_progress || is_swapping(s, now))
        cb_notify_beat(&s->notify);
    s->beat_progress = p;
}

int cb_selfcheck(struct cb_server *s, uint64_t now)
{
    struct cb_load load;
    uint64_t p = atomic_load(&s->progress);
    cb_notify_again(&s->notify);
    beat(s, now);
    if (now - s->t_health < s->opt.health_s * UINT64_C(1000000000))
        return 0;
    s->t_health = now;
    if (p != s->health_progress || is_swapping(s, now)) {
        s->health_progress = p;
        s->health_failed = 0;
        return 0;
    }
    struct cb_line l;
    cb_queue_load(s, &load);
    s->health_failed++;
    cb_line_begin(&l, s->log, "error", "stuck");
    cb_line_u64(&l, "failures", s->health_failed);
    cb_line_u64(&l, "active", load.active);
    cb_line_u64(&l, "queued", load.queued);
    cb_line_u64(&l, "prompt_done", load.prompt_done);
    cb_line_u64(&l, "prompt_total", load.prompt_total);
    cb_line_end(&l);
    return s->health_failed >= FAILURES;
}
#else
typedef int cb_serve_watch_is_posix;
#endif

/* queue.c — the slots of requests and the order among them. */
#if !defined(_WIN32)
#include <string.h>

#include "core/os.h"
#include "serve/server.h"

struct cb_req *cb_queue_slot(struct cb_server *s)
{
    struct cb_req *free_one = NULL;
    uint32_t taken = 0;
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < s->n_req; i++) {
        taken += s->req[i].state != CB_REQ_FREE;
        if (free_one == NULL && s->req[i].state == CB_REQ_FREE)
            free_one = &s->req[i];
    }
    if (taken >= s->opt.sequences + s->opt.queue) /* SIGHUP may have made the queue shorter */
        free_one = NULL;
    if (free_one != NULL) {
        free_one->state = CB_REQ_FILLING;
        free_one->number = s->next_number++;
    }
    pthread_mutex_unlock(&s->lock);
    return free_one;
}

void cb_queue_put(struct cb_server *s, struct cb_req *r)
{
    pthread_mutex_lock(&s->lock);
    r->cancel = r->prepared = 0;
    r->n_prompt = r->n_done = r->n_tok = r->n_text = 0;
    r->finish = CB_FINISH_LENGTH;
    memset(&r->refusal, 0, sizeof r->refusal);
    r->degraded = r->zeros = r->extra = 0;
    r->t_start = r->t_first = r->t_end = 0;
    r->words = NULL;
    r->state = CB_REQ_QUEUED;
    cb_worker_wake(s);
    pthread_mutex_unlock(&s->lock);
}

void cb_queue_free(struct cb_server *s, struct cb_req *r)
{
    pthread_mutex_lock(&s->lock);
    r->state = CB_REQ_FREE;
    if (s->swap_wanted)
        cb_worker_wake(s);
    pthread_mutex_unlock(&s->lock);
}

void cb_queue_cancel(struct cb_server *s, struct cb_req *r)
{
    pthread_mutex_lock(&s->lock);
    r->cancel = 1;
    if (r->state == CB_REQ_QUEUED) { /* the worker has not seen it */
        r->state = CB_REQ_DONE;
        r->finish = CB_FINISH_CANCEL;
        r->t_end = cb_os_now_ns();
    }
    pthread_mutex_unlock(&s->lock);
}

void cb_queue_load(struct cb_server *s, struct cb_load *l)
{
    memset(l, 0, sizeof *l);
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < s->n_req; i++) {
        const struct cb_req *r = &s->req[i];
        l->queued += r->state == CB_REQ_QUEUED;
        l->active += r->state == CB_REQ_PREFILL || r->state == CB_REQ_DECODE;
        l->draining += r->state == CB_REQ_DONE;
        if (r->state == CB_REQ_PREFILL) {
            l->prompt_done += r->n_done;
            l->prompt_total += r->n_prompt;
        }
    }
    pthread_mutex_unlock(&s->lock);
}

/* As long as the last requests took on average, 1 to 60 s. */
uint32_t cb_queue_wait_s(struct cb_server *s)
{
    const struct cb_hist *h = &s->m.total;
    uint64_t mean = h->count > 0 ? h->sum_ns / h->count / UINT64_C(1000000000) : 1;
    return mean < 1 ? 1 : mean > 60 ? 60 : (uint32_t)mean;
}
#else
typedef int cb_serve_queue_is_posix;
#endif

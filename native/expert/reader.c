/* reader.c — the threads that fill slots.
 *
 * Wanted records go first, in the order asked for; look-ahead runs only when no
 * wanted read is queued. A record is read in pieces of 1 MiB past the page
 * cache (records stand at multiples of 16 KiB, slots at page boundaries, so no
 * over-read is needed), checked by CRC32C, then made read-only. After a bad CRC
 * or an I/O error it is read once more; then the expert is unhealthy. */
#include <stdio.h>
#include <string.h>

#include "core/pool.h"
#include "expert/store.h"

#define PIECE (1u << 20)

static int read_piece(struct cb_store *s, const struct cb_record *r, uint8_t *to, uint64_t at,
                      uint64_t n, struct cb_err *err)
{
    if (s->io_hook != NULL) {
        int injected = s->io_hook(s->io_ud, r->shard, r->offset + at, n);
        if (injected != 0)
            return cb_fail(err, CB_EIO, "reading at offset %llu: %s",
                           (unsigned long long)(r->offset + at), strerror(injected));
    }
    int rc = cb_os_pread(&s->file[r->shard], to, n, r->offset + at, err);
    if (rc != 0 && cb_os_direct(&s->file[r->shard], 0) == 0) /* a file system without O_DIRECT */
        rc = cb_os_pread(&s->file[r->shard], to, n, r->offset + at, err);
    return rc;
}

/* Reads and checks record r into its slot's memory. No lock is held. */
static int fill(struct cb_store *s, const struct cb_record *r, uint8_t *data, struct cb_err *err)
{
    uint32_t crc = 0;
    for (uint64_t at = 0; at < r->size; at += PIECE) {
        uint64_t n = r->size - at < PIECE ? r->size - at : PIECE;
        int rc = read_piece(s, r, data + at, at, n, err);
        if (rc != 0)
            return rc;
        crc = cb_crc32c(crc, data + at, (size_t)n);
    }
    if (crc != r->crc)
        return cb_fail(err, CB_EFORMAT, "the record is damaged (CRC32C, read twice)");
    return 0;
}

static int protect(const struct cb_store *s, const struct cb_slot *c, enum cb_os_access access,
                   struct cb_err *err)
{
    if (cb_os_protect(c->data, s->slot_bytes, access) == 0)
        return 0;
    return cb_fail(err, CB_EIO, "the access to its slot could not be changed (vm.max_map_count?)");
}

/* The last of the reads that began together is done: what n of them take. */
static void note_batch(struct cb_store *s)
{
    uint32_t n = s->batch_n;
    if (n == 0 || s->queue_n > 0 || s->busy > 1)
        return;
    double ns = (double)(cb_os_now_ns() - s->batch_ns);
    if (n >= CB_READ_LEVELS) {
        ns = ns * (CB_READ_LEVELS - 1) / n;
        n = CB_READ_LEVELS - 1;
    }
    double *mean = &s->read_ns[n];
    *mean = *mean > 0.0 ? *mean + (ns - *mean) / 8.0 : ns;
    s->batch_n = 0;
}

static void load(struct cb_store *s, uint32_t slot)
{
    struct cb_slot *c = &s->slot[slot];
    struct cb_record *r = &s->record[c->record];
    struct cb_err err = {0, ""};
    pthread_mutex_unlock(&s->mutex);
    int retried = 0, rc = protect(s, c, CB_OS_WRITE, &err);
    if (rc == 0 && (rc = fill(s, r, c->data, &err)) != 0) {
        retried = 1;
        rc = fill(s, r, c->data, &err);
    }
    if (rc == 0)
        rc = protect(s, c, CB_OS_READ, &err);
    cb_os_drop_cache(&s->file[r->shard], r->offset, r->size);
    pthread_mutex_lock(&s->mutex);
    note_batch(s);
    s->counters->bytes_read += r->size * (1u + (uint32_t)retried);
    s->counters->retries += (uint32_t)retried;
    c->state = rc == 0 ? CB_SLOT_READY : CB_SLOT_FAILED;
    if (rc != 0) {
        uint32_t record = c->record;
        c->ahead = 0;
        cb_cache_drop(s, slot);
        cb_store_note_bad(s, record / s->n_expert, record % s->n_expert, err.msg);
    }
    pthread_cond_broadcast(&s->arrived);
}

void cb_reader_push(struct cb_store *s, uint32_t slot)
{
    if (s->busy == 0 && s->queue_n == 0) {
        s->batch_ns = cb_os_now_ns();
        s->batch_n = 0;
    }
    if (s->batch_n > 0 || (s->busy == 0 && s->queue_n == 0))
        s->batch_n++;
    s->queue[(s->queue_head + s->queue_n++) % s->n_slot] = slot;
    pthread_cond_signal(&s->work);
}

/* The next slot to fill, or CB_NO_SLOT. */
static uint32_t next_job(struct cb_store *s)
{
    if (s->queue_n > 0) {
        uint32_t slot = s->queue[s->queue_head];
        s->queue_head = (s->queue_head + 1) % s->n_slot;
        s->queue_n--;
        return slot;
    }
    while (s->ahead_n > 0 && s->busy == 0) { /* idle storage only */
        uint32_t r = s->ahead[--s->ahead_n];
        if (s->record[r].slot != CB_NO_SLOT || s->record[r].unhealthy)
            continue;
        uint32_t slot = cb_cache_claim(s, r, 1);
        if (slot != CB_NO_SLOT)
            s->counters->ahead_issued++;
        return slot;
    }
    return CB_NO_SLOT;
}

static void *reader(void *arg)
{
    struct cb_store *s = arg;
    pthread_mutex_lock(&s->mutex);
    for (;;) {
        uint32_t slot = s->stop ? CB_NO_SLOT : next_job(s);
        if (slot != CB_NO_SLOT) {
            s->busy++;
            load(s, slot);
            s->busy--;
            continue;
        }
        if (s->stop)
            break;
        pthread_cond_wait(&s->work, &s->mutex);
    }
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

int cb_readers_start(struct cb_store *s, uint32_t n, struct cb_err *err)
{
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, CB_SMALL_STACK);
    for (s->n_reader = 0; s->n_reader < n; s->n_reader++)
        if (pthread_create(&s->reader[s->n_reader], &attr, reader, s) != 0)
            break;
    pthread_attr_destroy(&attr);
    if (s->n_reader == n)
        return 0;
    cb_readers_stop(s);
    return cb_fail(err, CB_EIO, "starting reader thread %u of %u", s->n_reader + 1, n);
}

void cb_readers_stop(struct cb_store *s)
{
    pthread_mutex_lock(&s->mutex);
    s->stop = 1;
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->mutex);
    for (uint32_t i = 0; i < s->n_reader; i++)
        pthread_join(s->reader[i], NULL);
    s->n_reader = 0;
}

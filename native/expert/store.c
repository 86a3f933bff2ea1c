/* store.c — see store.h. */
#include "expert/store.h"

#include <stdio.h>
#include <string.h>

#include "expert/fault.h"
#include "model/layout.h"

/* ---- opening ------------------------------------------------------------ */

static void fill_record(struct cb_record *r, const struct cb_expert_entry *e, uint32_t shard)
{
    memset(r, 0, sizeof *r);
    r->offset = e->offset;
    r->size = (uint32_t)e->size;
    r->crc = e->crc;
    r->shard = shard;
    r->slot = CB_NO_SLOT;
    for (int k = 0; k < 3; k++) {
        r->part_type[k] = e->part[k].type;
        r->part_offset[k] = (uint32_t)e->part[k].offset;
    }
}

/* Decimal digits at *at; moves past them. -1: none, or more than fits an int. */
static long take_number(const char **at)
{
    long v = 0;
    const char *p = *at;
    for (; *p >= '0' && *p <= '9' && v <= INT32_MAX / 10 - 1; p++)
        v = 10 * v + (*p - '0');
    if (p == *at || (*p >= '0' && *p <= '9'))
        return -1;
    *at = p;
    return v;
}

static const char *past_blanks(const char *p)
{
    return p + strspn(p, " \t\r");
}

static int parse_pin(struct cb_store *s, const char *line, struct cb_err *err)
{
    const char *at = past_blanks(line);
    if (*at == '#' || *at == '\0')
        return 0;
    long layer = take_number(&at);
    at = past_blanks(at);
    long expert = take_number(&at);
    if (layer < 0 || expert < 0 || *past_blanks(at) != '\0' || layer < (long)s->first_layer ||
        layer - (long)s->first_layer >= (long)s->n_layer || expert >= (long)s->n_expert)
        return cb_fail(err, CB_EINVAL, "pin file: \"%.60s\" is no \"layer expert\" of this model",
                       line);
    cb_store_record(s, (uint32_t)layer - s->first_layer, (uint32_t)expert)->pinned = 1;
    return 0;
}

/* Reads "layer expert" lines; at most what leaves room for one token's experts. */
static int read_pins(struct cb_store *s, const char *path, uint32_t least, struct cb_err *err)
{
    char text[65536], *line = text;
    struct cb_os_file f;
    int rc = cb_os_open(&f, path, err);
    if (rc != 0)
        return rc;
    if (f.size >= sizeof text)
        rc = cb_fail(err, CB_EINVAL, "pin file %s: larger than 64 KiB", path);
    if (rc == 0)
        rc = cb_os_pread(&f, text, f.size, 0, err);
    text[rc == 0 ? f.size : 0] = '\0';
    cb_os_close(&f);
    while (rc == 0 && line != NULL && *line != '\0') {
        char *end = strchr(line, '\n');
        if (end != NULL)
            *end++ = '\0';
        rc = parse_pin(s, line, err);
        line = end;
    }
    uint64_t pinned = 0, n = (uint64_t)s->n_layer * s->n_expert;
    for (uint64_t i = 0; i < n; i++)
        pinned += s->record[i].pinned;
    if (rc == 0 && pinned + least > s->n_slot && pinned > 0 && s->n_slot < n)
        rc = cb_fail(err, CB_EBUDGET, "%llu experts are pinned, but there are %u slots and one "
                     "token needs %u", (unsigned long long)pinned, s->n_slot, least);
    return rc;
}

/* Fills the slots at start: pinned records first, then layer by layer in turn,
 * so that every layer begins with its share. Waits for the reads. */
static int prefill(struct cb_store *s, struct cb_err *err)
{
    uint64_t n = (uint64_t)s->n_layer * s->n_expert;
    pthread_mutex_lock(&s->mutex);
    uint32_t given = 0;
    for (int pinned = 1; pinned >= 0; pinned--)
        for (uint64_t k = 0; k < n && given < s->n_slot; k++) {
            uint32_t r = (uint32_t)(k % s->n_layer * s->n_expert + k / s->n_layer);
            if (s->record[r].pinned != pinned || s->record[r].slot != CB_NO_SLOT)
                continue;
            cb_reader_push(s, cb_cache_claim(s, r, 0));
            given++;
        }
    pthread_cond_broadcast(&s->work);
    while (s->queue_n > 0 || s->busy > 0)
        pthread_cond_wait(&s->arrived, &s->mutex);
    pthread_mutex_unlock(&s->mutex);
    if (s->counters->unhealthy > 0)
        return cb_fail(err, CB_EEXPERT, "%.240s", s->err.msg);
    return 0;
}

/* In the mapped modes every record is checked before its first use instead. */
static int open_mapped(struct cb_store *s, struct cb_err *err)
{
    return cb_mapped_open(&s->mapped, s->file, err);
}

/* Where a file system refuses O_DIRECT, or the caller does, reads are buffered:
 * without read-ahead, and dropped from the cache afterwards. */
static void past_page_cache(struct cb_store *s)
{
    for (uint32_t i = 0; i < s->n_shard; i++)
        if (s->buffered || cb_os_direct(&s->file[i], 1) != 0)
            cb_os_no_readahead(&s->file[i]);
}

static int open_slots(struct cb_store *s, const struct cb_options *opt, struct cb_err *err)
{
    past_page_cache(s);
    if (cb_os_protect(s->guard[0], cb_os_page(), CB_OS_NONE) != 0 ||
        cb_os_protect(s->guard[1], cb_os_page(), CB_OS_NONE) != 0)
        return cb_fail(err, CB_EIO, "protecting the guard pages failed");
    int rc = cb_readers_start(s, opt->readers != 0 ? opt->readers : 2, err);
    return rc == 0 ? prefill(s, err) : rc;
}

static void take_records(struct cb_store *s, const struct cb_files *f)
{
    uint64_t n = (uint64_t)s->n_layer * s->n_expert;
    for (uint64_t i = 0; i < n; i++) {
        uint8_t pinned = s->record[i].pinned;
        fill_record(&s->record[i], &f->record[i], f->record_shard[i]);
        s->record[i].pinned = pinned;
    }
}

/* The store's files change places with f's. */
static void trade_files(struct cb_store *s, struct cb_files *f)
{
    for (uint32_t i = 0; i < s->n_shard; i++) {
        struct cb_os_file mine = s->file[i];
        s->file[i] = f->shard_file[i];
        f->shard_file[i] = mine;
    }
}

int cb_store_open(struct cb_store *s, struct cb_files *f, const struct cb_options *opt,
                  struct cb_counters *counters, struct cb_err *err)
{
    s->counters = counters;
    s->io_hook = opt->io_hook;
    s->io_ud = opt->io_ud;
    s->buffered = opt->buffered != 0;
    s->ahead_off = opt->no_lookahead != 0 || opt->cache_none != 0;
    atomic_store(&s->waiting_for, -1);
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_cond_init(&s->arrived, NULL);
    for (uint32_t i = 0; i < s->n_shard; i++)
        s->file[i].h = -1;
    s->opened = 1;
    take_records(s, f);
    trade_files(s, f);
    int rc = cb_fault_install(err);
    if (rc != 0 || s->n_layer == 0)
        return rc;
    uint32_t least = opt->extra_expert != 0 ? f->m->n_used + 1 : f->m->n_used;
    if (opt->pin_file != NULL && (rc = read_pins(s, opt->pin_file, least, err)) != 0)
        return rc;
    if (s->mode == CB_WEIGHTS_MMAP || s->mode == CB_WEIGHTS_LAZY)
        return open_mapped(s, err);
    return open_slots(s, opt, err);
}

void cb_store_close(struct cb_store *s)
{
    if (!s->opened)
        return;
    cb_readers_stop(s);
    if (s->mapped.n_shard > 0)
        cb_mapped_close(&s->mapped);
    for (uint32_t i = 0; i < s->n_shard; i++)
        cb_os_close(&s->file[i]);
    pthread_mutex_destroy(&s->mutex);
    pthread_cond_destroy(&s->work);
    pthread_cond_destroy(&s->arrived);
    s->opened = 0;
}

/* Waits for reads under way, then forgets everything resident. */
static void empty(struct cb_store *s)
{
    pthread_mutex_lock(&s->mutex);
    s->ahead_n = 0;
    while (s->queue_n > 0 || s->busy > 0)
        pthread_cond_wait(&s->arrived, &s->mutex);
    for (uint32_t i = 0; i < s->n_slot; i++)
        cb_cache_drop(s, i);
    pthread_mutex_unlock(&s->mutex);
    if (s->mapped.n_shard > 0)
        cb_mapped_close(&s->mapped);
}

/* The files are others now: map them, or read past the page cache again. */
static int begin_files(struct cb_store *s, struct cb_err *err)
{
    if (s->n_slot > 0)
        past_page_cache(s);
    if (s->mapped.n_shard == 0)
        return 0;
    s->mapped.ring_n = s->mapped.ring_head = 0;
    for (uint32_t b = 0; b < s->mapped.n_block; b++)
        atomic_store(&s->mapped.is_mapped[b], 0);
    return open_mapped(s, err);
}

static void trade_records(struct cb_store *s)
{
    struct cb_record *old = s->record;
    s->record = s->spare;
    s->spare = old;
}

int cb_store_exchange(struct cb_store *s, struct cb_files *f, struct cb_err *err)
{
    empty(s);
    trade_records(s);
    uint64_t n = (uint64_t)s->n_layer * s->n_expert;
    for (uint64_t i = 0; i < n; i++)
        s->record[i].pinned = s->spare[i].pinned;
    take_records(s, f);
    trade_files(s, f);
    return begin_files(s, err);
}

int cb_store_restore(struct cb_store *s, struct cb_files *f, struct cb_err *err)
{
    empty(s);
    trade_records(s);
    trade_files(s, f);
    return begin_files(s, err);
}

/* ---- health ------------------------------------------------------------- */

void cb_store_note_bad(struct cb_store *s, uint32_t layer, uint32_t expert, const char *why)
{
    struct cb_record *r = cb_store_record(s, layer, expert);
    if (!r->unhealthy)
        s->counters->unhealthy++;
    r->unhealthy = 1;
    cb_fail(&s->err, CB_EEXPERT, "experts-%04u.coli: layer %u, expert %u is unhealthy: %.140s",
            r->shard, layer + s->first_layer, expert, why);
}

void cb_store_mark_bad(struct cb_store *s, uint32_t layer, uint32_t expert, const char *why)
{
    pthread_mutex_lock(&s->mutex);
    cb_store_note_bad(s, layer, expert, why);
    pthread_mutex_unlock(&s->mutex);
}

/* cb_store_bad; the mutex is held. */
static int bad(const struct cb_store *s, uint32_t layer, uint32_t expert, struct cb_err *err)
{
    char which[80];
    snprintf(which, sizeof which, "experts-%04u.coli: layer %u, expert %u is",
             cb_store_record(s, layer, expert)->shard, layer + s->first_layer, expert);
    if (strstr(s->err.msg, which) != NULL)
        return cb_fail(err, CB_EEXPERT, "%.250s", s->err.msg);
    return cb_fail(err, CB_EEXPERT, "%s unhealthy (found earlier)", which);
}

int cb_store_bad(struct cb_store *s, uint32_t layer, uint32_t expert, struct cb_err *err)
{
    pthread_mutex_lock(&s->mutex);
    int rc = bad(s, layer, expert, err);
    pthread_mutex_unlock(&s->mutex);
    return rc;
}

int cb_store_unhealthy(struct cb_store *s, uint32_t layer, uint8_t *flag)
{
    int any = 0;
    pthread_mutex_lock(&s->mutex);
    for (uint32_t x = 0; x < s->n_expert && s->counters->unhealthy > 0; x++) {
        flag[x] = cb_store_record(s, layer, x)->unhealthy;
        any |= flag[x];
    }
    pthread_mutex_unlock(&s->mutex);
    return any;
}

void cb_store_count_stuck(struct cb_store *s)
{
    pthread_mutex_lock(&s->mutex);
    s->counters->stuck++;
    pthread_mutex_unlock(&s->mutex);
}

void cb_store_counters(const struct cb_store *s, struct cb_counters *to)
{
    pthread_mutex_t *mutex = (pthread_mutex_t *)(uintptr_t)&s->mutex; /* not what const is about */
    pthread_mutex_lock(mutex);
    *to = *s->counters;
    pthread_mutex_unlock(mutex);
}

/* ---- the layer at work -------------------------------------------------- */

static void to_ffn(const struct cb_store *s, const struct cb_record *r, const uint8_t *base,
                   struct cb_ffn *ffn)
{
    cb_mat_init(&ffn->gate, r->part_type[0], s->n_ff, s->n_embd, base + r->part_offset[0]);
    cb_mat_init(&ffn->up, r->part_type[1], s->n_ff, s->n_embd, base + r->part_offset[1]);
    cb_mat_init(&ffn->down, r->part_type[2], s->n_embd, s->n_ff, base + r->part_offset[2]);
}

/* Claims slots for wanted records that have none; the mutex is held. */
static void issue(struct cb_store *s)
{
    for (uint32_t i = 0; i < s->n_want; i++) {
        struct cb_want *w = &s->want[i];
        uint32_t r = s->want_layer * s->n_expert + w->expert;
        if (w->state != CB_WANT_UNISSUED || s->record[r].unhealthy)
            continue;
        uint32_t slot = cb_cache_claim(s, r, 0);
        if (slot == CB_NO_SLOT)
            return; /* all in use: after the next cb_store_done */
        w->state = CB_WANT_WAITING;
        cb_reader_push(s, slot);
    }
}

void cb_store_want(struct cb_store *s, uint32_t layer, const uint32_t *expert, uint32_t n)
{
    int slots = s->n_slot > 0;
    pthread_mutex_lock(&s->mutex);
    s->want_layer = layer;
    s->n_want = n;
    s->ahead_n = 0; /* guesses about this layer are over */
    for (uint32_t i = 0; i < n; i++)
        cb_store_record(s, layer, expert[i])->wanted = 1;
    for (uint32_t i = 0; i < n; i++) {
        struct cb_record *r = cb_store_record(s, layer, expert[i]);
        s->want[i].expert = expert[i];
        s->want[i].state = CB_WANT_UNISSUED;
        if (!slots || r->slot != CB_NO_SLOT) {
            int there = !slots || s->slot[r->slot].state == CB_SLOT_READY;
            s->want[i].state = CB_WANT_WAITING;
            *(there ? &s->counters->hits : &s->counters->misses) += 1;
            if (slots)
                cb_cache_touch(s, r->slot);
        } else {
            s->counters->misses++;
        }
    }
    if (slots)
        issue(s);
    pthread_mutex_unlock(&s->mutex);
}

/* CRC of a mapped record, once; its faults are guarded. */
struct verify_job {
    const struct cb_record *r;
    const uint8_t *p;
    uint32_t crc;
};

static void verify_guarded(void *arg)
{
    struct verify_job *job = arg;
    job->crc = cb_crc32c(0, job->p, job->r->size);
}

static int mapped_ready(struct cb_store *s, uint32_t index, struct cb_ffn *ffn, struct cb_err *err)
{
    uint32_t e = s->want[index].expert;
    struct cb_record *r = cb_store_record(s, s->want_layer, e);
    struct verify_job job = {r, s->mapped.shard[r->shard].base + r->offset, 0};
    if (r->unhealthy)
        return cb_store_bad(s, s->want_layer, e, err);
    if (!r->verified) {
        for (int tries = 0; tries < 2 && !r->verified; tries++) {
            if (cb_guard(verify_guarded, &job) == 0 && job.crc == r->crc)
                r->verified = 1;
            else if (tries == 0)
                s->counters->retries++;
        }
        s->counters->bytes_read += r->size;
    }
    if (!r->verified) {
        cb_store_mark_bad(s, s->want_layer, e, "damaged or unreadable (checked twice)");
        return cb_store_bad(s, s->want_layer, e, err);
    }
    to_ffn(s, r, job.p, ffn);
    return 1;
}

/* Looks for a wanted record that arrived or failed; the mutex is held. */
static int find_ready(struct cb_store *s, uint32_t *index, struct cb_ffn *ffn, uint32_t *open_wants)
{
    *open_wants = 0;
    for (uint32_t i = 0; i < s->n_want; i++) {
        struct cb_want *w = &s->want[i];
        struct cb_record *r = cb_store_record(s, s->want_layer, w->expert);
        if (w->state == CB_WANT_GIVEN || w->state == CB_WANT_DONE)
            continue;
        if (r->unhealthy) {
            *index = i;
            return CB_EEXPERT;
        }
        if (r->slot != CB_NO_SLOT && s->slot[r->slot].state == CB_SLOT_READY) {
            w->state = CB_WANT_GIVEN;
            s->slot[r->slot].in_use++;
            to_ffn(s, r, s->slot[r->slot].data, ffn);
            *index = i;
            return 1;
        }
        ++*open_wants;
    }
    return 0;
}

int cb_store_ready(struct cb_store *s, int wait, uint32_t *index, struct cb_ffn *ffn,
                   struct cb_err *err)
{
    if (s->n_slot == 0) {
        for (uint32_t i = 0; i < s->n_want; i++)
            if (s->want[i].state == CB_WANT_WAITING) {
                s->want[i].state = CB_WANT_GIVEN;
                *index = i;
                return mapped_ready(s, i, ffn, err);
            }
        return 0;
    }
    uint32_t open_wants;
    uint64_t start = 0;
    pthread_mutex_lock(&s->mutex);
    int rc = find_ready(s, index, ffn, &open_wants);
    while (rc == 0 && wait && open_wants > 0) {
        if (start == 0)
            start = cb_os_now_ns();
        issue(s);
        for (uint32_t i = 0; i < s->n_want; i++)
            if (s->want[i].state == CB_WANT_WAITING)
                atomic_store(&s->waiting_for, (int32_t)s->want[i].expert);
        pthread_cond_wait(&s->arrived, &s->mutex);
        rc = find_ready(s, index, ffn, &open_wants);
    }
    if (start != 0)
        s->counters->ns_wait += cb_os_now_ns() - start;
    atomic_store(&s->waiting_for, -1);
    if (rc == CB_EEXPERT)
        rc = bad(s, s->want_layer, s->want[*index].expert, err);
    pthread_mutex_unlock(&s->mutex);
    return rc;
}

void cb_store_done(struct cb_store *s, uint32_t index)
{
    pthread_mutex_lock(&s->mutex);
    struct cb_want *w = &s->want[index];
    struct cb_record *r = cb_store_record(s, s->want_layer, w->expert);
    if (w->state == CB_WANT_GIVEN && s->n_slot > 0 && r->slot != CB_NO_SLOT)
        s->slot[r->slot].in_use--;
    w->state = CB_WANT_DONE;
    r->wanted = 0;
    if (s->n_slot > 0)
        issue(s);
    pthread_mutex_unlock(&s->mutex);
}

void cb_store_end(struct cb_store *s)
{
    pthread_mutex_lock(&s->mutex);
    for (uint32_t i = 0; i < s->n_want; i++) {
        struct cb_want *w = &s->want[i];
        struct cb_record *r = cb_store_record(s, s->want_layer, w->expert);
        if (w->state == CB_WANT_GIVEN && s->n_slot > 0 && r->slot != CB_NO_SLOT)
            s->slot[r->slot].in_use--;
        r->wanted = 0;
    }
    s->n_want = 0;
    pthread_mutex_unlock(&s->mutex);
}

int cb_store_resident(struct cb_store *s, uint32_t layer, uint32_t expert)
{
    if (s->n_slot == 0)
        return 1;
    pthread_mutex_lock(&s->mutex);
    uint32_t slot = cb_store_record(s, layer, expert)->slot;
    int there = slot != CB_NO_SLOT && s->slot[slot].state == CB_SLOT_READY;
    pthread_mutex_unlock(&s->mutex);
    return there;
}

void cb_store_missing(struct cb_store *s, uint32_t layer, const uint32_t *expert, uint32_t n,
                      uint8_t *missing, double read[CB_READ_LEVELS])
{
    pthread_mutex_lock(&s->mutex);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t slot = cb_store_record(s, layer, expert[i])->slot;
        missing[i] = s->n_slot > 0 && (slot == CB_NO_SLOT || s->slot[slot].state != CB_SLOT_READY);
    }
    memcpy(read, s->read_ns, sizeof s->read_ns);
    pthread_mutex_unlock(&s->mutex);
}

void cb_store_fetch(struct cb_store *s, uint32_t layer, const int32_t *expert, uint32_t n)
{
    pthread_mutex_lock(&s->mutex);
    for (uint32_t i = 0; i < n && s->n_slot > 0; i++) {
        uint32_t r = layer * s->n_expert + (uint32_t)expert[i];
        if (s->record[r].slot != CB_NO_SLOT || s->record[r].unhealthy)
            continue;
        uint32_t slot = cb_cache_claim(s, r, 0);
        if (slot == CB_NO_SLOT)
            break;
        cb_reader_push(s, slot);
        s->counters->misses++;
    }
    pthread_mutex_unlock(&s->mutex);
}

/* Every 256 look-ahead reads: go on only while more are used than thrown away. */
static void judge_ahead(struct cb_store *s)
{
    const struct cb_counters *c = s->counters;
    if (c->ahead_issued - s->ahead_mark[0] < 256)
        return;
    if (c->ahead_wasted - s->ahead_mark[2] > c->ahead_useful - s->ahead_mark[1])
        s->ahead_off = 1;
    s->ahead_mark[0] = c->ahead_issued;
    s->ahead_mark[1] = c->ahead_useful;
    s->ahead_mark[2] = c->ahead_wasted;
}

void cb_store_ahead(struct cb_store *s, uint32_t layer, const int32_t *expert, uint32_t n)
{
    if (s->ahead_off || s->n_slot == 0)
        return;
    pthread_mutex_lock(&s->mutex);
    s->ahead_n = 0;
    s->ahead_layer = layer;
    for (uint32_t i = n; i-- > 0 && s->ahead_n < CB_AHEAD_MAX;) { /* likeliest last: taken first */
        uint32_t r = layer * s->n_expert + (uint32_t)expert[i];
        if (s->record[r].slot == CB_NO_SLOT && !s->record[r].unhealthy)
            s->ahead[s->ahead_n++] = r;
    }
    judge_ahead(s);
    if (s->ahead_n > 0)
        pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->mutex);
}

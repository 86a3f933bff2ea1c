/* fault.c — see fault.h. Everything the handler calls is async-signal-safe:
 * mmap, atomics, siglongjmp, write, sigaction. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include "expert/fault.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ENGINES_MAX 8

static struct {
    pthread_mutex_t mutex;
    int installed;
    _Atomic(struct cb_mapped *) mapped[ENGINES_MAX];
    _Atomic unsigned serving; /* handlers that look at mapped[] */
    struct sigaction old[2]; /* SIGSEGV, SIGBUS */
} faults = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local struct {
    sigjmp_buf at;
    volatile sig_atomic_t armed;
} guard;

int cb_guard(cb_guarded_fn *fn, void *arg)
{
    /* SA_NODEFER leaves the mask alone, so there is none to restore. */
    if (sigsetjmp(guard.at, 0) != 0) {
        guard.armed = 0;
        return -1;
    }
    guard.armed = 1;
    fn(arg);
    guard.armed = 0;
    return 0;
}

static uint64_t block_len(const struct cb_mapped *m, const struct cb_mapped_shard *s, uint32_t b)
{
    uint64_t at = (uint64_t)(b - s->first_block) * m->block_bytes;
    return s->bytes - at < m->block_bytes ? s->bytes - at : m->block_bytes;
}

static struct cb_mapped_shard *shard_of_block(struct cb_mapped *m, uint32_t b)
{
    uint32_t i = m->n_shard - 1;
    while (i > 0 && m->shard[i].first_block > b)
        i--;
    return &m->shard[i];
}

static void evict_oldest(struct cb_mapped *m)
{
    uint32_t b = m->ring[m->ring_head];
    struct cb_mapped_shard *s = shard_of_block(m, b);
    uint64_t at = (uint64_t)(b - s->first_block) * m->block_bytes, n = block_len(m, s, b);
    atomic_store(&m->is_mapped[b], 0);
    mmap(s->base + at, (size_t)n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
         -1, 0);
    m->ring_head = (m->ring_head + 1) % m->limit;
    m->ring_n--;
    atomic_fetch_add(&m->evictions, 1);
}

/* Maps block b unless another thread did meanwhile. 0, or -1. */
static int map_block(struct cb_mapped *m, uint32_t b)
{
    int rc = 0;
    while (atomic_flag_test_and_set(&m->lock))
        ; /* held for one mmap, by a thread that cannot fault there */
    if (!atomic_load(&m->is_mapped[b])) {
        struct cb_mapped_shard *s = shard_of_block(m, b);
        uint64_t at = (uint64_t)(b - s->first_block) * m->block_bytes, n = block_len(m, s, b);
        if (m->ring_n == m->limit)
            evict_oldest(m);
        if (mmap(s->base + at, (size_t)n, PROT_READ, MAP_SHARED | MAP_FIXED, (int)s->file,
                 (off_t)at) == MAP_FAILED) {
            rc = -1;
        } else {
            m->ring[(m->ring_head + m->ring_n++) % m->limit] = b;
            atomic_store(&m->is_mapped[b], 1);
        }
    }
    atomic_flag_clear(&m->lock);
    atomic_fetch_add(&m->faults, 1);
    return rc;
}

/* 1 when addr is m's and its block is mapped now. */
static int serve_one(struct cb_mapped *m, const uint8_t *addr)
{
    for (uint32_t k = 0; k < m->n_shard; k++) {
        const struct cb_mapped_shard *s = &m->shard[k];
        if (addr >= s->base && addr < s->base + s->bytes)
            return map_block(m, s->first_block +
                                    (uint32_t)((uint64_t)(addr - s->base) / m->block_bytes)) == 0;
    }
    return 0;
}

/* 1 when the fault at addr was served. */
static int serve(int sig, const uint8_t *addr)
{
    int served = 0;
    atomic_fetch_add(&faults.serving, 1);
    for (int i = 0; i < ENGINES_MAX && sig == SIGSEGV && !served; i++) {
        struct cb_mapped *m = atomic_load(&faults.mapped[i]);
        served = m != NULL && m->lazy && serve_one(m, addr);
    }
    atomic_fetch_sub(&faults.serving, 1);
    return served;
}

static void report(int sig)
{
    static const char segv[] = "colibri: SIGSEGV outside the weights; this is a bug, please report it\n";
    static const char bus[] = "colibri: SIGBUS outside the weights: a file shrank or memory failed\n";
    ssize_t ignored = sig == SIGSEGV ? write(2, segv, sizeof segv - 1) : write(2, bus, sizeof bus - 1);
    (void)ignored;
}

static void on_fault(int sig, siginfo_t *info, void *context)
{
    (void)context;
    if (info->si_code > 0 && serve(sig, info->si_addr))
        return;
    if (info->si_code > 0 && guard.armed) /* a kill() is nobody's weights */
        siglongjmp(guard.at, 1);
    report(sig);
    /* The previous owner's turn: the instruction faults again on return. */
    sigaction(sig, &faults.old[sig == SIGBUS], NULL);
    if (info->si_code <= 0) /* sent by kill(): does not come back by itself */
        raise(sig);
}

int cb_fault_install(struct cb_err *err)
{
    int rc = 0;
    pthread_mutex_lock(&faults.mutex);
    if (!faults.installed) {
        struct sigaction sa;
        memset(&sa, 0, sizeof sa);
        sa.sa_sigaction = on_fault;
        sa.sa_flags = SA_SIGINFO | SA_NODEFER;
        sigemptyset(&sa.sa_mask);
        if (sigaction(SIGSEGV, &sa, &faults.old[0]) != 0 ||
            sigaction(SIGBUS, &sa, &faults.old[1]) != 0)
            rc = cb_fail(err, CB_EIO, "installing the fault handler");
        faults.installed = rc == 0;
    }
    pthread_mutex_unlock(&faults.mutex);
    return rc;
}

int cb_fault_add(struct cb_mapped *m, struct cb_err *err)
{
    for (int i = 0; i < ENGINES_MAX; i++) {
        struct cb_mapped *none = NULL;
        if (atomic_compare_exchange_strong(&faults.mapped[i], &none, m))
            return 0;
    }
    return cb_fail(err, CB_EUNSUPPORTED, "more than %d engines with mapped weights", ENGINES_MAX);
}

void cb_fault_remove(struct cb_mapped *m)
{
    for (int i = 0; i < ENGINES_MAX; i++) {
        struct cb_mapped *mine = m;
        atomic_compare_exchange_strong(&faults.mapped[i], &mine, NULL);
    }
    /* Another engine's thread may be looking at m this moment: its memory goes next. */
    while (atomic_load(&faults.serving) != 0)
        ;
}

/* ---- mapping ------------------------------------------------------------ */

int cb_mapped_open(struct cb_mapped *m, const struct cb_os_file *file, struct cb_err *err)
{
    uint64_t page = cb_os_page();
    uint32_t block = 0;
    for (uint32_t i = 0; i < m->n_shard; i++) {
        struct cb_mapped_shard *s = &m->shard[i];
        s->bytes = (file[i].size + page - 1) / page * page;
        s->file = file[i].h;
        s->first_block = block;
        block += (uint32_t)((s->bytes + m->block_bytes - 1) / m->block_bytes);
        if (block > m->n_block) { /* a hot swap to longer shards */
            cb_mapped_close(m);
            return cb_fail(err, CB_EBUDGET, "the shards need more than %u blocks", m->n_block);
        }
        void *p = m->lazy ? mmap(NULL, (size_t)s->bytes, PROT_NONE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                          : mmap(NULL, (size_t)s->bytes, PROT_READ, MAP_SHARED, (int)file[i].h, 0);
        if (p == MAP_FAILED) {
            cb_mapped_close(m);
            return cb_fail(err, CB_EIO, "mapping shard %u (%llu bytes) failed", i,
                           (unsigned long long)s->bytes);
        }
        s->base = p;
    }
    atomic_flag_clear(&m->lock);
    return m->lazy ? cb_fault_add(m, err) : 0;
}

void cb_mapped_close(struct cb_mapped *m)
{
    cb_fault_remove(m);
    for (uint32_t i = 0; i < m->n_shard; i++) {
        if (m->shard[i].base != NULL)
            munmap(m->shard[i].base, (size_t)m->shard[i].bytes);
        m->shard[i].base = NULL;
    }
}
#endif

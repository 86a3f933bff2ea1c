/* store.h — where expert weights come from, whatever the weight mode.
 *
 * A layer asks for its distinct experts with cb_store_want(), computes what
 * cb_store_ready() hands out (resident ones at once, the others as they
 * arrive), and gives each back with cb_store_done(). The order of arrival
 * never changes bits: outputs have places of their own (ffn.c).
 *
 *   arena, preload   slots in the arena, filled by reader threads (cache.c, reader.c)
 *   mmap, lazy       the files in the address space (mapped.c)
 */
#ifndef CB_EXPERT_STORE_H
#define CB_EXPERT_STORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "core/arena.h"
#include "core/container.h"
#include "expert/mapped.h"
#include "model/manifest.h"
#include "model/mat.h"

#define CB_READERS_MAX 16u
#define CB_READ_LEVELS 17u        /* times are kept for 1 … 16 records */
#define CB_AHEAD_MAX 64u          /* look-ahead requests waiting */
#define CB_NO_SLOT UINT32_MAX

/* One expert in the files. */
struct cb_record {
    uint64_t offset;              /* in its shard */
    uint32_t size, crc, shard;
    uint32_t slot;                /* CB_NO_SLOT = not resident */
    uint32_t uses;                /* look-ups, for the policies */
    uint32_t part_type[3];        /* gate, up, down */
    uint32_t part_offset[3];      /* inside the record */
    uint8_t unhealthy, pinned, verified;
    uint8_t wanted;               /* by the layer at work */
};

enum cb_slot_state { CB_SLOT_FREE, CB_SLOT_LOADING, CB_SLOT_READY, CB_SLOT_FAILED };

struct cb_slot {
    uint8_t *data;
    uint64_t used_at;             /* tick of the last look-up */
    uint32_t record;
    enum cb_slot_state state;
    uint32_t in_use;              /* cb_store_ready without cb_store_done */
    uint8_t hot;                  /* SLRU: in the protected segment */
    uint8_t ahead;                /* loaded by look-ahead, not asked for yet */
};

/* What a layer is waiting for. */
struct cb_want {
    uint32_t expert;
    enum { CB_WANT_UNISSUED, CB_WANT_WAITING, CB_WANT_GIVEN, CB_WANT_DONE } state;
};

struct cb_store {
    enum cb_weights mode;
    enum cb_cache_policy policy;
    uint32_t n_layer, n_expert;   /* MoE layers; layers here are counted among them */
    uint32_t n_embd, n_ff, first_layer;
    struct cb_record *record;     /* [n_layer][n_expert] */
    struct cb_record *spare;      /* the other release's, with opt.hot_swap */
    struct cb_os_file *file;      /* [n_shard] */
    uint32_t n_shard;

    struct cb_slot *slot;         /* [n_slot] */
    uint32_t n_slot, floor;       /* slots a layer keeps when others evict */
    uint64_t slot_bytes;
    void *guard[2];               /* a page without access before and after the slots */
    uint32_t *resident;           /* [n_layer] slots each layer holds */
    uint32_t n_hot;               /* slots in the protected segment */
    uint64_t tick;

    struct cb_want *want;         /* [n_expert] of the layer at work */
    uint32_t n_want, want_layer;

    pthread_mutex_t mutex;
    pthread_cond_t work, arrived;
    pthread_t reader[CB_READERS_MAX];
    uint32_t n_reader, busy;      /* reader threads; those in a read */
    uint32_t *queue;              /* [n_slot] slots to fill, first in first out */
    uint32_t queue_head, queue_n;
    uint32_t ahead[CB_AHEAD_MAX]; /* records to load when nothing else is to do */
    uint32_t ahead_n, ahead_layer;
    int ahead_off;                /* wastes more than it saves */
    uint64_t ahead_mark[3];       /* issued, useful, wasted at the last judgement */
    int stop, opened, buffered;

    struct cb_mapped mapped;      /* mmap and lazy */
    struct cb_counters *counters;
    int (*io_hook)(void *, uint32_t, uint64_t, uint64_t);
    void *io_ud;
    double read_ns[CB_READ_LEVELS]; /* [n]: reading n records at once, average; 0 = not seen */
    uint64_t batch_ns;            /* when the reads under way began */
    uint32_t batch_n;             /* how many they are; 0 = not measured */
    struct cb_err err;            /* why the last record became unhealthy */
    _Atomic int32_t waiting_for;  /* expert that compute waits for, -1 = none: the watchdog's view */
};

/* What the store needs of the files, read before. */
struct cb_files;

/* Slots that fit in room bytes, at most all; 0 when not even the fewest do.
 * least gets the fewest that work: one token's experts. */
uint32_t cb_store_slots(const struct cb_files *f, const struct cb_options *opt, uint64_t room,
                        uint32_t *least, uint64_t *slot_bytes);

/* Takes tables and slots from the arena (counting when its base is NULL). */
int cb_store_layout(struct cb_store *s, struct cb_arena *a, const struct cb_files *f,
                    const struct cb_options *opt, uint32_t n_slot, uint64_t slot_bytes,
                    struct cb_err *err);
/* Takes over the open shard files, starts the readers, fills the slots. */
int cb_store_open(struct cb_store *s, struct cb_files *f, const struct cb_options *opt,
                  struct cb_counters *counters, struct cb_err *err);
void cb_store_close(struct cb_store *s);

/* Forgets what is resident and reads from f's shards from now on (hot swap);
 * the old files end up in f. The caller is between tokens. */
int cb_store_exchange(struct cb_store *s, struct cb_files *f, struct cb_err *err);
/* Undoes the exchange: the files come back from f. */
int cb_store_restore(struct cb_store *s, struct cb_files *f, struct cb_err *err);

/* Begins layer l with n distinct experts. Reads of what is missing start now. */
void cb_store_want(struct cb_store *s, uint32_t layer, const uint32_t *expert, uint32_t n);
/* Index (into the wanted list) of an expert that is there, with its matrices;
 * waits for one when wait is set. Returns 1, 0 when nothing is there (yet), or
 * CB_EEXPERT with *index set when that expert cannot be had. */
int cb_store_ready(struct cb_store *s, int wait, uint32_t *index, struct cb_ffn *ffn,
                   struct cb_err *err);
void cb_store_done(struct cb_store *s, uint32_t index);
/* Gives up on all that was wanted. */
void cb_store_end(struct cb_store *s);

/* 1 when expert e of layer l could be used at once. */
int cb_store_resident(struct cb_store *s, uint32_t layer, uint32_t expert);
/* missing[i]: expert[i] would have to be read first. read gets read_ns: what
 * offloading weighs. */
void cb_store_missing(struct cb_store *s, uint32_t layer, const uint32_t *expert, uint32_t n,
                      uint8_t *missing, double read[CB_READ_LEVELS]);
/* Begins to read experts that nobody waits for (on_miss = zeros). */
void cb_store_fetch(struct cb_store *s, uint32_t layer, const int32_t *expert, uint32_t n);
/* Reads these soon, if storage is idle: experts that layer will likely want. */
void cb_store_ahead(struct cb_store *s, uint32_t layer, const int32_t *expert, uint32_t n);

static inline struct cb_record *cb_store_record(const struct cb_store *s, uint32_t layer,
                                                uint32_t expert)
{
    return &s->record[(uint64_t)layer * s->n_expert + expert];
}
void cb_store_mark_bad(struct cb_store *s, uint32_t layer, uint32_t expert, const char *why);
/* CB_EEXPERT with the layer, the expert and why. */
int cb_store_bad(struct cb_store *s, uint32_t layer, uint32_t expert, struct cb_err *err);
/* flag [n_expert] of a layer: 1 = unhealthy. Returns whether any is. */
int cb_store_unhealthy(struct cb_store *s, uint32_t layer, uint8_t *flag);
/* One more token over its deadline; from the watchdog. */
void cb_store_count_stuck(struct cb_store *s);
/* The counters, while readers and watchdog go on counting. */
void cb_store_counters(const struct cb_store *s, struct cb_counters *to);

/* ---- between cache.c and reader.c; the mutex is held -------------------- */

/* A slot for record r (state LOADING) or CB_NO_SLOT. ahead: may take only what
 * nobody will miss. */
uint32_t cb_cache_claim(struct cb_store *s, uint32_t r, int ahead);
void cb_cache_touch(struct cb_store *s, uint32_t slot);
void cb_cache_drop(struct cb_store *s, uint32_t slot);
void cb_reader_push(struct cb_store *s, uint32_t slot);
void cb_store_note_bad(struct cb_store *s, uint32_t layer, uint32_t expert, const char *why);
int cb_readers_start(struct cb_store *s, uint32_t n, struct cb_err *err);
void cb_readers_stop(struct cb_store *s);

#endif

/* mapped.h — weight modes `mmap` and `lazy`: shards in the address space.
 *
 * mmap maps the files; the kernel decides what stays. lazy reserves addresses
 * without access: the first touch of a block faults, the handler maps the block
 * from the file and unmaps the oldest when more than `limit` are mapped. A
 * thread may lose a block that it is reading; it faults and maps it again, so
 * the handler is idempotent and bits never depend on it. */
#ifndef CB_EXPERT_MAPPED_H
#define CB_EXPERT_MAPPED_H

#include <stdatomic.h>
#include <stdint.h>

#include "colibri.h"
#include "core/os.h"

struct cb_mapped_shard {
    uint8_t *base;            /* NULL = not mapped */
    uint64_t bytes;           /* rounded up to a page */
    uint32_t first_block;
    intptr_t file;
};

struct cb_mapped {
    struct cb_mapped_shard *shard; /* [n_shard] */
    uint32_t n_shard;
    int lazy;
    uint64_t block_bytes;
    uint32_t n_block, limit;  /* blocks in all; mapped at once */
    uint32_t *ring;           /* [limit] mapped blocks, oldest first */
    uint32_t ring_head, ring_n;
    _Atomic uint8_t *is_mapped; /* [n_block] */
    atomic_flag lock;         /* held only inside the handler */
    _Atomic uint64_t faults, evictions;
};

/* 0, or CB_EUNSUPPORTED on Windows. */
int cb_mapped_open(struct cb_mapped *m, const struct cb_os_file *file, struct cb_err *err);
void cb_mapped_close(struct cb_mapped *m);

#endif

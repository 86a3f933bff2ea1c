/* arena.h — one block of memory, handed out front to back and never returned.
 *
 * The same layout code runs twice: first with base == NULL, which only counts
 * (that is the plan), then on the mapped block. So the plan cannot drift from
 * what is taken. Each take is booked on a ledger line. */
#ifndef CB_ARENA_H
#define CB_ARENA_H

#include <stdint.h>

#include "colibri.h"

struct cb_arena {
    unsigned char *base; /* NULL = counting */
    uint64_t used;
    uint64_t size;       /* of base; ignored while counting */
    uint64_t line[CB_L_COUNT];
    int overflow;        /* a size did not fit in 64 bits or in the block */
};

/* n items of item_bytes, aligned to 64. NULL while counting or on overflow. */
void *cb_arena_take(struct cb_arena *a, int line, uint64_t n, uint64_t item_bytes);
/* The same for bytes at a multiple of align (a power of two; base is aligned to it). */
void *cb_arena_take_pages(struct cb_arena *a, int line, uint64_t bytes, uint64_t align);

/* Before the block is unmapped: a sanitizer's marks on it go. */
void cb_arena_forget(void *base, uint64_t size);

#endif

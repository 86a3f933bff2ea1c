/* arena.c — see arena.h. */
#include "arena.h"

#include <stddef.h>

void *cb_arena_take(struct cb_arena *a, int line, uint64_t n, uint64_t item_bytes)
{
    if (item_bytes != 0 && n > (UINT64_MAX >> 2) / item_bytes) {
        a->overflow = 1;
        return NULL;
    }
    uint64_t bytes = (n * item_bytes + 63) & ~UINT64_C(63);
    if (bytes > (UINT64_MAX >> 2) - a->used || (a->base != NULL && bytes > a->size - a->used)) {
        a->overflow = 1;
        return NULL;
    }
    unsigned char *p = a->base != NULL ? a->base + a->used : NULL;
    a->used += bytes;
    a->line[line] += bytes;
    return p;
}

void *cb_arena_take_pages(struct cb_arena *a, int line, uint64_t bytes, uint64_t align)
{
    cb_arena_take(a, line, (align - a->used % align) % align, 1);
    return cb_arena_take(a, line, bytes, 1);
}

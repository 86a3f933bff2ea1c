/* arena.c — see arena.h. */
#include "arena.h"

#include <stddef.h>

/* Built with AddressSanitizer, every item ends in a poisoned gap, so that an
 * overrun inside the block is seen like one of the heap. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ARENA_GAP 64u
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define ARENA_GAP 64u
#endif
#ifdef ARENA_GAP
#include <sanitizer/asan_interface.h>
static void guard_item(unsigned char *p, uint64_t bytes, uint64_t asked)
{
    __asan_unpoison_memory_region(p, (size_t)asked); /* a second layout in the same room */
    __asan_poison_memory_region(p + asked, (size_t)(bytes - asked));
}
void cb_arena_forget(void *base, uint64_t size)
{
    __asan_unpoison_memory_region(base, (size_t)size);
}
#else
#define ARENA_GAP 0u
static void guard_item(unsigned char *p, uint64_t bytes, uint64_t asked)
{
    (void)p, (void)bytes, (void)asked;
}
void cb_arena_forget(void *base, uint64_t size)
{
    (void)base, (void)size;
}
#endif

void *cb_arena_take(struct cb_arena *a, int line, uint64_t n, uint64_t item_bytes)
{
    if (item_bytes != 0 && n > (UINT64_MAX >> 2) / item_bytes) {
        a->overflow = 1;
        return NULL;
    }
    uint64_t bytes = ((n * item_bytes + 63) & ~UINT64_C(63)) + ARENA_GAP;
    if (bytes > (UINT64_MAX >> 2) - a->used || (a->base != NULL && bytes > a->size - a->used)) {
        a->overflow = 1;
        return NULL;
    }
    unsigned char *p = a->base != NULL ? a->base + a->used : NULL;
    a->used += bytes;
    a->line[line] += bytes;
    if (p != NULL)
        guard_item(p, bytes, n * item_bytes);
    return p;
}

void *cb_arena_take_pages(struct cb_arena *a, int line, uint64_t bytes, uint64_t align)
{
    uint64_t pad = (align - (a->used + ARENA_GAP) % align) % align;
    cb_arena_take(a, line, pad, 1);
    return cb_arena_take(a, line, bytes, 1);
}

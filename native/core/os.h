/* os.h — the few things that differ between POSIX and Windows.
 * os_posix.c and os_win.c implement it; nothing else includes system headers. */
#ifndef CB_OS_H
#define CB_OS_H

#include <stddef.h>
#include <stdint.h>

#include "colibri.h"

/* Anonymous zeroed memory, mapped and touched: every page is resident when it
 * returns. lock pins it. NULL and *err on failure. */
void *cb_os_map(uint64_t bytes, int lock, struct cb_err *err);
void cb_os_unmap(void *p, uint64_t bytes);

/* Bytes that this process may still take: the smaller of MemAvailable and what
 * every enclosing memory cgroup has left. UINT64_MAX when unknown. */
uint64_t cb_os_mem_available(void);

uint32_t cb_os_physical_cores(void); /* >= 1 */
uint64_t cb_os_now_ns(void);         /* monotonic */

struct cb_os_file {
    intptr_t h; /* descriptor or HANDLE; -1 = closed */
    uint64_t size;
};
/* Opens a regular file for reading; the message names the path. */
int cb_os_open(struct cb_os_file *f, const char *path, struct cb_err *err);
/* Reads exactly n bytes at offset, in pieces; short is CB_EIO. */
int cb_os_pread(const struct cb_os_file *f, void *p, uint64_t n, uint64_t offset,
                struct cb_err *err);
void cb_os_close(struct cb_os_file *f);

/* Reads of this file bypass the page cache from now on (aligned ones only).
 * Returns 0, or -1 where the file system does not do that. */
int cb_os_direct(const struct cb_os_file *f, int on);
/* Buffered reads of this file bring in no more than they ask for. */
void cb_os_no_readahead(const struct cb_os_file *f);
/* Asks the kernel to forget what it caches of a range; best effort. */
void cb_os_drop_cache(const struct cb_os_file *f, uint64_t offset, uint64_t n);

enum cb_os_access { CB_OS_NONE, CB_OS_READ, CB_OS_WRITE };
#define CB_OS_PAGE 4096u
uint64_t cb_os_page(void); /* the machine's page size */
/* Access to whole pages [p, p + n). */
int cb_os_protect(void *p, uint64_t n, enum cb_os_access access);

#if !defined(_WIN32)
/* Whether somebody listens on the Unix socket at path: a full queue has somebody,
 * who may be stopped, so this never waits. */
int cb_os_unix_answers(const char *path);
#endif

#endif

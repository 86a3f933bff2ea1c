/* os_posix.c — Linux (and other POSIX) side of os.h. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

void *cb_os_map(uint64_t bytes, int lock, struct cb_err *err)
{
    if (bytes == 0 || bytes > SIZE_MAX / 2) {
        cb_fail(err, CB_EINVAL, "cannot map %llu bytes", (unsigned long long)bytes);
        return NULL;
    }
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_POPULATE
    flags |= MAP_POPULATE;
#endif
    void *p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) {
        cb_fail(err, CB_EIO, "mapping %llu bytes of memory: %s", (unsigned long long)bytes,
                strerror(errno));
        return NULL;
    }
    if (lock && mlock(p, (size_t)bytes) != 0) {
        cb_fail(err, CB_EIO,
                "locking %llu bytes of memory: %s; raise the memlock limit (LimitMEMLOCK=, "
                "ulimit -l) or leave out --lock",
                (unsigned long long)bytes, strerror(errno));
        munmap(p, (size_t)bytes);
        return NULL;
    }
    /* MAP_POPULATE may stop early without saying so: touch what it left. */
    for (uint64_t i = 0; i < bytes; i += 4096)
        ((volatile unsigned char *)p)[i] = 0;
    return p;
}

void cb_os_unmap(void *p, uint64_t bytes)
{
    if (p != NULL)
        munmap(p, (size_t)bytes);
}

/* First unsigned number in a small file after key ("" = at the start);
 * UINT64_MAX if there is none ("max"). */
static uint64_t read_number(const char *path, const char *key, uint64_t unit)
{
    char buf[4096];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return UINT64_MAX;
    ssize_t n = read(fd, buf, sizeof buf - 1);
    close(fd);
    if (n <= 0)
        return UINT64_MAX;
    buf[n] = '\0';
    const char *s = strstr(buf, key);
    if (s == NULL)
        return UINT64_MAX;
    s += strlen(key);
    while (*s == ' ' || *s == '\t')
        s++;
    if (*s < '0' || *s > '9')
        return UINT64_MAX;
    unsigned long long v = strtoull(s, NULL, 10);
    return v > UINT64_MAX / unit ? UINT64_MAX : (uint64_t)v * unit;
}

static uint64_t min64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* What one cgroup directory leaves: limit minus use, file names by version. */
static uint64_t cgroup_left(const char *dir, const char *limit_name, const char *use_name)
{
    char path[1024];
    if (snprintf(path, sizeof path, "%s/%s", dir, limit_name) >= (int)sizeof path)
        return UINT64_MAX;
    uint64_t limit = read_number(path, "", 1);
    if (limit >= (UINT64_MAX >> 2)) /* v1 writes a huge number for "none" */
        return UINT64_MAX;
    if (snprintf(path, sizeof path, "%s/%s", dir, use_name) >= (int)sizeof path)
        return UINT64_MAX;
    uint64_t used = read_number(path, "", 1);
    if (used == UINT64_MAX)
        used = 0;
    return limit > used ? limit - used : 0;
}

/* Walks from this process's cgroup up to the root of the hierarchy. */
static uint64_t cgroup_chain(const char *root, char *rel, const char *limit, const char *use)
{
    uint64_t left = UINT64_MAX;
    for (;;) {
        char dir[768];
        if (snprintf(dir, sizeof dir, "%s%s", root, rel) < (int)sizeof dir)
            left = min64(left, cgroup_left(dir, limit, use));
        char *slash = strrchr(rel, '/');
        if (slash == NULL)
            return left;
        *slash = '\0';
    }
}

static uint64_t cgroup_available(void)
{
    char buf[4096];
    int fd = open("/proc/self/cgroup", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return UINT64_MAX;
    ssize_t n = read(fd, buf, sizeof buf - 1);
    close(fd);
    if (n <= 0)
        return UINT64_MAX;
    buf[n] = '\0';
    uint64_t left = UINT64_MAX;
    for (char *line = buf; line != NULL && *line != '\0';) {
        char *next = strchr(line, '\n');
        if (next != NULL)
            *next++ = '\0';
        char *first = strchr(line, ':');
        char *path = first != NULL ? strchr(first + 1, ':') : NULL;
        if (path != NULL) {
            *path++ = '\0';
            if (first[1] == '\0') /* v2: "0::/path" */
                left = min64(left, cgroup_chain("/sys/fs/cgroup", path, "memory.max",
                                                "memory.current"));
            else if (strstr(first + 1, "memory") != NULL)
                left = min64(left, cgroup_chain("/sys/fs/cgroup/memory", path,
                                                "memory.limit_in_bytes",
                                                "memory.usage_in_bytes"));
        }
        line = next;
    }
    return left;
}

uint64_t cb_os_mem_available(void)
{
    return min64(read_number("/proc/meminfo", "MemAvailable:", 1024), cgroup_available());
}

/* Cores, not hardware threads: counts CPUs that are first in their sibling list. */
uint32_t cb_os_physical_cores(void)
{
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    if (online < 1)
        return 1;
    uint32_t cores = 0;
    for (long i = 0; i < online && i < 1024; i++) {
        char path[128];
        snprintf(path, sizeof path,
                 "/sys/devices/system/cpu/cpu%ld/topology/thread_siblings_list", i);
        uint64_t first = read_number(path, "", 1);
        if (first == UINT64_MAX || first == (uint64_t)i)
            cores++;
    }
    return cores > 0 ? cores : 1;
}

uint64_t cb_os_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

int cb_os_open(struct cb_os_file *f, const char *path, struct cb_err *err)
{
    f->h = -1;
    f->size = 0;
    /* Without O_NONBLOCK a FIFO in a file's place would wait for a writer for ever. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return cb_fail(err, CB_EIO, "opening %s: %s", path, strerror(errno));
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return cb_fail(err, CB_EIO, "%s is not a regular file", path);
    }
    f->h = fd;
    f->size = (uint64_t)st.st_size;
    return 0;
}

int cb_os_pread(const struct cb_os_file *f, void *p, uint64_t n, uint64_t offset,
                struct cb_err *err)
{
    unsigned char *dst = p;
    while (n > 0) {
        size_t piece = n > (1u << 20) ? (1u << 20) : (size_t)n;
        ssize_t got = pread((int)f->h, dst, piece, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return cb_fail(err, CB_EIO, "reading at offset %llu: %s",
                           (unsigned long long)offset, strerror(errno));
        if (got == 0)
            return cb_fail(err, CB_EIO, "file ends at offset %llu, %llu bytes early",
                           (unsigned long long)offset, (unsigned long long)n);
        dst += got;
        offset += (uint64_t)got;
        n -= (uint64_t)got;
    }
    return 0;
}

void cb_os_close(struct cb_os_file *f)
{
    if (f->h >= 0)
        close((int)f->h);
    f->h = -1;
}

int cb_os_direct(const struct cb_os_file *f, int on)
{
#ifdef O_DIRECT
    int flags = fcntl((int)f->h, F_GETFL);
    if (flags < 0)
        return -1;
    return fcntl((int)f->h, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0 ? 0 : -1;
#else
    (void)f;
    return on ? -1 : 0;
#endif
}

void cb_os_no_readahead(const struct cb_os_file *f)
{
#ifdef POSIX_FADV_RANDOM
    (void)posix_fadvise((int)f->h, 0, 0, POSIX_FADV_RANDOM);
#else
    (void)f;
#endif
}

void cb_os_drop_cache(const struct cb_os_file *f, uint64_t offset, uint64_t n)
{
#ifdef POSIX_FADV_DONTNEED
    (void)posix_fadvise((int)f->h, (off_t)offset, (off_t)n, POSIX_FADV_DONTNEED);
#else
    (void)f, (void)offset, (void)n;
#endif
}

uint64_t cb_os_page(void)
{
    long page = sysconf(_SC_PAGESIZE);
    return page > 0 ? (uint64_t)page : CB_OS_PAGE;
}

int cb_os_protect(void *p, uint64_t n, enum cb_os_access access)
{
    static const int prot[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE};
    return mprotect(p, (size_t)n, prot[access]);
}

int cb_os_unix_answers(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t n = strlen(path);
    if (n >= sizeof a.sun_path)
        return 0;
    memcpy(a.sun_path, path, n);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    int there = fd >= 0 && fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 && fcntl(fd, F_SETFL, O_NONBLOCK) == 0 &&
                (connect(fd, (const struct sockaddr *)&a, sizeof a) == 0 || errno == EAGAIN);
    if (fd >= 0)
        close(fd);
    return there;
}
#else
typedef int cb_os_posix_is_empty_here;
#endif

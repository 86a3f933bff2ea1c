/* lines.c — lines of a stream that a signal may interrupt; see sys.h. stdio
 * cannot do that: a signal leaves its buffer in an unknown state. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#include <io.h>
#else
#include <poll.h>
#include <unistd.h>
#endif

#include "sys.h"

#define WAIT_MS 100 /* a signal just before poll() is seen this much later */

#if defined(_WIN32)
static int open_path(const char *path)
{
    FILE *f = sys_open(path, "rb"); /* UTF-8 paths */
    return f != NULL ? _fileno(f) : -1;
}

static long read_some(int fd, char *buf, size_t n)
{
    return _read(fd, buf, n < (1u << 20) ? (unsigned)n : 1u << 20);
}

static int wait_for(int fd)
{
    (void)fd;
    return sys_interrupted() ? SYS_LINE_SIGNAL : SYS_LINE_GOT;
}

static void close_fd(int fd)
{
    (void)_close(fd);
}
#else
static int open_path(const char *path)
{
    return open(path, O_RDONLY | O_CLOEXEC);
}

static long read_some(int fd, char *buf, size_t n)
{
    ssize_t got;
    do
        got = read(fd, buf, n);
    while (got < 0 && errno == EINTR);
    return (long)got;
}

static int wait_for(int fd)
{
    struct pollfd p = {fd, POLLIN, 0};
    int ready = poll(&p, 1, WAIT_MS);
    if (ready > 0)
        return SYS_LINE_GOT;
    return sys_interrupted() ? SYS_LINE_SIGNAL : SYS_LINE_END;
}

static void close_fd(int fd)
{
    (void)close(fd);
}
#endif

int sys_lines_open(struct sys_lines *l, const char *path, size_t cap, struct cb_err *err)
{
    memset(l, 0, sizeof *l);
    l->fd = strcmp(path, "-") == 0 ? 0 : open_path(path);
    if (l->fd < 0)
        return cb_fail(err, CB_EINVAL, "cannot open %.180s: %s", path, strerror(errno));
    l->cap = cap;
    l->buf = malloc(cap + 1);
    if (l->buf == NULL)
        return cb_fail(err, CB_EIO, "no memory for the prompts");
    memset(l->buf, 0, cap + 1); /* resident from now on */
    return CB_OK;
}

void sys_lines_close(struct sys_lines *l)
{
    if (l->fd > 0)
        close_fd(l->fd);
    free(l->buf);
    memset(l, 0, sizeof *l);
}

static void trim(char *line, size_t *n)
{
    if (*n > 0 && line[*n - 1] == '\r')
        --*n;
    line[*n] = '\0';
}

/* A line that is whole in the buffer, or the rest of the stream. */
static int take(struct sys_lines *l, char **line, size_t *n)
{
    char *begin = l->buf + l->at, *end = memchr(begin, '\n', l->n - l->at);
    if (end == NULL && !(l->eof && l->at < l->n))
        return SYS_LINE_END;
    int skip = l->skipping;
    *line = begin;
    *n = end != NULL ? (size_t)(end - begin) : l->n - l->at;
    l->at += *n + (end != NULL);
    trim(*line, n);
    l->skipping = 0;
    return skip ? SYS_LINE_LONG : SYS_LINE_GOT;
}

int sys_lines_next(struct sys_lines *l, char **line, size_t *n, struct cb_err *err)
{
    for (;;) {
        int got = take(l, line, n);
        if (got != SYS_LINE_END)
            return got;
        if (l->eof) {
            int cut = l->skipping;
            l->skipping = 0;
            return cut ? SYS_LINE_LONG : SYS_LINE_END;
        }
        memmove(l->buf, l->buf + l->at, l->n - l->at);
        l->n -= l->at;
        l->at = 0;
        if (l->n == l->cap) { /* longer than any line may be: forget it, remember that */
            l->skipping = 1;
            l->n = 0;
        }
        int ready = wait_for(l->fd);
        if (ready == SYS_LINE_SIGNAL || sys_reload_pending())
            return SYS_LINE_SIGNAL;
        if (ready == SYS_LINE_END)
            continue;
        long count = read_some(l->fd, l->buf + l->n, l->cap - l->n);
        if (count < 0)
            return cb_fail(err, CB_EIO, "reading the prompts: %s", strerror(errno));
        l->eof = count == 0;
        l->n += (size_t)count;
    }
}

/* log.c — see log.h. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include "serve/log.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CHUNK 8192
#define CUT_OFF (UINT32_C(1) << 31)

/* O_NONBLOCK belongs to the open file, which a shell or a parent shares: opened
 * once more by its name in /proc it has flags of its own. */
void cb_log_open(struct cb_log *log, int fd, int json, _Atomic uint32_t *lost)
{
    char path[40];
    struct stat st;
    *log = (struct cb_log){.fd = fd, .json = json, .lost = lost};
    if (fstat(fd, &st) != 0 || S_ISREG(st.st_mode))
        return;
    log->way = S_ISSOCK(st.st_mode) ? CB_LOG_SEND : CB_LOG_POLL;
    if (log->way == CB_LOG_SEND)
        return;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int again = open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (again < 0)
        return;
    log->fd = again;
    log->own = 1;
    log->way = CB_LOG_PLAIN;
}

void cb_log_close(struct cb_log *log)
{
    if (log->own)
        close(log->fd);
    log->own = 0;
}

/* 1 = all of it is out; 0 = nothing; -1 = a part. */
static int put(const struct cb_log *log, const char *p, size_t n)
{
    struct pollfd ready = {log->fd, POLLOUT, 0};
    ssize_t done = -1;
    if (log->way == CB_LOG_SEND)
        done = send(log->fd, p, n, MSG_DONTWAIT | MSG_NOSIGNAL);
    else if (log->way == CB_LOG_PLAIN || (poll(&ready, 1, 0) == 1 && (ready.revents & POLLOUT) != 0))
        done = write(log->fd, p, n);
    return done <= 0 ? 0 : (size_t)done == n ? 1 : -1;
}

static void lose(const struct cb_log *log, uint32_t lines, int how)
{
    if (log->lost == NULL)
        return;
    atomic_fetch_add(log->lost, lines);
    if (how < 0)
        atomic_fetch_or(log->lost, CUT_OFF);
}

/* What every line ends with; it always fits. */
static void close_line(struct cb_line *l)
{
    l->b.full = 0;
    l->b.cap = sizeof l->text;
    cb_buf_str(&l->b, l->log.json ? "}\n" : "\n");
}

/* What was left out before is said first. 1 = it is said, or there is nothing. */
static int say_lost(const struct cb_log *log)
{
    struct cb_line l;
    uint32_t lost = log->lost != NULL ? atomic_exchange(log->lost, 0) : 0;
    if (lost == 0)
        return 1;
    cb_line_begin(&l, (struct cb_log){.json = log->json}, "warning", "journal_lost");
    cb_line_u64(&l, "lines", lost & ~CUT_OFF);
    close_line(&l);
    int whole = lost & CUT_OFF ? put(log, "\n", 1) : 1;
    if (whole == 1)
        whole = put(log, l.text, l.b.n);
    if (whole == 1)
        return 1;
    lose(log, lost & ~CUT_OFF, lost & CUT_OFF ? -1 : whole);
    return 0;
}

/* Moves the whole lines of the file's last max / 2 bytes to its begin; their length, or 0. */
static off_t move_down(int file, uint64_t size, uint64_t max)
{
    char some[CHUNK];
    off_t from = (off_t)(size - max / 2), to = 0;
    ssize_t n = pread(file, some, sizeof some, from);
    const char *line = n > 0 ? memchr(some, '\n', (size_t)n) : NULL;
    if (line == NULL)
        return 0;
    from += line + 1 - some;
    while ((n = pread(file, some, sizeof some, from)) > 0) {
        if (pwrite(file, some, (size_t)n, to) != n)
            return 0;
        from += n;
        to += n;
    }
    return to;
}

/* The log's file to read and to write anywhere in; a write at an offset appends where
 * O_APPEND is set, as it may be on log->fd. -1 when it may not be opened so. */
static int open_again(const struct cb_log *log)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", log->fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* In place: a supervisor appends to the same file, and its folder may not be ours. */
static void shorten(const struct cb_log *log)
{
    struct cb_line l;
    struct stat st;
    if (log->max == 0 || fstat(log->fd, &st) != 0 || !S_ISREG(st.st_mode) ||
        (uint64_t)st.st_size <= log->max)
        return;
    int file = open_again(log);
    if (file < 0)
        return;
    off_t left = move_down(file, (uint64_t)st.st_size, log->max);
    close(file);
    if (ftruncate(log->fd, left) != 0)
        return;
    (void)lseek(log->fd, left, SEEK_SET); /* for what was not opened to append */
    cb_line_begin(&l, (struct cb_log){.json = log->json}, "info", "log_shortened");
    cb_line_u64(&l, "bytes", (uint64_t)st.st_size);
    close_line(&l);
    (void)put(log, l.text, l.b.n);
}

void cb_log_bound(struct cb_log *log, uint64_t max)
{
    struct stat st;
    log->max = max;
    if (max == 0 || fstat(log->fd, &st) != 0 || !S_ISREG(st.st_mode))
        return;
    int file = open_again(log);
    if (file >= 0)
        close(file);
    else
        cb_log_say(*log, "warning", "log_unbounded",
                   "--log-max: the log is a file that may be appended to only; it will not be shortened");
}

void cb_line_begin(struct cb_line *l, struct cb_log log, const char *level, const char *event)
{
    struct timespec now;
    struct tm tm;
    l->log = log;
    l->b = (struct cb_buf){l->text, 0, sizeof l->text - 2, 0}; /* "}\n" always fits */
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    const char *form = log.json ? "{\"time\":\"%04d-%02d-%02dT%02d:%02d:%02d.%03ldZ\",\"level\":\"%s\","
                                  "\"event\":\"%s\""
                                : "%04d-%02d-%02dT%02d:%02d:%02d.%03ldZ %s %s";
    cb_buf_fmt(&l->b, form, tm.tm_year + 1900, tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min,
               tm.tm_sec, now.tv_nsec / 1000000, level, event);
}

static void key(struct cb_line *l, const char *name)
{
    cb_buf_fmt(&l->b, l->log.json ? ",\"%s\":" : " %s=", name);
}

void cb_line_str(struct cb_line *l, const char *name, const char *value)
{
    key(l, name);
    if (!l->log.json && value[0] != '\0' && strpbrk(value, " \"\\=\n\r\t\x1b") == NULL)
        cb_buf_json(&l->b, value, strlen(value));
    else
        cb_buf_quoted(&l->b, value);
}

void cb_line_u64(struct cb_line *l, const char *name, uint64_t value)
{
    key(l, name);
    cb_buf_fmt(&l->b, "%llu", (unsigned long long)value);
}

void cb_line_ms(struct cb_line *l, const char *name, uint64_t ns)
{
    key(l, name);
    cb_buf_fmt(&l->b, "%llu.%03llu", (unsigned long long)(ns / 1000000),
               (unsigned long long)(ns / 1000 % 1000));
}

void cb_line_end(struct cb_line *l)
{
    close_line(l);
    int whole = say_lost(&l->log) ? put(&l->log, l->text, l->b.n) : 0;
    if (whole != 1)
        lose(&l->log, 1, whole);
    else
        shorten(&l->log);
}

void cb_log_say(struct cb_log log, const char *level, const char *event, const char *message)
{
    struct cb_line l;
    cb_line_begin(&l, log, level, event);
    if (message != NULL)
        cb_line_str(&l, "message", message);
    cb_line_end(&l);
}
#else
typedef int cb_serve_log_is_posix;
#endif

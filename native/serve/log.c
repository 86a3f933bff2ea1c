/* log.c — see log.h. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include "serve/log.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

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
    l->b.full = 0;
    l->b.cap = sizeof l->text;
    cb_buf_str(&l->b, l->log.json ? "}\n" : "\n");
    ssize_t done = write(l->log.fd, l->text, l->b.n);
    (void)done; /* a journal that is gone is no reason to stop */
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

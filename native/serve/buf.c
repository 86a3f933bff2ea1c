/* buf.c — see buf.h. */
#include "serve/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "text/text.h"

size_t cb_buf_room(const struct cb_buf *b)
{
    return b->full ? 0 : b->cap - b->n;
}

void cb_buf_add(struct cb_buf *b, const void *p, size_t n)
{
    if (b->full || n > b->cap - b->n) {
        b->full = 1;
        return;
    }
    memcpy(b->p + b->n, p, n);
    b->n += n;
}

void cb_buf_str(struct cb_buf *b, const char *s)
{
    cb_buf_add(b, s, strlen(s));
}

void cb_buf_fmt(struct cb_buf *b, const char *fmt, ...)
{
    va_list args;
    if (b->full)
        return;
    va_start(args, fmt);
    int n = vsnprintf(b->p + b->n, b->cap - b->n, fmt, args);
    va_end(args);
    if (n < 0 || (size_t)n >= b->cap - b->n)
        b->full = 1;
    else
        b->n += (size_t)n;
}

size_t cb_utf8_step(const char *s, size_t n)
{
    unsigned char c = (unsigned char)s[0];
    size_t len = c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    if (len == 1 || len > n || cb_utf8_check(s, len) != len)
        return 1;
    return len;
}

void cb_buf_json(struct cb_buf *b, const char *s, size_t n)
{
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)s[i];
        size_t len = cb_utf8_step(s + i, n - i);
        if (c == '"' || c == '\\') {
            char two[2] = {'\\', (char)c};
            cb_buf_add(b, two, 2);
        } else if (c == '\n') {
            cb_buf_add(b, "\\n", 2);
        } else if (c < 0x20 || c == 0x7f) {
            cb_buf_fmt(b, "\\u%04x", c);
        } else if (c >= 0x80 && len == 1) {
            cb_buf_add(b, "\xef\xbf\xbd", 3);
        } else {
            cb_buf_add(b, s + i, len);
        }
        i += len;
    }
}

void cb_buf_quoted(struct cb_buf *b, const char *s)
{
    cb_buf_add(b, "\"", 1);
    cb_buf_json(b, s, strlen(s));
    cb_buf_add(b, "\"", 1);
}

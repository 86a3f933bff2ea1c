/* buf.h — bytes appended to a fixed buffer; one that is full says so and takes no more. */
#ifndef CB_SERVE_BUF_H
#define CB_SERVE_BUF_H

#include <stddef.h>
#include <stdint.h>

struct cb_buf {
    char *p;
    size_t n, cap;
    int full;
};

size_t cb_buf_room(const struct cb_buf *b);
void cb_buf_add(struct cb_buf *b, const void *p, size_t n);
void cb_buf_str(struct cb_buf *b, const char *s);
void cb_buf_fmt(struct cb_buf *b, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;
/* The inside of a JSON string; bytes that are not UTF-8 come out as U+FFFD, one
 * a byte. At most 6 bytes for each of s. */
void cb_buf_json(struct cb_buf *b, const char *s, size_t n);
/* A JSON string with its quotes, NUL-terminated in. */
void cb_buf_quoted(struct cb_buf *b, const char *s);

/* Bytes of the character at s[0..n), n > 0: 1 for a byte that is part of none. */
size_t cb_utf8_step(const char *s, size_t n);

#endif

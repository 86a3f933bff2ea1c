/* jsonout.h — writes JSON to a stream, commas and escapes done right.
 *
 * key is NULL inside arrays and for the outermost value. */
#ifndef CLI_JSONOUT_H
#define CLI_JSONOUT_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct json {
    FILE *f;
    int need_comma;
};

void json_begin(struct json *j, const char *key, char open); /* open: '{' or '[' */
void json_end(struct json *j, char close);                   /* '}' or ']' */
/* Bytes that are not UTF-8 come out as U+FFFD, one a byte. */
void json_text(struct json *j, const char *key, const char *text, size_t n);
void json_word(struct json *j, const char *key, const char *text); /* NUL-terminated; NULL = null */
void json_u64(struct json *j, const char *key, uint64_t v);
void json_i64(struct json *j, const char *key, int64_t v);
void json_float(struct json *j, const char *key, double v); /* null unless finite */
void json_bool(struct json *j, const char *key, int v);
void json_null(struct json *j, const char *key);
void json_u64s(struct json *j, const char *key, const uint64_t *v, size_t n);

#endif

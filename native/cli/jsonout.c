/* jsonout.c — see jsonout.h. RFC 8259 strings: quote, backslash and everything
 * below U+0020 escaped; the rest of UTF-8 as it is. */
#include "jsonout.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "text/text.h"

static void quoted(FILE *f, const char *text, size_t n)
{
    fputc('"', f);
    for (size_t at = 0; at < n;) {
        size_t good = cb_utf8_check(text + at, n - at);
        for (size_t i = 0; i < good; i++) {
            unsigned char c = (unsigned char)text[at + i];
            if (c == '"' || c == '\\')
                fprintf(f, "\\%c", c);
            else if (c == '\n')
                fputs("\\n", f);
            else if (c == '\t')
                fputs("\\t", f);
            else if (c < 0x20 || c == 0x7f)
                fprintf(f, "\\u%04x", c);
            else
                fputc(c, f);
        }
        at += good;
        if (at < n) {
            fputs("\\ufffd", f);
            at++;
        }
    }
    fputc('"', f);
}

static void lead(struct json *j, const char *key)
{
    if (j->need_comma)
        fputs(", ", j->f);
    if (key) {
        quoted(j->f, key, strlen(key));
        fputs(": ", j->f);
    }
    j->need_comma = 1;
}

void json_begin(struct json *j, const char *key, char open)
{
    lead(j, key);
    fputc(open, j->f);
    j->need_comma = 0;
}

void json_end(struct json *j, char close)
{
    fputc(close, j->f);
    j->need_comma = 1;
}

void json_text(struct json *j, const char *key, const char *text, size_t n)
{
    lead(j, key);
    quoted(j->f, text, n);
}

void json_word(struct json *j, const char *key, const char *text)
{
    if (text)
        json_text(j, key, text, strlen(text));
    else
        json_null(j, key);
}

void json_u64(struct json *j, const char *key, uint64_t v)
{
    lead(j, key);
    fprintf(j->f, "%" PRIu64, v);
}

void json_i64(struct json *j, const char *key, int64_t v)
{
    lead(j, key);
    fprintf(j->f, "%" PRId64, v);
}

void json_float(struct json *j, const char *key, double v)
{
    if (!isfinite(v)) {
        json_null(j, key);
        return;
    }
    lead(j, key);
    fprintf(j->f, "%.9g", v);
}

void json_bool(struct json *j, const char *key, int v)
{
    lead(j, key);
    fputs(v ? "true" : "false", j->f);
}

void json_null(struct json *j, const char *key)
{
    lead(j, key);
    fputs("null", j->f);
}

void json_u64s(struct json *j, const char *key, const uint64_t *v, size_t n)
{
    json_begin(j, key, '[');
    for (size_t i = 0; i < n; i++)
        json_u64(j, NULL, v[i]);
    json_end(j, ']');
}

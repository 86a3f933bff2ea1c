/* json.h — a bounded, strict JSON reader (RFC 8259) over a caller's token array.
 *
 * Tokens are in document order; a container's token is followed by its
 * children, and `next` skips a whole value. No number is converted and no
 * string is unescaped until asked for. */
#ifndef CB_JSON_H
#define CB_JSON_H

#include <stddef.h>
#include <stdint.h>

#include "colibri.h"

enum cb_json_kind { CB_JSON_NULL, CB_JSON_FALSE, CB_JSON_TRUE, CB_JSON_NUMBER, CB_JSON_STRING,
                    CB_JSON_ARRAY, CB_JSON_OBJECT };

#define CB_JSON_DEPTH 32
#define CB_JSON_MEMBERS 4096u /* of one object: looking for duplicates takes their square */

struct cb_json_tok {
    uint32_t kind;
    uint32_t at, len;  /* bytes in the text; strings without their quotes */
    uint32_t size;     /* children: items of an array, members of an object */
    uint32_t next;     /* index of the token after this whole value */
};

struct cb_json {
    const char *text;
    struct cb_json_tok *tok;
    uint32_t n_tok;
};

/* Parses text[0..n) (n < 2^31) into tok[0..cap). Duplicate keys in one object
 * are an error. The message names the byte offset. */
int cb_json_parse(struct cb_json *j, const char *text, size_t n, struct cb_json_tok *tok,
                  uint32_t cap, struct cb_err *err);

#define CB_JSON_NONE UINT32_MAX
/* Value of a member of the object token obj, or CB_JSON_NONE. */
uint32_t cb_json_get(const struct cb_json *j, uint32_t obj, const char *key);
int cb_json_is(const struct cb_json *j, uint32_t t, enum cb_json_kind kind);
/* Token t as a whole number 0 … max / as a finite double / unescaped into
 * buf (NUL-terminated; an embedded NUL is refused). `what` names it in errors. */
int cb_json_u64(const struct cb_json *j, uint32_t t, uint64_t max, const char *what,
                uint64_t *out, struct cb_err *err);
int cb_json_f64(const struct cb_json *j, uint32_t t, const char *what, double *out,
                struct cb_err *err);
int cb_json_bool(const struct cb_json *j, uint32_t t, const char *what, int *out,
                 struct cb_err *err);
int cb_json_str(const struct cb_json *j, uint32_t t, const char *what, char *buf, size_t cap,
                struct cb_err *err);

#endif

/* emit.h — from token bytes to text that may be shown.
 *
 * Holds back what may still become a stop string and what is not yet a whole
 * UTF-8 sequence. What comes out, put together, depends only on the bytes that
 * went in, never on how they were cut into tokens. */
#ifndef CB_EMIT_H
#define CB_EMIT_H

#include "colibri.h"

#define CB_EMIT_CHUNK 1024u /* bytes of one token that pass in one callback */

struct cb_emit {
    const char *stop[CB_STOP_MAX]; /* the caller's strings; must outlive this */
    size_t stop_len[CB_STOP_MAX];
    uint32_t n_stop;
    int stopped;                   /* a stop string was completed */
    size_t n;                      /* bytes held back, < CB_STOP_LEN + 4 between calls */
    char buf[CB_EMIT_CHUNK + CB_STOP_LEN + 4];
};

/* Stop strings are 1 … CB_STOP_LEN bytes of UTF-8, at most CB_STOP_MAX of them. */
int cb_emit_init(struct cb_emit *m, const char *const *stop, uint32_t n_stop, struct cb_err *err);

/* Adds one token's bytes and calls fn with what can be shown: once, also when
 * that is nothing, or more than once for tokens above CB_EMIT_CHUNK. The stop
 * string that ends first wins (of two that end together the longer); it and
 * all after it are dropped. Returns non-zero when fn did. */
int cb_emit_push(struct cb_emit *m, const char *bytes, size_t n, int32_t id, cb_text_fn fn, void *ud);

/* Shows what was held back, as it is, with id -1; no call when that is nothing. */
int cb_emit_flush(struct cb_emit *m, cb_text_fn fn, void *ud);

#endif

/* text.h — byte-level BPE: UTF-8 in, token ids out, and back.
 *
 * tokenizer.coli is made for use in place: tables and hash indexes lie in the
 * file, so opening validates and points, it never allocates. */
#ifndef CB_TEXT_H
#define CB_TEXT_H

#include <stddef.h>
#include <stdint.h>
#include "colibri.h"

struct cb_text; /* fields are text.c's business; sized so that the engine can embed it */

/* Checks the whole file (64-byte header included; docs/format.md) and fills *t,
 * which keeps pointing into file[0..n). */
int cb_text_open(struct cb_text *t, const void *file, size_t n, struct cb_err *err);

uint32_t cb_text_n_vocab(const struct cb_text *t);

/* Scratch that encoding a text of at most max_bytes needs. */
size_t cb_text_scratch_bytes(size_t max_bytes);

/* As cb_encode() in colibri.h; scratch is 16-byte aligned. Work is
 * O(n log n) whatever the text. */
int cb_text_encode(const struct cb_text *t, const char *text, size_t n, int special,
                   int strict_utf8, int32_t *ids, size_t cap, void *scratch,
                   size_t scratch_bytes, struct cb_err *err);

const char *cb_text_token(const struct cb_text *t, int32_t id, int special, size_t *len);

/* Offset of the first byte that is not part of well-formed UTF-8 (RFC 3629:
 * no overlong forms, no surrogates, nothing above U+10FFFF), or n. */
size_t cb_utf8_check(const char *s, size_t n);
/* How many of the n bytes can be shown now: less than n only when the end is a
 * proper prefix of a well-formed sequence. */
size_t cb_utf8_complete(const char *s, size_t n);

#include "text_impl.h"
#endif

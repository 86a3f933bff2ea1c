/* text_internal.h — what the files of native/text share. */
#ifndef CB_TEXT_INTERNAL_H
#define CB_TEXT_INTERNAL_H

#include <string.h>

#include "text/text.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tokenizer.coli is read in place: little-endian machines only"
#endif

static inline uint32_t cb_ld32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v); /* the caller's file need not be aligned */
    return v;
}

/* ---- pieces: tokens [0, n_vocab), then byte strings that only merges name ---- */

static inline const uint8_t *cb_piece(const struct cb_text *t, uint32_t id, uint32_t *len)
{
    uint32_t a = cb_ld32(t->offsets + 4 * (size_t)id);
    *len = cb_ld32(t->offsets + 4 * (size_t)id + 4) - a;
    return t->bytes + a;
}

static inline uint32_t cb_pair_hash(uint32_t left, uint32_t right)
{
    uint64_t k = ((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15u;
    k ^= k >> 32;
    k *= 0xD6E8FEB86659FD93u;
    return (uint32_t)(k >> 32);
}

static inline uint32_t cb_word_hash(const uint8_t *s, size_t n)
{
    uint32_t h = 0x811C9DC5u; /* FNV-1a, then a finaliser for the high bits */
    for (size_t i = 0; i < n; i++)
        h = (h ^ s[i]) * 0x01000193u;
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    return h ^ h >> 13;
}

/* Slot where an entry of this hash belongs; grows with the hash. */
static inline uint32_t cb_home(uint32_t hash, uint32_t n_home)
{
    return (uint32_t)((uint64_t)hash * n_home >> 32);
}

/* ---- special.c ---------------------------------------------------------- */

enum cb_special_flags { CB_SPECIAL_CONTROL = 1, CB_SPECIAL_LSTRIP = 2, CB_SPECIAL_RSTRIP = 4 };

/* mark[] values after cb_special_mark(); anything from CB_MARK_ID on is id + CB_MARK_ID. */
enum { CB_MARK_TEXT = 0, CB_MARK_SKIP = 1, CB_MARK_ID = 2 };

/* Finds the special tokens in text[0..n). Returns 0 when there are none, and
 * mark is untouched; otherwise 1, with mark[i] set for every byte. */
int cb_special_mark(const struct cb_text *t, const char *text, size_t n, int special,
                    uint32_t *mark);

/* ---- pretok.c ----------------------------------------------------------- */

#define CB_PRE_STAGES 4
/* Length of the first piece of s[0..n), n > 0, s well-formed UTF-8; 1 <= result <= n. */
typedef size_t (*cb_pre_step)(const char *s, size_t n);
/* The stages of pre-tokenizer `pre`, NULL-terminated; NULL when there is no such one. */
const cb_pre_step *cb_pre_steps(uint32_t pre);

/* ---- bpe.c -------------------------------------------------------------- */

struct cb_ids {
    int32_t *v;
    size_t n, cap;
};

#define CB_BPE_WORDS 5 /* u32 of scratch a byte of the longest word */

/* Encodes one word (any bytes). Returns 0, or -1 when out is full. */
int cb_bpe_word(const struct cb_text *t, const char *word, size_t n, struct cb_ids *out,
                uint32_t *scratch);
/* Appends the tokens of one piece: itself, or its bytes when it is no token. */
int cb_bpe_emit(const struct cb_text *t, uint32_t piece, struct cb_ids *out);

#endif

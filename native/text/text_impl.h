/* text_impl.h — the fields behind struct cb_text (text.h). Not for callers.
 *
 * Every pointer leads into the caller's tokenizer.coli; docs/tokenizer.md
 * describes the sections. Numbers below were checked in cb_text_open(). */
#ifndef CB_TEXT_IMPL_H
#define CB_TEXT_IMPL_H

#include <stdint.h>

#define CB_TEXT_NONE UINT32_MAX
#define CB_SPECIAL_BYTES 1024u /* longest special token */

enum cb_text_flags { CB_TEXT_IGNORE_MERGES = 1, CB_TEXT_ADD_BOS = 2 };

struct cb_text {
    const uint8_t *offsets;  /* u32[n_piece + 1] into bytes */
    const uint8_t *bytes;    /* raw bytes of all pieces, one after the other */
    const uint8_t *types;    /* u8[n_vocab], llama.cpp's token types */
    const uint8_t *byte_ids; /* u32[256] piece of each single byte */
    const uint8_t *pairs;    /* {left, right, rank, result} u32[4] per slot */
    const uint8_t *special;  /* {id, parent, flags, 0} u32[4], sorted by bytes */
    const uint8_t *words;    /* u32 token id per slot; only with IGNORE_MERGES */
    const uint8_t *eog;      /* u32[n_eog], ascending */
    uint32_t n_vocab, n_piece, n_merge, n_special, n_eog;
    uint32_t pair_home, pair_probe; /* home slots, longest displacement */
    uint32_t word_home, word_probe;
    uint32_t pre, flags;
    uint32_t bos, eos, unk; /* CB_TEXT_NONE = the tokenizer has none */
    uint32_t special_max;   /* longest special token, bytes */
    uint32_t first[8], second[8]; /* bit sets: bytes that can begin / follow in a special token */
};

uint32_t cb_text_bos(const struct cb_text *t);
uint32_t cb_text_eos(const struct cb_text *t);
int cb_text_add_bos(const struct cb_text *t);
/* 1 when id ends a generation, 0 for every other number. */
int cb_text_is_eog(const struct cb_text *t, int32_t id);

#endif

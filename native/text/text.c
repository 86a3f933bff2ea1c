/* text.c — opening tokenizer.coli, encoding, tokens to bytes.
 *
 * Whatever the look-ups later use as an index or a bound is checked here once;
 * the file is hostile until then (docs/tokenizer.md). */
#include "text/text_internal.h"

#include <limits.h>

#include "core/container.h"
#include "kernels/kernels.h"

#define FILE_NAME "tokenizer.coli"
#define SECTION_BYTES 32u
#define PARAM_BYTES 64u
#define MAX_VOCAB (1u << 24)
#define MAX_TEXT ((size_t)1 << 30)

enum section {
    S_PARAMS, S_OFFSETS, S_BYTES, S_TYPES, S_BYTE_IDS, S_PAIRS, S_SPECIAL, S_WORDS, S_EOG, S_COUNT
};
static const char *const section_names[S_COUNT] = {
    "params", "offsets", "bytes", "types", "byte ids", "pairs", "special", "words", "eog",
};
static const uint32_t element_bytes[S_COUNT] = {PARAM_BYTES, 4, 1, 1, 4, 16, 16, 4, 4};

struct span {
    const uint8_t *p;
    uint32_t count; /* elements */
};

static int bad(struct cb_err *err, const char *what, uint32_t at)
{
    return cb_fail(err, CB_EFORMAT, FILE_NAME ": %s (entry %u)", what, at);
}

static uint64_t ld64(const uint8_t *p)
{
    return (uint64_t)cb_ld32(p) | (uint64_t)cb_ld32(p + 4) << 32;
}

/* Section k of the directory: {u32 number, u32 count, u64 offset, u64 size, u32 crc, u32 0}. */
static int read_section(const uint8_t *file, const struct cb_header *h, uint32_t k,
                        struct span *out, struct cb_err *err)
{
    const uint8_t *e = file + CB_HEADER_BYTES + (size_t)k * SECTION_BYTES;
    uint32_t count = cb_ld32(e + 4);
    uint64_t offset = ld64(e + 8), size = ld64(e + 16);
    if (cb_ld32(e) != k || cb_ld32(e + 28) != 0 || size != (uint64_t)count * element_bytes[k] ||
        offset < h->payload_offset || offset % 64 != 0 || size > h->payload_size ||
        offset - h->payload_offset > h->payload_size - size)
        return cb_fail(err, CB_EFORMAT, FILE_NAME ": section %u (%s) lies outside the file", k,
                       section_names[k]);
    out->p = file + offset;
    out->count = count;
    if (cb_crc32c(0, out->p, (size_t)size) != cb_ld32(e + 24))
        return cb_fail(err, CB_EFORMAT, FILE_NAME ": section %u (%s) is damaged (CRC32C)", k,
                       section_names[k]);
    return 0;
}

static int read_sections(const uint8_t *file, size_t n, struct span s[S_COUNT], struct cb_err *err)
{
    struct cb_header h;
    if (n < CB_HEADER_BYTES)
        return cb_fail(err, CB_EFORMAT, FILE_NAME ": %llu bytes, shorter than a header: truncated",
                       (unsigned long long)n);
    int rc = cb_header_parse(file, n, FILE_NAME, CB_FILE_TOKENIZER, SECTION_BYTES, &h, err);
    if (rc != 0)
        return rc;
    if (h.count != S_COUNT)
        return cb_fail(err, CB_EFORMAT, FILE_NAME ": %u sections; this engine reads %u", h.count,
                       (unsigned)S_COUNT);
    if (cb_crc32c(0, file + CB_HEADER_BYTES, S_COUNT * SECTION_BYTES) != h.dir_crc)
        return cb_fail(err, CB_EFORMAT, FILE_NAME ": the directory is damaged (CRC32C)");
    for (uint32_t k = 0; k < S_COUNT; k++)
        if ((rc = read_section(file, &h, k, &s[k], err)) != 0)
            return rc;
    return 0;
}

static int id_or_none(uint32_t id, uint32_t n_vocab)
{
    return id == CB_TEXT_NONE || id < n_vocab;
}

static int read_params(struct cb_text *t, const struct span s[S_COUNT], struct cb_err *err)
{
    const uint8_t *p = s[S_PARAMS].p;
    if (s[S_PARAMS].count != 1)
        return cb_fail(err, CB_EFORMAT, FILE_NAME ": no parameters");
    if (cb_ld32(p) != 1)
        return cb_fail(err, CB_EUNSUPPORTED, FILE_NAME ": kind of tokenizer %u; this engine has 1 "
                       "(byte-level BPE)", cb_ld32(p));
    t->pre = cb_ld32(p + 4);
    t->flags = cb_ld32(p + 8);
    t->n_vocab = cb_ld32(p + 12);
    t->n_piece = cb_ld32(p + 16);
    t->n_merge = cb_ld32(p + 20);
    t->bos = cb_ld32(p + 24);
    t->eos = cb_ld32(p + 28);
    t->unk = cb_ld32(p + 32);
    t->pair_home = cb_ld32(p + 36);
    t->pair_probe = cb_ld32(p + 40);
    t->word_home = cb_ld32(p + 44);
    t->word_probe = cb_ld32(p + 48);
    if (cb_pre_steps(t->pre) == NULL)
        return cb_fail(err, CB_EUNSUPPORTED, FILE_NAME ": unknown pre-tokenizer %u", t->pre);
    if (t->flags & ~(uint32_t)(CB_TEXT_IGNORE_MERGES | CB_TEXT_ADD_BOS))
        return cb_fail(err, CB_EUNSUPPORTED, FILE_NAME ": unknown flags 0x%x", t->flags);
    if (t->n_vocab == 0 || t->n_vocab > MAX_VOCAB || t->n_piece < t->n_vocab ||
        t->n_piece > 2 * MAX_VOCAB || t->n_merge > MAX_VOCAB)
        return cb_fail(err, CB_EFORMAT, FILE_NAME ": %u tokens, %u pieces, %u merges", t->n_vocab,
                       t->n_piece, t->n_merge);
    if (!id_or_none(t->bos, t->n_vocab) || !id_or_none(t->eos, t->n_vocab) ||
        !id_or_none(t->unk, t->n_vocab) || ((t->flags & CB_TEXT_ADD_BOS) && t->bos == CB_TEXT_NONE))
        return cb_fail(err, CB_EFORMAT, FILE_NAME ": bos %u, eos %u, unk %u of %u tokens", t->bos,
                       t->eos, t->unk, t->n_vocab);
    return 0;
}

/* Slots for every home and the longest displacement; an empty table has neither. */
static int table_fits(uint32_t home, uint32_t probe, uint32_t slots)
{
    if (home == 0)
        return probe == 0 && slots == 0;
    return probe < 256 && slots >= (uint64_t)home + probe;
}

static int point_sections(struct cb_text *t, const struct span s[S_COUNT], struct cb_err *err)
{
    if (s[S_OFFSETS].count != t->n_piece + 1 || s[S_TYPES].count != t->n_vocab ||
        s[S_BYTE_IDS].count != 256 || s[S_SPECIAL].count > t->n_vocab ||
        s[S_EOG].count > t->n_vocab ||
        !table_fits(t->pair_home, t->pair_probe, s[S_PAIRS].count) ||
        !table_fits(t->word_home, t->word_probe, s[S_WORDS].count) ||
        (t->word_home != 0) != ((t->flags & CB_TEXT_IGNORE_MERGES) != 0))
        return cb_fail(err, CB_EFORMAT, FILE_NAME ": the sections do not agree with the counts");
    t->offsets = s[S_OFFSETS].p;
    t->bytes = s[S_BYTES].p;
    t->types = s[S_TYPES].p;
    t->byte_ids = s[S_BYTE_IDS].p;
    t->pairs = s[S_PAIRS].p;
    t->special = s[S_SPECIAL].p;
    t->words = s[S_WORDS].p;
    t->eog = s[S_EOG].p;
    t->n_special = s[S_SPECIAL].count;
    t->n_eog = s[S_EOG].count;
    return 0;
}

static int check_pieces(const struct cb_text *t, uint32_t n_bytes, struct cb_err *err)
{
    uint32_t last = 0;
    for (uint32_t i = 0; i <= t->n_piece; i++) {
        uint32_t at = cb_ld32(t->offsets + 4 * (size_t)i);
        if (at < last || at > n_bytes || (i == 0 && at != 0))
            return bad(err, "token offsets do not ascend", i);
        last = at;
    }
    for (uint32_t i = 0; i < t->n_vocab; i++)
        if (t->types[i] < 1 || t->types[i] > 6)
            return bad(err, "unknown token type", i);
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t id = cb_ld32(t->byte_ids + 4 * (size_t)b), len;
        if (id >= t->n_piece)
            return bad(err, "a byte has no piece", b);
        const uint8_t *s = cb_piece(t, id, &len);
        if (len != 1 || s[0] != b)
            return bad(err, "a byte's piece is another one", b);
    }
    return 0;
}

/* The result of a merge is its two parts, one after the other: so encoding keeps the bytes. */
static int merge_joins(const struct cb_text *t, const uint8_t *slot)
{
    uint32_t l = cb_ld32(slot), r = cb_ld32(slot + 4), m = cb_ld32(slot + 12), nl, nr, nm;
    if (l >= t->n_piece || r >= t->n_piece || m >= t->n_piece || cb_ld32(slot + 8) >= t->n_merge)
        return 0;
    const uint8_t *pl = cb_piece(t, l, &nl), *pr = cb_piece(t, r, &nr), *pm = cb_piece(t, m, &nm);
    return nl != 0 && nr != 0 && (uint64_t)nl + nr == nm && memcmp(pm, pl, nl) == 0 &&
           memcmp(pm + nl, pr, nr) == 0;
}

/* An entry at slot i may stand between its home and home + probe. */
static int in_reach(uint32_t hash, uint32_t home, uint32_t probe, uint32_t i)
{
    uint32_t at = cb_home(hash, home);
    return i >= at && i - at <= probe;
}

static int check_pairs(const struct cb_text *t, uint32_t slots, struct cb_err *err)
{
    uint32_t last = 0;
    for (uint32_t i = 0; i < slots; i++) {
        const uint8_t *slot = t->pairs + 16 * (size_t)i;
        if (cb_ld32(slot) == CB_TEXT_NONE)
            continue;
        uint32_t hash = cb_pair_hash(cb_ld32(slot), cb_ld32(slot + 4));
        if (!merge_joins(t, slot) || hash < last || !in_reach(hash, t->pair_home, t->pair_probe, i))
            return bad(err, "a merge is invalid or misplaced", i);
        last = hash;
    }
    return 0;
}

static int check_words(const struct cb_text *t, uint32_t slots, struct cb_err *err)
{
    for (uint32_t i = 0; i < slots; i++) {
        uint32_t id = cb_ld32(t->words + 4 * (size_t)i), len;
        if (id == CB_TEXT_NONE)
            continue;
        if (id >= t->n_vocab)
            return bad(err, "a word is no token", i);
        const uint8_t *s = cb_piece(t, id, &len);
        if (!in_reach(cb_word_hash(s, len), t->word_home, t->word_probe, i))
            return bad(err, "a word is misplaced", i);
    }
    return 0;
}

static const uint8_t *special_bytes(const struct cb_text *t, uint32_t i, uint32_t *len)
{
    return cb_piece(t, cb_ld32(t->special + 16 * (size_t)i), len);
}

static int is_prefix(const struct cb_text *t, uint32_t a, uint32_t b)
{
    uint32_t na, nb;
    const uint8_t *pa = special_bytes(t, a, &na), *pb = special_bytes(t, b, &nb);
    return na < nb && memcmp(pa, pb, na) == 0;
}

/* Sorted, no two alike, and `parent` the longest special token that is a prefix. */
static int special_in_order(const struct cb_text *t, uint32_t i)
{
    uint32_t parent = cb_ld32(t->special + 16 * (size_t)i + 4);
    if (i == 0)
        return parent == CB_TEXT_NONE;
    uint32_t na, nb;
    const uint8_t *a = special_bytes(t, i - 1, &na), *b = special_bytes(t, i, &nb);
    int c = memcmp(a, b, na < nb ? na : nb);
    if (c > 0 || (c == 0 && na >= nb))
        return 0;
    uint32_t j = i - 1; /* every prefix of b that stands before it is j or j's ancestor */
    while (j != CB_TEXT_NONE && !is_prefix(t, j, i))
        j = cb_ld32(t->special + 16 * (size_t)j + 4);
    return parent == j;
}

static int check_special(struct cb_text *t, struct cb_err *err)
{
    t->special_max = 0;
    memset(t->first, 0, sizeof t->first);
    memset(t->second, 0, sizeof t->second);
    for (uint32_t i = 0; i < t->n_special; i++) {
        const uint8_t *e = t->special + 16 * (size_t)i;
        uint32_t len;
        if (cb_ld32(e) >= t->n_vocab || cb_ld32(e + 8) > 7 || cb_ld32(e + 12) != 0)
            return bad(err, "a special token is invalid", i);
        const uint8_t *s = special_bytes(t, i, &len);
        if (len == 0 || len > CB_SPECIAL_BYTES || !special_in_order(t, i))
            return bad(err, "special tokens are out of order", i);
        t->first[s[0] >> 5] |= 1u << (s[0] & 31);
        if (len == 1)
            memset(t->second, 0xFF, sizeof t->second);
        else
            t->second[s[1] >> 5] |= 1u << (s[1] & 31);
        if (len > t->special_max)
            t->special_max = len;
    }
    for (uint32_t i = 0; i < t->n_eog; i++) {
        uint32_t id = cb_ld32(t->eog + 4 * (size_t)i);
        if (id >= t->n_vocab || (i > 0 && id <= cb_ld32(t->eog + 4 * (size_t)i - 4)))
            return bad(err, "end-of-generation tokens are invalid", i);
    }
    return 0;
}

int cb_text_open(struct cb_text *t, const void *file, size_t n, struct cb_err *err)
{
    struct span s[S_COUNT];
    int rc = read_sections(file, n, s, err);
    if (rc == 0)
        rc = read_params(t, s, err);
    if (rc == 0)
        rc = point_sections(t, s, err);
    if (rc == 0)
        rc = check_pieces(t, s[S_BYTES].count, err);
    if (rc == 0)
        rc = check_pairs(t, s[S_PAIRS].count, err);
    if (rc == 0)
        rc = check_words(t, s[S_WORDS].count, err);
    if (rc == 0)
        rc = check_special(t, err);
    return rc;
}

uint32_t cb_text_n_vocab(const struct cb_text *t)
{
    return t->n_vocab;
}

uint32_t cb_text_bos(const struct cb_text *t)
{
    return t->bos;
}

uint32_t cb_text_eos(const struct cb_text *t)
{
    return t->eos;
}

int cb_text_add_bos(const struct cb_text *t)
{
    return (t->flags & CB_TEXT_ADD_BOS) != 0;
}

int cb_text_is_eog(const struct cb_text *t, int32_t id)
{
    for (uint32_t i = 0; i < t->n_eog; i++) /* a handful */
        if (id >= 0 && cb_ld32(t->eog + 4 * (size_t)i) == (uint32_t)id)
            return 1;
    return 0;
}

/* ---- encoding ------------------------------------------------------------- */

/* One u32 a byte for the special tokens' marks, then the longest word's arrays. */
size_t cb_text_scratch_bytes(size_t max_bytes)
{
    if (max_bytes > MAX_TEXT)
        return SIZE_MAX;
#if SIZE_MAX <= UINT32_MAX
    if (max_bytes > (SIZE_MAX - 64) / (4 * (1 + CB_BPE_WORDS)))
        return SIZE_MAX;
#endif
    return 4 * (1 + CB_BPE_WORDS) * max_bytes + 64;
}

struct encoder {
    const struct cb_text *t;
    const cb_pre_step *steps;
    uint32_t *words; /* scratch of bpe.c */
    struct cb_ids out;
};

/* Stage after stage; at most CB_PRE_STAGES deep. */
static int encode_stage(struct encoder *e, uint32_t stage, const char *s, size_t n)
{
    while (n > 0) {
        size_t k = e->steps[stage](s, n);
        int rc = e->steps[stage + 1] != NULL ? encode_stage(e, stage + 1, s, k)
                                             : cb_bpe_word(e->t, s, k, &e->out, e->words);
        if (rc != 0)
            return rc;
        s += k;
        n -= k;
    }
    return 0;
}

/* Text between special tokens: well-formed stretches, and stray bytes one by one. */
static int encode_plain(struct encoder *e, const char *s, size_t n)
{
    while (n > 0) {
        size_t ok = cb_utf8_check(s, n);
        if (encode_stage(e, 0, s, ok) != 0)
            return -1;
        if (ok < n) {
            uint32_t piece = cb_ld32(e->t->byte_ids + 4 * (size_t)(uint8_t)s[ok]);
            if (cb_bpe_emit(e->t, piece, &e->out) != 0)
                return -1;
            ok++;
        }
        s += ok;
        n -= ok;
    }
    return 0;
}

static int encode_marked(struct encoder *e, const char *text, size_t n, const uint32_t *mark)
{
    size_t i = 0;
    while (i < n) {
        size_t k = i;
        while (k < n && mark[k] == CB_MARK_TEXT)
            k++;
        if (encode_plain(e, text + i, k - i) != 0)
            return -1;
        for (; k < n && mark[k] != CB_MARK_TEXT; k++)
            if (mark[k] >= CB_MARK_ID && cb_bpe_emit(e->t, mark[k] - CB_MARK_ID, &e->out) != 0)
                return -1;
        i = k;
    }
    return 0;
}

int cb_text_encode(const struct cb_text *t, const char *text, size_t n, int special,
                   int strict_utf8, int32_t *ids, size_t cap, void *scratch, size_t scratch_bytes,
                   struct cb_err *err)
{
    if (n > MAX_TEXT || scratch_bytes < cb_text_scratch_bytes(n))
        return cb_fail(err, CB_EINVAL, "a text of %llu bytes needs more scratch than %llu bytes",
                       (unsigned long long)n, (unsigned long long)scratch_bytes);
    size_t ok = strict_utf8 ? cb_utf8_check(text, n) : n;
    if (ok < n)
        return cb_fail(err, CB_EUTF8, "the text is not UTF-8 at byte %llu (0x%02x)",
                       (unsigned long long)ok, (unsigned)(uint8_t)text[ok]);
    uint32_t *mark = scratch;
    struct encoder e = {t, cb_pre_steps(t->pre), mark + n, {ids, 0, cap}};
    int rc = cb_special_mark(t, text, n, special, mark) ? encode_marked(&e, text, n, mark)
                                                        : encode_plain(&e, text, n);
    if (rc != 0 || e.out.n > INT_MAX)
        return cb_fail(err, CB_ECONTEXT, "the text of %llu bytes has more than %llu tokens",
                       (unsigned long long)n, (unsigned long long)cap);
    return (int)e.out.n;
}

/* ---- decoding ------------------------------------------------------------- */

enum token_type { T_NORMAL = 1, T_UNKNOWN, T_CONTROL, T_USER, T_UNUSED, T_BYTE };

const char *cb_text_token(const struct cb_text *t, int32_t id, int special, size_t *len)
{
    uint32_t n = 0;
    const uint8_t *s = t->bytes;
    if (id >= 0 && (uint32_t)id < t->n_vocab) {
        uint8_t type = t->types[id];
        int shown = type == T_NORMAL || type == T_USER || type == T_BYTE ||
                    (special && (type == T_CONTROL || type == T_UNKNOWN));
        if (shown)
            s = cb_piece(t, (uint32_t)id, &n);
    }
    *len = n;
    return (const char *)s;
}

/* special.c — where the special tokens of a text lie.
 *
 * As in llama.cpp the longest token goes first, over the whole text, then the
 * next shorter one over what is left: a longer token wins over a shorter one
 * that begins before it. Of tokens equally long the leftmost wins.
 *
 * One walk notes the longest match at every byte; entry.parent leads to the
 * next shorter token that is a prefix of it. Then one pass per length that
 * occurs claims bytes. */
#include "text/text_internal.h"

struct entry {
    uint32_t id, parent, flags, len;
    const uint8_t *bytes;
};

static struct entry entry_at(const struct cb_text *t, uint32_t i)
{
    const uint8_t *p = t->special + 16 * (size_t)i;
    struct entry e = {cb_ld32(p), cb_ld32(p + 4), cb_ld32(p + 8), 0, NULL};
    e.bytes = cb_piece(t, e.id, &e.len);
    return e;
}

/* The last entry whose bytes are <= s[0..n), or CB_TEXT_NONE. */
static uint32_t floor_entry(const struct cb_text *t, const uint8_t *s, size_t n)
{
    uint32_t low = 0, high = t->n_special;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        struct entry e = entry_at(t, mid);
        size_t m = e.len < n ? e.len : n;
        int c = memcmp(e.bytes, s, m);
        if (c < 0 || (c == 0 && e.len <= n))
            low = mid + 1;
        else
            high = mid;
    }
    return low == 0 ? CB_TEXT_NONE : low - 1;
}

/* The longest token that s[0..n) begins with and that may be used. */
static uint32_t longest(const struct cb_text *t, const uint8_t *s, size_t n, int special)
{
    uint32_t i = floor_entry(t, s, n);
    while (i != CB_TEXT_NONE) {
        struct entry e = entry_at(t, i);
        if (e.len <= n && memcmp(e.bytes, s, e.len) == 0 &&
            (special || !(e.flags & CB_SPECIAL_CONTROL)))
            break;
        i = e.parent;
    }
    return i;
}

static int has(const uint32_t set[8], uint8_t c)
{
    return (int)(set[c >> 5] >> (c & 31) & 1u);
}

/* The next position >= i where a special token could begin, or n. */
static size_t next_candidate(const struct cb_text *t, const uint8_t *s, size_t i, size_t n)
{
    for (; i < n; i++)
        if (has(t->first, s[i]) && (i + 1 == n || has(t->second, s[i + 1])))
            break;
    return i;
}

static int is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r'); /* isspace() of the C locale */
}

/* A mark below CB_MARK_ID or from TAKEN on is settled; between lies a
 * candidate, entry index + CB_MARK_ID. Entry indexes are < 2^24. */
#define TAKEN 0x80000000u

static int is_free(uint32_t mark)
{
    return mark != CB_MARK_SKIP && mark < TAKEN;
}

static void claim(const struct entry *e, const char *text, size_t n, size_t at, uint32_t *mark)
{
    size_t end = at + e->len, from = at;
    if (e->flags & CB_SPECIAL_LSTRIP)
        while (from > 0 && is_free(mark[from - 1]) && is_space(text[from - 1]))
            from--;
    if (e->flags & CB_SPECIAL_RSTRIP)
        while (end < n && is_free(mark[end]) && is_space(text[end]))
            end++;
    for (size_t i = from; i < end; i++)
        mark[i] = CB_MARK_SKIP;
    mark[at] = TAKEN | e->id;
}

/* One pass: tokens of exactly len bytes, left to right. */
static void claim_length(const struct cb_text *t, const char *text, size_t n, uint32_t len,
                         int special, uint32_t *mark)
{
    for (size_t i = 0; i < n; i++) {
        if (mark[i] < CB_MARK_ID || mark[i] >= TAKEN)
            continue;
        struct entry e = entry_at(t, mark[i] - CB_MARK_ID);
        while (e.len > len && e.parent != CB_TEXT_NONE) { /* the longer ones had their turn */
            mark[i] = e.parent + CB_MARK_ID;
            e = entry_at(t, e.parent);
        }
        if (e.len != len || (!special && (e.flags & CB_SPECIAL_CONTROL)))
            continue;
        size_t k = 0;
        while (k < len && is_free(mark[i + k]))
            k++;
        if (k == len)
            claim(&e, text, n, i, mark);
    }
}

int cb_special_mark(const struct cb_text *t, const char *text, size_t n, int special,
                    uint32_t *mark)
{
    const uint8_t *s = (const uint8_t *)text;
    uint8_t lengths[CB_SPECIAL_BYTES / 8 + 1] = {0}; /* bit set: lengths that occur */
    int found = 0;
    for (size_t i = next_candidate(t, s, 0, n); i < n; i = next_candidate(t, s, i + 1, n)) {
        uint32_t k = longest(t, s + i, n - i, special);
        if (k == CB_TEXT_NONE)
            continue;
        if (!found)
            memset(mark, 0, n * sizeof *mark);
        found = 1;
        mark[i] = k + CB_MARK_ID;
        for (; k != CB_TEXT_NONE;) {
            struct entry e = entry_at(t, k);
            lengths[e.len >> 3] |= (uint8_t)(1u << (e.len & 7));
            k = e.parent;
        }
    }
    if (!found)
        return 0;
    for (uint32_t len = t->special_max; len >= 1; len--)
        if (lengths[len >> 3] >> (len & 7) & 1)
            claim_length(t, text, n, len, special, mark);
    for (size_t i = 0; i < n; i++)
        if (mark[i] >= TAKEN)
            mark[i] = (mark[i] & ~TAKEN) + CB_MARK_ID;
        else if (mark[i] >= CB_MARK_ID)
            mark[i] = CB_MARK_TEXT;
    return 1;
}

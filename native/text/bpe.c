/* bpe.c — byte-pair merges inside one word.
 *
 * The lowest rank merges first, ties by position. Short words are held as a
 * shrinking array, searched for its minimum. Long ones, which only hostile or
 * odd texts have, get a linked list under a tournament tree, so that a word of
 * n bytes costs O(n log n). No entry ever goes stale: a merge rewrites the
 * ranks of the at most three pairs it touches. */
#include "text/text_internal.h"

#define SHORT_WORD 48

struct merge {
    uint32_t rank, result; /* rank CB_TEXT_NONE: the two do not merge */
};

static struct merge pair_find(const struct cb_text *t, uint32_t left, uint32_t right)
{
    const struct merge none = {CB_TEXT_NONE, CB_TEXT_NONE};
    if (t->pair_home == 0)
        return none;
    uint32_t hash = cb_pair_hash(left, right);
    const uint8_t *slot = t->pairs + 16 * (size_t)cb_home(hash, t->pair_home);
    for (uint32_t k = 0; k <= t->pair_probe; k++, slot += 16) {
        uint32_t l = cb_ld32(slot), r = cb_ld32(slot + 4);
        if (l == left && r == right)
            return (struct merge){cb_ld32(slot + 8), cb_ld32(slot + 12)};
        /* slots ascend by hash: past ours means absent */
        if (l == CB_TEXT_NONE || cb_pair_hash(l, r) > hash)
            break;
    }
    return none;
}

static int push(struct cb_ids *out, uint32_t id)
{
    if (out->n == out->cap)
        return -1;
    out->v[out->n++] = (int32_t)id;
    return 0;
}

int cb_bpe_emit(const struct cb_text *t, uint32_t piece, struct cb_ids *out)
{
    if (piece < t->n_vocab)
        return push(out, piece);
    uint32_t len;
    const uint8_t *s = cb_piece(t, piece, &len);
    for (uint32_t i = 0; i < len; i++) {
        uint32_t id = cb_ld32(t->byte_ids + 4 * (size_t)s[i]);
        /* A vocabulary may lack bytes; like llama.cpp, such a byte leaves no token. */
        if (id < t->n_vocab && push(out, id) != 0)
            return -1;
    }
    return 0;
}

/* The token whose bytes are the word, or CB_TEXT_NONE. */
static uint32_t word_find(const struct cb_text *t, const uint8_t *word, size_t n)
{
    if (t->word_home == 0)
        return CB_TEXT_NONE;
    uint32_t hash = cb_word_hash(word, n);
    const uint8_t *slot = t->words + 4 * (size_t)cb_home(hash, t->word_home);
    for (uint32_t k = 0; k <= t->word_probe; k++, slot += 4) {
        uint32_t len, id = cb_ld32(slot);
        if (id == CB_TEXT_NONE)
            break;
        const uint8_t *s = cb_piece(t, id, &len);
        if (len == n && memcmp(s, word, n) == 0)
            return id;
    }
    return CB_TEXT_NONE;
}

static uint32_t byte_piece(const struct cb_text *t, uint8_t byte)
{
    return cb_ld32(t->byte_ids + 4 * (size_t)byte);
}

/* id[i] and m[i], the merge of id[i] with id[i + 1], stay dense. */
static int short_word(const struct cb_text *t, const uint8_t *word, size_t n, struct cb_ids *out)
{
    uint32_t id[SHORT_WORD];
    uint32_t rank[SHORT_WORD], result[SHORT_WORD];
    for (size_t i = 0; i < n; i++)
        id[i] = byte_piece(t, word[i]);
    for (size_t i = 0; i + 1 < n; i++) {
        struct merge m = pair_find(t, id[i], id[i + 1]);
        rank[i] = m.rank;
        result[i] = m.result;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best])
                best = i;
        if (rank[best] == CB_TEXT_NONE)
            break;
        id[best] = result[best];
        n--;
        memmove(id + best + 1, id + best + 2, (n - best - 1) * sizeof *id);
        if (best + 1 < n) {
            memmove(rank + best, rank + best + 1, (n - best - 1) * sizeof *rank);
            memmove(result + best, result + best + 1, (n - best - 1) * sizeof *result);
            struct merge m = pair_find(t, id[best], id[best + 1]);
            rank[best] = m.rank;
            result[best] = m.result;
        }
        if (best > 0) {
            struct merge m = pair_find(t, id[best - 1], id[best]);
            rank[best - 1] = m.rank;
            result[best - 1] = m.result;
        }
    }
    for (size_t i = 0; i < n; i++)
        if (cb_bpe_emit(t, id[i], out) != 0)
            return -1;
    return 0;
}

/* A word of n symbols; position i is the symbol that begins at byte i. */
struct list {
    uint32_t *id;   /* [n] piece */
    uint32_t *prev; /* [n] position before, CB_TEXT_NONE at the start */
    uint32_t *next; /* [n] position after, n at the end */
    uint32_t *rank; /* [n] of the pair (i, next[i]); CB_TEXT_NONE = none or not a symbol */
    uint32_t *tree; /* [n] node k's winner; its children are 2k and 2k+1, leaf i is node n+i */
    uint32_t n;
};

static uint32_t winner(const struct list *w, uint32_t node)
{
    return node >= w->n ? node - w->n : w->tree[node];
}

static uint32_t better(const struct list *w, uint32_t a, uint32_t b)
{
    if (w->rank[a] != w->rank[b])
        return w->rank[a] < w->rank[b] ? a : b;
    return a < b ? a : b;
}

/* Sets a rank and plays its games again; above a node whose winner stays the
 * same and is another position nothing can change. */
static void set_rank(struct list *w, uint32_t pos, uint32_t rank)
{
    if (w->rank[pos] == rank)
        return;
    w->rank[pos] = rank;
    for (uint32_t node = (w->n + pos) / 2; node >= 1; node /= 2) {
        uint32_t win = better(w, winner(w, 2 * node), winner(w, 2 * node + 1));
        if (win == w->tree[node] && win != pos)
            return;
        w->tree[node] = win;
    }
}

static uint32_t rank_at(const struct cb_text *t, const struct list *w, uint32_t pos)
{
    if (w->next[pos] >= w->n)
        return CB_TEXT_NONE;
    return pair_find(t, w->id[pos], w->id[w->next[pos]]).rank;
}

static int long_word(const struct cb_text *t, const uint8_t *word, uint32_t n, struct cb_ids *out,
                     uint32_t *scratch)
{
    struct list w = {scratch, scratch + n, scratch + 2 * (size_t)n, scratch + 3 * (size_t)n,
                     scratch + 4 * (size_t)n, n};
    for (uint32_t i = 0; i < n; i++) {
        w.id[i] = byte_piece(t, word[i]);
        w.prev[i] = i == 0 ? CB_TEXT_NONE : i - 1;
        w.next[i] = i + 1;
    }
    for (uint32_t i = 0; i < n; i++)
        w.rank[i] = rank_at(t, &w, i);
    for (uint32_t node = n - 1; node >= 1; node--)
        w.tree[node] = better(&w, winner(&w, 2 * node), winner(&w, 2 * node + 1));
    for (;;) {
        uint32_t a = w.tree[1];
        if (w.rank[a] == CB_TEXT_NONE)
            break;
        uint32_t b = w.next[a], after = w.next[b], before = w.prev[a];
        w.id[a] = pair_find(t, w.id[a], w.id[b]).result;
        w.next[a] = after;
        if (after < n)
            w.prev[after] = a;
        set_rank(&w, b, CB_TEXT_NONE);
        set_rank(&w, a, rank_at(t, &w, a));
        if (before != CB_TEXT_NONE)
            set_rank(&w, before, rank_at(t, &w, before));
    }
    for (uint32_t i = 0; i < n; i = w.next[i])
        if (cb_bpe_emit(t, w.id[i], out) != 0)
            return -1;
    return 0;
}

int cb_bpe_word(const struct cb_text *t, const char *word, size_t n, struct cb_ids *out,
                uint32_t *scratch)
{
    const uint8_t *s = (const uint8_t *)word;
    if (n == 1)
        return cb_bpe_emit(t, byte_piece(t, s[0]), out);
    if (t->flags & CB_TEXT_IGNORE_MERGES) {
        uint32_t id = word_find(t, s, n);
        if (id != CB_TEXT_NONE)
            return push(out, id);
    }
    if (n <= SHORT_WORD)
        return short_word(t, s, n, out);
    return long_word(t, s, (uint32_t)n, out, scratch); /* n < 2^31: cb_text_encode */
}

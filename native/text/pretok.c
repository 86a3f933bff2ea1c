/* pretok.c — cuts a text into words, the way each model's regular expression does.
 *
 * A pre-tokenizer is a cascade: every stage cuts the pieces of the one before.
 * A stage sees only its piece, so "end of text" below is the end of the piece.
 * The expressions are llama.cpp's (src/llama-vocab.cpp); each is matched by
 * hand, in one pass, without backtracking. */
#include "text/text_internal.h"
#include "text/unicode.h"

#define MASK(c) (1u << (c))
#define M_L MASK(CB_UC_L)
#define M_N MASK(CB_UC_N)
#define M_M MASK(CB_UC_M)
#define M_P MASK(CB_UC_P)
#define M_SPACE MASK(CB_UC_SPACE)

/* The code point at s[i] of well-formed UTF-8; *len = its bytes. */
static inline uint32_t point(const char *s, size_t i, size_t *len)
{
    const unsigned char *p = (const unsigned char *)s + i;
    uint32_t c = p[0];
    if (c < 0x80) {
        *len = 1;
        return c;
    }
    if (c < 0xE0) {
        *len = 2;
        return (c & 31) << 6 | (p[1] & 63u);
    }
    if (c < 0xF0) {
        *len = 3;
        return (c & 15) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u);
    }
    *len = 4;
    return (c & 7) << 18 | (p[1] & 63u) << 12 | (p[2] & 63u) << 6 | (p[3] & 63u);
}

/* Bit of the class at s[i], 0 at the end. */
static inline unsigned mask_at(const char *s, size_t i, size_t n, size_t *len)
{
    if (i >= n) {
        *len = 0;
        return 0;
    }
    return MASK(cb_uc_class(point(s, i, len)));
}

/* End of the run from i on of code points whose class is in `set`. */
static size_t run(const char *s, size_t i, size_t n, unsigned set)
{
    size_t len;
    while (mask_at(s, i, n, &len) & set)
        i += len;
    return i;
}

static int newline(char c)
{
    return c == '\r' || c == '\n';
}

/* 's 't 're 've 'm 'll 'd at s[i]: its length or 0. */
static size_t contraction(const char *s, size_t i, size_t n, int any_case)
{
    char a, b;
    if (i + 1 >= n || s[i] != '\'')
        return 0;
    a = s[i + 1];
    b = i + 2 < n ? s[i + 2] : '\0';
    if (any_case) { /* ASCII letters; the others below stay what they are not */
        a = (char)(a >= 'A' && a <= 'Z' ? a + 32 : a);
        b = (char)(b >= 'A' && b <= 'Z' ? b + 32 : b);
    }
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l'))
        return 3;
    return 0;
}

/* \s+(?!\S)|\s+ at s[0]: all of the white space, less its last one when text follows. */
static size_t spaces(const char *s, size_t n)
{
    size_t i = 0, last = 0, len;
    while (mask_at(s, i, n, &len) & M_SPACE) {
        last = i;
        i += len;
    }
    return i < n && last > 0 ? last : i;
}

/* \s*[\r\n]+|\s+(?!\S)|\s+ */
static size_t lines_or_spaces(const char *s, size_t n)
{
    size_t end = 0;
    for (size_t i = 0, len; mask_at(s, i, n, &len) & M_SPACE; i += len)
        if (newline(s[i]))
            end = i + 1;
    return end > 0 ? end : spaces(s, n);
}

/* A word of no known class still has to move on: one code point. */
static size_t at_least_one(const char *s, size_t k)
{
    size_t len;
    if (k > 0)
        return k;
    (void)point(s, 0, &len);
    return len;
}

/* 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static size_t gpt2(const char *s, size_t n)
{
    size_t len, i = s[0] == ' ', k = contraction(s, 0, n, 0);
    if (k > 0)
        return k;
    unsigned m = mask_at(s, i, n, &len);
    if (m & (M_L | M_N))
        return run(s, i, n, m);
    if (m != 0 && !(m & M_SPACE))
        return run(s, i, n, ~(M_L | M_N | M_SPACE));
    return at_least_one(s, spaces(s, n));
}

/*  ?[^\s\p{L}\p{N}]+[\r\n]* where `not` = the classes in the brackets; 0 = no match */
static size_t punctuation(const char *s, size_t n, unsigned not, int slash)
{
    size_t len, i = s[0] == ' ';
    unsigned m = mask_at(s, i, n, &len);
    if (m == 0 || (m & not))
        return 0;
    i = run(s, i, n, ~not);
    while (i < n && (newline(s[i]) || (slash && s[i] == '/')))
        i++;
    return i;
}

static size_t digits(const char *s, size_t n, int most)
{
    size_t i = 0, len;
    for (int k = 0; k < most && (mask_at(s, i, n, &len) & M_N); k++)
        i += len;
    return i;
}

/* (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[letters]+|\p{N}{1,most}|
 *  ?[^\s\p{N}letters]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ */
static size_t llama3_like(const char *s, size_t n, unsigned letters, int most)
{
    size_t len, next_len, k = contraction(s, 0, n, 1);
    if (k > 0)
        return k;
    unsigned m = mask_at(s, 0, n, &len);
    if (m & letters)
        return run(s, 0, n, letters);
    if (m & M_N)
        return digits(s, n, most);
    if (!newline(s[0]) && (mask_at(s, len, n, &next_len) & letters))
        return run(s, len, n, letters);
    k = punctuation(s, n, M_SPACE | M_N | letters, 0);
    return k > 0 ? k : at_least_one(s, lines_or_spaces(s, n));
}

static size_t llama3(const char *s, size_t n)
{
    return llama3_like(s, n, M_L, 3);
}

static size_t qwen2(const char *s, size_t n)
{
    return llama3_like(s, n, M_L, 1);
}

static size_t qwen35(const char *s, size_t n)
{
    return llama3_like(s, n, M_L | M_M, 1);
}

/* A*B+|A+B* at s[i], a letter; A = letters but a-z, B = letters but A-Z. Greedy
 * A* may eat what B+ needs: then B+ is the last letter that is both. */
static size_t cased_word(const char *s, size_t i, size_t n)
{
    size_t len, both = 0;
    while ((mask_at(s, i, n, &len) & M_L) && !(s[i] >= 'a' && s[i] <= 'z')) {
        i += len;
        if (len > 1)
            both = i;
    }
    size_t end = i;
    while ((mask_at(s, end, n, &len) & M_L) && !(s[end] >= 'A' && s[end] <= 'Z'))
        end += len;
    return end > i || both == 0 ? end : both;
}

/* [^\r\n\p{L}\p{N}]?(A*B+|A+B*)(contraction)?|\p{N}{1,most}| ?[^\s\p{L}\p{N}]+[\r\n/]*|… */
static size_t cased(const char *s, size_t n, int contractions, int most)
{
    size_t len, next_len, k;
    unsigned m = mask_at(s, 0, n, &len);
    size_t from = m & M_L ? 0 : len;
    if ((m & M_L) ||
        (!(m & M_N) && !newline(s[0]) && (mask_at(s, len, n, &next_len) & M_L))) {
        k = cased_word(s, from, n);
        return k + (contractions ? contraction(s, k, n, 1) : 0);
    }
    if (m & M_N)
        return digits(s, n, most);
    k = punctuation(s, n, M_SPACE | M_L | M_N, 1);
    return k > 0 ? k : at_least_one(s, lines_or_spaces(s, n));
}

static size_t gpt4o(const char *s, size_t n)
{
    return cased(s, n, 1, 3);
}

static size_t tekken(const char *s, size_t n)
{
    return cased(s, n, 0, 1);
}

/* ---- stages that find something and leave the gaps between ---------------- */

/* \p{N} */
static size_t each_number(const char *s, size_t n)
{
    size_t k = digits(s, n, 1);
    return k > 0 ? k : run(s, 0, n, ~M_N);
}

/* \p{N}+ */
static size_t numbers(const char *s, size_t n)
{
    size_t k = run(s, 0, n, M_N);
    return k > 0 ? k : run(s, 0, n, ~M_N);
}

/* [0-9][0-9][0-9] */
static size_t three_digits(const char *s, size_t n)
{
    size_t row = 0; /* ASCII digits just before i */
    for (size_t i = 0; i < n; i++) {
        row = s[i] >= '0' && s[i] <= '9' ? row + 1 : 0;
        if (row == 3)
            return i == 2 ? 3 : i - 2;
    }
    return n;
}

static int mark_at(const char *s, size_t i, size_t n, const char *more, size_t *len)
{
    unsigned m = mask_at(s, i, n, len);
    return (m & M_P) || (m != 0 && s[i] != '\0' && strchr(more, s[i]) != NULL);
}

/* [\p{P}more]+ */
static size_t marks(const char *s, size_t n, const char *more)
{
    size_t i = 0, len;
    int inside = mark_at(s, 0, n, more, &len);
    while (i < n && mark_at(s, i, n, more, &len) == inside)
        i += len;
    return i;
}

static size_t marks_default(const char *s, size_t n)
{
    return marks(s, n, "$+<=>^~|");
}

static size_t marks_falcon(const char *s, size_t n)
{
    return marks(s, n, "$+<=>^~|`");
}

/* The numbers are part of the file format (docs/tokenizer.md). */
static const cb_pre_step steps[][CB_PRE_STAGES + 1] = {
    {marks_default, gpt2, numbers, three_digits, NULL}, /* 0 default */
    {gpt2, NULL},                                       /* 1 gpt-2 */
    {each_number, gpt2, NULL},                          /* 2 starcoder, refact, smollm */
    {llama3, NULL},                                     /* 3 llama-bpe */
    {qwen2, NULL},                                      /* 4 qwen2 */
    {qwen35, NULL},                                     /* 5 qwen35 */
    {gpt4o, NULL},                                      /* 6 gpt-4o */
    {tekken, NULL},                                     /* 7 tekken */
    {marks_falcon, gpt2, three_digits, NULL},           /* 8 falcon */
};

const cb_pre_step *cb_pre_steps(uint32_t pre)
{
    return pre < sizeof steps / sizeof steps[0] ? steps[pre] : NULL;
}

/* args.c — see args.h. */
#include "args.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WORD_MAX 32
#define ARGS_MAX 64 /* names that are looked at for a suggestion */

enum { FROM_WORD = 1, FROM_LINE = 2 }; /* arg.seen */

/* Levenshtein distance of two words, cut at WORD_MAX letters. */
static size_t edit_distance(const char *a, const char *b)
{
    size_t row[WORD_MAX + 1];
    size_t na = strlen(a), nb = strlen(b);
    if (na > WORD_MAX || nb > WORD_MAX)
        return WORD_MAX;
    for (size_t j = 0; j <= nb; j++)
        row[j] = j;
    for (size_t i = 1; i <= na; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[nb];
}

const char *args_nearest(const char *word, const char *const *candidates, size_t n)
{
    const char *best = NULL;
    size_t least = 4; /* further away it is a guess, not a help */
    for (size_t i = 0; i < n; i++) {
        size_t d = edit_distance(word, candidates[i]);
        size_t len = strlen(candidates[i]);
        if (len > 4 && strlen(word) > 4 && strncmp(word, candidates[i], strlen(word)) == 0)
            d = 1; /* a cut-off name: --temp for --temperature */
        if (d < least && d * 2 < len + 2) {
            least = d;
            best = candidates[i];
        }
    }
    return best;
}

int args_size(const char *text, uint64_t *bytes)
{
    static const struct { const char *name; uint64_t unit; } units[] = {
        {"", 1}, {"B", 1}, {"K", 1u << 10}, {"KiB", 1u << 10}, {"M", 1u << 20},
        {"MiB", 1u << 20}, {"G", 1u << 30}, {"GiB", 1u << 30},
    };
    if (*text < '0' || *text > '9')
        return CB_EINVAL;
    size_t digits = strspn(text, "0123456789");
    size_t fraction = text[digits] == '.' ? strspn(text + digits + 1, "0123456789") : 0;
    if (text[digits] == '.' && fraction == 0)
        return CB_EINVAL;
    const char *suffix = text + digits + (fraction ? fraction + 1 : 0);
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (strcmp(suffix, units[i].name) != 0)
            continue;
        if (fraction) {
            double v = strtod(text, NULL) * (double)units[i].unit;
            if (units[i].unit == 1 || !(v < 9.2e18))
                return CB_EINVAL;
            *bytes = (uint64_t)v;
            return CB_OK;
        }
        errno = 0;
        unsigned long long v = strtoull(text, NULL, 10);
        if (errno != 0 || v > UINT64_MAX / units[i].unit)
            return CB_EINVAL;
        *bytes = (uint64_t)v * units[i].unit;
        return CB_OK;
    }
    return CB_EINVAL;
}

static int parse_u64(const char *text, uint64_t *out)
{
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || text[digits] != '\0')
        return CB_EINVAL;
    errno = 0;
    unsigned long long v = strtoull(text, NULL, 10);
    *out = (uint64_t)v;
    return errno == 0 ? CB_OK : CB_EINVAL;
}

static int set_u32(const struct arg *a, const char *value, struct cb_err *err)
{
    uint64_t v = 0;
    double lo = a->lo, hi = a->hi > 0 ? a->hi : (double)UINT32_MAX;
    if (parse_u64(value, &v) < 0 || (double)v < lo || (double)v > hi)
        return cb_fail(err, CB_EINVAL, "%s must be a whole number from %.0f to %.0f, not \"%.40s\"",
                       a->name, lo, hi, value);
    *(uint32_t *)a->out = (uint32_t)v;
    return CB_OK;
}

static int set_float(const struct arg *a, const char *value, struct cb_err *err)
{
    char *end = NULL;
    double v = strtod(value, &end);
    /* strtod also takes hex, "inf" and blanks: only plain decimals pass here. */
    int plain = value[0] != '\0' && strspn(value, "+-.0123456789eE") == strlen(value);
    if (!plain || end == value || *end != '\0' || !isfinite(v) || v < a->lo || v > a->hi)
        return cb_fail(err, CB_EINVAL, "%s must be a number from %g to %g, not \"%.40s\"", a->name,
                       a->lo, a->hi, value);
    *(float *)a->out = (float)v;
    return CB_OK;
}

static int set_choice(const struct arg *a, const char *value, struct cb_err *err)
{
    size_t len = strlen(value);
    uint32_t index = 0;
    for (const char *word = a->meta; word != NULL; index++) {
        const char *bar = strchr(word, '|');
        size_t n = bar ? (size_t)(bar - word) : strlen(word);
        if (n == len && memcmp(word, value, n) == 0) {
            *(uint32_t *)a->out = index;
            return CB_OK;
        }
        word = bar ? bar + 1 : NULL;
    }
    return cb_fail(err, CB_EINVAL, "%s must be one of %s, not \"%.40s\"", a->name, a->meta, value);
}

static int set_value(struct arg *a, const char *value, struct cb_err *err)
{
    switch (a->kind) {
    case ARG_TEXT:
        *(const char **)a->out = value;
        return CB_OK;
    case ARG_LIST: {
        struct arg_list *list = a->out;
        if (list->n == list->max)
            return cb_fail(err, CB_EINVAL, "%s may be given at most %u times", a->name, list->max);
        list->item[list->n++] = value;
        return CB_OK;
    }
    case ARG_U32:
        return set_u32(a, value, err);
    case ARG_U64:
        if (parse_u64(value, a->out) < 0)
            return cb_fail(err, CB_EINVAL, "%s must be a whole number below 2^64, not \"%.40s\"",
                           a->name, value);
        return CB_OK;
    case ARG_SIZE:
        if (args_size(value, a->out) < 0)
            return cb_fail(err, CB_EINVAL,
                           "%s must be a size such as 512MiB or 2GiB (KiB, MiB, GiB or plain "
                           "bytes), not \"%.40s\"",
                           a->name, value);
        return CB_OK;
    case ARG_FLOAT:
        return set_float(a, value, err);
    case ARG_CHOICE:
        return set_choice(a, value, err);
    case ARG_FLAG:
        break;
    }
    return cb_fail(err, CB_EINVAL, "%s takes no value", a->name);
}

static int unknown(const struct arg *args, size_t n_args, const char *word, struct cb_err *err)
{
    const char *names[ARGS_MAX];
    char bare[WORD_MAX + 1];
    size_t n = 0, len = strcspn(word, "=");
    for (size_t i = 0; i < n_args && n < ARGS_MAX; i++)
        names[n++] = args[i].name;
    const char *near = NULL;
    if (len <= WORD_MAX) {
        memcpy(bare, word, len);
        bare[len] = '\0';
        near = args_nearest(bare, names, n);
    }
    if (near)
        return cb_fail(err, CB_EINVAL, "unknown option %.60s; did you mean %s?", word, near);
    return cb_fail(err, CB_EINVAL, "unknown option %.60s", word);
}

static struct arg *find(struct arg *args, size_t n_args, const char *word, size_t len)
{
    for (size_t i = 0; i < n_args; i++) {
        const char *const names[2] = {args[i].name, args[i].alias};
        for (int k = 0; k < 2; k++)
            if (names[k] && strlen(names[k]) == len && memcmp(names[k], word, len) == 0)
                return &args[i];
    }
    return NULL;
}

int args_parse(struct arg *args, size_t n_args, int argc, char **argv, struct cb_err *err)
{
    for (int i = 0; i < argc; i++) {
        const char *word = argv[i];
        if (word[0] != '-' || word[1] == '\0')
            return cb_fail(err, CB_EINVAL, "unexpected word \"%.60s\"; every value needs its option",
                           word);
        const char *equals = strncmp(word, "--", 2) == 0 ? strchr(word, '=') : NULL;
        size_t len = equals ? (size_t)(equals - word) : strlen(word);
        struct arg *a = find(args, n_args, word, len);
        if (a == NULL)
            return unknown(args, n_args, word, err);
        if (a->seen && a->kind != ARG_LIST)
            return cb_fail(err, CB_EINVAL, "%s is given twice", a->name);
        a->seen = FROM_WORD;
        if (a->kind == ARG_FLAG && equals == NULL) {
            *(int *)a->out = a->flag_value;
            continue;
        }
        const char *value = equals ? equals + 1 : NULL;
        if (value == NULL && a->kind != ARG_FLAG) {
            if (i + 1 == argc)
                return cb_fail(err, CB_EINVAL, "%s needs a value (%s)", a->name, a->meta);
            value = argv[++i];
            /* "--prompt --temp 1" is a forgotten value; write --prompt=--temp to mean it. */
            if (strncmp(value, "--", 2) == 0 && find(args, n_args, value, strcspn(value, "=")))
                return cb_fail(err, CB_EINVAL, "%s needs a value (%s), but %.40s follows", a->name,
                               a->meta, value);
        }
        int rc = set_value(a, value, err);
        if (rc < 0)
            return rc;
    }
    return CB_OK;
}

/* ---- the same from a file ------------------------------------------------ */

/* Checks the value of a line that a word of the command line overrules. */
static int check_value(const struct arg *a, const char *value, struct cb_err *err)
{
    union {
        const char *text;
        uint32_t u32;
        uint64_t u64;
        float f;
        struct arg_list list;
    } sink;
    struct arg copy = *a;
    memset(&sink, 0, sizeof sink);
    if (a->kind == ARG_LIST)
        sink.list.max = 1;
    copy.out = &sink;
    return set_value(&copy, value, err);
}

/* line: "name value", its ends trimmed, not empty. */
static int take_line(struct arg *args, size_t n_args, char *line, struct cb_err *err)
{
    char name[WORD_MAX + 3] = "--";
    size_t len = strcspn(line, " \t");
    char *value = line + len;
    if (line[0] == '-')
        return cb_fail(err, CB_EINVAL, "names stand here without dashes, not \"%.40s\"", line);
    if (len > WORD_MAX)
        return cb_fail(err, CB_EINVAL, "unknown option %.60s", line);
    memcpy(name + 2, line, len);
    value += strspn(value, " \t");
    struct arg *a = find(args, n_args, name, len + 2);
    if (a == NULL)
        return unknown(args, n_args, name, err);
    if (a->seen == FROM_LINE && a->kind != ARG_LIST)
        return cb_fail(err, CB_EINVAL, "%s is given twice", a->name);
    if (a->kind != ARG_FLAG && *value == '\0')
        return cb_fail(err, CB_EINVAL, "%s needs a value (%s)", a->name, a->meta);
    if (a->kind == ARG_FLAG && *value != '\0')
        return cb_fail(err, CB_EINVAL, "%s takes no value", a->name);
    if (a->seen == FROM_WORD)
        return a->kind == ARG_FLAG ? CB_OK : check_value(a, value, err);
    a->seen = FROM_LINE;
    if (a->kind == ARG_FLAG) {
        *(int *)a->out = a->flag_value;
        return CB_OK;
    }
    return set_value(a, value, err);
}

int args_lines(struct arg *args, size_t n_args, char *text, size_t n, const char *file,
               struct cb_err *err)
{
    struct cb_err why = {0, ""};
    size_t at = 0;
    text[n] = '\0';
    for (unsigned number = 1; at < n; number++) {
        char *line = text + at;
        char *end = memchr(line, '\n', n - at);
        size_t len = end != NULL ? (size_t)(end - line) : n - at;
        at += len + 1;
        if (memchr(line, '\0', len) != NULL)
            return cb_fail(err, CB_EINVAL, "%.100s:%u: a zero byte", file, number);
        line[len] = '\0';
        line += strspn(line, " \t\r");
        for (len = strlen(line); len > 0 && strchr(" \t\r", line[len - 1]) != NULL;)
            line[--len] = '\0';
        if (line[0] == '\0' || line[0] == '#')
            continue;
        if (take_line(args, n_args, line, &why) < 0)
            return cb_fail(err, CB_EINVAL, "%.100s:%u: %s", file, number, why.msg);
    }
    return CB_OK;
}

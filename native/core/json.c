/* json.c — see json.h. Recursive descent, depth-limited. */
#include "json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct parser {
    const char *s;
    size_t n, i;
    struct cb_json *j;
    uint32_t cap;
    struct cb_err *err;
};

static int bad(struct parser *p, const char *what)
{
    cb_fail(p->err, CB_EFORMAT, "JSON: %s at byte %zu", what, p->i);
    return CB_EFORMAT;
}

static void skip_space(struct parser *p)
{
    while (p->i < p->n && (p->s[p->i] == ' ' || p->s[p->i] == '\t' || p->s[p->i] == '\n' ||
                           p->s[p->i] == '\r'))
        p->i++;
}

static int new_tok(struct parser *p, enum cb_json_kind kind, uint32_t *t)
{
    if (p->j->n_tok >= p->cap)
        return bad(p, "too many values");
    *t = p->j->n_tok++;
    p->j->tok[*t] = (struct cb_json_tok){(uint32_t)kind, (uint32_t)p->i, 0, 0, 0};
    return 0;
}

static int is_hex(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

static int parse_string(struct parser *p)
{
    uint32_t t = 0;
    p->i++; /* the quote */
    if (new_tok(p, CB_JSON_STRING, &t) != 0)
        return CB_EFORMAT;
    while (p->i < p->n && p->s[p->i] != '"') {
        unsigned char c = (unsigned char)p->s[p->i];
        if (c < 0x20)
            return bad(p, "control character in a string");
        if (c == '\\') {
            p->i++;
            char e = p->i < p->n ? p->s[p->i] : '\0';
            if (e == 'u') {
                for (int k = 1; k <= 4; k++)
                    if (p->i + (size_t)k >= p->n || !is_hex(p->s[p->i + (size_t)k]))
                        return bad(p, "bad \\u escape");
                p->i += 4;
            } else if (e == '\0' || strchr("\"\\/bfnrt", e) == NULL) {
                return bad(p, "bad escape");
            }
        }
        p->i++;
    }
    if (p->i >= p->n)
        return bad(p, "string without end");
    p->j->tok[t].len = (uint32_t)p->i - p->j->tok[t].at;
    p->j->tok[t].next = p->j->n_tok;
    p->i++;
    return 0;
}

static size_t digits(struct parser *p)
{
    size_t from = p->i;
    while (p->i < p->n && p->s[p->i] >= '0' && p->s[p->i] <= '9')
        p->i++;
    return p->i - from;
}

static int parse_number(struct parser *p)
{
    uint32_t t = 0;
    if (new_tok(p, CB_JSON_NUMBER, &t) != 0)
        return CB_EFORMAT;
    if (p->s[p->i] == '-')
        p->i++;
    size_t first = p->i, n = digits(p);
    if (n == 0 || (n > 1 && p->s[first] == '0'))
        return bad(p, "bad number");
    if (p->i < p->n && p->s[p->i] == '.') {
        p->i++;
        if (digits(p) == 0)
            return bad(p, "bad number");
    }
    if (p->i < p->n && (p->s[p->i] == 'e' || p->s[p->i] == 'E')) {
        p->i++;
        if (p->i < p->n && (p->s[p->i] == '+' || p->s[p->i] == '-'))
            p->i++;
        if (digits(p) == 0)
            return bad(p, "bad number");
    }
    p->j->tok[t].len = (uint32_t)p->i - p->j->tok[t].at;
    p->j->tok[t].next = p->j->n_tok;
    return 0;
}

static int parse_word(struct parser *p, const char *word, enum cb_json_kind kind)
{
    uint32_t t = 0;
    size_t len = strlen(word);
    if (p->n - p->i < len || memcmp(p->s + p->i, word, len) != 0)
        return bad(p, "unexpected character");
    if (new_tok(p, kind, &t) != 0)
        return CB_EFORMAT;
    p->i += len;
    p->j->tok[t].len = (uint32_t)len;
    p->j->tok[t].next = p->j->n_tok;
    return 0;
}

static int parse_value(struct parser *p, unsigned depth);

static int check_unique(struct parser *p, uint32_t obj, uint32_t key)
{
    const struct cb_json_tok *tok = p->j->tok;
    for (uint32_t k = obj + 1; k < key; k = tok[k + 1].next)
        if (tok[k].len == tok[key].len &&
            memcmp(p->s + tok[k].at, p->s + tok[key].at, tok[k].len) == 0)
            return bad(p, "duplicate key");
    return 0;
}

static int parse_container(struct parser *p, unsigned depth, int object)
{
    uint32_t t = 0, key;
    char end = object ? '}' : ']';
    int rc;
    if (depth >= CB_JSON_DEPTH)
        return bad(p, "nested too deeply");
    if ((rc = new_tok(p, object ? CB_JSON_OBJECT : CB_JSON_ARRAY, &t)) != 0)
        return rc;
    p->i++;
    skip_space(p);
    if (p->i < p->n && p->s[p->i] == end)
        goto done;
    for (;;) {
        skip_space(p);
        if (object) {
            if (p->i >= p->n || p->s[p->i] != '"')
                return bad(p, "expected a key");
            key = p->j->n_tok;
            if ((rc = parse_string(p)) != 0)
                return rc;
            if (p->j->tok[t].size >= CB_JSON_MEMBERS)
                return bad(p, "too many members in one object");
            if ((rc = check_unique(p, t, key)) != 0)
                return rc;
            skip_space(p);
            if (p->i >= p->n || p->s[p->i] != ':')
                return bad(p, "expected ':'");
            p->i++;
            skip_space(p);
        }
        if ((rc = parse_value(p, depth + 1)) != 0)
            return rc;
        p->j->tok[t].size++;
        skip_space(p);
        if (p->i < p->n && p->s[p->i] == ',') {
            p->i++;
            continue;
        }
        if (p->i < p->n && p->s[p->i] == end)
            break;
        return bad(p, object ? "expected ',' or '}'" : "expected ',' or ']'");
    }
done:
    p->i++;
    p->j->tok[t].len = (uint32_t)p->i - p->j->tok[t].at;
    p->j->tok[t].next = p->j->n_tok;
    return 0;
}

static int parse_value(struct parser *p, unsigned depth)
{
    if (p->i >= p->n)
        return bad(p, "unexpected end");
    switch (p->s[p->i]) {
    case '{':
        return parse_container(p, depth, 1);
    case '[':
        return parse_container(p, depth, 0);
    case '"':
        return parse_string(p);
    case 't':
        return parse_word(p, "true", CB_JSON_TRUE);
    case 'f':
        return parse_word(p, "false", CB_JSON_FALSE);
    case 'n':
        return parse_word(p, "null", CB_JSON_NULL);
    default:
        if (p->s[p->i] == '-' || (p->s[p->i] >= '0' && p->s[p->i] <= '9'))
            return parse_number(p);
        return bad(p, "unexpected character");
    }
}

int cb_json_parse(struct cb_json *j, const char *text, size_t n, struct cb_json_tok *tok,
                  uint32_t cap, struct cb_err *err)
{
    struct parser p = {text, n, 0, j, cap, err};
    *j = (struct cb_json){text, tok, 0};
    if (n >= (UINT32_MAX >> 1))
        return bad(&p, "text too long");
    skip_space(&p);
    int rc = parse_value(&p, 0);
    if (rc != 0)
        return rc;
    skip_space(&p);
    return p.i == p.n ? 0 : bad(&p, "something after the value");
}

uint32_t cb_json_get(const struct cb_json *j, uint32_t obj, const char *key)
{
    size_t len = strlen(key);
    if (!cb_json_is(j, obj, CB_JSON_OBJECT))
        return CB_JSON_NONE;
    uint32_t k = obj + 1;
    for (uint32_t i = 0; i < j->tok[obj].size; i++) {
        if (j->tok[k].len == len && memcmp(j->text + j->tok[k].at, key, len) == 0)
            return k + 1;
        k = j->tok[k + 1].next;
    }
    return CB_JSON_NONE;
}

int cb_json_is(const struct cb_json *j, uint32_t t, enum cb_json_kind kind)
{
    return t < j->n_tok && j->tok[t].kind == (uint32_t)kind;
}

int cb_json_f64(const struct cb_json *j, uint32_t t, const char *what, double *out,
                struct cb_err *err)
{
    char buf[64];
    if (!cb_json_is(j, t, CB_JSON_NUMBER))
        return cb_fail(err, CB_EFORMAT, "%s is missing or not a number", what);
    if (j->tok[t].len >= sizeof buf)
        return cb_fail(err, CB_EFORMAT, "%s has %u characters, at most %zu are read", what,
                       j->tok[t].len, sizeof buf - 1);
    memcpy(buf, j->text + j->tok[t].at, j->tok[t].len);
    buf[j->tok[t].len] = '\0';
    *out = strtod(buf, NULL);
    if (!isfinite(*out))
        return cb_fail(err, CB_EFORMAT, "%s is out of range", what);
    return 0;
}

int cb_json_u64(const struct cb_json *j, uint32_t t, uint64_t max, const char *what,
                uint64_t *out, struct cb_err *err)
{
    uint64_t v = 0;
    if (!cb_json_is(j, t, CB_JSON_NUMBER))
        return cb_fail(err, CB_EFORMAT, "%s is missing or not a number", what);
    for (uint32_t i = 0; i < j->tok[t].len; i++) {
        char c = j->text[j->tok[t].at + i];
        uint64_t digit = (uint64_t)(c - '0');
        if (c < '0' || c > '9')
            return cb_fail(err, CB_EFORMAT, "%s is not a whole number%s", what,
                           c == '-' ? " from 0 up" : " in plain digits");
        if (v > (UINT64_MAX - digit) / 10)
            return cb_fail(err, CB_EFORMAT, "%s is out of range", what);
        v = v * 10 + digit;
    }
    if (v > max)
        return cb_fail(err, CB_EFORMAT, "%s is %llu, more than %llu", what,
                       (unsigned long long)v, (unsigned long long)max);
    *out = v;
    return 0;
}

int cb_json_bool(const struct cb_json *j, uint32_t t, const char *what, int *out,
                 struct cb_err *err)
{
    if (!cb_json_is(j, t, CB_JSON_TRUE) && !cb_json_is(j, t, CB_JSON_FALSE))
        return cb_fail(err, CB_EFORMAT, "%s is missing or not true/false", what);
    *out = j->tok[t].kind == CB_JSON_TRUE;
    return 0;
}

static uint32_t hex4(const char *s)
{
    uint32_t v = 0;
    for (int i = 0; i < 4; i++) {
        char c = s[i];
        v = v * 16 + (uint32_t)(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    return v;
}

static size_t put_utf8(uint32_t c, char out[4])
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xc0 | c >> 6);
        out[1] = (char)(0x80 | (c & 63));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xe0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 63));
        out[2] = (char)(0x80 | (c & 63));
        return 3;
    }
    out[0] = (char)(0xf0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 63));
    out[2] = (char)(0x80 | (c >> 6 & 63));
    out[3] = (char)(0x80 | (c & 63));
    return 4;
}

/* One (possibly escaped) character at s[*i]; 0 = a lone surrogate or NUL. */
static size_t unescape(const char *s, uint32_t n, uint32_t *i, char out[4])
{
    if (s[*i] != '\\') {
        out[0] = s[(*i)++];
        return 1;
    }
    char e = s[*i + 1];
    *i += 2;
    if (e != 'u') {
        static const char from[] = "bfnrt", to[] = "\b\f\n\r\t";
        const char *at = strchr(from, e);
        out[0] = at != NULL ? to[at - from] : e;
        return 1;
    }
    uint32_t c = hex4(s + *i);
    *i += 4;
    if (c >= 0xd800 && c < 0xdc00 && *i + 6 <= n && s[*i] == '\\' && s[*i + 1] == 'u') {
        uint32_t lo = hex4(s + *i + 2);
        if (lo >= 0xdc00 && lo < 0xe000) {
            *i += 6;
            c = 0x10000 + ((c - 0xd800) << 10) + (lo - 0xdc00);
        }
    }
    return c == 0 || (c >= 0xd800 && c < 0xe000) ? 0 : put_utf8(c, out);
}

int cb_json_str(const struct cb_json *j, uint32_t t, const char *what, char *buf, size_t cap,
                struct cb_err *err)
{
    size_t n = 0;
    if (!cb_json_is(j, t, CB_JSON_STRING))
        return cb_fail(err, CB_EFORMAT, "%s is missing or not a string", what);
    const char *s = j->text + j->tok[t].at;
    for (uint32_t i = 0; i < j->tok[t].len;) {
        char out[4];
        size_t k = unescape(s, j->tok[t].len, &i, out);
        if (k == 0)
            return cb_fail(err, CB_EFORMAT, "%s holds a character that is none", what);
        if (n + k >= cap)
            return cb_fail(err, CB_EFORMAT, "%s is longer than %zu bytes", what, cap - 1);
        memcpy(buf + n, out, k);
        n += k;
    }
    buf[n] = '\0';
    return 0;
}

/* chat.c — see chat.h. */
#include "model/chat.h"

#include <string.h>

#include "model/engine.h"

struct out {
    char *buf;
    size_t n, cap;
    int full;
};

/* Bytes of the white-space character that s[0..n) begins with, or 0. */
static size_t space(const unsigned char *s, size_t n)
{
    if (n >= 1 && (s[0] == ' ' || (s[0] >= 0x09 && s[0] <= 0x0d) || (s[0] >= 0x1c && s[0] <= 0x1f)))
        return 1;
    if (n >= 2 && s[0] == 0xc2)
        return s[1] == 0x85 || s[1] == 0xa0 ? 2 : 0; /* U+0085, U+00A0 */
    if (n < 3)
        return 0;
    uint32_t c = (uint32_t)s[0] << 16 | (uint32_t)s[1] << 8 | s[2];
    int is = (c >= 0xe28080 && c <= 0xe2808a) || /* U+2000 to U+200A */
             c == 0xe280a8 || c == 0xe280a9 || c == 0xe280af || /* U+2028, U+2029, U+202F */
             c == 0xe19a80 || c == 0xe2819f || c == 0xe38080;   /* U+1680, U+205F, U+3000 */
    return is ? 3 : 0;
}

size_t cb_chat_trim(const char *text, size_t n, size_t *from)
{
    const unsigned char *s = (const unsigned char *)text;
    size_t at = 0, k;
    while ((k = space(s + at, n - at)) > 0)
        at += k;
    do {
        for (k = 3; k > 0 && (n - at < k || space(s + n - k, k) != k);)
            k--;
        n -= k;
    } while (k > 0);
    *from = at;
    return n - at;
}

static void put_n(struct out *o, const char *s, size_t k)
{
    if (k >= o->cap - o->n) {
        o->full = 1;
        return;
    }
    memcpy(o->buf + o->n, s, k);
    o->n += k;
    o->buf[o->n] = '\0';
}

static void put(struct out *o, const char *s)
{
    put_n(o, s, strlen(s));
}

static void turn(struct out *o, const struct cb_chat *c, enum cb_role role, const char *text)
{
    size_t from = 0, n = strlen(text);
    if (c->trims[role])
        n = cb_chat_trim(text, n, &from);
    put(o, c->prefix[role]);
    put_n(o, text + from, n);
    put(o, c->suffix[role]);
}

int cb_chat_render(const struct cb_engine *e, const char *system, const char *user, char *buf,
                   size_t cap, size_t *len, struct cb_err *err)
{
    const struct cb_chat *c = &e->rel->m.chat;
    struct out o = {buf, 0, cap, 0};
    if (!c->have)
        return cb_fail(err, CB_EUNSUPPORTED, "the model has no chat template that could be used");
    if (cap == 0)
        return cb_fail(err, CB_EINVAL, "no room for the prompt");
    buf[0] = '\0';
    put(&o, c->first);
    if (system == NULL)
        system = c->system_default;
    if (system[0] != '\0')
        turn(&o, c, CB_ROLE_SYSTEM, system);
    turn(&o, c, CB_ROLE_USER, user);
    put(&o, c->generation);
    if (o.full)
        return cb_fail(err, CB_ECONTEXT, "the prompt is longer than %zu bytes", cap - 1);
    *len = o.n;
    return 0;
}

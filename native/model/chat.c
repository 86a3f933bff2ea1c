/* chat.c — see chat.h. */
#include "model/chat.h"

#include <string.h>

#include "model/engine.h"

struct out {
    char *buf;
    size_t n, cap;
    int full;
};

static void put(struct out *o, const char *s)
{
    size_t k = strlen(s);
    if (k >= o->cap - o->n) {
        o->full = 1;
        return;
    }
    memcpy(o->buf + o->n, s, k + 1);
    o->n += k;
}

static void turn(struct out *o, const struct cb_chat *c, enum cb_role role, const char *text)
{
    put(o, c->prefix[role]);
    put(o, text);
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

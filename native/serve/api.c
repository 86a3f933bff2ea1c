/* api.c — what a client may ask for: the JSON of /v1/completions and
 * /v1/chat/completions. Every field is one of: used, allowed with its neutral
 * value only, passed over because nothing depends on it; all others are refused
 * by name. */
#if !defined(_WIN32)
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "serve/server.h"
#include "text/text.h"

#define MEMBERS_MAX 64u /* of any object in a body; twice the fields there are */

struct reading {
    struct cb_server *s;
    struct cb_req *r;
    struct cb_json j;
    struct cb_refusal *no;
    int seen_max, seen_tops, seen_usage;
};

void cb_refuse(struct cb_refusal *no, int status, const char *code, const char *param,
               const char *fmt, ...)
{
    va_list args;
    memset(no, 0, sizeof *no);
    no->status = status;
    no->type = status == 429   ? "rate_limit_error"
               : status == 401 ? "authentication_error"
               : status >= 500 ? "server_error"
                               : "invalid_request_error";
    no->code = code;
    snprintf(no->param, sizeof no->param, "%s", param != NULL ? param : "");
    va_start(args, fmt);
    vsnprintf(no->msg, sizeof no->msg, fmt, args);
    va_end(args);
}

static int bad(struct reading *x, const char *param, const char *msg)
{
    cb_refuse(x->no, 400, "invalid_value", param, "%s", msg);
    return -1;
}

static int wrong(struct reading *x, const char *param, const struct cb_err *err)
{
    return bad(x, param, err->msg);
}

typedef int field_fn(struct reading *x, uint32_t t, const char *name);

/* ---- numbers and flags -------------------------------------------------- */

static int get_float(struct reading *x, uint32_t t, const char *name, double lo, double hi,
                     float *out)
{
    struct cb_err err;
    double v = 0;
    if (cb_json_f64(&x->j, t, name, &v, &err) < 0)
        return wrong(x, name, &err);
    if (v < lo || v > hi) {
        cb_refuse(x->no, 400, "invalid_value", name, "%s must lie between %g and %g", name, lo, hi);
        return -1;
    }
    *out = (float)v;
    return 0;
}

static int get_u64(struct reading *x, uint32_t t, const char *name, uint64_t lo, uint64_t hi,
                   uint64_t *out)
{
    struct cb_err err;
    if (cb_json_u64(&x->j, t, hi, name, out, &err) < 0)
        return wrong(x, name, &err);
    if (*out < lo) {
        cb_refuse(x->no, 400, "invalid_value", name, "%s must be at least %llu", name,
                  (unsigned long long)lo);
        return -1;
    }
    return 0;
}

static int get_bool(struct reading *x, uint32_t t, const char *name, int *out)
{
    struct cb_err err;
    return cb_json_bool(&x->j, t, name, out, &err) < 0 ? wrong(x, name, &err) : 0;
}

static int f_max(struct reading *x, uint32_t t, const char *name)
{
    uint64_t v = 0;
    if (get_u64(x, t, name, 1, 1u << 24, &v) != 0)
        return -1;
    if (x->seen_max)
        return bad(x, name, "max_tokens and max_completion_tokens together");
    x->seen_max = 1;
    x->r->ask.max_new = (uint32_t)v;
    return 0;
}

static int f_temperature(struct reading *x, uint32_t t, const char *name)
{
    return get_float(x, t, name, 0, 2, &x->r->ask.sampling.temperature);
}

static int f_top_p(struct reading *x, uint32_t t, const char *name)
{
    return get_float(x, t, name, 0, 1, &x->r->ask.sampling.top_p);
}

static int f_min_p(struct reading *x, uint32_t t, const char *name)
{
    return get_float(x, t, name, 0, 1, &x->r->ask.sampling.min_p);
}

static int f_repeat_penalty(struct reading *x, uint32_t t, const char *name)
{
    return get_float(x, t, name, 0.01, 100, &x->r->ask.sampling.repeat_penalty);
}

static int f_top_k(struct reading *x, uint32_t t, const char *name)
{
    uint64_t v = 0;
    if (get_u64(x, t, name, 0, 1u << 24, &v) != 0)
        return -1;
    x->r->ask.sampling.top_k = (uint32_t)v;
    return 0;
}

static int f_seed(struct reading *x, uint32_t t, const char *name)
{
    return get_u64(x, t, name, 0, INT64_MAX, &x->r->ask.sampling.seed);
}

static int f_stream(struct reading *x, uint32_t t, const char *name)
{
    return get_bool(x, t, name, &x->r->ask.stream);
}

static int f_logprobs(struct reading *x, uint32_t t, const char *name)
{
    uint64_t v = 0;
    if (x->r->ask.chat)
        return get_bool(x, t, name, &x->r->ask.logprobs);
    if (get_u64(x, t, name, 0, 5, &v) != 0)
        return -1;
    x->r->ask.logprobs = 1;
    x->r->ask.top = (uint32_t)v;
    return 0;
}

static int f_top_logprobs(struct reading *x, uint32_t t, const char *name)
{
    uint64_t v = 0;
    if (get_u64(x, t, name, 0, CB_TOP_MAX, &v) != 0)
        return -1;
    x->r->ask.top = (uint32_t)v;
    x->seen_tops = 1;
    return 0;
}

/* ---- text --------------------------------------------------------------- */

static int f_stop(struct reading *x, uint32_t t, const char *name)
{
    struct cb_ask *a = &x->r->ask;
    struct cb_err err;
    int list = cb_json_is(&x->j, t, CB_JSON_ARRAY);
    uint32_t n = list ? x->j.tok[t].size : 1, at = list ? t + 1 : t;
    if (n > CB_STOP_MAX)
        return bad(x, name, "at most 4 stop strings");
    for (uint32_t i = 0; i < n; i++) {
        if (cb_json_str(&x->j, at, name, a->stop[i], sizeof a->stop[i], &err) < 0)
            return wrong(x, name, &err);
        if (a->stop[i][0] == '\0')
            return bad(x, name, "a stop string is empty");
        at = x->j.tok[at].next;
    }
    a->n_stop = n;
    return 0;
}

/* Appends an unescaped string to the prompt. */
static int put_string(struct reading *x, uint32_t t, const char *name)
{
    struct cb_req *r = x->r;
    struct cb_err err;
    char *to = r->text + r->ask.n_text;
    if (cb_json_str(&x->j, t, name, to, x->s->text_cap - r->ask.n_text, &err) < 0)
        return wrong(x, name, &err);
    r->ask.n_text += (uint32_t)strlen(to);
    return 0;
}

static int put(struct reading *x, const char *text)
{
    struct cb_req *r = x->r;
    size_t n = strlen(text);
    if (n >= x->s->text_cap - r->ask.n_text)
        return bad(x, "messages", "the messages are too long");
    memcpy(r->text + r->ask.n_text, text, n);
    r->ask.n_text += (uint32_t)n;
    return 0;
}

static int prompt_ids(struct reading *x, uint32_t t, const char *name)
{
    struct cb_req *r = x->r;
    struct cb_err err;
    uint32_t n = x->j.tok[t].size, at = t + 1;
    if (n > x->s->opt.ctx) {
        cb_refuse(x->no, 400, "context_length_exceeded", name,
                  "the prompt has %u tokens, the context holds %u", n, x->s->opt.ctx);
        return -1;
    }
    for (uint32_t i = 0; i < n; i++, at = x->j.tok[at].next) {
        uint64_t id = 0;
        if (cb_json_u64(&x->j, at, x->s->info.n_vocab - 1u, "a prompt token", &id, &err) < 0)
            return wrong(x, name, &err);
        r->ids[i] = (int32_t)id;
    }
    r->ask.have_ids = 1;
    r->ask.n_ids = n;
    return 0;
}

static int f_prompt(struct reading *x, uint32_t t, const char *name)
{
    if (cb_json_is(&x->j, t, CB_JSON_STRING))
        return put_string(x, t, name);
    if (!cb_json_is(&x->j, t, CB_JSON_ARRAY) || x->j.tok[t].size == 0)
        return bad(x, name, "prompt must be a string, one string in an array, or token ids");
    if (cb_json_is(&x->j, t + 1, CB_JSON_NUMBER))
        return prompt_ids(x, t, name);
    if (x->j.tok[t].size > 1)
        return bad(x, name, "one prompt a request: several are not supported");
    if (cb_json_is(&x->j, t + 1, CB_JSON_ARRAY))
        return prompt_ids(x, t + 1, name);
    return put_string(x, t + 1, name);
}

/* "content": a string, or parts of type text. */
static int put_content(struct reading *x, uint32_t t)
{
    struct cb_err err;
    char type[16];
    if (!cb_json_is(&x->j, t, CB_JSON_ARRAY))
        return put_string(x, t, "messages.content");
    uint32_t part = t + 1;
    for (uint32_t i = 0; i < x->j.tok[t].size; i++, part = x->j.tok[part].next) {
        uint32_t kind = cb_json_get(&x->j, part, "type"), text = cb_json_get(&x->j, part, "text");
        if (kind == CB_JSON_NONE || cb_json_str(&x->j, kind, "type", type, sizeof type, &err) < 0 ||
            strcmp(type, "text") != 0 || text == CB_JSON_NONE || x->j.tok[part].size != 2)
            return bad(x, "messages.content", "content parts must be {\"type\": \"text\", \"text\": …}");
        if (put_string(x, text, "messages.content.text") != 0)
            return -1;
    }
    return 0;
}

static int get_role(struct reading *x, uint32_t t, enum cb_role *role)
{
    static const struct {
        const char *name;
        enum cb_role role;
    } roles[] = {{"system", CB_ROLE_SYSTEM},
                 {"developer", CB_ROLE_SYSTEM},
                 {"user", CB_ROLE_USER},
                 {"assistant", CB_ROLE_ASSISTANT}};
    struct cb_err err;
    char text[16];
    if (t != CB_JSON_NONE && cb_json_str(&x->j, t, "role", text, sizeof text, &err) == 0)
        for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++)
            if (strcmp(text, roles[i].name) == 0) {
                *role = roles[i].role;
                return 0;
            }
    return bad(x, "messages.role", "role must be system, developer, user or assistant");
}

/* What the prompt holds from begin on, without white space at its ends. */
static void trim_from(struct cb_req *r, uint32_t begin)
{
    size_t from = 0, n = cb_chat_trim(r->text + begin, r->ask.n_text - begin, &from);
    memmove(r->text + begin, r->text + begin + from, n);
    r->ask.n_text = begin + (uint32_t)n;
}

static int put_message(struct reading *x, uint32_t t, const struct cb_chat *chat, int first)
{
    enum cb_role role = CB_ROLE_USER;
    if (!cb_json_is(&x->j, t, CB_JSON_OBJECT))
        return bad(x, "messages", "a message must be an object");
    for (uint32_t k = t + 1, i = 0; i < x->j.tok[t].size; i++, k = x->j.tok[k + 1].next) {
        struct cb_span key = {x->j.tok[k].at, x->j.tok[k].len};
        if (cb_span_is(x->j.text, key, "role") || cb_span_is(x->j.text, key, "content") ||
            cb_json_is(&x->j, k + 1, CB_JSON_NULL))
            continue;
        cb_refuse(x->no, 400, "unsupported_parameter", "messages",
                  "\"%.*s\" in a message is not supported", (int)(key.len < 64 ? key.len : 64),
                  x->j.text + key.at);
        return -1;
    }
    uint32_t content = cb_json_get(&x->j, t, "content");
    if (get_role(x, cb_json_get(&x->j, t, "role"), &role) != 0)
        return -1;
    if (content == CB_JSON_NONE)
        return bad(x, "messages.content", "content is missing");
    if (first && role != CB_ROLE_SYSTEM && chat->system_default[0] != '\0' &&
        (put(x, chat->prefix[CB_ROLE_SYSTEM]) != 0 || put(x, chat->system_default) != 0 ||
         put(x, chat->suffix[CB_ROLE_SYSTEM]) != 0))
        return -1;
    if (put(x, chat->prefix[role]) != 0)
        return -1;
    uint32_t begin = x->r->ask.n_text;
    if (put_content(x, content) != 0)
        return -1;
    if (chat->trims[role])
        trim_from(x->r, begin);
    return put(x, chat->suffix[role]);
}

static int f_messages(struct reading *x, uint32_t t, const char *name)
{
    struct cb_chat chat;
    pthread_mutex_lock(&x->s->lock);
    chat = x->s->chat;
    x->r->ask.release = x->s->release;
    pthread_mutex_unlock(&x->s->lock);
    if (!chat.have)
        return bad(x, name, "this model has no chat template that could be used; /v1/completions "
                            "takes a prompt as it is");
    if (!cb_json_is(&x->j, t, CB_JSON_ARRAY) || x->j.tok[t].size == 0)
        return bad(x, name, "messages must be an array of at least one message");
    if (put(x, chat.first) != 0)
        return -1;
    uint32_t at = t + 1;
    for (uint32_t i = 0; i < x->j.tok[t].size; i++, at = x->j.tok[at].next)
        if (put_message(x, at, &chat, i == 0) != 0)
            return -1;
    return put(x, chat.generation);
}

/* ---- the rest ----------------------------------------------------------- */

static int f_model(struct reading *x, uint32_t t, const char *name)
{
    char text[80], here[64];
    struct cb_err err;
    if (cb_json_str(&x->j, t, name, text, sizeof text, &err) < 0)
        return wrong(x, name, &err);
    pthread_mutex_lock(&x->s->lock);
    memcpy(here, x->s->info.name, sizeof here);
    pthread_mutex_unlock(&x->s->lock);
    if (strcmp(text, here) == 0 || strcmp(text, "colibri") == 0)
        return 0;
    cb_refuse(x->no, 404, "model_not_found", name,
              "there is no model \"%.63s\" here; \"%.63s\" and \"colibri\" name the one that is", text,
              here);
    return -1;
}

static int f_stream_options(struct reading *x, uint32_t t, const char *name)
{
    if (!cb_json_is(&x->j, t, CB_JSON_OBJECT))
        return bad(x, name, "stream_options must be an object");
    for (uint32_t k = t + 1, i = 0; i < x->j.tok[t].size; i++, k = x->j.tok[k + 1].next) {
        struct cb_span key = {x->j.tok[k].at, x->j.tok[k].len};
        if (!cb_span_is(x->j.text, key, "include_usage"))
            return bad(x, name, "only include_usage is known in stream_options");
        if (get_bool(x, k + 1, "include_usage", &x->r->ask.include_usage) != 0)
            return -1;
    }
    x->seen_usage = 1;
    return 0;
}

static int f_one(struct reading *x, uint32_t t, const char *name)
{
    double v = 0;
    if (cb_json_f64(&x->j, t, name, &v, NULL) < 0 || v < 1 || v > 1) {
        cb_refuse(x->no, 400, "unsupported_value", name, "%s must be 1", name);
        return -1;
    }
    return 0;
}

static int f_zero(struct reading *x, uint32_t t, const char *name)
{
    double v = 0;
    if (cb_json_f64(&x->j, t, name, &v, NULL) < 0 || v < 0 || v > 0) {
        cb_refuse(x->no, 400, "unsupported_value", name,
                  "%s is not supported, only 0; repeat_penalty is", name);
        return -1;
    }
    return 0;
}

static int f_empty(struct reading *x, uint32_t t, const char *name)
{
    if ((cb_json_is(&x->j, t, CB_JSON_ARRAY) || cb_json_is(&x->j, t, CB_JSON_OBJECT)) &&
        x->j.tok[t].size == 0)
        return 0;
    if (cb_json_is(&x->j, t, CB_JSON_FALSE))
        return 0;
    cb_refuse(x->no, 400, "unsupported_parameter", name, "%s is not supported", name);
    return -1;
}

static int f_text_only(struct reading *x, uint32_t t, const char *name)
{
    struct cb_err err;
    char type[16];
    uint32_t kind = cb_json_get(&x->j, t, "type");
    if (kind != CB_JSON_NONE && x->j.tok[t].size == 1 &&
        cb_json_str(&x->j, kind, "type", type, sizeof type, &err) == 0 && strcmp(type, "text") == 0)
        return 0;
    cb_refuse(x->no, 400, "unsupported_value", name, "%s may only be {\"type\": \"text\"}", name);
    return -1;
}

static int f_ignored(struct reading *x, uint32_t t, const char *name)
{
    (void)x, (void)t, (void)name;
    return 0;
}

enum { COMPLETIONS = 1, CHAT = 2, BOTH = 3 };
static const struct field {
    const char *name;
    int where;
    field_fn *fn;
} fields[] = {
    {"model", BOTH, f_model},
    {"prompt", COMPLETIONS, f_prompt},
    {"messages", CHAT, f_messages},
    {"max_tokens", BOTH, f_max},
    {"max_completion_tokens", CHAT, f_max},
    {"temperature", BOTH, f_temperature},
    {"top_p", BOTH, f_top_p},
    {"top_k", BOTH, f_top_k},
    {"min_p", BOTH, f_min_p},
    {"repeat_penalty", BOTH, f_repeat_penalty},
    {"seed", BOTH, f_seed},
    {"stop", BOTH, f_stop},
    {"stream", BOTH, f_stream},
    {"stream_options", BOTH, f_stream_options},
    {"logprobs", BOTH, f_logprobs},
    {"top_logprobs", CHAT, f_top_logprobs},
    {"n", BOTH, f_one},
    {"best_of", COMPLETIONS, f_one},
    {"echo", COMPLETIONS, f_empty},
    {"frequency_penalty", BOTH, f_zero},
    {"presence_penalty", BOTH, f_zero},
    {"logit_bias", BOTH, f_empty},
    {"tools", CHAT, f_empty},
    {"functions", CHAT, f_empty},
    {"response_format", CHAT, f_text_only},
    {"user", BOTH, f_ignored},
    {"store", CHAT, f_ignored},
    {"metadata", CHAT, f_ignored},
    {"service_tier", CHAT, f_ignored},
    {"safety_identifier", CHAT, f_ignored},
    {"prompt_cache_key", CHAT, f_ignored},
};

static int read_field(struct reading *x, uint32_t k)
{
    struct cb_span key = {x->j.tok[k].at, x->j.tok[k].len};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        const struct field *f = &fields[i];
        if (!cb_span_is(x->j.text, key, f->name))
            continue;
        if ((f->where & (x->r->ask.chat ? CHAT : COMPLETIONS)) == 0)
            break;
        return cb_json_is(&x->j, k + 1, CB_JSON_NULL) ? 0 : f->fn(x, k + 1, f->name);
    }
    char name[32];
    snprintf(name, sizeof name, "%.*s", (int)(key.len < 31 ? key.len : 31), x->j.text + key.at);
    name[cb_utf8_complete(name, strlen(name))] = '\0';
    cb_refuse(x->no, 400, "unsupported_parameter", name, "the field \"%s\" is not supported", name);
    return -1;
}

/* What only all fields together can tell. */
static int check_together(struct reading *x)
{
    struct cb_ask *a = &x->r->ask;
    uint32_t ctx = x->s->opt.ctx;
    if (a->n_text == 0 && !a->have_ids)
        return bad(x, a->chat ? "messages" : "prompt",
                   a->chat ? "messages is missing" : "the prompt is missing or empty");
    if (x->seen_tops && !a->logprobs)
        return bad(x, "top_logprobs", "top_logprobs needs logprobs = true");
    if (x->seen_usage && !a->stream)
        return bad(x, "stream_options", "stream_options needs stream = true");
    if (!x->seen_max)
        a->max_new = a->chat ? ctx : 16;
    a->max_new = a->max_new < ctx ? a->max_new : ctx;
    if ((uint64_t)a->max_new * a->top > (uint64_t)ctx * CB_TOP_ROOM) {
        if (x->seen_max) {
            cb_refuse(x->no, 400, "invalid_value", "top_logprobs",
                      "with top_logprobs %u at most %u tokens fit the buffers; lower max_tokens",
                      a->top, (uint32_t)((uint64_t)ctx * CB_TOP_ROOM / a->top));
            return -1;
        }
        a->max_new = (uint32_t)((uint64_t)ctx * CB_TOP_ROOM / a->top);
    }
    return 0;
}

/* An object with more members than a request has use for. The parser compares each
 * with all before it, on the thread that serves everybody; so this is seen first.
 * As far as body is JSON both see the same strings and depths. */
static int too_many_members(const char *body, size_t n)
{
    uint32_t members[CB_JSON_DEPTH + 1] = {0}, depth = 0;
    int in_string = 0;
    for (size_t i = 0; i < n; i++) {
        char c = body[i];
        if (c == '"')
            in_string = !in_string;
        else if (in_string)
            i += c == '\\';
        else if ((c == '{' || c == '[') && ++depth > CB_JSON_DEPTH)
            return 0; /* nested too deeply */
        else if (c == '{' || c == '[')
            members[depth] = 0;
        else if ((c == '}' || c == ']') && depth > 0)
            depth--;
        else if (c == ':' && ++members[depth] > MEMBERS_MAX)
            return 1;
    }
    return 0;
}

int cb_api_read(struct cb_server *s, struct cb_req *r, int chat, const char *body, size_t n,
                struct cb_refusal *no)
{
    struct reading x = {.s = s, .r = r, .no = no};
    struct cb_err err;
    memset(&r->ask, 0, sizeof r->ask);
    r->ask.chat = chat;
    cb_sampling_default(&r->ask.sampling);
    r->ask.sampling.temperature = 1.0f;
    r->ask.sampling.top_p = 1.0f;
    r->ask.sampling.top_k = 0;
    r->ask.sampling.min_p = 0.0f;
    r->ask.sampling.seed = r->number * UINT64_C(0x9E3779B97F4A7C15) >> 11;
    if (cb_utf8_check(body, n) != n) {
        cb_refuse(no, 400, "invalid_json", NULL, "the body is not UTF-8");
        return -1;
    }
    if (too_many_members(body, n)) {
        cb_refuse(no, 400, "invalid_json", NULL, "an object with more than %u members",
                  MEMBERS_MAX);
        return -1;
    }
    if (cb_json_parse(&x.j, body, n, s->json, s->n_json, &err) < 0) {
        cb_refuse(no, 400, "invalid_json", NULL, "%s", err.msg);
        return -1;
    }
    if (!cb_json_is(&x.j, 0, CB_JSON_OBJECT)) {
        cb_refuse(no, 400, "invalid_json", NULL, "the body must be a JSON object");
        return -1;
    }
    for (uint32_t k = 1, i = 0; i < x.j.tok[0].size; i++, k = x.j.tok[k + 1].next)
        if (read_field(&x, k) != 0)
            return -1;
    return check_together(&x);
}
#else
typedef int cb_serve_api_is_posix;
#endif

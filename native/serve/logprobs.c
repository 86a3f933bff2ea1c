/* logprobs.c — the "logprobs" object of an answer, piece by piece.
 *
 * Chat: {"content": [{token, logprob, bytes, top_logprobs: [{token, logprob, bytes}]}]}.
 * Completions: {"tokens": […], "token_logprobs": […], "top_logprobs": [{…}], "text_offset": […]}. */
#if !defined(_WIN32)
#include <math.h>
#include <stdio.h>

#include "serve/server.h"
#include "text/text.h"

/* Not the engine's tokens: it may have another release by now. */
static const char *token_bytes(const struct cb_text *words, int32_t id, size_t *n)
{
    const char *p = cb_text_token(words, id, 1, n);
    if (*n > CB_TOKEN_SHOWN)
        *n = CB_TOKEN_SHOWN;
    return p;
}

static void put_logprob(struct cb_buf *b, float x)
{
    cb_buf_fmt(b, "%.9g", isfinite(x) ? (double)x : -9999.0);
}

/* "token": …, "logprob": …, "bytes": […] */
static void put_entry(const struct cb_text *words, struct cb_buf *b, int32_t id, float logprob)
{
    size_t n = 0;
    const char *p = token_bytes(words, id, &n);
    cb_buf_str(b, "{\"token\":\"");
    cb_buf_json(b, p, n);
    cb_buf_str(b, "\",\"logprob\":");
    put_logprob(b, logprob);
    cb_buf_str(b, ",\"bytes\":[");
    for (size_t i = 0; i < n; i++)
        cb_buf_fmt(b, i > 0 ? ",%u" : "%u", (unsigned)(unsigned char)p[i]);
    cb_buf_str(b, "]");
}

/* A token as one string; what is not UTF-8 by itself as OpenAI writes it. */
static void put_name(const struct cb_text *words, struct cb_buf *b, int32_t id)
{
    size_t n = 0;
    const char *p = token_bytes(words, id, &n);
    cb_buf_str(b, "\"");
    if (cb_utf8_check(p, n) == n) {
        cb_buf_json(b, p, n);
    } else {
        cb_buf_str(b, "bytes:");
        for (size_t i = 0; i < n; i++)
            cb_buf_fmt(b, "\\\\x%02x", (unsigned)(unsigned char)p[i]);
    }
    cb_buf_str(b, "\"");
}

enum { OPEN, TOKEN, TOPS, TOKEN_END, NAMES, LOGPROBS, TOP_MAPS, OFFSETS };

static int chat_step(struct cb_conn *c, uint32_t end)
{
    struct cb_pump *p = &c->pump;
    const struct cb_req *r = c->req;
    struct cb_buf *b = &c->out;
    switch (p->lp_stage) {
    case OPEN:
        cb_buf_str(b, "{\"content\":[");
        p->lp_stage = TOKEN;
        return 0;
    case TOKEN:
        if (p->lp_tok == end) {
            cb_buf_str(b, "],\"refusal\":null}");
            p->lp_stage = OPEN;
            return 1;
        }
        if (p->lp_tok > p->tok)
            cb_buf_str(b, ",");
        put_entry(r->words, b, r->tok[p->lp_tok].id, r->tok[p->lp_tok].logprob);
        cb_buf_str(b, ",\"top_logprobs\":[");
        p->lp_top = 0;
        p->lp_stage = TOPS;
        return 0;
    case TOPS:
        if (p->lp_top < r->ask.top) {
            const struct cb_top *t = &r->tops[(size_t)p->lp_tok * r->ask.top + p->lp_top];
            if (p->lp_top++ > 0)
                cb_buf_str(b, ",");
            put_entry(r->words, b, t->id, t->logprob);
            cb_buf_str(b, "}");
            return 0;
        }
        cb_buf_str(b, "]}");
        p->lp_tok++;
        p->lp_stage = TOKEN;
        return 0;
    default:
        return 1;
    }
}

/* Characters of the text before byte at; at never goes back. */
static uint32_t char_offset(struct cb_pump *p, const struct cb_req *r, uint32_t n_text, uint32_t at)
{
    while (p->char_at < at && p->char_at < n_text) {
        p->char_at += (uint32_t)cb_utf8_step(r->text + p->char_at, n_text - p->char_at);
        p->chars++;
    }
    return p->chars;
}

/* Ends one list and begins the next. */
static int next_list(struct cb_pump *p, struct cb_buf *b, const char *between, int stage)
{
    cb_buf_str(b, between);
    p->lp_tok = p->tok;
    p->lp_top = 0;
    p->lp_stage = stage;
    return stage == OPEN;
}

static int completion_step(struct cb_conn *c, uint32_t end)
{
    struct cb_pump *p = &c->pump;
    const struct cb_req *r = c->req;
    struct cb_buf *b = &c->out;
    const struct cb_tok *t = &r->tok[p->lp_tok];
    int stage = p->lp_stage;
    if (stage == OPEN)
        return next_list(p, b, "{\"tokens\":[", NAMES);
    if (p->lp_tok == end)
        return stage == NAMES      ? next_list(p, b, "],\"token_logprobs\":[", LOGPROBS)
               : stage == LOGPROBS ? next_list(p, b, "],\"top_logprobs\":[", TOP_MAPS)
               : stage == TOP_MAPS ? next_list(p, b, "],\"text_offset\":[", OFFSETS)
                                   : next_list(p, b, "]}", OPEN);
    if (p->lp_tok > p->tok && p->lp_top == 0)
        cb_buf_str(b, ",");
    if (stage == NAMES) {
        put_name(r->words, b, t->id);
    } else if (stage == LOGPROBS) {
        put_logprob(b, t->logprob);
    } else if (stage == OFFSETS) {
        cb_buf_fmt(b, "%u", char_offset(p, r, p->text_end, p->lp_tok > 0 ? t[-1].raw_end : 0));
    } else {
        const struct cb_top *top = &r->tops[(size_t)p->lp_tok * r->ask.top + p->lp_top];
        if (p->lp_top == 0)
            cb_buf_str(b, "{");
        if (p->lp_top < r->ask.top) {
            if (p->lp_top++ > 0)
                cb_buf_str(b, ",");
            put_name(r->words, b, top->id);
            cb_buf_str(b, ":");
            put_logprob(b, top->logprob);
            if (p->lp_top < r->ask.top)
                return 0;
        }
        cb_buf_str(b, "}");
        p->lp_top = 0;
    }
    p->lp_tok++;
    return 0;
}

int cb_logprobs_step(struct cb_conn *c, uint32_t end)
{
    return c->req->ask.chat ? chat_step(c, end) : completion_step(c, end);
}
#else
typedef int cb_serve_logprobs_is_posix;
#endif

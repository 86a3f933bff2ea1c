/* answer.c — writes an answer out as it grows, in steps that each fit the
 * connection's buffer: a slow reader costs no memory.
 *
 * A stream's events do not depend on timing: one for each token after which
 * more text could be shown, and one at the end for what was held back. */
#if !defined(_WIN32)
#include <stdio.h>
#include <string.h>

#include "core/os.h"
#include "serve/server.h"
#include "text/text.h"

enum phase { START, ROLE, NEXT, OPEN, TEXT, TEXT_END, LOGPROBS, CLOSE, LAST, USAGE, MARK, COMPLETE };

#define TEXT_STEP 512u
#define SAY_NS UINT64_C(5000000000)

/* What the worker has made public so far. */
struct view {
    enum cb_req_state state;
    int prepared, finish;
    uint32_t n_prompt, n_done, n_tok, n_text;
    struct cb_refusal refusal;
};

void cb_pump_start(struct cb_pump *p)
{
    memset(p, 0, sizeof *p);
    p->t_said = cb_os_now_ns();
}

static void look(struct cb_server *s, const struct cb_req *r, struct view *v)
{
    pthread_mutex_lock(&s->lock);
    v->state = r->state;
    v->prepared = r->prepared;
    v->finish = r->finish;
    v->n_prompt = r->n_prompt;
    v->n_done = r->n_done;
    v->n_tok = r->n_tok;
    v->n_text = r->n_text;
    v->refusal = r->refusal;
    pthread_mutex_unlock(&s->lock);
}

static const char *finish_reason(int finish)
{
    return finish == CB_FINISH_EOG || finish == CB_FINISH_STOP ? "stop" : "length";
}

static const char *finish_name(int finish)
{
    static const char *const names[] = {"length", "eog", "stop", "cancel", "context"};
    return names[finish];
}

/* {"id": … up to "choices":[ */
static void put_head(const struct cb_req *r, struct cb_buf *b, int chunk)
{
    const char *object = !r->ask.chat ? "text_completion"
                         : chunk      ? "chat.completion.chunk"
                                      : "chat.completion";
    cb_buf_fmt(b, "{\"id\":\"%s-%016llx\",\"object\":\"%s\",\"created\":%llu,\"model\":",
               r->ask.chat ? "chatcmpl" : "cmpl", (unsigned long long)r->number, object,
               (unsigned long long)r->created);
    cb_buf_quoted(b, r->model);
    cb_buf_fmt(b, ",\"system_fingerprint\":\"fp_%.12s\",\"choices\":[", r->golden);
}

static void put_usage(const struct cb_req *r, struct cb_buf *b)
{
    cb_buf_fmt(b, "{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"total_tokens\":%u}", r->n_prompt,
               r->n_tok, r->n_prompt + r->n_tok);
}

/* What OpenAI's API has no field for. */
static void put_own(const struct cb_req *r, struct cb_buf *b)
{
    cb_buf_fmt(b,
               "{\"seed\":%llu,\"finish\":\"%s\",\"degraded\":%llu,\"zeros\":%llu,\"extra\":%llu,"
               "\"queue_ms\":%.3f,\"first_token_ms\":%.3f,\"total_ms\":%.3f}",
               (unsigned long long)r->ask.sampling.seed, finish_name(r->finish),
               (unsigned long long)r->degraded, (unsigned long long)r->zeros,
               (unsigned long long)r->extra, (double)(r->t_start - r->t_arrive) / 1e6,
               r->t_first > r->t_arrive ? (double)(r->t_first - r->t_arrive) / 1e6 : 0.0,
               (double)(r->t_end - r->t_arrive) / 1e6);
}

/* How many tokens belong to the text that is out: all of the answer's but those
 * that made a stop string. */
static uint32_t tokens_shown(const struct cb_req *r, const struct view *v)
{
    uint32_t n = v->n_tok;
    if (v->finish == CB_FINISH_STOP)
        while (n > 0 && (n > 1 ? r->tok[n - 2].raw_end : 0) >= v->n_text)
            n--;
    return n;
}

/* The next event of a stream: *p gets its ends. 0 = not yet. */
static int next_event(struct cb_pump *p, const struct cb_req *r, const struct view *v)
{
    for (uint32_t i = p->tok_end; i < v->n_tok; i++) {
        uint32_t end = r->tok[i].text_end;
        if (end <= p->text_end)
            continue;
        p->text_end = end;
        /* Not beyond i: a token without text may be there already, or come later. */
        while (p->tok_end <= i && r->tok[p->tok_end].raw_end <= end)
            p->tok_end++;
        return 1;
    }
    if (v->state != CB_REQ_DONE)
        return 0;
    uint32_t shown = tokens_shown(r, v);
    int more = v->n_text > p->text_end || (r->ask.logprobs && shown > p->tok_end);
    p->text_end = v->n_text;
    p->tok_end = shown > p->tok_end ? shown : p->tok_end;
    return more;
}

static void open_choice(const struct cb_req *r, struct cb_buf *b)
{
    if (r->ask.stream)
        cb_event_begin(b);
    put_head(r, b, r->ask.stream);
    cb_buf_str(b, !r->ask.chat      ? "{\"index\":0,\"text\":\""
                  : r->ask.stream   ? "{\"index\":0,\"delta\":{\"content\":\""
                                    : "{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"");
}

/* Up to TEXT_STEP bytes of text; 1 = all of this event's is out. */
static int text_step(struct cb_pump *p, const struct cb_req *r, struct cb_buf *b)
{
    uint32_t left = p->text_end - p->text;
    size_t n = left;
    if (left > TEXT_STEP) {
        n = cb_utf8_complete(r->text + p->text, TEXT_STEP);
        n = n == 0 ? TEXT_STEP : n;
    }
    cb_buf_json(b, r->text + p->text, n);
    p->text += (uint32_t)n;
    return p->text == p->text_end;
}

static void end_text(const struct cb_req *r, struct cb_buf *b)
{
    cb_buf_str(b, !r->ask.chat    ? "\",\"logprobs\":"
                  : r->ask.stream ? "\"},\"logprobs\":"
                                  : "\",\"refusal\":null},\"logprobs\":");
}

static void close_choice(const struct cb_req *r, const struct view *v, struct cb_buf *b)
{
    if (r->ask.stream) {
        cb_buf_fmt(b, ",\"finish_reason\":null}]%s}", r->ask.include_usage ? ",\"usage\":null" : "");
        cb_event_end(b);
        return;
    }
    cb_buf_fmt(b, ",\"finish_reason\":\"%s\"}],\"usage\":", finish_reason(v->finish));
    put_usage(r, b);
    cb_buf_str(b, ",\"colibri\":");
    put_own(r, b);
    cb_buf_str(b, "}\n");
}

static void put_role(const struct cb_req *r, struct cb_buf *b)
{
    cb_event_begin(b);
    put_head(r, b, 1);
    cb_buf_fmt(b, "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                  "\"finish_reason\":null}]%s}",
               r->ask.include_usage ? ",\"usage\":null" : "");
    cb_event_end(b);
}

static void put_last(const struct cb_req *r, const struct view *v, struct cb_buf *b)
{
    cb_event_begin(b);
    put_head(r, b, 1);
    cb_buf_fmt(b, "{\"index\":0,%s,\"logprobs\":null,\"finish_reason\":\"%s\"}]%s,\"colibri\":",
               r->ask.chat ? "\"delta\":{}" : "\"text\":\"\"", finish_reason(v->finish),
               r->ask.include_usage ? ",\"usage\":null" : "");
    put_own(r, b);
    cb_buf_str(b, "}");
    cb_event_end(b);
}

static void put_usage_event(const struct cb_req *r, struct cb_buf *b)
{
    cb_event_begin(b);
    put_head(r, b, 1);
    cb_buf_str(b, "],\"usage\":");
    put_usage(r, b);
    cb_buf_str(b, "}");
    cb_event_end(b);
}

/* A stream that cannot go on: its head is out, so the error comes as an event. */
static void put_failure(const struct view *v, struct cb_buf *b)
{
    cb_event_begin(b);
    cb_buf_fmt(b, "{\"error\":{\"message\":");
    cb_buf_quoted(b, v->refusal.msg);
    cb_buf_fmt(b, ",\"type\":\"%s\",\"param\":null,\"code\":\"%s\"}}", v->refusal.type,
               v->refusal.code != NULL ? v->refusal.code : "error");
    cb_event_end(b);
}

/* A sign of life while the prompt is computed; clients pass comments over. */
static void say_progress(struct cb_pump *p, const struct view *v, struct cb_buf *b)
{
    char text[64];
    uint64_t now = cb_os_now_ns();
    if (now - p->t_said < SAY_NS)
        return;
    p->t_said = now;
    snprintf(text, sizeof text, "prompt %u of %u tokens", v->n_done, v->n_prompt);
    cb_event_comment(b, text);
}

/* One step; 1 = nothing more to say now. */
static int step(struct cb_conn *c, const struct view *v)
{
    struct cb_pump *p = &c->pump;
    struct cb_req *r = c->req;
    struct cb_buf *b = &c->out;
    switch ((enum phase)p->phase) {
    case ROLE:
        if (r->ask.chat)
            put_role(r, b);
        p->phase = NEXT;
        return 0;
    case NEXT:
        p->tok = p->tok_end;
        if (next_event(p, r, v)) {
            p->phase = OPEN;
            return 0;
        }
        if (v->state == CB_REQ_DONE) {
            p->phase = LAST;
            return 0;
        }
        say_progress(p, v, b);
        return 1;
    case OPEN:
        open_choice(r, b);
        p->phase = TEXT;
        return 0;
    case TEXT:
        if (text_step(p, r, b))
            p->phase = TEXT_END;
        return 0;
    case TEXT_END:
        end_text(r, b);
        p->lp_tok = p->tok;
        p->phase = LOGPROBS;
        return 0;
    case LOGPROBS:
        if (!r->ask.logprobs)
            cb_buf_str(b, "null");
        if (!r->ask.logprobs || cb_logprobs_step(c, p->tok_end))
            p->phase = CLOSE;
        return 0;
    case CLOSE:
        close_choice(r, v, b);
        p->phase = r->ask.stream ? NEXT : COMPLETE;
        return 0;
    case LAST:
        put_last(r, v, b);
        p->phase = r->ask.include_usage ? USAGE : MARK;
        return 0;
    case USAGE:
        put_usage_event(r, b);
        p->phase = MARK;
        return 0;
    case MARK:
        cb_event_done(b);
        p->phase = COMPLETE;
        return 0;
    default:
        return 1;
    }
}

/* Status line and headers; 0 = too early for them. */
static int begin(struct cb_server *s, struct cb_conn *c, const struct view *v)
{
    struct cb_req *r = c->req;
    struct cb_pump *p = &c->pump;
    if (v->state == CB_REQ_DONE && v->refusal.status != 0) {
        cb_reply_refusal(s, c, &v->refusal);
        p->phase = COMPLETE;
        return 1;
    }
    if (r->ask.stream ? !v->prepared && v->state != CB_REQ_DONE : v->state != CB_REQ_DONE)
        return 0;
    c->chunked = c->http.minor == 1;
    c->keep = c->keep && c->chunked;
    cb_reply_head(c, 200, r->ask.stream ? "text/event-stream; charset=utf-8" : "application/json",
                  c->chunked ? "Transfer-Encoding: chunked\r\n" : NULL);
    p->phase = r->ask.stream ? ROLE : OPEN;
    if (!r->ask.stream) {
        p->text_end = v->n_text;
        p->tok_end = tokens_shown(r, v);
    }
    return 1;
}

int cb_pump(struct cb_server *s, struct cb_conn *c)
{
    struct cb_pump *p = &c->pump;
    struct view v;
    size_t chunk = 0;
    if (p->phase == COMPLETE)
        return 1;
    look(s, c->req, &v);
    if (p->phase == START && !begin(s, c, &v))
        return 0;
    if (p->phase == COMPLETE)
        return 1;
    if (cb_buf_room(&c->out) < CB_STEP_ROOM + 64)
        return 0;
    if (c->chunked)
        cb_chunk_begin(&c->out, &chunk);
    while (p->phase != COMPLETE && cb_buf_room(&c->out) >= CB_STEP_ROOM) {
        if (v.refusal.status != 0 && p->phase == NEXT) {
            put_failure(&v, &c->out);
            p->phase = COMPLETE;
            c->keep = 0;
        } else if (step(c, &v)) {
            break;
        }
    }
    if (c->chunked) {
        cb_chunk_end(&c->out, chunk);
        if (p->phase == COMPLETE)
            cb_buf_str(&c->out, "0\r\n\r\n");
    }
    return p->phase == COMPLETE;
}
#else
typedef int cb_serve_answer_is_posix;
#endif

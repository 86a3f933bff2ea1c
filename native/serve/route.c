/* route.c — from a request to an answer: paths, access, heads. */
#if !defined(_WIN32)
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/os.h"
#include "serve/server.h"

static const char *reason(int status)
{
    static const struct {
        int status;
        const char *text;
    } all[] = {
        {200, "OK"}, {400, "Bad Request"}, {401, "Unauthorized"}, {403, "Forbidden"},
        {404, "Not Found"}, {405, "Method Not Allowed"}, {408, "Request Timeout"},
        {411, "Length Required"}, {413, "Content Too Large"}, {414, "URI Too Long"},
        {415, "Unsupported Media Type"}, {417, "Expectation Failed"}, {421, "Misdirected Request"},
        {429, "Too Many Requests"}, {431, "Request Header Fields Too Large"},
        {500, "Internal Server Error"}, {501, "Not Implemented"}, {503, "Service Unavailable"},
        {504, "Gateway Timeout"}, {505, "HTTP Version Not Supported"},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (all[i].status == status)
            return all[i].text;
    return "Error";
}

/* extra: header lines with their ends; NULL = none. */
void cb_reply_head(struct cb_conn *c, int status, const char *type, const char *extra)
{
    c->status = status;
    cb_buf_fmt(&c->out,
               "HTTP/1.1 %d %s\r\nServer: colibri/" CB_VERSION "\r\nContent-Type: %s\r\n"
               "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: %s\r\n%s\r\n",
               status, reason(status), type, c->keep ? "keep-alive" : "close",
               extra != NULL ? extra : "");
}

void cb_reply_text(struct cb_server *s, struct cb_conn *c, int status, const char *type,
                   const char *body, size_t n, const char *extra)
{
    char lines[256];
    (void)s;
    snprintf(lines, sizeof lines, "Content-Length: %zu\r\n%s", n, extra != NULL ? extra : "");
    cb_reply_head(c, status, type, lines);
    if (c->http.method == CB_HTTP_HEAD)
        return;
    c->fixed = body;
    c->n_fixed = n;
}

/* The same for a body that is not a constant: it goes into the buffer. */
static void reply_copy(struct cb_conn *c, int status, const char *type, const char *body, size_t n,
                       const char *extra)
{
    char lines[256];
    snprintf(lines, sizeof lines, "Content-Length: %zu\r\n%s", n, extra != NULL ? extra : "");
    cb_reply_head(c, status, type, lines);
    if (c->http.method != CB_HTTP_HEAD)
        cb_buf_add(&c->out, body, n);
}

void cb_reply_refusal(struct cb_server *s, struct cb_conn *c, const struct cb_refusal *no)
{
    char text[2560], extra[64] = "";
    struct cb_buf b = {text, 0, sizeof text, 0};
    cb_buf_str(&b, "{\"error\":{\"message\":");
    cb_buf_quoted(&b, no->msg);
    cb_buf_fmt(&b, ",\"type\":\"%s\",\"param\":", no->type);
    if (no->param[0] != '\0')
        cb_buf_quoted(&b, no->param);
    else
        cb_buf_str(&b, "null");
    cb_buf_fmt(&b, no->code != NULL ? ",\"code\":\"%s\"}}\n" : ",\"code\":null}}\n", no->code);
    if (no->status == 429 || no->status == 503)
        snprintf(extra, sizeof extra, "Retry-After: %u\r\n", cb_queue_wait_s(s));
    else if (no->status == 401)
        snprintf(extra, sizeof extra, "WWW-Authenticate: Bearer\r\n");
    else if (no->status == 405)
        snprintf(extra, sizeof extra, "Allow: %s\r\n",
                 c->endpoint == CB_EP_COMPLETIONS || c->endpoint == CB_EP_CHAT ? "POST" : "GET, HEAD");
    reply_copy(c, no->status, "application/json", b.p, b.n, extra);
}

static void refuse(struct cb_server *s, struct cb_conn *c, int status, const char *code,
                   const char *msg)
{
    struct cb_refusal no;
    cb_refuse(&no, status, code, NULL, "%s", msg);
    cb_reply_refusal(s, c, &no);
}

/* ---- after the head ----------------------------------------------------- */

static enum cb_endpoint find_endpoint(const struct cb_conn *c)
{
    static const struct {
        const char *path;
        enum cb_endpoint ep;
    } all[] = {
        {"/v1/completions", CB_EP_COMPLETIONS}, {"/v1/chat/completions", CB_EP_CHAT},
        {"/v1/models", CB_EP_MODELS}, {"/health", CB_EP_HEALTH}, {"/metrics", CB_EP_METRICS},
        {"/status", CB_EP_STATUS}, {"/", CB_EP_PAGE},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (cb_span_is(c->in, c->http.path, all[i].path))
            return all[i].ep;
    return c->http.path.len > 11 && memcmp(c->in + c->http.path.at, "/v1/models/", 11) == 0
               ? CB_EP_MODELS
               : CB_EP_OTHER;
}

/* The page holds no secret, and a probe of health needs none. */
static int needs_token(const struct cb_server *s, const struct cb_conn *c)
{
    return s->opt.token_file != NULL && !c->local && c->endpoint != CB_EP_HEALTH &&
           c->endpoint != CB_EP_PAGE;
}

static int check_access(struct cb_server *s, struct cb_conn *c)
{
    const struct cb_http *h = &c->http;
    if ((h->n_host > 0 || h->absolute) &&
        !cb_host_allowed(c->in + h->host.at, h->host.len, s->opt.host, s->opt.n_host)) {
        s->m.bad_host++;
        c->keep = 0;
        refuse(s, c, 421, "host_not_allowed",
               "this Host is not served here; --allow-host NAME allows it");
        return -1;
    }
    if (h->origin.len > 0 && !cb_origin_allowed(c->in + h->origin.at, h->origin.len,
                                                c->in + h->host.at, h->host.len)) {
        s->m.bad_host++;
        c->keep = 0;
        refuse(s, c, 403, "origin_not_allowed", "pages of other sites may not ask here");
        return -1;
    }
    if (needs_token(s, c) &&
        !cb_tokens_allow(&s->tokens, c->in + h->authorization.at, h->authorization.len)) {
        s->m.unauthorised++;
        c->keep = 0;
        refuse(s, c, 401, "invalid_api_key", "a bearer token is needed");
        return -1;
    }
    return 0;
}

int cb_route_head(struct cb_server *s, struct cb_conn *c)
{
    const struct cb_http *h = &c->http;
    c->endpoint = find_endpoint(c);
    int post = c->endpoint == CB_EP_COMPLETIONS || c->endpoint == CB_EP_CHAT;
    int has_body = h->length > 0;
    c->keep = h->keep && !s->draining;
    if (check_access(s, c) != 0)
        return -1;
    if (has_body) /* until it is read, the connection is of no use after a refusal */
        c->keep = 0;
    if (c->endpoint == CB_EP_OTHER) {
        refuse(s, c, 404, "not_found", "there is nothing under this path");
        return -1;
    }
    if (post ? h->method != CB_HTTP_POST : h->method != CB_HTTP_GET && h->method != CB_HTTP_HEAD) {
        refuse(s, c, 405, "method_not_allowed", "this path does not know that method");
        return -1;
    }
    if (!post && has_body) {
        refuse(s, c, 400, "unexpected_body", "a body where none belongs");
        return -1;
    }
    if (post && h->type != CB_HTTP_TYPE_JSON) {
        refuse(s, c, 415, "content_type", "Content-Type must be application/json");
        return -1;
    }
    if (h->length > s->opt.body_bytes) {
        struct cb_refusal no;
        cb_refuse(&no, 413, "body_too_large", NULL, "the body has %llu bytes, at most %u are taken",
                  (unsigned long long)h->length, s->opt.body_bytes);
        cb_reply_refusal(s, c, &no);
        return -1;
    }
    c->keep = h->keep && !s->draining;
    return 0;
}

/* ---- the whole request is there ----------------------------------------- */

static void answer_models(struct cb_server *s, struct cb_conn *c)
{
    char text[1024], name[64];
    struct cb_buf b = {text, 0, sizeof text, 0};
    struct cb_span rest = {c->http.path.at + 11, c->http.path.len > 11 ? c->http.path.len - 11 : 0};
    int one = c->http.path.len > 11;
    pthread_mutex_lock(&s->lock);
    memcpy(name, s->info.name, sizeof name);
    pthread_mutex_unlock(&s->lock);
    if (one && !cb_span_is(c->in, rest, name) && !cb_span_is(c->in, rest, "colibri")) {
        refuse(s, c, 404, "model_not_found", "there is no such model here");
        return;
    }
    if (!one)
        cb_buf_str(&b, "{\"object\":\"list\",\"data\":[");
    cb_buf_str(&b, "{\"id\":");
    cb_buf_quoted(&b, name);
    cb_buf_fmt(&b, ",\"object\":\"model\",\"created\":%llu,\"owned_by\":\"colibri\"}%s\n",
               (unsigned long long)s->created, one ? "" : "]}");
    reply_copy(c, 200, "application/json", b.p, b.n, NULL);
}

static void answer_health(struct cb_server *s, struct cb_conn *c)
{
    char text[2048];
    struct cb_buf b = {text, 0, sizeof text, 0};
    int status = 200;
    cb_status_health(s, &b, &status);
    reply_copy(c, status, "application/json", b.p, b.n, NULL);
}

/* Long bodies are written behind room for the head, which is moved up to them. */
static void answer_long(struct cb_server *s, struct cb_conn *c, const char *type,
                        void (*fill)(struct cb_server *, struct cb_buf *))
{
    enum { ROOM = 512 };
    struct cb_buf body = {c->out.p + ROOM, 0, CB_OUT_BYTES - ROOM, 0};
    fill(s, &body);
    if (body.full) {
        refuse(s, c, 500, "too_long", "the answer does not fit the buffer");
        return;
    }
    char lines[64];
    snprintf(lines, sizeof lines, "Content-Length: %zu\r\n", body.n);
    cb_reply_head(c, 200, type, lines);
    if (c->http.method == CB_HTTP_HEAD)
        return;
    memmove(c->out.p + c->out.n, body.p, body.n);
    c->out.n += body.n;
}

static uint64_t wall_seconds(void)
{
    return (uint64_t)time(NULL);
}

static void answer_tokens(struct cb_server *s, struct cb_conn *c)
{
    struct cb_refusal no;
    if (s->draining) {
        c->keep = 0;
        refuse(s, c, 503, "stopping", "the service is about to stop");
        return;
    }
    struct cb_req *r = cb_queue_slot(s);
    if (r == NULL) {
        s->m.queue_full++;
        refuse(s, c, 429, "queue_full", "all places in the queue are taken; try again later");
        return;
    }
    if (cb_api_read(s, r, c->endpoint == CB_EP_CHAT, c->in + c->http.bytes, (size_t)c->http.length,
                    &no) != 0) {
        cb_queue_free(s, r);
        cb_reply_refusal(s, c, &no);
        return;
    }
    r->t_arrive = cb_os_now_ns();
    r->t_deadline = r->t_arrive + s->opt.deadline_s * UINT64_C(1000000000);
    r->created = wall_seconds();
    c->req = r;
    cb_pump_start(&c->pump);
    cb_queue_put(s, r);
}

void cb_route_request(struct cb_server *s, struct cb_conn *c)
{
    switch (c->endpoint) {
    case CB_EP_COMPLETIONS:
    case CB_EP_CHAT:
        answer_tokens(s, c);
        break;
    case CB_EP_MODELS:
        answer_models(s, c);
        break;
    case CB_EP_HEALTH:
        answer_health(s, c);
        break;
    case CB_EP_METRICS:
        answer_long(s, c, "text/plain; version=0.0.4; charset=utf-8", cb_status_metrics);
        break;
    case CB_EP_STATUS:
        answer_long(s, c, "application/json", cb_status_json);
        break;
    default:
        cb_reply_text(s, c, 200, "text/html; charset=utf-8", cb_page_html, cb_page_html_bytes,
                      "Content-Security-Policy: default-src 'none'; script-src 'unsafe-inline'; "
                      "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'\r\n");
        break;
    }
}
#else
typedef int cb_serve_route_is_posix;
#endif

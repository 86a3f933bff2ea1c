/* http.c — see http.h. */
#include "serve/http.h"

#include <string.h>

static char lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c + 32) : c;
}

int cb_span_is(const char *buf, struct cb_span s, const char *text)
{
    return strlen(text) == s.len && memcmp(buf + s.at, text, s.len) == 0;
}

int cb_span_is_nocase(const char *buf, struct cb_span s, const char *text)
{
    if (strlen(text) != s.len)
        return 0;
    for (uint32_t i = 0; i < s.len; i++)
        if (lower(buf[s.at + i]) != lower(text[i]))
            return 0;
    return 1;
}

/* tchar of RFC 9110 */
static int is_token(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (c != '\0' && strchr("!#$%&'*+-.^_`|~", c) != NULL);
}

static int fail(const char **why, int status, const char *text)
{
    *why = text;
    return -status;
}

static enum cb_http_method method_of(const char *s, struct cb_span m)
{
    return cb_span_is(s, m, "GET")    ? CB_HTTP_GET
           : cb_span_is(s, m, "HEAD") ? CB_HTTP_HEAD
           : cb_span_is(s, m, "POST") ? CB_HTTP_POST
                                      : CB_HTTP_OTHER;
}

/* The target at s[t.at]: a path, or http://host/path, whose host counts in place
 * of the header (RFC 9112, 3.2.2). Whether a host is ours is access.c's to say. */
static int target(struct cb_http *h, const char *s, struct cb_span t, const char **why)
{
    uint32_t at = t.at, end = t.at + t.len, slash = t.at + 6; /* the second of http:// */
    for (uint32_t i = at; i < end; i++)
        if ((unsigned char)s[i] <= 0x20 || (unsigned char)s[i] >= 0x7f)
            return fail(why, 400, "bad character in the request target");
    struct cb_span scheme = {at, t.len < 7 ? 0 : 7};
    h->absolute = cb_span_is_nocase(s, scheme, "http://");
    if (h->absolute) {
        for (at += 7; at < end && s[at] != '/' && s[at] != '?';)
            at++;
        h->host = (struct cb_span){slash + 1, at - slash - 1};
        if (h->host.len == 0)
            return fail(why, 400, "the request target has no host");
    }
    if (!h->absolute && (t.len == 0 || s[at] != '/'))
        return fail(why, 400, "the request target must be a path");
    uint32_t query = at;
    while (query < end && s[query] != '?')
        query++;
    h->path = (struct cb_span){at, query - at};
    if (h->path.len == 0)
        h->path = (struct cb_span){slash, 1}; /* http://host means its root */
    return 0;
}

/* The line of n bytes at s[at]. */
static int request_line(struct cb_http *h, const char *s, uint32_t at, uint32_t n, const char **why)
{
    uint32_t end = at + n, i = at;
    while (i < end && is_token(s[i]))
        i++;
    if (i == at || i >= end || s[i] != ' ')
        return fail(why, 400, "malformed request line");
    h->method = method_of(s, (struct cb_span){at, i - at});
    struct cb_span t = {++i, 0};
    while (i < end && s[i] != ' ')
        i++;
    t.len = i - t.at;
    int rc = target(h, s, t, why);
    if (rc != 0)
        return rc;
    if (t.len > CB_HTTP_TARGET_MAX)
        return fail(why, 414, "the request target is too long");
    if (end - i != 9 || memcmp(s + i, " HTTP/", 6) != 0 || s[i + 7] != '.')
        return fail(why, 400, "malformed request line");
    if (s[i + 6] != '1' || (s[i + 8] != '0' && s[i + 8] != '1'))
        return fail(why, 505, "HTTP/1.0 and HTTP/1.1 only");
    h->minor = (uint32_t)(s[i + 8] - '0');
    h->keep = h->minor == 1;
    return 0;
}

static int content_length(struct cb_http *h, const char *s, struct cb_span v, const char **why)
{
    uint64_t n = 0;
    if (h->has_length)
        return fail(why, 400, "Content-Length twice");
    if (v.len == 0 || v.len > 18)
        return fail(why, v.len == 0 ? 400 : 413, "bad Content-Length");
    for (uint32_t i = 0; i < v.len; i++) {
        char c = s[v.at + i];
        if (c < '0' || c > '9')
            return fail(why, 400, "bad Content-Length");
        n = n * 10 + (uint64_t)(c - '0');
    }
    h->has_length = 1;
    h->length = n;
    return 0;
}

/* Connection: a list of tokens. */
static void connection(struct cb_http *h, const char *s, struct cb_span v)
{
    for (uint32_t i = 0; i < v.len;) {
        uint32_t from = i;
        while (i < v.len && s[v.at + i] != ',')
            i++;
        struct cb_span t = {v.at + from, i - from};
        while (t.len > 0 && (s[t.at] == ' ' || s[t.at] == '\t')) {
            t.at++;
            t.len--;
        }
        while (t.len > 0 && (s[t.at + t.len - 1] == ' ' || s[t.at + t.len - 1] == '\t'))
            t.len--;
        if (cb_span_is_nocase(s, t, "close"))
            h->keep = 0;
        else if (h->minor == 0 && cb_span_is_nocase(s, t, "keep-alive"))
            h->keep = 1;
        i++;
    }
}

static int header_value(struct cb_http *h, const char *s, struct cb_span name, struct cb_span v,
                        const char **why)
{
    if (cb_span_is_nocase(s, name, "content-length"))
        return content_length(h, s, v, why);
    if (cb_span_is_nocase(s, name, "transfer-encoding"))
        return fail(why, 501, "Transfer-Encoding is not supported; send Content-Length");
    if (cb_span_is_nocase(s, name, "content-encoding"))
        return fail(why, 415, "Content-Encoding is not supported");
    if (cb_span_is_nocase(s, name, "expect")) {
        if (!cb_span_is_nocase(s, v, "100-continue"))
            return fail(why, 417, "only Expect: 100-continue is known");
        h->expect_continue = 1;
    } else if (cb_span_is_nocase(s, name, "host")) {
        if (h->n_host++ > 0)
            return fail(why, 400, "Host twice");
        if (!h->absolute)
            h->host = v;
    } else if (cb_span_is_nocase(s, name, "connection")) {
        connection(h, s, v);
    } else if (cb_span_is_nocase(s, name, "authorization")) {
        if (h->authorization.len > 0)
            return fail(why, 400, "Authorization twice");
        h->authorization = v;
    } else if (cb_span_is_nocase(s, name, "origin")) {
        h->origin = v;
    } else if (cb_span_is_nocase(s, name, "content-type")) {
        struct cb_span type = v;
        for (uint32_t i = 0; i < v.len; i++) {
            if (s[v.at + i] == ';' || s[v.at + i] == ' ' || s[v.at + i] == '\t') {
                type.len = i;
                break;
            }
        }
        h->type = cb_span_is_nocase(s, type, "application/json") ? CB_HTTP_TYPE_JSON
                                                                  : CB_HTTP_TYPE_OTHER;
    }
    return 0;
}

static int header_line(struct cb_http *h, const char *s, uint32_t at, uint32_t n, const char **why)
{
    struct cb_span name = {at, 0}, v;
    uint32_t i = at, end = at + n;
    while (i < end && is_token(s[i]))
        i++;
    name.len = i - at;
    if (name.len == 0 || i >= end || s[i] != ':')
        return fail(why, 400, "malformed header line");
    for (i++; i < end && (s[i] == ' ' || s[i] == '\t'); i++) {
    }
    while (end > i && (s[end - 1] == ' ' || s[end - 1] == '\t'))
        end--;
    v = (struct cb_span){i, end - i};
    return header_value(h, s, name, v, why);
}

/* No control character but TAB belongs into a head, whole or not; above 0x7f
 * only in values, which are never looked into there. */
static int check_bytes(const char *s, size_t from, size_t n, const char **why)
{
    for (size_t i = from; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c == '\r' && i + 1 == n)
            break; /* its LF is to come */
        if (c == '\r' && s[i + 1] == '\n') {
            i++;
            continue;
        }
        if ((c < 0x20 && c != '\t') || c == 0x7f)
            return fail(why, 400, c == '\n' ? "a line that ends without CR"
                                            : "control character in the head");
    }
    return 0;
}

static int finish(struct cb_http *h, uint32_t bytes, const char **why)
{
    if (h->minor == 1 && h->n_host == 0)
        return fail(why, 400, "Host is missing");
    if (h->method == CB_HTTP_POST && !h->has_length)
        return fail(why, 411, "Content-Length is missing");
    h->bytes = bytes;
    return 1;
}

int cb_http_parse(struct cb_http *h, const char *buf, size_t n, const char **why)
{
    size_t avail = n < CB_HTTP_HEAD_MAX ? n : CB_HTTP_HEAD_MAX;
    uint32_t at = 0, lines = 0;
    memset(h, 0, sizeof *h);
    for (;;) {
        const char *lf = memchr(buf + at, '\n', avail - at);
        uint32_t end = lf != NULL ? (uint32_t)(lf - buf) : (uint32_t)avail;
        int rc = check_bytes(buf, at, lf != NULL ? end + 1u : end, why);
        if (rc != 0)
            return rc;
        if (lf == NULL) {
            if (lines == 0 && avail > CB_HTTP_TARGET_MAX + 64)
                return fail(why, 414, "the request line is too long");
            return n >= CB_HTTP_HEAD_MAX ? fail(why, 431, "the header is too long") : 0;
        }
        uint32_t len = end - at; /* with its CR, which check_bytes saw */
        if (len == 0)
            return fail(why, 400, "a line that ends without CR");
        len--;
        if (lines == 0)
            rc = request_line(h, buf, at, len, why);
        else if (len == 0)
            return finish(h, end + 1, why);
        else
            rc = header_line(h, buf, at, len, why);
        if (rc != 0)
            return rc;
        if (lines++ > CB_HTTP_HEADERS_MAX)
            return fail(why, 431, "too many headers");
        at = end + 1;
    }
}

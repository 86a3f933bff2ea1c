/* http.h — a strict reader of HTTP/1.x request heads (RFC 9112), no more than
 * this service needs: CRLF only, no folding, no chunked bodies. */
#ifndef CB_SERVE_HTTP_H
#define CB_SERVE_HTTP_H

#include <stddef.h>
#include <stdint.h>

#define CB_HTTP_HEAD_MAX 8192u   /* bytes of request line and headers together */
#define CB_HTTP_TARGET_MAX 1024u
#define CB_HTTP_HEADERS_MAX 64u

enum cb_http_method { CB_HTTP_GET, CB_HTTP_HEAD, CB_HTTP_POST, CB_HTTP_OTHER };
enum cb_http_type { CB_HTTP_TYPE_NONE, CB_HTTP_TYPE_JSON, CB_HTTP_TYPE_OTHER };

struct cb_span {
    uint32_t at, len; /* bytes in the head; len 0 = absent or empty */
};

struct cb_http {
    enum cb_http_method method;
    uint32_t minor;             /* HTTP/1.minor, 0 or 1 */
    int absolute;               /* the target names the host itself */
    struct cb_span path;        /* of the target, without its query; starts with '/' */
    struct cb_span host;        /* of the target or of the header Host */
    struct cb_span authorization, origin;
    uint32_t n_host;            /* headers Host */
    int has_length;
    uint64_t length;            /* of the body; 0 without Content-Length */
    enum cb_http_type type;     /* Content-Type */
    int keep;                   /* the connection may serve another request */
    int expect_continue;
    uint32_t bytes;             /* of the whole head */
};

/* Reads buf[0..n): 1 = a whole head, in *h; 0 = it goes on; otherwise -status
 * of the answer that it deserves, *why says in words. What is wrong is found
 * as soon as it is there. An empty line before the head is wrong here: one that
 * may be passed over is conn.c's to take away. */
int cb_http_parse(struct cb_http *h, const char *buf, size_t n, const char **why);

int cb_span_is(const char *buf, struct cb_span s, const char *text);
int cb_span_is_nocase(const char *buf, struct cb_span s, const char *text);

#endif

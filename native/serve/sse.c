/* sse.c — framing: server-sent events (WHATWG HTML, 9.2) and the chunked
 * transfer coding (RFC 9112, 7.1). */
#if !defined(_WIN32)
#include <stdio.h>
#include <string.h>

#include "serve/server.h"

void cb_event_begin(struct cb_buf *b)
{
    cb_buf_str(b, "data: ");
}

void cb_event_end(struct cb_buf *b)
{
    cb_buf_str(b, "\n\n");
}

void cb_event_done(struct cb_buf *b)
{
    cb_buf_str(b, "data: [DONE]\n\n");
}

void cb_event_comment(struct cb_buf *b, const char *text)
{
    cb_buf_fmt(b, ": %s\n\n", text);
}

#define SIZE_LINE 6u /* "7ffa\r\n": leading zeros are allowed */

void cb_chunk_begin(struct cb_buf *b, size_t *at)
{
    *at = b->n;
    cb_buf_str(b, "0000\r\n");
}

void cb_chunk_end(struct cb_buf *b, size_t at)
{
    char size[8];
    size_t n = b->n - at - SIZE_LINE;
    if (n == 0) { /* would end the body */
        b->n = at;
        return;
    }
    snprintf(size, sizeof size, "%04x", (unsigned)n & 0xffffu);
    memcpy(b->p + at, size, 4);
    cb_buf_str(b, "\r\n");
}
#else
typedef int cb_serve_sse_is_posix;
#endif

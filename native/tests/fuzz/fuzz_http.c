/* fuzz_http.c — libFuzzer harness: hostile request heads.
 *
 * The input lies at the very end of a heap block of its own size. Whatever is
 * read must be the same however the bytes arrive: a prefix that was refused or
 * accepted stays so when more comes. Host and Origin checks see the spans. */
#include <stdlib.h>
#include <string.h>

#include "serve/access.h"
#include "serve/http.h"

static void require(int ok)
{
    if (!ok)
        abort();
}

static void check_span(struct cb_span s, const struct cb_http *h)
{
    require(s.at <= h->bytes && s.len <= h->bytes - s.at);
}

static void check_whole(const struct cb_http *h, const char *buf)
{
    static const char *const names[] = {"board.lan"};
    require(h->bytes >= 16 && h->bytes <= CB_HTTP_HEAD_MAX);
    require(memcmp(buf + h->bytes - 2, "\r\n", 2) == 0);
    require(h->path.len >= 1 && h->path.len <= CB_HTTP_TARGET_MAX && buf[h->path.at] == '/');
    require(h->minor <= 1 && h->n_host <= 1 && (h->has_length || h->length == 0));
    require(h->method != CB_HTTP_POST || h->has_length);
    check_span(h->path, h);
    check_span(h->host, h);
    check_span(h->origin, h);
    check_span(h->authorization, h);
    struct cb_tokens t = {1, {"0"}};
    require(!cb_tokens_allow(&t, buf + h->authorization.at, h->authorization.len));
    (void)cb_host_allowed(buf + h->host.at, h->host.len, names, 1);
    (void)cb_origin_allowed(buf + h->origin.at, h->origin.len, buf + h->host.at, h->host.len);
}

static int parse_tight(struct cb_http *h, const uint8_t *data, size_t n)
{
    const char *why = NULL;
    char *buf = malloc(n > 0 ? n : 1);
    require(buf != NULL);
    memcpy(buf, data, n);
    int rc = cb_http_parse(h, buf, n, &why);
    require(rc == 0 || rc == 1 || (rc <= -400 && rc > -600 && why != NULL));
    if (rc == 1)
        check_whole(h, buf);
    free(buf);
    return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct cb_http whole, part;
    struct cb_address address;
    char text[96];
    if (n > 2 * CB_HTTP_HEAD_MAX)
        return 0;
    int rc = parse_tight(&whole, data, n);
    size_t step = n > 64 ? n / 16 : 1;
    for (size_t i = 1; i < n; i += step) {
        int early = parse_tight(&part, data, i);
        require(early == 0 || early == rc);
        require(early != 1 || part.bytes == whole.bytes);
    }
    size_t len = n < sizeof text - 1 ? n : sizeof text - 1;
    memcpy(text, data, len);
    text[len] = '\0';
    (void)cb_address_parse(&address, text, NULL);
    return 0;
}

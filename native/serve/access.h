/* access.h — who may ask: bearer tokens, Host and Origin headers, addresses. */
#ifndef CB_SERVE_ACCESS_H
#define CB_SERVE_ACCESS_H

#include <stddef.h>
#include <stdint.h>

#include "colibri.h"

#define CB_TOKENS_MAX 16u
#define CB_TOKEN_MIN 16u  /* characters */
#define CB_TOKEN_MAX 256u

struct cb_tokens {
    uint32_t n;
    char hash[CB_TOKENS_MAX][65]; /* sha256, so that lengths do not matter in comparing */
};
/* One token a line; empty lines and lines with # are passed over. The file may
 * not be readable by everybody. */
int cb_tokens_read(struct cb_tokens *t, const char *path, struct cb_err *err);
/* value: of an Authorization header. Time does not depend on what matches. */
int cb_tokens_allow(const struct cb_tokens *t, const char *value, size_t n);

/* A Host header, port or not: localhost, an address in digits, or one of names.
 * A page of another site can only come under a name of its own (DNS rebinding). */
int cb_host_allowed(const char *host, size_t n, const char *const *name, uint32_t n_name);
/* An Origin header against the Host header of the same request. */
int cb_origin_allowed(const char *origin, size_t n, const char *host, size_t n_host);

struct cb_address {
    int v6, loopback;
    uint8_t ip[16];
    uint16_t port;
};
/* "127.0.0.1:8080", "[::1]:8080", "localhost:8080" */
int cb_address_parse(struct cb_address *a, const char *text, struct cb_err *err);

#endif

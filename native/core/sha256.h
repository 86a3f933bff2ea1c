/* sha256.h — FIPS 180-4 SHA-256. */
#ifndef CB_SHA256_H
#define CB_SHA256_H

#include <stddef.h>
#include <stdint.h>

struct cb_sha256 {
    uint32_t h[8];
    uint64_t n;       /* bytes so far */
    uint8_t buf[64];
};

void cb_sha256_init(struct cb_sha256 *s);
void cb_sha256_add(struct cb_sha256 *s, const void *p, size_t n);
void cb_sha256_hex(struct cb_sha256 *s, char hex[65]); /* ends the hash */

#endif

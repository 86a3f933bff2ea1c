/* access.c — see access.h. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include "serve/access.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/sha256.h"

#define TOKEN_FILE_MAX 8192u

static void hash(const char *p, size_t n, char hex[65])
{
    struct cb_sha256 s;
    cb_sha256_init(&s);
    cb_sha256_add(&s, p, n);
    cb_sha256_hex(&s, hex);
}

static int add_token(struct cb_tokens *t, const char *p, size_t n, const char *path,
                     struct cb_err *err)
{
    if (n < CB_TOKEN_MIN || n > CB_TOKEN_MAX)
        return cb_fail(err, CB_EINVAL, "%.150s: a token has %u to %u characters, one has %zu", path,
                       CB_TOKEN_MIN, CB_TOKEN_MAX, n);
    for (size_t i = 0; i < n; i++)
        if (p[i] <= 0x20 || p[i] >= 0x7f)
            return cb_fail(err, CB_EINVAL, "%.150s: a token holds a character that a header may not",
                           path);
    if (t->n == CB_TOKENS_MAX)
        return cb_fail(err, CB_EINVAL, "%.150s: more than %u tokens", path, CB_TOKENS_MAX);
    hash(p, n, t->hash[t->n++]);
    return CB_OK;
}

static int split(struct cb_tokens *t, const char *p, size_t n, const char *path, struct cb_err *err)
{
    for (size_t i = 0; i < n;) {
        size_t from = i;
        while (i < n && p[i] != '\n')
            i++;
        size_t len = i - from;
        if (len > 0 && p[from + len - 1] == '\r')
            len--;
        i++;
        if (len == 0 || p[from] == '#')
            continue;
        int rc = add_token(t, p + from, len, path, err);
        if (rc < 0)
            return rc;
    }
    return t->n > 0 ? CB_OK : cb_fail(err, CB_EINVAL, "%.180s holds no token", path);
}

int cb_tokens_read(struct cb_tokens *t, const char *path, struct cb_err *err)
{
    char buf[TOKEN_FILE_MAX + 1];
    struct stat st;
    size_t n = 0;
    t->n = 0;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* nor wait for a pipe */
    if (fd < 0 || fstat(fd, &st) != 0) {
        int rc = cb_fail(err, CB_EINVAL, "token file %.150s: %s", path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return rc;
    }
    for (ssize_t got; n < sizeof buf && (got = read(fd, buf + n, sizeof buf - n)) > 0;)
        n += (size_t)got;
    close(fd);
    if (!S_ISREG(st.st_mode) || n > TOKEN_FILE_MAX)
        return cb_fail(err, CB_EINVAL, "token file %.150s: not a file of at most %u bytes", path,
                       TOKEN_FILE_MAX);
    if (st.st_mode & S_IRWXO)
        return cb_fail(err, CB_EINVAL, "token file %.150s: everybody may read it; chmod 600", path);
    int rc = split(t, buf, n, path, err);
    memset(buf, 0, sizeof buf);
    return rc;
}

int cb_tokens_allow(const struct cb_tokens *t, const char *value, size_t n)
{
    char hex[65];
    unsigned any = 0;
    if (n < 7 || strncasecmp(value, "Bearer ", 7) != 0)
        return 0;
    hash(value + 7, n - 7, hex);
    for (uint32_t i = 0; i < t->n; i++) {
        unsigned differ = 0;
        for (size_t k = 0; k < 64; k++)
            differ |= (unsigned)(hex[k] ^ t->hash[i][k]) & 0xffu;
        any |= (differ - 1u) >> 31; /* 1 only when differ is 0 */
    }
    return (int)any;
}

/* The host without its port: *n shrinks. 0 when it is malformed. */
static int cut_port(const char *s, size_t *n)
{
    size_t len = *n, end;
    if (len > 0 && s[0] == '[') {
        const char *close_at = memchr(s, ']', len);
        if (close_at == NULL)
            return 0;
        end = (size_t)(close_at - s) + 1;
    } else {
        const char *colon = memchr(s, ':', len);
        end = colon != NULL ? (size_t)(colon - s) : len;
    }
    if (end < len) {
        if (s[end] != ':' || len - end > 6)
            return 0;
        for (size_t i = end + 1; i < len; i++)
            if (s[i] < '0' || s[i] > '9')
                return 0;
    }
    *n = end;
    return end > 0;
}

int cb_host_allowed(const char *host, size_t n, const char *const *name, uint32_t n_name)
{
    char text[64];
    uint8_t ip[16];
    if (!cut_port(host, &n))
        return 0;
    for (uint32_t i = 0; i < n_name; i++)
        if (strlen(name[i]) == n && strncasecmp(name[i], host, n) == 0)
            return 1;
    if (n == 9 && strncasecmp(host, "localhost", 9) == 0)
        return 1;
    int v6 = host[0] == '[';
    size_t len = v6 ? n - 2 : n;
    if (len >= sizeof text)
        return 0;
    memcpy(text, v6 ? host + 1 : host, len);
    text[len] = '\0';
    return strlen(text) == len && inet_pton(v6 ? AF_INET6 : AF_INET, text, ip) == 1;
}

int cb_origin_allowed(const char *origin, size_t n, const char *host, size_t n_host)
{
    if (n > 7 && strncasecmp(origin, "http://", 7) == 0) {
        origin += 7;
        n -= 7;
    } else if (n > 8 && strncasecmp(origin, "https://", 8) == 0) {
        origin += 8;
        n -= 8;
    } else {
        return 0; /* "null" and other schemes */
    }
    return n == n_host && strncasecmp(origin, host, n) == 0;
}

int cb_address_parse(struct cb_address *a, const char *text, struct cb_err *err)
{
    char host[64];
    memset(a, 0, sizeof *a);
    const char *colon = strrchr(text, ':');
    size_t n = colon != NULL ? (size_t)(colon - text) : 0;
    char *end = NULL;
    unsigned long port = colon != NULL ? strtoul(colon + 1, &end, 10) : 0;
    if (n == 0 || n >= sizeof host || colon[1] < '0' || colon[1] > '9' || *end != '\0' || port > 65535)
        return cb_fail(err, CB_EINVAL, "--listen %.80s: expected ADDRESS:PORT, as 127.0.0.1:8080 or "
                       "[::1]:8080", text);
    memcpy(host, text, n);
    host[n] = '\0';
    a->port = (uint16_t)port;
    if (host[0] == '[' && host[n - 1] == ']') {
        host[n - 1] = '\0';
        a->v6 = 1;
        if (inet_pton(AF_INET6, host + 1, a->ip) == 1) {
            static const uint8_t one[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
            a->loopback = memcmp(a->ip, one, 16) == 0;
            return CB_OK;
        }
    } else if (inet_pton(AF_INET, strcmp(host, "localhost") == 0 ? "127.0.0.1" : host, a->ip) == 1) {
        a->loopback = a->ip[0] == 127;
        return CB_OK;
    }
    return cb_fail(err, CB_EINVAL, "--listen %.80s: an address in digits is needed", text);
}
#else
typedef int cb_serve_access_is_posix;
#endif

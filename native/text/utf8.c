/* utf8.c — strict UTF-8 (RFC 3629, table 3-7 of the Unicode standard). */
#include "text/text_internal.h"

/* The sequence at s[0..n), n > 0: its length when well-formed, 0 when not, -1
 * when s[0..n) is a proper prefix of a well-formed one. */
static int sequence(const unsigned char *s, size_t n)
{
    unsigned c = s[0], low = 0x80, high = 0xBF;
    int len;
    if (c < 0x80)
        return 1;
    if (c < 0xC2 || c > 0xF4)
        return 0;
    if (c < 0xE0) {
        len = 2;
    } else if (c < 0xF0) {
        len = 3;
        low = c == 0xE0 ? 0xA0 : 0x80;  /* no overlong forms */
        high = c == 0xED ? 0x9F : 0xBF; /* no surrogates */
    } else {
        len = 4;
        low = c == 0xF0 ? 0x90 : 0x80;
        high = c == 0xF4 ? 0x8F : 0xBF; /* nothing above U+10FFFF */
    }
    for (int i = 1; i < len; i++) {
        if ((size_t)i == n)
            return -1;
        if (s[i] < low || s[i] > high)
            return 0;
        low = 0x80;
        high = 0xBF;
    }
    return len;
}

size_t cb_utf8_check(const char *s, size_t n)
{
    const unsigned char *p = (const unsigned char *)s;
    size_t i = 0;
    while (i < n) {
        uint64_t eight;
        if (n - i >= sizeof eight) { /* ASCII, eight bytes at a time */
            memcpy(&eight, p + i, sizeof eight);
            if ((eight & 0x8080808080808080u) == 0) {
                i += sizeof eight;
                continue;
            }
        }
        int len = sequence(p + i, n - i);
        if (len <= 0)
            return i;
        i += (size_t)len;
    }
    return n;
}

size_t cb_utf8_complete(const char *s, size_t n)
{
    const unsigned char *p = (const unsigned char *)s;
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        unsigned char c = p[n - back];
        if (c >= 0xC0) /* a lead byte: is what follows it unfinished? */
            return sequence(p + n - back, back) == -1 ? n - back : n;
        if (c < 0x80)
            break;
    }
    return n;
}

/* fuzz_text.c — libFuzzer harness: hostile tokenizer.coli, then hostile text.
 *
 * Input: u32 length of the file, the file, the rest is text. The CRCs are made
 * right first, or no mutation would get past them. Whatever opens must encode
 * and decode any text inside its arrays, and in a lossless vocabulary give the
 * bytes back. */
#include <stdlib.h>
#include <string.h>

#include "core/container.h"
#include "kernels/kernels.h"
#include "text/text.h"

#define SECTIONS 9u
#define SECTION_BYTES 32u
#define MAX_FILE (1u << 20)
#define MAX_TEXT 4096u

static uint64_t get(const uint8_t *p, int n)
{
    uint64_t v = 0;
    for (int i = 0; i < n; i++)
        v |= (uint64_t)p[i] << (8 * i);
    return v;
}

static void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

/* Sections, directory, header: from the inside out. */
static void mend_crcs(uint8_t *f, size_t n)
{
    if (n < CB_HEADER_BYTES + SECTIONS * SECTION_BYTES)
        return;
    for (uint32_t k = 0; k < SECTIONS; k++) {
        uint8_t *e = f + CB_HEADER_BYTES + k * SECTION_BYTES;
        uint64_t at = get(e + 8, 8), size = get(e + 16, 8);
        if (at <= n && size <= n - at)
            put32(e + 24, cb_crc32c(0, f + at, (size_t)size));
    }
    put32(f + 56, cb_crc32c(0, f + CB_HEADER_BYTES, SECTIONS * SECTION_BYTES));
    put32(f + 60, cb_crc32c(0, f, 60));
}

static void require(int ok)
{
    if (!ok)
        abort();
}

static void check_utf8(const char *s, size_t n)
{
    size_t ok = cb_utf8_check(s, n), shown = cb_utf8_complete(s, n);
    require(ok <= n && shown <= n && n - shown <= 3);
    require(shown == n || ok <= shown); /* held back: an unfinished sequence */
}

static void decode(const struct cb_text *t, const int32_t *ids, int n, int special, char *out,
                   size_t *len)
{
    *len = 0;
    for (int i = 0; i < n; i++) {
        size_t k;
        const char *s = cb_text_token(t, ids[i], special, &k);
        require(k <= MAX_FILE);
        if (*len + k <= 2 * MAX_TEXT)
            memcpy(out + *len, s, k);
        *len += k;
    }
}

static void try_text(const struct cb_text *t, const char *text, size_t n, int special)
{
    static int32_t ids[MAX_TEXT];
    static char out[2 * MAX_TEXT];
    size_t need = cb_text_scratch_bytes(n), len;
    struct cb_err err;
    void *scratch = malloc(need); /* exact: an overrun shows */
    require(scratch != NULL);
    int got = cb_text_encode(t, text, n, special, 0, ids, MAX_TEXT, scratch, need, &err);
    require(got >= 0 && (size_t)got <= n); /* a token has at least one byte */
    for (int i = 0; i < got; i++)
        require(ids[i] >= 0 && (uint32_t)ids[i] < cb_text_n_vocab(t));
    decode(t, ids, got, special, out, &len);
    require(len <= n); /* bytes may lack a token, none may be added */
    if (got > 0)
        require(cb_text_encode(t, text, n, special, 0, ids, (size_t)got - 1, scratch, need, &err) ==
                CB_ECONTEXT);
    int strict = cb_text_encode(t, text, n, special, 1, ids, MAX_TEXT, scratch, need, &err);
    require((strict == CB_EUTF8) == (cb_utf8_check(text, n) != n));
    free(scratch);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 4)
        return 0;
    size_t n = (size_t)get(data, 4), rest = size - 4;
    if (n > rest)
        n = rest;
    if (n > MAX_FILE)
        return 0;
    const char *text = (const char *)data + 4 + n;
    size_t len = rest - n < MAX_TEXT ? rest - n : MAX_TEXT;
    check_utf8(text, len);
    uint8_t *file = malloc(n > 0 ? n : 1);
    require(file != NULL);
    memcpy(file, data + 4, n);
    mend_crcs(file, n);
    struct cb_text t;
    struct cb_err err;
    if (cb_text_open(&t, file, n, &err) == 0) {
        try_text(&t, text, len, 1);
        try_text(&t, text, len, 0);
        size_t k;
        for (uint32_t id = 0; id < cb_text_n_vocab(&t); id++) {
            (void)cb_text_token(&t, (int32_t)id, 1, &k);
            (void)cb_text_is_eog(&t, (int32_t)id);
        }
    }
    free(file);
    return 0;
}

/* fuzz_files.c — libFuzzer harness: hostile manifest.json; hostile headers and
 * directories of .coli files with -DFUZZ_COLI.
 *
 * Input: the manifest's text, every getter of its JSON tried too; or a byte that
 * chooses the kind of file, then the file. Its header's CRC is made right first, or
 * no mutation would get past it. What parses must lie inside the file. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/container.h"
#include "core/json.h"
#include "kernels/kernels.h"
#include "model/manifest.h"

#define MAX_TEXT (1u << 16)

static void require(int ok)
{
    if (!ok)
        abort();
}

#ifndef FUZZ_COLI
/* Every token and every getter stays inside the text. */
static void try_json(const char *text, size_t n)
{
    struct cb_json j;
    size_t cap = n / 2 + 2;
    struct cb_json_tok *tok = malloc(cap * sizeof *tok);
    char small[8];
    require(tok != NULL);
    if (cb_json_parse(&j, text, n, tok, (uint32_t)cap, NULL) == 0) {
        require(j.n_tok > 0 && tok[0].next == j.n_tok);
        for (uint32_t t = 0; t < j.n_tok; t++) {
            double d;
            uint64_t u;
            int b;
            require(tok[t].at <= n && tok[t].len <= n - tok[t].at && tok[t].next > t &&
                    tok[t].next <= j.n_tok);
            if (cb_json_str(&j, t, "x", small, sizeof small, NULL) == 0)
                require(strlen(small) < sizeof small);
            if (cb_json_f64(&j, t, "x", &d, NULL) == 0)
                require(isfinite(d));
            if (cb_json_u64(&j, t, 1000, "x", &u, NULL) == 0)
                require(u <= 1000);
            (void)cb_json_bool(&j, t, "x", &b, NULL);
            uint32_t v = cb_json_get(&j, t, "name");
            require(v == CB_JSON_NONE || (v > t && v < tok[t].next));
        }
    }
    free(tok);
}

static void try_manifest(const char *text, size_t n)
{
    struct cb_manifest m;
    struct cb_err err = {0, ""};
    void *scratch = malloc((size_t)cb_manifest_scratch(n));
    require(scratch != NULL);
    int rc = cb_manifest_parse(&m, text, n, scratch, &err);
    require(rc == 0 || (rc == err.code && strstr(err.msg, "manifest.json") != NULL));
    if (rc == 0)
        require(m.n_layer >= 1 && m.n_layer <= CB_MAX_LAYER && m.n_expert <= CB_MAX_EXPERT &&
                m.n_used <= m.n_expert && m.n_head % m.n_head_kv == 0 && m.rope_dim % 2 == 0 &&
                m.rope_dim <= m.head_dim && m.n_dense_layer <= m.n_layer);
    free(scratch);
}
#else
static void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

static void try_dense(const uint8_t *dir, const struct cb_header *h, size_t n)
{
    struct cb_dense_entry e;
    for (uint32_t i = 0; i < h->count; i++)
        if (cb_dense_entry_parse(dir, i, h, &e, NULL) == 0)
            require(e.size <= n && e.offset >= h->payload_offset && e.offset <= n - e.size &&
                    e.rows > 0 && e.cols > 0 && strlen(e.name) <= 48);
}

static void try_experts(const uint8_t *dir, const struct cb_header *h, size_t n)
{
    struct cb_expert_entry e;
    for (uint32_t i = 0; i < h->count; i++)
        if (cb_expert_entry_parse(dir, i, h, &e, NULL) == 0) {
            require(e.size <= n && e.offset >= h->payload_offset && e.offset <= n - e.size);
            for (int k = 0; k < 3; k++)
                require(e.part[k].size <= e.size && e.part[k].offset <= e.size - e.part[k].size &&
                        e.part[k].size ==
                            cb_mat_bytes(e.part[k].type, e.part[k].rows, e.part[k].cols));
        }
}

static void try_file(uint8_t *f, size_t n, enum cb_file_kind kind)
{
    static const uint32_t entry[] = {0, 0, CB_DENSE_ENTRY, CB_EXPERT_ENTRY};
    struct cb_header h;
    if (n < CB_HEADER_BYTES)
        return;
    put32(f + 60, cb_crc32c(0, f, 60));
    if (cb_header_parse(f, n, "x", kind, entry[kind], &h, NULL) != 0)
        return;
    require(h.payload_offset <= n && h.payload_size == n - h.payload_offset &&
            CB_HEADER_BYTES + (uint64_t)h.count * entry[kind] <= h.payload_offset);
    if (kind == CB_FILE_DENSE)
        try_dense(f + h.dir_offset, &h, n);
    else if (kind == CB_FILE_EXPERTS)
        try_experts(f + h.dir_offset, &h, n);
}
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t skip = 0;
#ifdef FUZZ_COLI
    skip = 1;
#endif
    if (size < skip || size > MAX_TEXT)
        return 0;
    size_t n = size - skip;
    uint8_t *copy = malloc(n > 0 ? n : 1); /* exact: an overrun shows */
    require(copy != NULL);
    memcpy(copy, data + skip, n);
#ifdef FUZZ_COLI
    try_file(copy, n, (enum cb_file_kind)(data[0] % 3 + 1));
#else
    try_json((const char *)copy, n);
    try_manifest((const char *)copy, n);
#endif
    free(copy);
    return 0;
}

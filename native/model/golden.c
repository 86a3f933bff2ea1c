/* golden.c — the hash that every board must reproduce. */
#include <string.h>

#include "core/sha256.h"
#include "model/forward.h"

#define GOLDEN_TOKENS 16u

struct hash {
    struct cb_sha256 sha;
    uint32_t n_vocab;
};

static void hash_logits(void *ud, uint32_t i, const float *logits)
{
    struct hash *h = ud;
    (void)i;
    cb_sha256_add(&h->sha, logits, h->n_vocab * sizeof *logits);
}

int cb_golden(struct cb_engine *e, char hex[65], struct cb_err *err)
{
    int32_t tokens[GOLDEN_TOKENS];
    struct hash h;
    uint32_t kv = e->opt.kv_type;
    for (uint32_t i = 0; i < GOLDEN_TOKENS; i++)
        tokens[i] = (int32_t)((i * 2654435761u + 12345u) % e->m.n_vocab);
    cb_sha256_init(&h.sha);
    h.n_vocab = e->m.n_vocab;
    /* An F32 cache has room for an F16 one: the golden is about F16 always. */
    e->opt.kv_type = CB_KV_F16;
    cb_reset(e);
    int rc = cb_forward(e, tokens, 8, hash_logits, &h, NULL, err);
    for (uint32_t i = 8; rc == 0 && i < GOLDEN_TOKENS; i++)
        rc = cb_forward(e, tokens + i, 1, hash_logits, &h, NULL, err);
    cb_reset(e);
    e->opt.kv_type = kv;
    if (rc == 0)
        cb_sha256_hex(&h.sha, hex);
    else
        hex[0] = '\0';
    return rc;
}

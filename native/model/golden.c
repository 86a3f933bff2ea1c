/* golden.c — the hash that every board must reproduce. */
#include <string.h>

#include "core/sha256.h"
#include "model/forward.h"
#include "offload/offload.h"

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
    int32_t tokens[CB_GOLDEN_TOKENS];
    struct hash h;
    const struct cb_options opt = e->opt;
    for (uint32_t i = 0; i < CB_GOLDEN_TOKENS; i++)
        tokens[i] = (int32_t)((i * 2654435761u + 12345u) % e->rel->m.n_vocab);
    cb_sha256_init(&h.sha);
    h.n_vocab = e->rel->m.n_vocab;
    /* The golden is about exact routing and an F16 cache, whatever was asked for;
     * the layout takes room for that. */
    e->opt.kv_type = CB_KV_F16;
    e->opt.ctx = CB_GOLDEN_TOKENS; /* a narrower cache type leaves room for these */
    e->opt.on_miss = CB_MISS_WAIT;
    e->opt.extra_expert = 0;
    cb_offload_pause(e, 1); /* this board's own bits */
    cb_reset(e);
    int rc = cb_forward(e, tokens, 8, hash_logits, &h, NULL, err);
    for (uint32_t i = 8; rc == 0 && i < CB_GOLDEN_TOKENS; i++)
        rc = cb_forward(e, tokens + i, 1, hash_logits, &h, NULL, err);
    cb_reset(e);
    cb_offload_pause(e, 0);
    e->opt = opt;
    if (rc == 0)
        cb_sha256_hex(&h.sha, hex);
    else
        hex[0] = '\0';
    return rc;
}

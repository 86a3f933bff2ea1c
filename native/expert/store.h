/* store.h — where expert weights lie.
 *
 * Weight mode `arena`: every expert has a slot in the arena, read once at start
 * and checked by CRC32C; a hit is a pointer. */
#ifndef CB_EXPERT_STORE_H
#define CB_EXPERT_STORE_H

#include <stdint.h>

#include "core/arena.h"
#include "core/container.h"
#include "model/mat.h"

struct cb_experts {
    uint32_t n_layer;      /* MoE layers */
    uint32_t n_expert;
    struct cb_ffn *ffn;    /* [n_layer][n_expert] */
};

/* Expert e of MoE layer l (counted among MoE layers). */
static inline const struct cb_ffn *cb_expert(const struct cb_experts *s, uint32_t l, uint32_t e)
{
    return &s->ffn[(uint64_t)l * s->n_expert + e];
}

#endif

/* manifest.h — manifest.json as a struct (docs/format.md). */
#ifndef CB_MANIFEST_H
#define CB_MANIFEST_H

#include <stdint.h>

#include "colibri.h"
#include "model/chat.h"

#define CB_MAX_LAYER 512u
#define CB_MAX_EXPERT 1024u
#define CB_MAX_USED 64u
#define CB_MANIFEST_MAX (1u << 20) /* bytes of manifest.json */

enum cb_rope { CB_ROPE_NONE, CB_ROPE_NORM, CB_ROPE_NEOX };
enum cb_qk_norm { CB_QK_NONE, CB_QK_HEAD, CB_QK_ROW };
enum cb_router_kind { CB_ROUTER_SOFTMAX, CB_ROUTER_SOFTMAX_TOPK };

struct cb_manifest {
    char name[64], arch[32];
    uint8_t model_id[16];
    char golden[65]; /* "" = none */
    uint32_t n_layer, n_embd, n_head, n_head_kv, head_dim, n_vocab, n_ff;
    uint32_t n_expert, n_used, n_expert_ff, n_shexp_ff, n_dense_layer, ctx_train, rope_dim;
    uint32_t n_shard; /* experts-NNNN.coli files */
    enum cb_rope rope;
    enum cb_qk_norm qk_norm;
    enum cb_router_kind router;
    int router_renorm;
    uint32_t window;         /* positions that a windowed layer sees, its own included */
    uint8_t windowed[CB_MAX_LAYER];
    double rope_base, rope_scale;
    float norm_eps, embd_scale, resid_scale, attn_scale, logit_scale;
    struct cb_chat chat;
};

/* Parses and cross-checks manifest.json text[0..n). scratch holds the JSON
 * tokens: cb_manifest_scratch(n) bytes, 8-byte aligned. */
uint64_t cb_manifest_scratch(uint64_t n);
int cb_manifest_parse(struct cb_manifest *m, const char *text, uint64_t n, void *scratch,
                      struct cb_err *err);

/* MoE layers: n_layer - n_dense_layer, 0 for a dense model. */
uint32_t cb_manifest_moe_layers(const struct cb_manifest *m);

#endif

/* engine.h — the inside of struct cb_engine: model, memory, session.
 *
 * Everything below lies in one arena that is laid out by cb_layout() and taken
 * in cb_engine_open(). Shapes: T = tokens of one chunk (<= batch), d = n_embd,
 * H = n_head, G = n_head_kv, hd = head_dim, E = n_expert, K = experts a token
 * may use: n_expert_used, one more with opt.extra_expert. */
#ifndef CB_ENGINE_H
#define CB_ENGINE_H

#include "colibri.h"
#include "core/arena.h"
#include "core/pool.h"
#include "expert/store.h"
#include "kernels/kernels.h"
#include "model/manifest.h"
#include "model/mat.h"
#include "model/watch.h"
#include "text/text.h"

#define CB_BATCH_MAX 256u
#define CB_GOLDEN_TOKENS 16u
#define CB_LOGIT_TILE 4u /* rows of logits kept while all are asked for */

/* One transformer block. Vectors are NULL when the family has none. */
struct cb_layer {
    const float *attn_norm, *ffn_norm;           /* [d] */
    struct cb_mat q, k, v, o;                    /* [H*hd][d], [G*hd][d], [G*hd][d], [d][H*hd] */
    const float *q_bias, *k_bias, *v_bias, *o_bias;
    const float *q_norm, *k_norm;                /* [hd] or [H*hd], [G*hd] */
    struct cb_ffn ffn;                           /* dense layers */
    struct cb_mat router;                        /* [E][d] F32; data NULL = dense layer */
    float *router_norm;                          /* [E] upper bounds of its rows' norms */
    struct cb_ffn shexp;                         /* shared expert; gate.data NULL = none */
    const float *shexp_router;                   /* [d]; NULL = added as it is */
    uint32_t in_wants, mid_wants;                /* activation forms (1 << enum cb_act) of its FFNs */
    void *k_cache, *v_cache;                     /* [sequences][G][length][hd] of kv_type */
};

/* Where a row of the chunk stands: its sequence and position. */
struct cb_place {
    uint32_t seq, pos;
};

/* Activations of one chunk. Strides are padded to CB_GROUP floats. */
struct cb_work {
    struct cb_place *place;  /* [T] */
    float *x, *xn;           /* [T][d] residual stream, normalised input */
    float *q, *k, *v, *att;  /* [T][H*hd], [T][G*hd], [T][G*hd], [T][H*hd] */
    float *proj;             /* [T][d] output of a branch */
    float *score;            /* [threads][ctx] attention scores */
    float *route;            /* [T][E] router logits, then probabilities */
    float *gate, *up;        /* [R][ff] R = T*K (token, rank) rows + T shared-expert rows */
    float *out;              /* [R][d] FFN outputs; row t*K + rank, then T*K + t */
    float *rope_cos, *rope_sin; /* [T][rope_dim/2] */
    double *inv_freq;        /* [rope_dim/2] */
    float *logits;           /* [max(CB_LOGIT_TILE, sequences)][n_vocab] */
    const float *last_logits; /* the row of the last token */
    int32_t *chosen;         /* [T][K] experts in rank order */
    float *weight;           /* [T][K] */
    struct cb_segment *seg;  /* [E + 1] the FFNs at work in this layer */
    uint32_t *distinct;      /* [E] experts of this layer and chunk, ascending */
    uint32_t *row_first;     /* [E + 1] first row of each distinct expert */
    uint8_t *exclude;        /* [E] unhealthy experts of this layer */
    float *guess;            /* [E] next layer's router logits, for look-ahead */
    int32_t *guess_chosen;   /* [K + 1] */
    float *guess_weight;     /* [K + 1] */
    uint32_t *row_token;     /* [R] input row of each FFN row, FFN rows sorted by segment */
    uint32_t *row_out;       /* [R] where its output goes */
    struct cb_acts in;       /* quantised inputs, [T][max(d, H*hd)] */
    struct cb_acts mid;      /* quantised FFN middles, [R][ff] */
    uint32_t ff;             /* floats a row of gate and up */
};

/* One FFN (an expert, a shared expert or a dense FFN) and its rows. */
struct cb_segment {
    struct cb_ffn ffn;
    uint32_t first, n;       /* rows first … first + n - 1 */
    uint32_t expert;         /* UINT32_MAX = shared or dense */
    _Atomic int failed;      /* a fault while computing it */
};

/* What a release of the weights brings apart from experts: everything that
 * cb_swap() exchanges. The geometry is the same for both. */
struct cb_release {
    struct cb_manifest m;
    struct cb_layer *layer;  /* [n_layer] */
    const float *output_norm;
    struct cb_mat token_embd, output;
    const float *rope_freqs; /* [rope_dim/2] divisors or NULL */
    struct cb_text text;
    void *text_file;         /* tokenizer.coli as it is */
    uint64_t text_bytes;
    uint32_t text_bos, text_eos, text_add_bos; /* ids or UINT32_MAX; 0 or 1 */
    void *room;              /* its part of the arena */
    uint64_t room_bytes;
};

struct cb_offload;

/* What made rows other than the model's own; see cb_counters. */
struct cb_lossy {
    uint64_t degraded, zeros, extra;
};

struct cb_engine {
    struct cb_options opt;   /* with the defaults filled in; model_dir is NULL */
    struct cb_kernels kern;
    struct cb_pool pool;
    struct cb_ledger ledger;
    struct cb_release *rel;  /* the one in use */
    struct cb_release release[2]; /* the second only with opt.hot_swap */
    struct cb_store store;
    struct cb_work w;
    void *text_scratch;      /* cb_text_scratch_bytes(text_max) */
    size_t text_max;         /* longest text that can be encoded, bytes */
    float *sample_weight;    /* [n_vocab] */
    int32_t *sample_index;   /* [n_vocab] */

    uint32_t used_max;       /* K */
    uint32_t n_slot;         /* expert slots planned */
    uint64_t slot_bytes;
    struct cb_watch watch;
    struct cb_offload *offload; /* NULL = no link asked for */
    uint32_t *pos;           /* [sequences] tokens in each KV cache */
    struct cb_counters counters;
    struct cb_lossy lossy[CB_SEQ_MAX]; /* of each sequence in this cb_run */
    uint64_t *route_ns;      /* [n_moe_layer] of the last cb_eval */
    int32_t *last_experts;   /* [n_moe_layer][K] */
    float *last_weights;     /* [n_moe_layer][K] */

    void *block;             /* the mapping that holds all this */
    uint64_t block_bytes;
};

#endif

/* forward.h — tokens through the model. */
#ifndef CB_FORWARD_H
#define CB_FORWARD_H

#include "model/engine.h"

/* Called with the logits [n_vocab] of token i of the call, in order. */
typedef void cb_logits_fn(void *ud, uint32_t i, const float *logits);

/* cb_eval() with a function for the logits: NULL = only the last token's are
 * computed, into e->w.last_logits. */
int cb_forward(struct cb_engine *e, const int32_t *tokens, uint32_t n, cb_logits_fn *fn, void *ud,
               int32_t *experts, struct cb_err *err);

/* RoPE frequencies and per-layer facts of e->rel: once after loading it.
 * CB_EFORMAT for frequencies that no position of the context can be turned by. */
int cb_forward_prepare(struct cb_engine *e, struct cb_err *err);

/* ---- between the parts of a layer --------------------------------------- */

/* One chunk on its way through the layers. */
struct cb_chunk {
    struct cb_engine *e;
    uint32_t n;         /* tokens */
    uint32_t il;        /* layer */
    _Atomic uint32_t bad; /* 1 + row whose numbers are not finite */
};

/* Runs fn over the chunk's rows: on the pool when there are several. */
void cb_rows_run(struct cb_chunk *c, cb_pool_fn *fn);

/* attention.c: from w.xn (normed, prepared in w.in) to w.proj. */
void cb_attention(struct cb_chunk *c);
/* ffn.c: from w.xn (normed, prepared in w.in) to w.out and, for MoE layers,
 * w.chosen and w.weight. CB_ENUMERIC for a router logit that is no number,
 * CB_EEXPERT for an expert that cannot be had. */
int cb_ffn_layer(struct cb_chunk *c, struct cb_err *err);
/* ffn.c: experts asked for by another engine (offload/module.c). The n_token
 * inputs stand in w.xn and w.in in the forms that the experts want; rows are in
 * ascending order of experts, n_row <= batch * K. Row i's output goes to row i
 * of w.out. */
struct cb_ffn_row {
    uint32_t expert, token;
};
int cb_ffn_rows(struct cb_engine *e, uint32_t il, uint32_t n_token, const struct cb_ffn_row *row,
                uint32_t n_row, struct cb_err *err);
/* ffn.c: adds the FFN outputs of token t into y [d], in rank order. */
void cb_ffn_combine(const struct cb_chunk *c, uint32_t t, float *y);

#endif

/* router.h — from router logits to experts and weights. */
#ifndef CB_ROUTER_H
#define CB_ROUTER_H

#include <stdint.h>

#include "kernels/kernels.h"
#include "model/manifest.h"

struct cb_record; /* expert/store.h */

/* What a layer's router is, for the margin certificate. */
struct cb_router {
    const float *w;         /* [n_expert][n_embd] row-major F32 */
    const float *norm;      /* [n_expert] upper bounds of the rows' 2-norms */
    const uint8_t *exclude; /* [n_expert] 1 = unhealthy, pass over; NULL = none */
};

struct cb_route {
    uint32_t n;             /* experts chosen: n_used, or one more */
    int recomputed;         /* the certificate failed: straddlers were recomputed */
    int passed_over;        /* an excluded expert would have been chosen */
};

/* Chooses experts for one token.
 *   logits [n_expert]: F32 products of w and x; consumed
 *   x [n_embd]: the router's input
 *   extra: 1 = one more expert when the top logit is below `below`
 *   chosen, weight [n_used + 1]: rank order: logit descending, index ascending
 *
 * The chosen set is exact with respect to real arithmetic on x: a binary32 dot
 * product in 32 lanes is off by at most gamma·|w|·|x| + (n + 32)·2^-149 with
 * gamma = k·2^-24/(1 - k·2^-24), k = n/32 + 6; when the gap between the last chosen
 * and the first rest is within the two bounds, the experts inside it are recomputed
 * in binary64, and where that bound (Higham, Accuracy and Stability, §3.1) does not
 * tell them apart either, compared without any rounding; ties by index.
 *
 * Weights: `softmax`: softmax over all, gathered, renormalised when
 * router_renorm (the sum held above 2^-14, as llama.cpp does). `softmax_topk`:
 * softmax over the chosen logits. Returns -1 when a logit is NaN or infinite,
 * -2 when fewer than n_used experts are left. */
int cb_route(const struct cb_manifest *m, const struct cb_kernels *kern, const struct cb_router *r,
             float *logits, const float *x, int extra, float below, int32_t *chosen, float *weight,
             struct cb_route *out);

/* Upper bounds of the 2-norms of n_expert rows of n_embd floats. */
void cb_router_norms(float *norm, const float *w, uint32_t n_expert, uint32_t n_embd);

#endif

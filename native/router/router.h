/* router.h — from router logits to experts and weights. */
#ifndef CB_ROUTER_H
#define CB_ROUTER_H

#include <stdint.h>

#include "kernels/kernels.h"
#include "model/manifest.h"

/* Chooses m->n_used experts for one token.
 *   logits [n_expert]: consumed (holds probabilities afterwards for `softmax`)
 *   chosen, weight [n_used]: rank order: value descending, index ascending
 * `softmax`: softmax over all, top-k, weights renormalised when router_renorm
 * (the sum is held above 2^-14, as llama.cpp does). `softmax_topk`: top-k of the
 * logits, softmax over the k. Returns -1 when a logit is NaN or infinite. */
int cb_route(const struct cb_manifest *m, const struct cb_kernels *kern, float *logits,
             int32_t *chosen, float *weight);

#endif

/* router.c — see router.h. */
#include "router/router.h"

#include <math.h>

/* Inserts the n values one by one into a list of the k best. Values are not NaN.
 * Strict > keeps the earlier index first among equals. */
static void top_k(const float *value, uint32_t n, uint32_t k, int32_t *chosen, float *best)
{
    uint32_t have = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (have == k && !(value[i] > best[k - 1]))
            continue;
        uint32_t at = have < k ? have++ : k - 1;
        for (; at > 0 && value[i] > best[at - 1]; at--) {
            best[at] = best[at - 1];
            chosen[at] = chosen[at - 1];
        }
        best[at] = value[i];
        chosen[at] = (int32_t)i;
    }
}

static void renormalise(float *weight, uint32_t k)
{
    float sum = 0.0f;
    for (uint32_t i = 0; i < k; i++)
        sum += weight[i];
    if (sum < 0x1p-14f) /* smallest normal F16: llama.cpp's guard */
        sum = 0x1p-14f;
    for (uint32_t i = 0; i < k; i++)
        weight[i] = weight[i] / sum;
}

int cb_route(const struct cb_manifest *m, const struct cb_kernels *kern, float *logits,
             int32_t *chosen, float *weight)
{
    for (uint32_t i = 0; i < m->n_expert; i++)
        if (!isfinite(logits[i]))
            return -1;
    if (m->router == CB_ROUTER_SOFTMAX)
        kern->softmax(logits, m->n_expert);
    top_k(logits, m->n_expert, m->n_used, chosen, weight);
    if (m->router == CB_ROUTER_SOFTMAX_TOPK)
        kern->softmax(weight, m->n_used);
    else if (m->router_renorm)
        renormalise(weight, m->n_used);
    return 0;
}

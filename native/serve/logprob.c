/* logprob.c — see logprob.h. */
#include "serve/logprob.h"

#include "kernels/kernels.h"

/* Keeps top[0..*n) in order; *n <= n_top. */
static void insert(struct cb_top *top, uint32_t *n, uint32_t n_top, int32_t id, float x)
{
    uint32_t i = *n;
    if (i == n_top) {
        if (x <= top[i - 1].logprob)
            return;
        i--;
    } else {
        ++*n;
    }
    for (; i > 0 && x > top[i - 1].logprob; i--)
        top[i] = top[i - 1];
    top[i] = (struct cb_top){id, x};
}

void cb_logprob(const float *logits, uint32_t n_vocab, int32_t id, float *logprob,
                struct cb_top *top, uint32_t n_top)
{
    uint32_t n = 0;
    double sum = 0;
    float max = logits[0];
    for (uint32_t i = 1; i < n_vocab; i++)
        max = logits[i] > max ? logits[i] : max;
    for (uint32_t i = 0; i < n_vocab; i++) {
        sum += cb_exp((double)logits[i] - (double)max);
        if (n_top > 0)
            insert(top, &n, n_top, (int32_t)i, logits[i]);
    }
    double norm = (double)max + cb_log(sum);
    *logprob = (float)((double)logits[id] - norm);
    for (uint32_t i = 0; i < n; i++)
        top[i].logprob = (float)((double)top[i].logprob - norm);
}

/* logprob.h — log-softmax of a row of logits. */
#ifndef CB_SERVE_LOGPROB_H
#define CB_SERVE_LOGPROB_H

#include "serve/request.h"

/* log p of token id over the whole vocabulary, before temperature and cuts, and
 * the n_top likeliest, best first, ties by id. Float work in a fixed order. */
void cb_logprob(const float *logits, uint32_t n_vocab, int32_t id, float *logprob,
                struct cb_top *top, uint32_t n_top);

#endif

/* generate.h — cb_generate() with somebody who watches the experts. */
#ifndef CB_GENERATE_H
#define CB_GENERATE_H

#include "colibri.h"

/* Sees the experts of every token evaluated, of the prompt and of the answer. */
struct cb_observer {
    int32_t *experts; /* room for [n_moe_layer][batch + 1][n_expert_used] */
    /* After each cb_eval of n tokens: experts is [n_moe_layer][n][n_expert_used]
     * in rank order, -1 where an expert was left out. The engine evaluated the
     * tokens in chunks of its batch. */
    void (*fn)(void *ud, const int32_t *experts, uint32_t n);
    void *ud;
};

/* As cb_generate(); see may be NULL. */
int cb_generate_observed(struct cb_engine *e, const int32_t *prompt, uint32_t n_prompt,
                         uint32_t max_new, const struct cb_sampling *s, const char *const *stop,
                         uint32_t n_stop, cb_text_fn fn, void *ud, const struct cb_observer *see,
                         struct cb_gen_result *res, struct cb_err *err);

#endif

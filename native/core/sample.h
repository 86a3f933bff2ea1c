/* sample.h — one token out of a row of logits.
 *
 * The draw is a pure function of (logits, options, recent tokens, seed, n), and
 * all its float work is IEEE in a fixed order: the same text on every board. */
#ifndef CB_SAMPLE_H
#define CB_SAMPLE_H

#include "colibri.h"

#define CB_REPEAT_MAX 1024u /* most tokens that the repetition penalty looks back on */

/* Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy
 * as 1, 2, 3; SC11): out = block number ctr under key. */
void cb_philox4x32(const uint32_t ctr[4], const uint32_t key[2], uint32_t out[4]);

/* Uniform in [0, 1), a multiple of 2^-53: counter n of stream seed. */
double cb_uniform(uint64_t seed, uint64_t n);

/* CB_EINVAL with the option's name when a value makes no sense. */
int cb_sampling_check(const struct cb_sampling *s, struct cb_err *err);

/* As cb_sample() in colibri.h.
 *   weight, index: scratch, [n_vocab] each; may not overlap logits
 *   recent: oldest first; ids outside the vocabulary are passed over
 * NaN or +infinity in logits, or nothing above -infinity: CB_ENUMERIC. */
int cb_sample_core(float *weight, int32_t *index, const float *logits, uint32_t n_vocab,
                   const struct cb_sampling *s, uint64_t n, const int32_t *recent,
                   uint32_t n_recent, int32_t *id, struct cb_err *err);

#endif

/* kv.h — the key/value cache of one layer: [sequence][G][length] rows of head_dim values in
 * F16, F32 or Q8_0 (34 bytes a 32 values: f16 scale, int8[32]). */
#ifndef CB_KV_H
#define CB_KV_H

#include "model/engine.h"

/* Bytes of one position of one KV head; 0 when the type does not fit head_dim. */
uint64_t cb_kv_row_bytes(uint32_t kv_type, uint32_t head_dim);

/* Positions that layer il keeps: all of the context, or its attention window
 * and one prefill chunk more, so that a chunk is stored before it is read. The
 * cache is a ring: position p lies at row p mod length. */
uint32_t cb_kv_len(const struct cb_engine *e, uint32_t il);

/* Stores x [G][hd] of layer il at its place. */
void cb_kv_put(const struct cb_engine *e, uint32_t il, void *cache, const float *x,
               const struct cb_place *at);
/* score[i] = q·k[p] * scale for the n positions p = from + i of sequence seq, KV head g. */
void cb_kv_score(const struct cb_engine *e, uint32_t il, uint32_t seq, uint32_t g, const float *q,
                 float *score, uint32_t from, uint32_t n);
/* o[hd] = sum over those p in order of score[i] * v[p], one fma each, from 0. */
void cb_kv_mix(const struct cb_engine *e, uint32_t il, uint32_t seq, uint32_t g,
               const float *score, float *o, uint32_t from, uint32_t n);

#endif

/* kv.h — the key/value cache of one layer: [G][ctx] rows of head_dim values in
 * F16, F32 or Q8_0 (34 bytes a 32 values: f16 scale, int8[32]). */
#ifndef CB_KV_H
#define CB_KV_H

#include "model/engine.h"

/* Bytes of one position of one KV head; 0 when the type does not fit head_dim. */
uint64_t cb_kv_row_bytes(uint32_t kv_type, uint32_t head_dim);

/* Stores x [G][hd] at position pos. */
void cb_kv_put(const struct cb_engine *e, void *cache, const float *x, uint32_t pos);
/* score[p] = q·k[p] * scale for positions [0, n) of KV head g. */
void cb_kv_score(const struct cb_engine *e, const void *cache, uint32_t g, const float *q,
                 float *score, uint32_t n);
/* o[hd] = sum over p in order of score[p] * v[p], one fma each, from 0. */
void cb_kv_mix(const struct cb_engine *e, const void *cache, uint32_t g, const float *score,
               float *o, uint32_t n);

#endif

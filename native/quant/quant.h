/* quant.h — float rows to ggml's blocks and back.
 *
 * Rows stand one after another in GGUF order (not x8c16: packing is the converter's work). Every
 * row is independent of the others, nothing is kept between calls, so callers may split a matrix
 * over threads by rows: the bytes do not change. They do not change with the machine either: only
 * + - × ÷ of IEEE binary32 and binary64, in the order that the sources state.
 */
#ifndef CB_QUANT_H
#define CB_QUANT_H

#include <stdint.h>

#include "colibri.h"

/* Bytes of one row of n_cols weights in GGUF order; 0 if the type is unknown, n_cols is 0 or not
 * a multiple of the type's block, or the size overflows. */
uint64_t cb_row_bytes(uint32_t type, uint64_t n_cols);

/* Quantises x[n_rows][n_cols] to out, which must have exactly n_rows · cb_row_bytes() bytes.
 *   type: enum cb_type: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K
 *   importance_or_NULL: [n_cols], >= 0 and finite: how much a column's squared error counts in
 *     the search for scales (NULL: all the same). F32, F16, BF16 and Q8_0 do not search.
 * CB_ENUMERIC names the row (of this call) and column of the first value that is NaN, infinite, or
 * too large for the type's scales, before anything is written. CB_EINVAL: unknown type, wrong
 * size. */
int cb_quantise_rows(uint32_t type, const float *x, uint64_t n_rows, uint64_t n_cols,
                     const float *importance_or_NULL, void *out, uint64_t out_bytes,
                     struct cb_err *err);

/* The exact values of blocks: in[in_bytes], in_bytes = n_rows · cb_row_bytes(), to
 * out[n_rows][n_cols]. Any bytes are valid blocks; NaN and infinite scales come out as such. */
int cb_dequantise_rows(uint32_t type, const void *in, uint64_t in_bytes, uint64_t n_rows,
                       uint64_t n_cols, float *out, struct cb_err *err);

#endif

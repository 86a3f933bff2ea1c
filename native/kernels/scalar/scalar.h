/* scalar.h — what the scalar files give to scalar/init.c. */
#ifndef CB_SCALAR_H
#define CB_SCALAR_H

#include "../impl.h"

cb_gemm_fn cb_gemm_f32_scalar, cb_gemm_f16_scalar, cb_gemm_bf16_scalar;
cb_gemm_fn cb_gemm_q4_0_scalar, cb_gemm_q4_1_scalar, cb_gemm_q5_0_scalar, cb_gemm_q5_1_scalar;
cb_gemm_fn cb_gemm_q8_0_scalar, cb_gemm_q4_k_scalar, cb_gemm_q5_k_scalar, cb_gemm_q6_k_scalar;

void cb_quant_q8_0_scalar(struct cb_q8_0 *y, const float *x, size_t n);
void cb_quant_q8_k_scalar(struct cb_q8_k *y, const float *x, size_t n);

void cb_attn_init_scalar(struct cb_kernels *k);
void cb_vec_init_scalar(struct cb_kernels *k);

#endif

/* neon.h — the NEON kernels, for init_neon.c. Meaning and shapes: kernels.h. */
#ifndef CB_NEON_H
#define CB_NEON_H

#include "../kernels.h"

cb_gemm_fn cb_gemm_q4_0_neon, cb_gemm_q4_1_neon, cb_gemm_q5_0_neon, cb_gemm_q5_1_neon;
cb_gemm_fn cb_gemm_q8_0_neon, cb_gemm_q4_k_neon, cb_gemm_q5_k_neon, cb_gemm_q6_k_neon;
cb_gemm_fn cb_gemm_f32_neon, cb_gemm_f16_neon, cb_gemm_bf16_neon;

void cb_quant_q8_0_neon(struct cb_q8_0 *y, const float *x, size_t n);
void cb_quant_q8_k_neon(struct cb_q8_k *y, const float *x, size_t n);

float cb_dot_neon(const float *a, const float *b, size_t n);
float cb_sum_neon(const float *x, size_t n);
float cb_max_neon(const float *x, size_t n);
void cb_rmsnorm_neon(float *y, const float *x, const float *w, size_t n, float eps);
void cb_add_neon(float *y, const float *x, size_t n);
void cb_scale_neon(float *x, float s, size_t n);
void cb_axpy_neon(float *y, float a, const float *x, size_t n);
void cb_silu_mul_neon(float *y, const float *gate, const float *up, size_t n);
void cb_softmax_neon(float *x, size_t n);
void cb_f32_to_f16_neon(uint16_t *y, const float *x, size_t n);
void cb_f16_to_f32_neon(float *y, const uint16_t *x, size_t n);

void cb_attn_score_f32_neon(float *s, const float *q, const float *k, size_t n_pos, size_t hd,
                            float scale);
void cb_attn_score_f16_neon(float *s, const float *q, const uint16_t *k, size_t n_pos, size_t hd,
                            float scale);
void cb_attn_mix_f32_neon(float *o, const float *s, const float *v, size_t n_pos, size_t hd);
void cb_attn_mix_f16_neon(float *o, const float *s, const uint16_t *v, size_t n_pos, size_t hd);

#endif

/* init_neon.c — puts the NEON kernels into the table. */
#include "../impl.h"
#include "neon.h"

void cb_kernels_init_neon(struct cb_kernels *k)
{
    k->isa = "neon";
    k->gemm[CB_F32] = cb_gemm_f32_neon;
    k->gemm[CB_F16] = cb_gemm_f16_neon;
    k->gemm[CB_BF16] = cb_gemm_bf16_neon;
    k->gemm[CB_Q4_0] = cb_gemm_q4_0_neon;
    k->gemm[CB_Q4_1] = cb_gemm_q4_1_neon;
    k->gemm[CB_Q5_0] = cb_gemm_q5_0_neon;
    k->gemm[CB_Q5_1] = cb_gemm_q5_1_neon;
    k->gemm[CB_Q8_0] = cb_gemm_q8_0_neon;
    k->gemm[CB_Q4_K] = cb_gemm_q4_k_neon;
    k->gemm[CB_Q5_K] = cb_gemm_q5_k_neon;
    k->gemm[CB_Q6_K] = cb_gemm_q6_k_neon;
    k->quant_q8_0 = cb_quant_q8_0_neon;
    k->quant_q8_k = cb_quant_q8_k_neon;
    k->dot = cb_dot_neon;
    k->sum = cb_sum_neon;
    k->max = cb_max_neon;
    k->rmsnorm = cb_rmsnorm_neon;
    k->add = cb_add_neon;
    k->scale = cb_scale_neon;
    k->axpy = cb_axpy_neon;
    k->silu_mul = cb_silu_mul_neon;
    k->softmax = cb_softmax_neon;
    k->f32_to_f16 = cb_f32_to_f16_neon;
    k->f16_to_f32 = cb_f16_to_f32_neon;
    k->attn_score_f32 = cb_attn_score_f32_neon;
    k->attn_score_f16 = cb_attn_score_f16_neon;
    k->attn_mix_f32 = cb_attn_mix_f32_neon;
    k->attn_mix_f16 = cb_attn_mix_f16_neon;
}

/* init.c — the AVX2 slots (AVX2, FMA, F16C). Compiled with the folder's flags, called only
 * after dispatch.c has asked the CPU. */
#include "avx2.h"

void cb_kernels_init_avx2(struct cb_kernels *k)
{
    k->gemm[CB_F32] = cb_gemm_f32_avx2;
    k->gemm[CB_F16] = cb_gemm_f16_avx2;
    k->gemm[CB_BF16] = cb_gemm_bf16_avx2;
    k->gemm[CB_Q4_0] = cb_gemm_q4_0_avx2;
    k->gemm[CB_Q4_1] = cb_gemm_q4_1_avx2;
    k->gemm[CB_Q5_0] = cb_gemm_q5_0_avx2;
    k->gemm[CB_Q5_1] = cb_gemm_q5_1_avx2;
    k->gemm[CB_Q8_0] = cb_gemm_q8_0_avx2;
    k->gemm[CB_Q4_K] = cb_gemm_q4_k_avx2;
    k->gemm[CB_Q5_K] = cb_gemm_q5_k_avx2;
    k->gemm[CB_Q6_K] = cb_gemm_q6_k_avx2;
    k->quant_q8_0 = cb_quant_q8_0_avx2;
    k->quant_q8_k = cb_quant_q8_k_avx2;
    k->dot = cb_dot_avx2;
    k->sum = cb_sum_avx2;
    k->max = cb_max_avx2;
    k->rmsnorm = cb_rmsnorm_avx2;
    k->add = cb_add_avx2;
    k->scale = cb_scale_avx2;
    k->axpy = cb_axpy_avx2;
    k->silu_mul = cb_silu_mul_avx2;
    k->softmax = cb_softmax_avx2;
    k->f32_to_f16 = cb_f32_to_f16_avx2;
    k->f16_to_f32 = cb_f16_to_f32_avx2;
    k->attn_score_f32 = cb_attn_score_f32_avx2;
    k->attn_score_f16 = cb_attn_score_f16_avx2;
    k->attn_mix_f32 = cb_attn_mix_f32_avx2;
    k->attn_mix_f16 = cb_attn_mix_f16_avx2;
}

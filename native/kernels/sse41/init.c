/* init.c — the slots that SSE4.1 improves; f32_to_f16 stays scalar. */
#include "sse41.h"

void cb_kernels_init_sse41(struct cb_kernels *k)
{
    k->gemm[CB_F32] = cb_gemm_f32_sse41;
    k->gemm[CB_F16] = cb_gemm_f16_sse41;
    k->gemm[CB_BF16] = cb_gemm_bf16_sse41;
    k->gemm[CB_Q4_0] = cb_gemm_q4_0_sse41;
    k->gemm[CB_Q4_1] = cb_gemm_q4_1_sse41;
    k->gemm[CB_Q5_0] = cb_gemm_q5_0_sse41;
    k->gemm[CB_Q5_1] = cb_gemm_q5_1_sse41;
    k->gemm[CB_Q8_0] = cb_gemm_q8_0_sse41;
    k->gemm[CB_Q4_K] = cb_gemm_q4_k_sse41;
    k->gemm[CB_Q5_K] = cb_gemm_q5_k_sse41;
    k->gemm[CB_Q6_K] = cb_gemm_q6_k_sse41;
    k->quant_q8_0 = cb_quant_q8_0_sse41;
    k->quant_q8_k = cb_quant_q8_k_sse41;
    cb_vec_init_sse41(k);
    cb_attn_init_sse41(k);
}

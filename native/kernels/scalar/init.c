/* init.c — fills every slot with the reference. */
#include <string.h>

#include "scalar.h"

void cb_kernels_init_scalar(struct cb_kernels *k)
{
    memset(k, 0, sizeof *k);
    k->gemm[CB_F32] = cb_gemm_f32_scalar;
    k->gemm[CB_F16] = cb_gemm_f16_scalar;
    k->gemm[CB_BF16] = cb_gemm_bf16_scalar;
    k->gemm[CB_Q4_0] = cb_gemm_q4_0_scalar;
    k->gemm[CB_Q4_1] = cb_gemm_q4_1_scalar;
    k->gemm[CB_Q5_0] = cb_gemm_q5_0_scalar;
    k->gemm[CB_Q5_1] = cb_gemm_q5_1_scalar;
    k->gemm[CB_Q8_0] = cb_gemm_q8_0_scalar;
    k->gemm[CB_Q4_K] = cb_gemm_q4_k_scalar;
    k->gemm[CB_Q5_K] = cb_gemm_q5_k_scalar;
    k->gemm[CB_Q6_K] = cb_gemm_q6_k_scalar;
    k->quant_q8_0 = cb_quant_q8_0_scalar;
    k->quant_q8_k = cb_quant_q8_k_scalar;
    cb_vec_init_scalar(k);
    cb_attn_init_scalar(k);
}

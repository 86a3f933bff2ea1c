/* impl.h — what a kernel file gives to dispatch.c, and what it may use.
 * Each ISA folder defines its init function, which overrides the slots it has. */
#ifndef CB_KERNELS_IMPL_H
#define CB_KERNELS_IMPL_H

#include "kernels.h"

void cb_kernels_init_scalar(struct cb_kernels *k);
void cb_kernels_init_sse41(struct cb_kernels *k);  /* built when CB_HAVE_SSE41 */
void cb_kernels_init_avx2(struct cb_kernels *k);   /* built when CB_HAVE_AVX2 (AVX2, FMA, F16C) */
void cb_kernels_init_neon(struct cb_kernels *k);   /* built when CB_HAVE_NEON (ARMv8.0-A) */

#endif

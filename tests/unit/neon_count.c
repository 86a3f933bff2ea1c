/* neon_count.c — calls one NEON matrix kernel once, for test_neon.py to count its instructions.
 * neon_count TYPE BLOCKS TOKENS: 8 rows of BLOCKS blocks, all bytes 0x11. */
#include <stdlib.h>
#include <string.h>

#include "kernels/impl.h"

enum { MAX_TOK = 8, MAX_W = 1 << 17, MAX_X = 1 << 14 };
static _Alignas(64) unsigned char weights[MAX_W];
static _Alignas(64) unsigned char acts[MAX_X];
static float out[MAX_TOK][8];

int main(int argc, char **argv)
{
    struct cb_kernels k;
    float *y[MAX_TOK];
    const void *x[MAX_TOK];
    memset(&k, 0, sizeof k);
    cb_kernels_init_neon(&k);
    if (argc != 4) {
        return 2;
    }
    const unsigned type = (unsigned)atoi(argv[1]);
    const size_t blocks = (size_t)atoi(argv[2]), tokens = (size_t)atoi(argv[3]);
    const struct cb_type_info *info = cb_type_info(type);
    if (info == NULL || tokens > MAX_TOK ||
        cb_mat_bytes(type, 8, blocks * info->block) > sizeof weights ||
        cb_act_bytes(info->act, blocks * info->block) > sizeof acts) {
        return 2;
    }
    memset(weights, 0x11, sizeof weights);
    memset(acts, 0x11, sizeof acts);
    for (size_t t = 0; t < tokens; t++) {
        y[t] = out[t];
        x[t] = acts;
    }
    k.gemm[type](y, x, tokens, weights, 1, blocks * info->block);
    return 0;
}

/* types.c — what is known about each weight type, and the sizes of things. */
#include "kernels.h"

static const struct cb_type_info TYPES[CB_TYPE_MAX] = {
    [CB_F32] = {"F32", 1, 4, CB_ACT_F32},
    [CB_F16] = {"F16", 1, 2, CB_ACT_F32},
    [CB_BF16] = {"BF16", 1, 2, CB_ACT_F32},
    [CB_Q4_0] = {"Q4_0", 32, 18, CB_ACT_Q8_0},
    [CB_Q4_1] = {"Q4_1", 32, 20, CB_ACT_Q8_0},
    [CB_Q5_0] = {"Q5_0", 32, 22, CB_ACT_Q8_0},
    [CB_Q5_1] = {"Q5_1", 32, 24, CB_ACT_Q8_0},
    [CB_Q8_0] = {"Q8_0", 32, 34, CB_ACT_Q8_0},
    [CB_Q4_K] = {"Q4_K", 256, 144, CB_ACT_Q8_K},
    [CB_Q5_K] = {"Q5_K", 256, 176, CB_ACT_Q8_K},
    [CB_Q6_K] = {"Q6_K", 256, 210, CB_ACT_Q8_K},
};

const struct cb_type_info *cb_type_info(uint32_t type)
{
    if (type >= CB_TYPE_MAX || TYPES[type].name == NULL) {
        return NULL;
    }
    return &TYPES[type];
}

/* Bytes of n_cols prepared activations; 0 if n_cols is no multiple of the
 * activation block or the size overflows. */
size_t cb_act_bytes(enum cb_act act, size_t n_cols)
{
    size_t block = 1;
    size_t bytes = sizeof(float);
    if (act == CB_ACT_Q8_0) {
        block = 32;
        bytes = sizeof(struct cb_q8_0);
    } else if (act == CB_ACT_Q8_K) {
        block = 256;
        bytes = sizeof(struct cb_q8_k);
    }
    if (n_cols % block != 0 || n_cols / block > SIZE_MAX / bytes) {
        return 0;
    }
    return n_cols / block * bytes;
}

uint64_t cb_mat_bytes(uint32_t type, uint64_t rows, uint64_t cols)
{
    const struct cb_type_info *info = cb_type_info(type);
    if (info == NULL || cols % info->block != 0 || rows > UINT64_MAX - (CB_GROUP - 1)) {
        return 0;
    }
    const uint64_t padded = (rows + (CB_GROUP - 1)) / CB_GROUP * CB_GROUP;
    const uint64_t blocks = cols / info->block;
    if (blocks > UINT64_MAX / info->block_bytes) {
        return 0;
    }
    const uint64_t row_bytes = blocks * info->block_bytes;
    if (row_bytes != 0 && padded > UINT64_MAX / row_bytes) {
        return 0;
    }
    return padded * row_bytes;
}

/* dequant.c — one row of a group as floats: the embedding look-up.
 * Products of scale and code are exact in binary32 but for Q6_K's last one, and
 * the sum with an offset is rounded once: the bits are ggml's. */
#include "f16.h"
#include "kernels.h"
#include "scalar/unpack.h"

CB_INLINE void cb_dequant_32(uint32_t type, const uint8_t *sb, size_t r, float *out)
{
    int8_t w[32];
    float m = 0.0f;
    const float d = cb_row_d(sb, r);
    switch (type) {
    case CB_Q4_0: cb_unpack_q4_0(sb, r, w); break;
    case CB_Q5_0: cb_unpack_q5_0(sb, r, w); break;
    case CB_Q8_0: cb_unpack_q8_0(sb, r, w); break;
    case CB_Q4_1: cb_unpack_q4_1(sb, r, w); m = cb_row_m(sb, r); break;
    default: cb_unpack_q5_1(sb, r, w); m = cb_row_m(sb, r); break;
    }
    const int has_m = type == CB_Q4_1 || type == CB_Q5_1;
    for (size_t i = 0; i < 32; i++) {
        const float p = d * (float)w[i];
        out[i] = has_m ? p + m : p;
    }
}

CB_INLINE void cb_dequant_256(uint32_t type, const uint8_t *sb, size_t r, float *out)
{
    int8_t w[256];
    uint8_t sc[8], m[8];
    const float d = cb_row_d(sb, r);
    if (type == CB_Q6_K) {
        cb_unpack_q6_k(sb, r, w);
        for (size_t i = 0; i < 256; i++) {
            out[i] = (d * (float)cb_q6_k_scale(sb, r, i / 16)) * (float)w[i];
        }
        return;
    }
    const float dmin = cb_row_m(sb, r);
    if (type == CB_Q4_K) {
        cb_unpack_q4_k(sb, r, w);
    } else {
        cb_unpack_q5_k(sb, r, w);
    }
    cb_unpack_k_scales(sb, r, sc, m);
    for (size_t i = 0; i < 256; i++) {
        out[i] = (d * (float)sc[i / 32]) * (float)w[i] - dmin * (float)m[i / 32];
    }
}

static void cb_widen_row(uint32_t type, const void *group, size_t row, size_t n_cols, float *out)
{
    const uint8_t *bytes = group;
    if (type == CB_F32) {
        memcpy(out, bytes + row * n_cols * sizeof(float), n_cols * sizeof(float));
        return;
    }
    bytes += row * n_cols * 2;
    for (size_t i = 0; i < n_cols; i++) {
        const uint16_t h = cb_load_u16(bytes + 2 * i);
        out[i] = type == CB_F16 ? cb_f16_to_f32(h) : cb_bf16_to_f32(h);
    }
}

/* An unknown type gives zeros: the loader has refused it long before. */
void cb_dequant_row(uint32_t type, const void *group, size_t row, size_t n_cols, float *out)
{
    const struct cb_type_info *info = cb_type_info(type);
    if (info == NULL) {
        memset(out, 0, n_cols * sizeof *out);
        return;
    }
    if (info->block == 1) {
        cb_widen_row(type, group, row, n_cols, out);
        return;
    }
    const uint8_t *sb = group;
    const size_t step = (size_t)info->block_bytes * CB_GROUP;
    for (size_t b = 0; b < n_cols / info->block; b++, sb += step) {
        if (info->block == 32) {
            cb_dequant_32(type, sb, row, out + 32 * b);
        } else {
            cb_dequant_256(type, sb, row, out + 256 * b);
        }
    }
}

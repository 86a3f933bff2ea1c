/* gemm.c — cases and data of the matrix products. */
#include <string.h>

#include "../../kernels/f16.h"
#include "ck.h"

static const uint8_t SHAPES[][2] = {/* groups, tokens */
                                    {1, 1}, {1, 9}, {2, 3}, {3, 2}, {4, 4},
                                    {5, 1}, {5, 5}, {1, 8}, {2, 6}, {1, 7}};
static const uint16_t COLS_1[] = {1, 7, 31, 32, 33, 100, 576, 2048};
static const uint16_t COLS_32[] = {32, 64, 96, 224, 576, 2048};
static const uint16_t COLS_256[] = {256, 768, 2048};
#define N_SHAPES (sizeof SHAPES / sizeof SHAPES[0])

static size_t ck_cols(const struct ck_slot *s, size_t i)
{
    const uint32_t block = cb_type_info(s->type)->block;
    if (block == 1) {
        return i < sizeof COLS_1 / 2 ? COLS_1[i] : 0;
    }
    if (block == 32) {
        return i < sizeof COLS_32 / 2 ? COLS_32[i] : 0;
    }
    return i < sizeof COLS_256 / 2 ? COLS_256[i] : 0;
}

static int ck_gemm_case(const struct ck_slot *s, size_t i, struct ck_case *cs)
{
    const size_t shape = i % N_SHAPES;
    i /= N_SHAPES;
    memset(cs, 0, sizeof *cs);
    cs->mode = (enum ck_mode)(i % CK_TIES); /* the four before the ties */
    cs->n = ck_cols(s, i / CK_TIES);
    if (cs->n == 0) {
        return 0;
    }
    const size_t fit = CK_W_BYTES / (size_t)cb_mat_bytes(s->type, CB_GROUP, cs->n);
    cs->n_groups = SHAPES[shape][0] < fit ? SHAPES[shape][0] : fit;
    cs->n_tok = SHAPES[shape][1];
    return 1;
}

static uint16_t ck_scale(struct ck *c, enum ck_mode mode)
{
    const uint32_t r = ck_rand(c);
    switch (mode) {
    case CK_EXTREME: return (uint16_t)(0x7BFFu | (r & 0x8000u)); /* 65504 */
    case CK_SPECIAL: return (uint16_t)r;
    case CK_TINY: return (uint16_t)(r & 0x83FFu);
    default: return (uint16_t)((r & 0x83FFu) | (8u + (r >> 16) % 9u) << 10);
    }
}

/* One super-block: random codes (constant ones in EXTREME), scales by mode. */
static void ck_super_block(struct ck *c, uint8_t *sb, size_t bytes, int has_m, enum ck_mode mode)
{
    static const uint8_t codes[6] = {0x00, 0xFF, 0x80, 0x7F, 0x88, 0x0F};
    const uint8_t code = codes[ck_rand(c) % 6];
    for (size_t i = 0; i < bytes; i++) {
        sb[i] = mode == CK_EXTREME ? code : (uint8_t)ck_rand(c);
    }
    for (size_t i = 0; i < (has_m ? 16u : 8u); i++) {
        const uint16_t h = ck_scale(c, mode);
        memcpy(sb + 2 * i, &h, 2);
    }
}

static void ck_float_weights(struct ck *c, uint32_t type, size_t n, enum ck_mode mode)
{
    for (size_t i = 0; i < n; i++) {
        const float x = ck_float(c, mode);
        uint16_t h = (uint16_t)(cb_f32_bits(x) >> 16);
        if (type == CB_F32) {
            memcpy(c->w + 4 * i, &x, 4);
            continue;
        }
        if (type == CB_F16) {
            h = mode == CK_PLAIN ? cb_f32_to_f16(x) : ck_scale(c, mode);
        }
        memcpy(c->w + 2 * i, &h, 2);
    }
}

static float ck_act_scale(struct ck *c, enum ck_mode mode)
{
    if (mode == CK_TINY) {
        return cb_f32_from_bits(ck_rand(c) & 0x80FFFFFFu);
    }
    return ck_float(c, mode == CK_PLAIN ? CK_PLAIN : CK_EXTREME);
}

/* q in -127…127, at the ends only in EXTREME. */
static int8_t ck_code(struct ck *c, enum ck_mode mode, uint32_t style)
{
    const uint32_t r = ck_rand(c);
    if (mode == CK_EXTREME && style % 4 != 0) {
        return (int8_t)(style % 4 == 1 ? 127 : style % 4 == 2 ? -127 : (r & 1) ? 127 : -127);
    }
    return (int8_t)((int32_t)(r % 255u) - 127);
}

static void ck_act_row(struct ck *c, enum cb_act act, float *row, size_t n, enum ck_mode mode)
{
    if (act == CB_ACT_F32) {
        ck_floats(c, row, n, mode);
        return;
    }
    struct cb_q8_0 *y0 = (void *)row;
    struct cb_q8_k *yk = (void *)row;
    if (act == CB_ACT_Q8_0) {
        for (size_t b = 0; b < n / 32; b++) {
            const uint32_t style = ck_rand(c);
            y0[b].d = ck_act_scale(c, mode);
            y0[b].sum = 0;
            for (size_t i = 0; i < 32; i++) {
                y0[b].q[i] = ck_code(c, mode, style);
                y0[b].sum += y0[b].q[i];
            }
        }
        return;
    }
    for (size_t b = 0; b < n / 256; b++) {
        const uint32_t style = ck_rand(c);
        yk[b].d = ck_act_scale(c, mode);
        memset(yk[b].bsum, 0, sizeof yk[b].bsum);
        for (size_t i = 0; i < 256; i++) {
            yk[b].q[i] = ck_code(c, mode, style);
            yk[b].bsum[i / 16] = (int16_t)(yk[b].bsum[i / 16] + yk[b].q[i]);
        }
    }
}

static void ck_gemm_fill(struct ck *c, const struct ck_slot *s, const struct ck_case *cs)
{
    const struct cb_type_info *info = cb_type_info(s->type);
    const size_t n_w = cs->n_groups * CB_GROUP * cs->n;
    const int has_m = s->type == CB_Q4_1 || s->type == CB_Q5_1 || s->type == CB_Q4_K ||
                      s->type == CB_Q5_K;
    c->w = c->w_buf + 16; /* 16-byte aligned, not 32 */
    if (info->block == 1) {
        ck_float_weights(c, s->type, n_w, cs->mode);
    } else {
        const size_t step = (size_t)info->block_bytes * CB_GROUP;
        for (size_t b = 0; b < n_w / info->block / CB_GROUP; b++) {
            ck_super_block(c, c->w + b * step, step, has_m, cs->mode);
        }
    }
    for (size_t t = 0; t < cs->n_tok; t++) {
        c->act[t] = c->act_buf + t * (CK_COLS + 8) + 1 + t % 3; /* 4, 8 or 12 bytes off */
        ck_act_row(c, info->act, c->act[t], cs->n, cs->mode);
    }
}

/* Rows of the output: token t at out + t·(8·n_groups + 4) floats, 16 bytes of guard between. */
static void ck_gemm_run(const struct cb_kernels *k, const struct ck *c, const struct ck_slot *s,
                        const struct ck_case *cs, void *out)
{
    float *y[CK_TOKS];
    const void *x[CK_TOKS];
    for (size_t t = 0; t < cs->n_tok; t++) {
        y[t] = (float *)out + t * (CB_GROUP * cs->n_groups + 4);
        x[t] = c->act[t];
    }
    k->gemm[s->type](y, x, cs->n_tok, c->w, cs->n_groups, cs->n);
}

static size_t ck_gemm_out(const struct ck_slot *s, const struct ck_case *cs)
{
    (void)s;
    return cs->n_tok * (CB_GROUP * cs->n_groups + 4) * 4 - 16;
}

#define GEMM(NAME, TYPE, GROUPS, HASH)                                                      \
    {                                                                                       \
        .name = NAME, .offset = offsetof(struct cb_kernels, gemm) + TYPE * sizeof(void *),  \
        .type = TYPE, .out = CK_OUT_F32, .n_variants = 1, .nth_case = ck_gemm_case,         \
        .fill = ck_gemm_fill, .run = ck_gemm_run, .out_bytes = ck_gemm_out,                 \
        .bench = {.n = CK_COLS, .n_tok = 1, .n_groups = GROUPS}, .hash = HASH               \
    }

const struct ck_slot CK_GEMM[] = {
    GEMM("gemm_f32", CB_F32, 1, 0x0E8563C4),
    GEMM("gemm_f16", CB_F16, 2, 0x33DA3475),
    GEMM("gemm_bf16", CB_BF16, 2, 0x856C6DF9),
    GEMM("gemm_q4_0", CB_Q4_0, 4, 0x6FD6D30E),
    GEMM("gemm_q4_1", CB_Q4_1, 4, 0x207B06DB),
    GEMM("gemm_q5_0", CB_Q5_0, 4, 0x7EDB3B50),
    GEMM("gemm_q5_1", CB_Q5_1, 4, 0x39A7153E),
    GEMM("gemm_q8_0", CB_Q8_0, 4, 0x8039621D),
    GEMM("gemm_q4_k", CB_Q4_K, 4, 0xE80D67B0),
    GEMM("gemm_q5_k", CB_Q5_K, 4, 0x8EFDC8EB),
    GEMM("gemm_q6_k", CB_Q6_K, 4, 0x34DE32F9),
};
const size_t CK_N_GEMM = sizeof CK_GEMM / sizeof CK_GEMM[0];

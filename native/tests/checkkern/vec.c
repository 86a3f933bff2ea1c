/* vec.c — cases and data of the vector, quantiser and attention slots. */
#include <string.h>

#include "ck.h"

static const uint16_t SIZES[] = {1,  2,  3,  4,  5,  7,  8,  9,   15,  16,  17,  31,   32,  33,
                                 47, 63, 64, 65, 95, 96, 97, 100, 127, 576, 999, 1536, 2048};
static const uint8_t HEADS[] = {1, 7, 8, 20, 32, 33, 48, 64, 80, 96, 128};
static const uint8_t POSITIONS[] = {1, 2, 3, 4, 5, 8, 17, 40};
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static int ck_vec_case(const struct ck_slot *s, size_t i, struct ck_case *cs)
{
    memset(cs, 0, sizeof *cs);
    cs->variant = (int)(i % (size_t)s->n_variants);
    i /= (size_t)s->n_variants;
    cs->mode = (enum ck_mode)(i % CK_N_MODES);
    i /= CK_N_MODES;
    if (i >= COUNT(SIZES)) {
        return 0;
    }
    cs->n = SIZES[i];
    return 1;
}

/* Multiples of 32 or 256, without infinities: finite input is the caller's duty. */
static int ck_quant_case(const struct ck_slot *s, size_t i, struct ck_case *cs)
{
    static const uint8_t blocks[] = {1, 2, 3, 5, 8, 8, 8, 8};
    const size_t block = s->type == CB_Q8_0 ? 32 : 256;
    memset(cs, 0, sizeof *cs);
    cs->mode = (enum ck_mode)(i % CK_N_MODES);
    if (cs->mode == CK_SPECIAL) {
        cs->mode = CK_PLAIN;
    }
    if (i / CK_N_MODES >= COUNT(blocks)) {
        return 0;
    }
    cs->n = block * blocks[i / CK_N_MODES];
    return 1;
}

static int ck_attn_case(const struct ck_slot *s, size_t i, struct ck_case *cs)
{
    (void)s;
    memset(cs, 0, sizeof *cs);
    cs->mode = (enum ck_mode)(i % CK_TIES);
    i /= CK_TIES;
    cs->n_tok = POSITIONS[i % COUNT(POSITIONS)];
    i /= COUNT(POSITIONS);
    if (i >= COUNT(HEADS)) {
        return 0;
    }
    cs->n = HEADS[i];
    return 1;
}

static void ck_vec_fill(struct ck *c, const struct ck_slot *s, const struct ck_case *cs)
{
    (void)s;
    c->a = c->act_buf + 1 + ck_rand(c) % 4;
    c->b = c->b_buf + 1 + ck_rand(c) % 4;
    ck_floats(c, c->a, cs->n, cs->mode);
    ck_floats(c, c->b, cs->n, cs->mode);
}

/* Halfway cases between two binary16 numbers, and the range around its limits. */
static void ck_f16_fill(struct ck *c, const struct ck_slot *s, const struct ck_case *cs)
{
    ck_vec_fill(c, s, cs);
    for (size_t i = 0; cs->mode != CK_SPECIAL && i < cs->n; i++) {
        const uint32_t r = ck_rand(c);
        const uint32_t u = ((r & 1u) << 31) | ((100u + (r >> 1) % 45u) << 23) |
                           ((r >> 8) & 0x7FE000u) | ((r & 64u) ? 0x1000u : r & 0x1FFFu);
        memcpy(c->a + i, &u, 4);
    }
}

/* K or V in w: n_tok · n numbers of 2 or 4 bytes; q or s in b. */
static void ck_attn_fill(struct ck *c, const struct ck_slot *s, const struct ck_case *cs)
{
    const size_t n = cs->n_tok * cs->n;
    c->b = c->b_buf + 1;
    ck_floats(c, c->b, cs->n > cs->n_tok ? cs->n : cs->n_tok, cs->mode);
    c->w = c->w_buf + 4;
    for (size_t i = 0; i < n; i++) {
        const float x = ck_float(c, cs->mode);
        const uint32_t r = ck_rand(c);
        uint16_t h = (uint16_t)r;
        if (s->type == CB_F32) {
            memcpy(c->w + 4 * i, &x, 4);
            continue;
        }
        if (cs->mode != CK_SPECIAL) {
            h = (uint16_t)((r & 0x83FFu) | (cs->mode == CK_TINY ? 0 : (r >> 16) % 31u) << 10);
        }
        memcpy(c->w + 2 * i, &h, 2);
    }
}

#define RUN(NAME)                                                                           \
    static void NAME(const struct cb_kernels *k, const struct ck *c, const struct ck_slot *s, \
                     const struct ck_case *cs, void *out)

RUN(run_dot) { (void)s; *(float *)out = k->dot(c->a, c->b, cs->n); }
RUN(run_sum) { (void)s; *(float *)out = k->sum(c->a, cs->n); }
RUN(run_max) { (void)s; *(float *)out = k->max(c->a, cs->n); }

RUN(run_rmsnorm)
{
    (void)s;
    float *y = out;
    if (cs->variant == 2) {
        memcpy(y, c->a, cs->n * 4);
    }
    k->rmsnorm(y, cs->variant == 2 ? y : c->a, cs->variant == 1 ? NULL : c->b, cs->n, 1e-5f);
}

RUN(run_add)
{
    (void)s;
    memcpy(out, c->a, cs->n * 4);
    k->add(out, c->b, cs->n);
}

RUN(run_scale)
{
    (void)s;
    memcpy(out, c->a, cs->n * 4);
    k->scale(out, c->b[0], cs->n);
}

RUN(run_axpy)
{
    (void)s;
    memcpy(out, c->a, cs->n * 4);
    k->axpy(out, c->b[cs->n / 2], c->b, cs->n);
}

RUN(run_silu_mul)
{
    (void)s;
    float *y = out;
    if (cs->variant != 0) {
        memcpy(y, cs->variant == 1 ? c->a : c->b, cs->n * 4);
    }
    k->silu_mul(y, cs->variant == 1 ? y : c->a, cs->variant == 2 ? y : c->b, cs->n);
}

RUN(run_softmax)
{
    (void)s;
    memcpy(out, c->a, cs->n * 4);
    k->softmax(out, cs->n);
}

RUN(run_f32_to_f16) { (void)s; k->f32_to_f16(out, c->a, cs->n); }
RUN(run_f16_to_f32) { (void)s; k->f16_to_f32(out, (const uint16_t *)(const void *)c->a, cs->n); }

RUN(run_quant)
{
    if (s->type == CB_Q8_0) {
        k->quant_q8_0(out, c->a, cs->n);
    } else {
        k->quant_q8_k(out, c->a, cs->n);
    }
}

RUN(run_score)
{
    if (s->type == CB_F32) {
        k->attn_score_f32(out, c->b, (const void *)c->w, cs->n_tok, cs->n, 0.125f);
    } else {
        k->attn_score_f16(out, c->b, (const void *)c->w, cs->n_tok, cs->n, 0.088388346f);
    }
}

RUN(run_mix)
{
    if (s->type == CB_F32) {
        k->attn_mix_f32(out, c->b, (const void *)c->w, cs->n_tok, cs->n);
    } else {
        k->attn_mix_f16(out, c->b, (const void *)c->w, cs->n_tok, cs->n);
    }
}

static size_t out_one(const struct ck_slot *s, const struct ck_case *cs)
{
    (void)s;
    (void)cs;
    return 4;
}

static size_t out_n(const struct ck_slot *s, const struct ck_case *cs)
{
    return cs->n * (s->out == CK_OUT_F16 ? 2 : 4);
}

static size_t out_positions(const struct ck_slot *s, const struct ck_case *cs)
{
    (void)s;
    return cs->n_tok * 4;
}

static size_t out_quant(const struct ck_slot *s, const struct ck_case *cs)
{
    return cb_act_bytes(s->type == CB_Q8_0 ? CB_ACT_Q8_0 : CB_ACT_Q8_K, cs->n);
}

#define SLOT(SLOT_, TYPE, OUT, VARIANTS, CASE, FILL, RUN_, OUTB, N, POS, HASH)               \
    {                                                                                       \
        .name = #SLOT_, .offset = offsetof(struct cb_kernels, SLOT_), .type = TYPE,         \
        .out = OUT, .n_variants = VARIANTS, .nth_case = CASE, .fill = FILL, .run = RUN_,    \
        .out_bytes = OUTB, .bench = {.n = N, .n_tok = POS}, .hash = HASH                    \
    }
#define VEC(SLOT_, VARIANTS, RUN_, OUTB, HASH)                                              \
    SLOT(SLOT_, 0, CK_OUT_F32, VARIANTS, ck_vec_case, ck_vec_fill, RUN_, OUTB, 2048, 0, HASH)
#define ATTN(SLOT_, TYPE, RUN_, OUTB, HASH)                                                 \
    SLOT(SLOT_, TYPE, CK_OUT_F32, 1, ck_attn_case, ck_attn_fill, RUN_, OUTB, 64, 128, HASH)
#define CONVERT(SLOT_, OUT, RUN_, HASH)                                                     \
    SLOT(SLOT_, 0, OUT, 1, ck_vec_case, ck_f16_fill, RUN_, out_n, 2048, 0, HASH)
#define QUANT(SLOT_, TYPE, HASH)                                                            \
    SLOT(SLOT_, TYPE, CK_OUT_BYTES_EXACT, 1, ck_quant_case, ck_vec_fill, run_quant,         \
         out_quant, 2048, 0, HASH)

const struct ck_slot CK_VEC[] = {
    QUANT(quant_q8_0, CB_Q8_0, 0xA531AF78),
    QUANT(quant_q8_k, CB_Q4_K, 0x6ED03B6A),
    VEC(dot, 1, run_dot, out_one, 0x93E23496),
    VEC(sum, 1, run_sum, out_one, 0x96E9F699),
    VEC(max, 1, run_max, out_one, 0xF2C14446),
    VEC(rmsnorm, 3, run_rmsnorm, out_n, 0x035AA3E5),
    VEC(add, 1, run_add, out_n, 0x367D036B),
    VEC(scale, 1, run_scale, out_n, 0xAD664BB9),
    VEC(axpy, 1, run_axpy, out_n, 0x33A86A3F),
    VEC(silu_mul, 3, run_silu_mul, out_n, 0x01368419),
    VEC(softmax, 1, run_softmax, out_n, 0xD9179E9F),
    CONVERT(f32_to_f16, CK_OUT_F16, run_f32_to_f16, 0xA7FED0A9),
    CONVERT(f16_to_f32, CK_OUT_F32, run_f16_to_f32, 0xAA8FA487),
    ATTN(attn_score_f32, CB_F32, run_score, out_positions, 0xFB0E6AC7),
    ATTN(attn_score_f16, CB_F16, run_score, out_positions, 0xD0821B07),
    ATTN(attn_mix_f32, CB_F32, run_mix, out_n, 0x3636EDBC),
    ATTN(attn_mix_f16, CB_F16, run_mix, out_n, 0x168B7F0E),
};
const size_t CK_N_VEC = COUNT(CK_VEC);

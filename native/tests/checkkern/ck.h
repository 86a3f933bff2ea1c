/* ck.h — inside checkkern: the context, the cases, the data. */
#ifndef CB_CK_H
#define CB_CK_H

#include <stddef.h>
#include <stdint.h>

#include "../../kernels/kernels.h"

#define CK_W_BYTES (96u * 1024u)
#define CK_COLS 2048u
#define CK_TOKS 9u
#define CK_ACT_FLOATS (CK_TOKS * (CK_COLS + 8u))
#define CK_GUARD 64u /* bytes before and after each output, and 16 between rows */
#define CK_GUARD_BYTE 0x88
#define CK_OUT_BYTES (CK_COLS * 4u + 2u * CK_GUARD + 32u)

/* What kind of numbers a case gets. */
enum ck_mode {
    CK_PLAIN,    /* ordinary numbers */
    CK_EXTREME,  /* largest codes and scales; any finite exponent */
    CK_SPECIAL,  /* infinities, NaN, raw bytes in scales: no trap, NaN for NaN */
    CK_TINY,     /* zeros and subnormals */
    CK_TIES,     /* halves: rounding ties in the quantisers */
    CK_N_MODES
};

struct ck_case {
    size_t n;                /* columns, elements or head size */
    size_t n_tok, n_groups;  /* gemm; n_tok = positions for attention */
    int variant;             /* aliasing: which input the output is */
    enum ck_mode mode;
};

enum ck_out { CK_OUT_F32, CK_OUT_F16, CK_OUT_BYTES_EXACT };

struct ck {
    void (*line)(void *ud, const char *text);
    void *ud;
    uint64_t seed, rng;
    const struct cb_kernels *ref;
    /* inputs; pointers into the buffers, 4 · k bytes off a 16-byte boundary */
    float *a, *b;
    uint8_t *w;
    float *act[CK_TOKS];     /* activation rows of a gemm */
    _Alignas(64) uint8_t w_buf[CK_W_BYTES + 64];
    _Alignas(64) float act_buf[CK_ACT_FLOATS + 16];
    _Alignas(64) float b_buf[CK_COLS + 32];
    _Alignas(64) uint8_t out_ref[CK_OUT_BYTES];
    _Alignas(64) uint8_t out_new[CK_OUT_BYTES];
};

struct ck_slot {
    const char *name;
    size_t offset;           /* of the pointer in struct cb_kernels */
    uint32_t type;           /* gemm: weight type */
    enum ck_out out;
    int n_variants;
    /* 1 + number of cases of the family; fills *cs for index i, returns 0 past the end */
    int (*nth_case)(const struct ck_slot *s, size_t i, struct ck_case *cs);
    void (*fill)(struct ck *c, const struct ck_slot *s, const struct ck_case *cs);
    /* out: 64 + 4 bytes into an output area that ck_prefill prepared */
    void (*run)(const struct cb_kernels *k, const struct ck *c, const struct ck_slot *s,
                const struct ck_case *cs, void *out);
    size_t (*out_bytes)(const struct ck_slot *s, const struct ck_case *cs);
    struct ck_case bench;
    uint32_t hash;           /* CRC32C of the reference's outputs under CB_CHECKKERN_SEED */
};

extern const struct ck_slot CK_GEMM[], CK_VEC[];
extern const size_t CK_N_GEMM, CK_N_VEC;

uint32_t ck_rand(struct ck *c);
float ck_float(struct ck *c, enum ck_mode mode);
void ck_floats(struct ck *c, float *x, size_t n, enum ck_mode mode);

#endif

/* kernels.h — the dispatch table and the data layouts that kernels see.
 *
 * The contract (docs/determinism.md): every implementation of a slot gives the
 * same bits as the scalar one. Scalar C is the reference; a kernel file holds
 * one instruction set; its functions carry the ISA as name suffix (`_avx2`),
 * which is also what the build's instruction scan goes by.
 */
#ifndef CB_KERNELS_H
#define CB_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Type ids are ggml's, so a GGUF type is its own .coli type. */
enum cb_type {
    CB_F32 = 0, CB_F16 = 1, CB_Q4_0 = 2, CB_Q4_1 = 3, CB_Q5_0 = 6, CB_Q5_1 = 7,
    CB_Q8_0 = 8, CB_Q4_K = 12, CB_Q5_K = 13, CB_Q6_K = 14, CB_BF16 = 30,
    CB_TYPE_MAX = 40
};

/* How the activations must be prepared for a weight type. */
enum cb_act { CB_ACT_F32, CB_ACT_Q8_0, CB_ACT_Q8_K };

struct cb_type_info {
    const char *name;      /* "Q4_K"; NULL = not a type we know */
    uint32_t block;        /* weights a block: 1, 32 or 256 */
    uint32_t block_bytes;  /* bytes a block of one row */
    enum cb_act act;
};
const struct cb_type_info *cb_type_info(uint32_t type); /* NULL if unknown */

/* Activation blocks. q never is -128. */
struct cb_q8_0 {           /* 32 values */
    float d;               /* = fp16-rounded amax/127, as ggml stores it */
    int32_t sum;           /* sum of q[0..31] */
    int8_t q[32];
};
struct cb_q8_k {           /* 256 values */
    float d;               /* = 1/iscale, iscale = -127/(first value of largest magnitude) */
    int16_t bsum[16];      /* sum of q over each 16 */
    int8_t q[256];
};
size_t cb_act_bytes(enum cb_act act, size_t n_cols); /* bytes of one activation row */

#define CB_GROUP 8u        /* rows of a weight group; every matrix is padded to it with zero rows */

/* Bytes of a matrix in the engine's layout: rows padded to CB_GROUP. Float
 * types stand row-major; quantised ones in x8c16 (docs/format.md). Returns 0
 * if cols is not a multiple of the block or the size overflows. */
uint64_t cb_mat_bytes(uint32_t type, uint64_t rows, uint64_t cols);

/* y[t][0 .. 8*n_groups) = W · x[t] for n_tok tokens.
 *   w: first of n_groups row groups, each cb_mat_bytes(type, 8, n_cols) bytes, 16-byte aligned
 *   x[t]: one activation row as type_info.act says; y[t]: float
 * No order in it depends on n_tok or n_groups. */
typedef void cb_gemm_fn(float *const *y, const void *const *x, size_t n_tok,
                        const void *w, size_t n_groups, size_t n_cols);

struct cb_kernels {
    const char *isa;
    cb_gemm_fn *gemm[CB_TYPE_MAX];                     /* NULL = type not supported */

    void (*quant_q8_0)(struct cb_q8_0 *y, const float *x, size_t n);  /* n % 32 == 0 */
    void (*quant_q8_k)(struct cb_q8_k *y, const float *x, size_t n);  /* n % 256 == 0 */

    /* 32 virtual lanes, fma, fixed tree (determinism.md §3) */
    float (*dot)(const float *a, const float *b, size_t n);
    float (*sum)(const float *x, size_t n);
    float (*max)(const float *x, size_t n);            /* -inf for n = 0; NaN if any is NaN */

    void (*rmsnorm)(float *y, const float *x, const float *w, size_t n, float eps); /* w may be NULL; y may be x */
    void (*add)(float *y, const float *x, size_t n);                  /* y += x */
    void (*scale)(float *x, float s, size_t n);                       /* x *= s */
    void (*axpy)(float *y, float a, const float *x, size_t n);        /* y = fma(a, x, y) */
    void (*silu_mul)(float *y, const float *gate, const float *up, size_t n); /* y = silu(gate)*up; y may be either */
    void (*softmax)(float *x, size_t n);               /* in place; max, exp, sum in lanes, divide */

    void (*f32_to_f16)(uint16_t *y, const float *x, size_t n);        /* round to nearest even */
    void (*f16_to_f32)(float *y, const uint16_t *x, size_t n);

    /* One head against a KV head laid out [n_pos][hd], hd any size:
     * s[p] = dot(q, k[p]) * scale (dot as above, then one multiply) */
    void (*attn_score_f32)(float *s, const float *q, const float *k, size_t n_pos, size_t hd, float scale);
    void (*attn_score_f16)(float *s, const float *q, const uint16_t *k, size_t n_pos, size_t hd, float scale);
    /* o[i] = sum over p, in order of p, one fma each: o = fma(s[p], v[p][i], o), from 0 */
    void (*attn_mix_f32)(float *o, const float *s, const float *v, size_t n_pos, size_t hd);
    void (*attn_mix_f16)(float *o, const float *s, const uint16_t *v, size_t n_pos, size_t hd);
};

/* Fills *k for the named ISA (NULL = best that was built in and that this CPU
 * runs): scalar first, then overrides weak to strong. Returns 0, or -1 when the
 * ISA is unknown, not built in, or not on this CPU (why gets a phrase). */
int cb_kernels_init(struct cb_kernels *k, const char *isa, const char **why);
const char *cb_kernels_built(void);  /* "scalar,sse41,avx2" */

/* Dequantises row `row` (0..7) of one group to out[n_cols]: the embedding look-up. */
void cb_dequant_row(uint32_t type, const void *group, size_t row, size_t n_cols, float *out);

/* Elementary functions: the same bits in every build. */
float cb_expf(float x);            /* <= 2 ulp; exact 0 and inf at the ends; NaN stays */
float cb_siluf(float x);           /* x / (1 + exp(-x)) */
float cb_sigmoidf(float x);
double cb_pow_inv(double base, double num, double den); /* base^(-num/den), base > 0: RoPE frequencies */
void cb_sincos(double x, float *s, float *c);  /* |x| < 2^31; |error| <= 1 ulp of float */
double cb_log(double x);           /* x > 0 */
double cb_exp(double x);

/* CRC32C (Castagnoli), start with crc = 0; the hardware instruction where there is one. */
uint32_t cb_crc32c(uint32_t crc, const void *p, size_t n);

#endif

/* dequant.c — the exact values of ggml's blocks in GGUF order.
 *
 * Each value is rounded once a multiplication and once an addition, in ggml's order: (d·sc)·q,
 * then minus (dmin·m).
 */
#include "search.h"

static float cb_half(const uint8_t *p)
{
    return cb_f16_to_f32((uint16_t)(p[0] | p[1] << 8));
}

void cb_deq_f32(const uint8_t *in, size_t n, float *out)
{
    memcpy(out, in, n * sizeof *out);
}

void cb_deq_f16(const uint8_t *in, size_t n, float *out)
{
    for (size_t i = 0; i < n; i++) {
        out[i] = cb_half(in + 2 * i);
    }
}

void cb_deq_bf16(const uint8_t *in, size_t n, float *out)
{
    for (size_t i = 0; i < n; i++) {
        out[i] = cb_bf16_to_f32((uint16_t)(in[2 * i] | in[2 * i + 1] << 8));
    }
}

void cb_deq_q8_0(const uint8_t *in, size_t n, float *out)
{
    for (size_t b = 0; b < n; b += 32, in += 34, out += 32) {
        const float d = cb_half(in);
        for (size_t i = 0; i < 32; i++) {
            out[i] = (float)(int8_t)in[2 + i] * d;
        }
    }
}

/* Q4_0, Q4_1, Q5_0, Q5_1: d · (m) · (qh) · qs; z: zero point. */
static void cb_deq32(const uint8_t *in, size_t n, float *out, int offset, int five, int z)
{
    const size_t at = (offset ? 4u : 2u) + (five ? 4u : 0u);
    for (size_t b = 0; b < n; b += 32, in += at + 16, out += 32) {
        const float d = cb_half(in);
        const uint32_t qh = five ? cb_load_u32(in + at - 4) : 0;
        for (unsigned i = 0; i < 32; i++) {
            const int nibble = i < 16 ? in[at + i] & 15 : in[at + i - 16] >> 4;
            const int q = nibble | (int)((qh >> i) & 1u) << 4;
            out[i] = d * (float)(q - z);
        }
        if (offset) {
            const float m = cb_half(in + 2);
            for (size_t i = 0; i < 32; i++) {
                out[i] += m;
            }
        }
    }
}

void cb_deq_q4_0(const uint8_t *in, size_t n, float *out) { cb_deq32(in, n, out, 0, 0, 8); }
void cb_deq_q4_1(const uint8_t *in, size_t n, float *out) { cb_deq32(in, n, out, 1, 0, 0); }
void cb_deq_q5_0(const uint8_t *in, size_t n, float *out) { cb_deq32(in, n, out, 0, 1, 16); }
void cb_deq_q5_1(const uint8_t *in, size_t n, float *out) { cb_deq32(in, n, out, 1, 1, 0); }

/* Q4_K and Q5_K: d · dmin · scales[12] · (qh[32]) · qs[128] */
static void cb_deq_k(const uint8_t *in, size_t n, float *out, int five)
{
    const size_t at = five ? 48u : 16u;
    for (size_t b = 0; b < n; b += 256, in += at + 128, out += 256) {
        const float d = cb_half(in), dmin = cb_half(in + 2);
        const uint8_t *s = in + 4;
        for (unsigned j = 0; j < 8; j++) {
            const int sc = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
            const int m = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
            const float scale = d * (float)sc, min = dmin * (float)m;
            for (size_t l = 0; l < 32; l++) {
                const int byte = in[at + 32 * (j / 2) + l];
                const int nibble = j % 2 == 0 ? byte & 15 : byte >> 4;
                const int q = nibble | (five ? (in[16 + l] >> j & 1) << 4 : 0);
                out[32 * j + l] = scale * (float)q - min;
            }
        }
    }
}

void cb_deq_q4_k(const uint8_t *in, size_t n, float *out) { cb_deq_k(in, n, out, 0); }
void cb_deq_q5_k(const uint8_t *in, size_t n, float *out) { cb_deq_k(in, n, out, 1); }

/* ql[128] · qh[64] · scales i8[16] · d */
void cb_deq_q6_k(const uint8_t *in, size_t n, float *out)
{
    for (size_t b = 0; b < n; b += 256, in += 210, out += 256) {
        const float d = cb_half(in + 208);
        for (unsigned i = 0; i < 256; i++) {
            const unsigned h = i / 128, r = i % 128, l = r % 32;
            const int byte = in[64 * h + r % 64];
            const int nibble = r < 64 ? byte & 15 : byte >> 4;
            const int q = nibble | ((in[128 + 32 * h + l] >> (2 * (r / 32))) & 3) << 4;
            const float scale = d * (float)(int8_t)in[192 + i / 16];
            out[i] = scale * (float)(q - 32);
        }
    }
}

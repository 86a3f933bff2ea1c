/* quant_k.c — Q4_K, Q5_K and Q6_K: blocks of 256 with quantised scales.
 *
 * 1. Each sub-block (32 weights, Q6_K: 16) gets its own best scale (and offset) by search.
 * 2. The block's d (and dmin) map the largest of them to the end of the 6-bit (Q6_K: signed 8-bit)
 *    range; the sub-block's integers are chosen among the neighbours of the exact ratio by the
 *    error they really cause with the stored d and dmin.
 * 3. With all integers fixed, d and dmin are fitted by least squares, stored again, and step 2 is
 *    repeated; the best of the rounds is kept.
 */
#include "search.h"

#define CB_ROUNDS 3

/* A Q4_K or Q5_K block under construction; x ≈ d·sc[j]·q - dmin·m[j]. */
struct cb_k {
    struct cb_stored d, dmin;
    float sc[8], m[8];
    float q[CB_QMAX];
    float err;
};

/* Best integers (sc, m) of sub-block j near s/d and o/dmin; returns the error. */
static float cb_k_choose(const struct cb_block *b, struct cb_k *c, size_t j, float s, float o,
                         float hi)
{
    const float *x = b->x + 32 * j, *w = b->w + 32 * j;
    const float sc0 = cb_near(cb_clampf(s * cb_inv(c->d.v), 0.0f, 63.0f));
    const float m0 = cb_near(cb_clampf(o * cb_inv(c->dmin.v), 0.0f, 63.0f));
    float best = -1.0f, q[32];
    for (int i = -1; i <= 1; i++) {
        for (int k = -1; k <= 1; k++) {
            const float sc = sc0 + (float)i, m = m0 + (float)k;
            if (sc < 0.0f || sc > 63.0f || m < 0.0f || m > 63.0f) {
                continue;
            }
            const float d = c->d.v * sc, off = c->dmin.v * m, inv = cb_inv(d);
            cb_assign(x, 32, inv, off * inv, 0.0f, hi, q);
            const float e = cb_error(x, w, 32, q, d, -off);
            if (best < 0.0f || e < best) {
                best = e;
                c->sc[j] = sc;
                c->m[j] = m;
                memcpy(c->q + 32 * j, q, sizeof q);
            }
        }
    }
    return best;
}

/* Least squares for x ≈ d·a - dmin·m with a = sc·q; keeps what it has when that is singular. */
static void cb_k_refit(const struct cb_block *b, struct cb_k *c)
{
    double aa = 0.0, am = 0.0, mm = 0.0, xa = 0.0, xm = 0.0;
    for (size_t i = 0; i < 256; i++) {
        const double a = (double)c->sc[i / 32] * (double)c->q[i], m = (double)c->m[i / 32];
        const double w = (double)b->w[i], x = (double)b->x[i];
        aa += w * a * a;
        am += w * a * m;
        mm += w * m * m;
        xa += w * x * a;
        xm += w * x * m;
    }
    const double det = aa * mm - am * am;
    double d = aa > 0.0 ? xa / aa : 0.0, dmin = 0.0;
    if (det > 1e-9 * aa * mm) {
        d = (xa * mm - xm * am) / det;
        dmin = (xa * am - xm * aa) / det;
    } else if (mm > 0.0 && !(aa > 0.0)) {
        dmin = -xm / mm;
    } else if (mm > 0.0) {
        return;
    }
    if (d >= 0.0 && dmin >= 0.0) {
        c->d = cb_store_f16((float)d, b->exp);
        c->dmin = cb_store_f16((float)dmin, b->exp);
    }
}

static void cb_k_block(const struct cb_block *b, float hi, struct cb_k *best)
{
    struct cb_k c;
    float s[8], o[8], s_max = 0.0f, o_max = 0.0f;
    for (size_t j = 0; j < 8; j++) {
        cb_search_offset(b->x + 32 * j, b->w + 32 * j, 32, hi, 1, &s[j], &o[j]);
        s[j] = s[j] > 0.0f ? s[j] : 0.0f;
        o[j] = -o[j];
        s_max = s[j] > s_max ? s[j] : s_max;
        o_max = o[j] > o_max ? o[j] : o_max;
    }
    memset(&c, 0, sizeof c);
    c.d = cb_store_step(s_max, 63.0f, b->exp);
    c.dmin = cb_store_step(o_max, 63.0f, b->exp);
    for (int round = 0; round < CB_ROUNDS; round++) {
        c.err = 0.0f;
        for (size_t j = 0; j < 8; j++) {
            c.err += cb_k_choose(b, &c, j, s[j], o[j], hi);
        }
        if (round == 0 || c.err < best->err) {
            *best = c;
        }
        if (round + 1 < CB_ROUNDS) {
            cb_k_refit(b, &c);
        }
    }
}

/* d · dmin · 12 bytes of 6-bit scales and minima */
static void cb_k_put_head(const struct cb_k *k, uint8_t *out)
{
    uint8_t *s = out + 4;
    cb_put_u16(out, k->d.h);
    cb_put_u16(out + 2, k->dmin.h);
    for (size_t j = 0; j < 4; j++) {
        const unsigned a = (unsigned)k->sc[j], a4 = (unsigned)k->sc[j + 4];
        const unsigned m = (unsigned)k->m[j], m4 = (unsigned)k->m[j + 4];
        s[j] = (uint8_t)(a | (a4 >> 4) << 6);
        s[j + 4] = (uint8_t)(m | (m4 >> 4) << 6);
        s[j + 8] = (uint8_t)((a4 & 15u) | (m4 & 15u) << 4);
    }
}

/* qs: 32 bytes for each pair of sub-blocks; qh (or NULL): bit j of byte l is sub-block j's. */
static void cb_k_put_q(const struct cb_k *k, uint8_t *qh, uint8_t *qs)
{
    for (size_t i = 0; i < 4; i++) {
        for (size_t l = 0; l < 32; l++) {
            const unsigned a = (unsigned)k->q[64 * i + l], b = (unsigned)k->q[64 * i + 32 + l];
            qs[32 * i + l] = (uint8_t)((a & 15u) | (b & 15u) << 4);
            if (qh != NULL) {
                const unsigned bits = (a >> 4) << (2 * i) | (b >> 4) << (2 * i + 1);
                qh[l] = (uint8_t)(i == 0 ? bits : qh[l] | bits);
            }
        }
    }
}

void cb_quant_row_q4_k(const float *x, const float *importance, size_t n, uint8_t *out)
{
    for (size_t i = 0; i < n; i += 256, out += 144) {
        struct cb_block b;
        struct cb_k k;
        cb_block_load(&b, x + i, importance != NULL ? importance + i : NULL, 256);
        cb_k_block(&b, 15.0f, &k);
        cb_k_put_head(&k, out);
        cb_k_put_q(&k, NULL, out + 16);
    }
}

void cb_quant_row_q5_k(const float *x, const float *importance, size_t n, uint8_t *out)
{
    for (size_t i = 0; i < n; i += 256, out += 176) {
        struct cb_block b;
        struct cb_k k;
        cb_block_load(&b, x + i, importance != NULL ? importance + i : NULL, 256);
        cb_k_block(&b, 31.0f, &k);
        cb_k_put_head(&k, out);
        cb_k_put_q(&k, out + 16, out + 48);
    }
}

/* A Q6_K block under construction; x ≈ d·sc[g]·q, q in [-32, 31]. */
struct cb_k6 {
    struct cb_stored d;
    float sc[16];
    float q[CB_QMAX];
    float err;
};

static float cb_k6_choose(const struct cb_block *b, struct cb_k6 *c, size_t g, float s)
{
    const float *x = b->x + 16 * g, *w = b->w + 16 * g;
    const float sc0 = cb_near(cb_clampf(s * cb_inv(c->d.v), -128.0f, 127.0f));
    float best = -1.0f, q[16];
    for (int i = -1; i <= 1; i++) {
        const float sc = sc0 + (float)i;
        if (sc < -128.0f || sc > 127.0f) {
            continue;
        }
        const float d = c->d.v * sc;
        cb_assign(x, 16, cb_inv(d), 0.0f, -32.0f, 31.0f, q);
        const float e = cb_error(x, w, 16, q, d, 0.0f);
        if (best < 0.0f || e < best) {
            best = e;
            c->sc[g] = sc;
            memcpy(c->q + 16 * g, q, sizeof q);
        }
    }
    return best;
}

static void cb_k6_refit(const struct cb_block *b, struct cb_k6 *c)
{
    double aa = 0.0, xa = 0.0;
    for (size_t i = 0; i < 256; i++) {
        const double a = (double)c->sc[i / 16] * (double)c->q[i];
        aa += (double)b->w[i] * a * a;
        xa += (double)b->w[i] * a * (double)b->x[i];
    }
    if (aa > 0.0) {
        c->d = cb_store_f16((float)(xa / aa), b->exp);
    }
}

static void cb_k6_block(const struct cb_block *b, struct cb_k6 *best)
{
    struct cb_k6 c;
    float s[16], ext = 0.0f;
    for (size_t g = 0; g < 16; g++) {
        const float a = ext < 0.0f ? -ext : ext;
        s[g] = cb_search_scale(b->x + 16 * g, b->w + 16 * g, 16, -32.0f, 31.0f);
        ext = (s[g] < 0.0f ? -s[g] : s[g]) > a ? s[g] : ext;
    }
    memset(&c, 0, sizeof c);
    c.d = cb_store_step(ext, -128.0f, b->exp);
    for (int round = 0; round < CB_ROUNDS; round++) {
        c.err = 0.0f;
        for (size_t g = 0; g < 16; g++) {
            c.err += cb_k6_choose(b, &c, g, s[g]);
        }
        if (round == 0 || c.err < best->err) {
            *best = c;
        }
        cb_k6_refit(b, &c);
    }
}

/* ql[128] · qh[64] · scales i8[16] · d */
static void cb_k6_put(const struct cb_k6 *k, uint8_t *out)
{
    for (size_t h = 0; h < 2; h++) {
        const float *q = k->q + 128 * h;
        uint8_t *ql = out + 64 * h, *qh = out + 128 + 32 * h;
        for (size_t l = 0; l < 32; l++) {
            const unsigned a = (unsigned)(q[l] + 32.0f), b = (unsigned)(q[l + 32] + 32.0f);
            const unsigned c = (unsigned)(q[l + 64] + 32.0f), d = (unsigned)(q[l + 96] + 32.0f);
            ql[l] = (uint8_t)((a & 15u) | (c & 15u) << 4);
            ql[l + 32] = (uint8_t)((b & 15u) | (d & 15u) << 4);
            qh[l] = (uint8_t)(a >> 4 | (b >> 4) << 2 | (c >> 4) << 4 | (d >> 4) << 6);
        }
    }
    for (size_t g = 0; g < 16; g++) {
        out[192 + g] = (uint8_t)(int8_t)k->sc[g];
    }
    cb_put_u16(out + 208, k->d.h);
}

void cb_quant_row_q6_k(const float *x, const float *importance, size_t n, uint8_t *out)
{
    for (size_t i = 0; i < n; i += 256, out += 210) {
        struct cb_block b;
        struct cb_k6 k;
        cb_block_load(&b, x + i, importance != NULL ? importance + i : NULL, 256);
        cb_k6_block(&b, &k);
        cb_k6_put(&k, out);
    }
}

/* router.c — see router.h. */
#include "router/router.h"

#include <math.h>
#include <string.h>

/* The k best of value[0..n), those with skip[i] left out. Strict > keeps the
 * earlier index first among equals. Returns how many there are. */
static uint32_t top_k(const float *value, uint32_t n, uint32_t k, const uint8_t *skip,
                      int32_t *chosen, float *best)
{
    uint32_t have = 0;
    for (uint32_t i = 0; i < n; i++) {
        if ((skip != NULL && skip[i]) || (have == k && !(value[i] > best[k - 1])))
            continue;
        uint32_t at = have < k ? have++ : k - 1;
        for (; at > 0 && value[i] > best[at - 1]; at--) {
            best[at] = best[at - 1];
            chosen[at] = chosen[at - 1];
        }
        best[at] = value[i];
        chosen[at] = (int32_t)i;
    }
    return have;
}

static double dot64(const float *w, const float *x, uint32_t n)
{
    double s = 0.0;
    for (uint32_t i = 0; i < n; i++)
        s += (double)w[i] * (double)x[i]; /* the product is exact */
    return s;
}

/* A sum of binary64 numbers without rounding: digits of 32 bits, the lowest
 * worth 2^LOW. Products of two binary32 numbers reach from 2^-298 (2^-350 with
 * the zeros behind it) to 2^256, and 2^21 of them fit the carries. */
#define EXACT_LOW (-352)
#define EXACT_DIGITS 21

static void exact_add(int64_t digit[EXACT_DIGITS], double v)
{
    uint64_t bits, m;
    memcpy(&bits, &v, sizeof bits);
    if (v == 0.0)
        return;
    m = (bits & ((UINT64_C(1) << 52) - 1)) | UINT64_C(1) << 52; /* never subnormal: see above */
    uint32_t at = (uint32_t)((int)(bits >> 52 & 0x7FF) - 1075 - EXACT_LOW), shift = at % 32;
    uint64_t lo = (m & UINT32_MAX) << shift, hi = (m >> 32) << shift;
    uint64_t part[3] = {lo & UINT32_MAX, (lo >> 32) + (hi & UINT32_MAX), hi >> 32};
    for (uint32_t i = 0; i < 3; i++)
        digit[at / 32 + i] += v < 0.0 ? -(int64_t)part[i] : (int64_t)part[i];
}

/* Sign of (a - b)·x in real arithmetic. */
static int exact_compare(const float *a, const float *b, const float *x, uint32_t n)
{
    int64_t digit[EXACT_DIGITS] = {0}, carry = 0;
    int any = 0;
    for (uint32_t i = 0; i < n; i++) {
        exact_add(digit, (double)a[i] * (double)x[i]);
        exact_add(digit, -(double)b[i] * (double)x[i]);
    }
    for (uint32_t i = 0; i < EXACT_DIGITS; i++) {
        int64_t v = digit[i] + carry, low = v & UINT32_MAX;
        carry = (v - low) / (INT64_C(1) << 32);
        any |= low != 0;
    }
    return carry < 0 ? -1 : any;
}

void cb_router_norms(float *norm, const float *w, uint32_t n_expert, uint32_t n_embd)
{
    for (uint32_t e = 0; e < n_expert; e++) {
        const float *row = w + (size_t)e * n_embd;
        /* Up by more than the rounding of this sum and of the conversion. */
        norm[e] = (float)(sqrt(dot64(row, row, n_embd)) * (1.0 + 0x1p-20)) + 0x1p-149f;
    }
}

static int is_chosen(const int32_t *chosen, uint32_t k, uint32_t i)
{
    for (uint32_t c = 0; c < k; c++)
        if (chosen[c] == (int32_t)i)
            return 1;
    return 0;
}

/* One candidate of the exact comparison. */
struct straddler {
    double value; /* off by at most slack */
    double slack;
    uint32_t index;
};

/* How far logits may be off: unit times the row's norm, and never less than
 * what underflow takes. */
struct bound {
    double unit, least;
    double norm; /* upper bound of x's 2-norm */
};

static double bound_of(const struct bound *b, const struct cb_router *r, uint32_t i)
{
    return b->unit * (double)r->norm[i] + b->least;
}

/* Whether a goes before b: by value in real arithmetic, ties by index. */
static int goes_before(const struct cb_manifest *m, const struct cb_router *r, const float *x,
                       const struct straddler *a, const struct straddler *b)
{
    if (a->value - a->slack > b->value + b->slack)
        return 1;
    if (b->value - b->slack > a->value + a->slack)
        return 0;
    int sign = exact_compare(r->w + (size_t)a->index * m->n_embd,
                             r->w + (size_t)b->index * m->n_embd, x, m->n_embd);
    return sign != 0 ? sign > 0 : a->index < b->index;
}

/* The cut between chosen and rest is uncertain: recompute whoever's interval
 * reaches it and refill the uncertain places by exact value. lo and hi are the
 * lowest certain bound of the chosen and the highest of the rest. */
static void settle(const struct cb_manifest *m, const struct cb_router *r, const float *logits,
                   const float *x, const struct bound *b, double lo, double hi, uint32_t k,
                   int32_t *chosen)
{
    struct straddler s[CB_MAX_EXPERT];
    uint32_t n = 0, places = 0;
    double unit64 = ((double)m->n_embd + 2.0) * 0x1p-52 * b->norm; /* twice the bound of dot64 */
    for (uint32_t i = 0; i < m->n_expert; i++) {
        double eps = bound_of(b, r, i), v = (double)logits[i];
        int in = is_chosen(chosen, k, i);
        if ((r->exclude != NULL && r->exclude[i]) || (in ? v - eps > hi : v + eps < lo))
            continue;
        s[n++] = (struct straddler){dot64(r->w + (size_t)i * m->n_embd, x, m->n_embd),
                                    unit64 * (double)r->norm[i], i};
        places += (uint32_t)in;
    }
    for (uint32_t p = 0; p < places; p++) /* selection: value descending, index ascending */
        for (uint32_t q = p + 1; q < n; q++)
            if (goes_before(m, r, x, &s[q], &s[p])) {
                struct straddler t = s[p];
                s[p] = s[q];
                s[q] = t;
            }
    uint32_t kept = 0;
    for (uint32_t c = 0; c < k; c++) /* certain ones stay */
        if ((double)logits[chosen[c]] - bound_of(b, r, (uint32_t)chosen[c]) > hi)
            chosen[kept++] = chosen[c];
    for (uint32_t p = 0; p < places; p++)
        chosen[kept++] = (int32_t)s[p].index;
}

/* The bound of router.h for this x. */
static struct bound bound_for(const struct cb_manifest *m, const struct cb_kernels *kern,
                              const float *x)
{
    double square = (double)kern->dot(x, x, m->n_embd), steps = m->n_embd / 32.0 + 6.0;
    if (!(square >= 0x1p-60 && square <= 0x1p100)) /* binary32 squares may have been lost */
        square = dot64(x, x, m->n_embd);
    double gamma = steps * 0x1p-24 / (1.0 - steps * 0x1p-24);
    double norm = sqrt(square) * (1.0 + gamma);
    return (struct bound){gamma * norm, ((double)m->n_embd + 32.0) * 0x1p-149, norm};
}

/* Whether the set is certain; else repairs it. */
static int certify(const struct cb_manifest *m, const struct cb_kernels *kern,
                   const struct cb_router *r, const float *logits, const float *x, uint32_t k,
                   int32_t *chosen)
{
    struct bound b = bound_for(m, kern, x);
    double lo = INFINITY, hi = -INFINITY;
    for (uint32_t i = 0; i < m->n_expert; i++) {
        double eps = bound_of(&b, r, i), v = (double)logits[i];
        if (r->exclude != NULL && r->exclude[i])
            continue;
        if (is_chosen(chosen, k, i))
            lo = v - eps < lo ? v - eps : lo;
        else
            hi = v + eps > hi ? v + eps : hi;
    }
    if (lo > hi)
        return 1;
    settle(m, r, logits, x, &b, lo, hi, k, chosen);
    return 0;
}

/* Rank order by the binary32 logits, which are the same bits everywhere. */
static void sort_ranks(const float *logits, uint32_t k, int32_t *chosen)
{
    for (uint32_t a = 1; a < k; a++)
        for (uint32_t b = a; b > 0; b--) {
            float hi = logits[chosen[b]], lo = logits[chosen[b - 1]];
            if (!(hi > lo || (hi == lo && chosen[b] < chosen[b - 1])))
                break;
            int32_t t = chosen[b];
            chosen[b] = chosen[b - 1];
            chosen[b - 1] = t;
        }
}

static void weigh(const struct cb_manifest *m, const struct cb_kernels *kern, float *logits,
                  uint32_t k, const int32_t *chosen, float *weight)
{
    if (m->router == CB_ROUTER_SOFTMAX)
        kern->softmax(logits, m->n_expert);
    for (uint32_t i = 0; i < k; i++)
        weight[i] = logits[chosen[i]];
    if (m->router == CB_ROUTER_SOFTMAX_TOPK) {
        kern->softmax(weight, k);
        return;
    }
    if (!m->router_renorm)
        return;
    float sum = 0.0f;
    for (uint32_t i = 0; i < k; i++)
        sum += weight[i];
    if (sum < 0x1p-14f) /* smallest normal F16: llama.cpp's guard */
        sum = 0x1p-14f;
    for (uint32_t i = 0; i < k; i++)
        weight[i] = weight[i] / sum;
}

/* Whether any excluded expert's logit beats the last chosen one's. */
static int passed_over(const struct cb_manifest *m, const uint8_t *exclude, const float *logits,
                       int32_t last)
{
    for (uint32_t i = 0; i < m->n_expert && exclude != NULL; i++)
        if (exclude[i] && (logits[i] > logits[last] ||
                           (logits[i] == logits[last] && (int32_t)i < last)))
            return 1;
    return 0;
}

int cb_route(const struct cb_manifest *m, const struct cb_kernels *kern, const struct cb_router *r,
             float *logits, const float *x, int extra, float below, int32_t *chosen, float *weight,
             struct cb_route *out)
{
    float top = -INFINITY;
    for (uint32_t i = 0; i < m->n_expert; i++) {
        if (!isfinite(logits[i]))
            return -1;
        top = logits[i] > top ? logits[i] : top;
    }
    uint32_t k = m->n_used + (extra && top < below && m->n_used < m->n_expert);
    memset(out, 0, sizeof *out);
    out->n = k;
    if (top_k(logits, m->n_expert, k, r->exclude, chosen, weight) < k)
        return -2;
    out->recomputed = !certify(m, kern, r, logits, x, k, chosen);
    sort_ranks(logits, k, chosen);
    out->passed_over = passed_over(m, r->exclude, logits, chosen[k - 1]);
    weigh(m, kern, logits, k, chosen, weight);
    return 0;
}

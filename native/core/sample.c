/* sample.c — greedy and stochastic choice of a token.
 *
 * Order: repetition penalty, temperature, top-k, min-p, top-p, one draw. top-k,
 * min-p and top-p each keep a prefix of the tokens in descending order, so
 * top-k and min-p may be applied in either order; min-p goes first because it
 * needs no sorting. Ties go to the lower token id. */
#include "sample.h"

#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

void cb_philox4x32(const uint32_t ctr[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = ctr[0], c1 = ctr[1], c2 = ctr[2], c3 = ctr[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0;
        uint64_t b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

double cb_uniform(uint64_t seed, uint64_t n)
{
    const uint32_t ctr[4] = {(uint32_t)n, (uint32_t)(n >> 32), 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t out[4];
    cb_philox4x32(ctr, key, out);
    uint64_t bits = ((uint64_t)out[1] << 32 | out[0]) >> 11;
    return (double)bits * 0x1p-53;
}

void cb_sampling_default(struct cb_sampling *s)
{
    memset(s, 0, sizeof *s);
    s->temperature = 0.0f;
    s->top_k = 40;
    s->top_p = 0.95f;
    s->min_p = 0.05f;
    s->repeat_penalty = 1.0f;
    s->repeat_last_n = 64;
    s->seed = 0;
}

int cb_sampling_check(const struct cb_sampling *s, struct cb_err *err)
{
    if (!isfinite(s->temperature))
        return cb_fail(err, CB_EINVAL, "temperature must be a number");
    if (!(s->top_p >= 0.0f && s->top_p <= 1.0f))
        return cb_fail(err, CB_EINVAL, "top-p must lie between 0 and 1");
    if (!(s->min_p >= 0.0f && s->min_p <= 1.0f))
        return cb_fail(err, CB_EINVAL, "min-p must lie between 0 and 1");
    if (!(s->repeat_penalty > 0.0f) || !isfinite(s->repeat_penalty))
        return cb_fail(err, CB_EINVAL, "repeat-penalty must be a number above 0");
    if (s->repeat_last_n > CB_REPEAT_MAX)
        return cb_fail(err, CB_EINVAL, "repeat-last-n is at most %u", CB_REPEAT_MAX);
    return CB_OK;
}

/* Copies the logits and penalises each distinct recent token once: the penalty
 * is taken from logits[], so a second visit writes the same value again. */
static void penalise(float *x, const float *logits, uint32_t n_vocab, const struct cb_sampling *s,
                     const int32_t *recent, uint32_t n_recent)
{
    memcpy(x, logits, (size_t)n_vocab * sizeof *x);
    if (s->repeat_penalty == 1.0f)
        return;
    uint32_t first = n_recent > s->repeat_last_n ? n_recent - s->repeat_last_n : 0;
    for (uint32_t i = first; i < n_recent; i++) {
        if (recent[i] < 0 || (uint32_t)recent[i] >= n_vocab)
            continue;
        float v = logits[recent[i]];
        x[recent[i]] = v > 0.0f ? v / s->repeat_penalty : v * s->repeat_penalty;
    }
}

/* Index of the largest value, the lowest on ties. */
static int argmax(const float *x, uint32_t n, uint32_t *best, struct cb_err *err)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (isnan(x[i]) || x[i] == INFINITY)
            return cb_fail(err, CB_ENUMERIC, "logit of token %u is %s", i,
                           isnan(x[i]) ? "NaN" : "infinite");
        if (x[i] > x[at])
            at = i;
    }
    if (x[at] == -INFINITY)
        return cb_fail(err, CB_ENUMERIC, "every logit is -infinity");
    *best = at;
    return CB_OK;
}

static int ranks_before(const float *w, int32_t a, int32_t b)
{
    return w[a] > w[b] || (w[a] == w[b] && a < b);
}

static void sift_down(const float *w, int32_t *heap, uint32_t n, uint32_t at)
{
    int32_t item = heap[at];
    while (2 * (uint64_t)at + 1 < n) {
        uint32_t child = 2 * at + 1;
        if (child + 1 < n && ranks_before(w, heap[child + 1], heap[child]))
            child++;
        if (!ranks_before(w, heap[child], item))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = item;
}

/* Moves the best of heap[0..n) to heap[n-1] and restores the heap below it. */
static void pop_to_end(const float *w, int32_t *heap, uint32_t n)
{
    int32_t best = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = best;
    sift_down(w, heap, n - 1, 0);
}

/* Walks tokens from `from` by `step` until the running sum passes target. */
static int32_t walk(const float *w, const int32_t *from, ptrdiff_t step, uint32_t n, double target)
{
    double sum = 0.0;
    int32_t last = *from;
    for (uint32_t i = 0; i < n; i++) {
        last = from[(ptrdiff_t)i * step];
        sum += (double)w[last];
        if (sum > target)
            break;
    }
    return last;
}

/* Draws among the tokens index[0..n) with the weights w, best-ranked ones only
 * as top_k and top_p say. index is in ascending order of token. */
static int32_t draw(const float *w, int32_t *index, uint32_t n, const struct cb_sampling *s, double u)
{
    double total = 0.0;
    uint32_t k = s->top_k > 0 && s->top_k < n ? s->top_k : n;
    if (k == n) {
        for (uint32_t i = 0; i < n; i++)
            total += (double)w[index[i]];
        if (s->top_p >= 1.0f)
            return walk(w, index, 1, n, u * total);
    }
    for (uint32_t i = n / 2; i-- > 0;)
        sift_down(w, index, n, i);
    uint32_t kept = 0;
    double sum = 0.0;
    if (k < n) {
        for (; kept < k; kept++) {
            pop_to_end(w, index, n - kept);
            total += (double)w[index[n - 1 - kept]];
        }
        uint32_t enough = 0;
        for (sum = 0.0; enough < k && (enough == 0 || sum < (double)s->top_p * total); enough++)
            sum += (double)w[index[n - 1 - enough]];
        kept = enough;
    } else {
        for (; kept < n && (kept == 0 || sum < (double)s->top_p * total); kept++) {
            pop_to_end(w, index, n - kept);
            sum += (double)w[index[n - 1 - kept]];
        }
    }
    return walk(w, index + n - 1, -1, kept, u * sum);
}

int cb_sample_core(float *weight, int32_t *index, const float *logits, uint32_t n_vocab,
                   const struct cb_sampling *s, uint64_t n, const int32_t *recent,
                   uint32_t n_recent, int32_t *id, struct cb_err *err)
{
    int rc = cb_sampling_check(s, err);
    if (rc < 0)
        return rc;
    if (n_vocab == 0 || n_vocab > INT32_MAX)
        return cb_fail(err, CB_EINVAL, "cannot sample from %u tokens", n_vocab);
    penalise(weight, logits, n_vocab, s, recent, n_recent);
    uint32_t best = 0;
    rc = argmax(weight, n_vocab, &best, err);
    if (rc < 0)
        return rc;
    *id = (int32_t)best;
    if (s->temperature <= 0.0f)
        return CB_OK;

    /* Weights relative to the best token's 1; those that underflow or fall
     * below min_p leave the race here. */
    float top = weight[best];
    uint32_t n_cand = 0;
    for (uint32_t i = 0; i < n_vocab; i++) {
        float w = i == best ? 1.0f : cb_expf((weight[i] - top) / s->temperature);
        weight[i] = w;
        if (w > 0.0f && w >= s->min_p)
            index[n_cand++] = (int32_t)i;
    }
    *id = draw(weight, index, n_cand, s, cb_uniform(s->seed, n));
    return CB_OK;
}

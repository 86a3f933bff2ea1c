/* sched.c — see sched.h. */
#include "offload/sched.h"

/* Less than this is not worth the risk of a late layer. */
#define WORTH 0.97

static uint32_t bin_of(uint32_t rows)
{
    uint32_t b = 0;
    while (b + 1 < CB_COST_BINS && 1u << b < rows)
        b++;
    return b;
}

void cb_average(double *to, double value)
{
    if (*to <= 0.0) {
        *to = value;
        return;
    }
    /* One hiccup of the machine must not pass for a slow link. */
    double lo = *to / 2.0, hi = *to * 2.0;
    *to += ((value < lo ? lo : value > hi ? hi : value) - *to) / 8.0;
}

void cb_cost_note(double cost[CB_COST_BINS], uint32_t rows, double ns)
{
    if (ns > 0.0)
        cb_average(&cost[bin_of(rows)], ns);
}

double cb_cost_of(const double cost[CB_COST_BINS], uint32_t rows)
{
    uint32_t b = bin_of(rows);
    for (uint32_t away = 0; away < CB_COST_BINS; away++) {
        if (b >= away && cost[b - away] > 0.0)
            return cost[b - away] * (double)(1u << away);
        if (b + away < CB_COST_BINS && cost[b + away] > 0.0)
            return cost[b + away]; /* the load of the weights dominates */
    }
    return 0.0;
}

void cb_sched_order(const struct cb_sched_layer *l, uint32_t *order)
{
    for (uint32_t i = 0; i < l->n; i++) { /* insertion: n is small */
        uint32_t at = i;
        for (; at > 0; at--) {
            uint32_t o = order[at - 1];
            if (l->missing[o] > l->missing[i] ||
                (l->missing[o] == l->missing[i] && l->rows[o] >= l->rows[i]))
                break;
            order[at] = o;
        }
        order[at] = i;
    }
}

/* Reading n records; a number that was never seen in proportion to the nearest. */
static double reading(const struct cb_sched_layer *l, uint32_t n)
{
    uint32_t most = CB_READ_LEVELS - 1, level = n < most ? n : most;
    for (uint32_t away = 0; away < CB_READ_LEVELS; away++)
        for (int up = 0; up < 2; up++) {
            uint32_t known = up ? level + away : level - away;
            if (known >= 1 && known <= most && l->read[known] > 0.0)
                return l->read[known] * n / known;
        }
    return 0.0;
}

double cb_sched_time(const struct cb_sched *s, const struct cb_sched_layer *l,
                     const uint32_t *order, uint32_t k, double *there)
{
    double cpu = l->shared * cb_cost_of(s->here, l->shared_rows), last = 0.0, module = 0.0;
    uint64_t rows = 0;
    uint32_t missing = 0;
    for (uint32_t i = 0; i < l->n; i++) {
        uint32_t x = order[i];
        if (i < k) {
            rows += l->rows[x];
            module += cb_cost_of(s->there, l->rows[x]);
            continue;
        }
        double one = cb_cost_of(s->here, l->rows[x]);
        cpu += one;
        if (l->missing[x]) {
            missing++;
            last = one;
        }
    }
    double io = missing > 0 ? reading(l, missing) + last : 0.0;
    double here = io > cpu ? io : cpu;
    *there = 0.0;
    if (k == 0)
        return here;
    uint64_t tokens = rows < l->tokens ? rows : l->tokens;
    uint64_t bytes = l->frame + rows * (l->row_up + l->row_down) + tokens * l->token_up;
    *there = s->latency + (double)bytes * s->byte + module;
    return here > *there ? here : *there;
}

uint32_t cb_sched_split(const struct cb_sched *s, const struct cb_sched_layer *l,
                        const uint32_t *order, double *there)
{
    double none = cb_sched_time(s, l, order, 0, there), best_time = none;
    uint32_t best = 0;
    *there = 0.0;
    for (uint32_t k = 1; k <= l->n; k++) {
        double link, t = cb_sched_time(s, l, order, k, &link);
        if (t < best_time && t < none * WORTH) {
            best = k;
            best_time = t;
            *there = link;
        }
    }
    return best;
}

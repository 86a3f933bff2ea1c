/* sched.h — which experts of a layer go over the link.
 *
 * Pure arithmetic on measured times. All are moving averages in nanoseconds;
 * compute is kept by rows an expert has in the chunk (1, 2, 3-4, 5-8, …), since
 * an expert's weights are read once however many rows it has. */
#ifndef CB_OFFLOAD_SCHED_H
#define CB_OFFLOAD_SCHED_H

#include <stdint.h>

#include "expert/store.h" /* CB_READ_LEVELS */

#define CB_COST_BINS 9u

struct cb_sched {
    double here[CB_COST_BINS];   /* one expert, computed here; 0 = not known */
    double there[CB_COST_BINS];  /* the same at the module */
    double latency;              /* one small frame there and one back */
    double byte;                 /* one byte over the link */
};

/* One layer's question. */
struct cb_sched_layer {
    uint32_t n;                  /* distinct experts */
    const uint32_t *rows;        /* [n] rows each has */
    const uint8_t *missing;      /* [n] would have to be read first */
    double shared;               /* the shared expert, in experts of shared_rows rows */
    uint32_t shared_rows;
    double read[CB_READ_LEVELS]; /* [n]: reading n records at once; 0 = not known */
    uint64_t row_up, row_down;   /* bytes a row costs each way */
    uint64_t token_up;           /* bytes of one token's activations */
    uint32_t tokens;             /* of the chunk: no more are ever sent */
    uint64_t frame;              /* bytes that the layer costs however many rows */
};

void cb_cost_note(double cost[CB_COST_BINS], uint32_t rows, double ns);
/* Falls back on the nearest known number of rows, in proportion; 0 = nothing is known. */
double cb_cost_of(const double cost[CB_COST_BINS], uint32_t rows);
void cb_average(double *to, double value);

/* order[i]: the experts in the order in which they would go. Missing ones
 * first, then those with most rows: a transfer a row, but a load an expert,
 * so it is the same order for any link. order gets n indices. */
void cb_sched_order(const struct cb_sched_layer *l, uint32_t *order);
/* Time of the layer when the first k of order go; *there gets the link's part. */
double cb_sched_time(const struct cb_sched *s, const struct cb_sched_layer *l,
                     const uint32_t *order, uint32_t k, double *there);
/* The best k; *there gets what the link is expected to take. */
uint32_t cb_sched_split(const struct cb_sched *s, const struct cb_sched_layer *l,
                        const uint32_t *order, double *there);

#endif

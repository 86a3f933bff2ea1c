/* stats.h — order statistics of a sample, without allocating. */
#ifndef CLI_STATS_H
#define CLI_STATS_H

#include <stddef.h>
#include <stdint.h>

/* Sorts ascending in place (heap sort: no memory, no bad case). */
void stats_sort(uint64_t *v, size_t n);

/* Nearest rank of a sorted sample: the smallest value such that at least p per
 * cent of the sample are not above it, v[ceil(p/100 · n) − 1]. 0 if n is 0. */
uint64_t stats_rank(const uint64_t *sorted, size_t n, uint32_t p);

#endif

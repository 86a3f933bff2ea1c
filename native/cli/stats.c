/* stats.c — see stats.h. */
#include "stats.h"

static void sift(uint64_t *v, size_t n, size_t at)
{
    uint64_t item = v[at];
    while (2 * at + 1 < n) {
        size_t child = 2 * at + 1;
        if (child + 1 < n && v[child + 1] > v[child])
            child++;
        if (v[child] <= item)
            break;
        v[at] = v[child];
        at = child;
    }
    v[at] = item;
}

void stats_sort(uint64_t *v, size_t n)
{
    for (size_t i = n / 2; i-- > 0;)
        sift(v, n, i);
    for (size_t end = n; end > 1; end--) {
        uint64_t top = v[0];
        v[0] = v[end - 1];
        v[end - 1] = top;
        sift(v, end - 1, 0);
    }
}

uint64_t stats_rank(const uint64_t *sorted, size_t n, uint32_t p)
{
    if (n == 0)
        return 0;
    uint64_t rank = ((uint64_t)n * p + 99) / 100;
    if (rank < 1)
        rank = 1;
    return sorted[(rank > n ? n : rank) - 1];
}

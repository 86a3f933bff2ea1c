/* probe.h — what `colibri probe` measures, and how it is told. */
#ifndef CLI_PROBE_H
#define CLI_PROBE_H

#include "cli.h"
#include "sys.h"

#define PROBE_SAMPLES_MAX (1u << 22) /* routing samples of all runs */

struct probe {
    struct cli_args args;
    struct cli_model model;
    uint32_t runs, tokens, prompt; /* tokens decoded and prompt tokens of each run */
    int with_samples;

    struct cb_engine *e;
    struct cb_info info;
    char golden[65];
    uint64_t ns_load, ns_golden, ns_cold; /* ns_cold: main() to the first token */

    /* Samples: taken in one block before anything is measured. ns each. */
    uint64_t *route;        /* [runs][tokens][n_moe_layer] */
    uint64_t *token;        /* [runs][tokens]: cb_eval of one token + greedy choice */
    uint64_t *first;        /* [runs]: reset to first token, warm */
    uint64_t *prefill;      /* [runs]: the prompt's cb_eval */
    uint64_t *decode;       /* [runs]: all tokens of the run */
    uint64_t *minor, *major;/* [runs]: page faults while decoding */
    uint64_t n_route, n_token;
    void *block;
    uint64_t block_bytes;
    int32_t *ids;           /* [prompt] */
    struct cb_counters counters; /* of the runs */
    struct sys_memory memory_before, memory_after;
    struct sys_machine machine_before, machine_after;
};

void probe_json(struct probe *p);  /* sorts the samples */
void probe_table(struct probe *p); /* sorts the samples */

#endif

/* cli.h — what the verbs of the `colibri` tool share. */
#ifndef CLI_CLI_H
#define CLI_CLI_H

#include <stdint.h>
#include <stdio.h>

#include "args.h"
#include "colibri.h"
#include "jsonout.h"

enum cli_exit {
    EXIT_OK = 0,
    EXIT_RUNTIME = 1,
    EXIT_USAGE = 2,
    EXIT_MODEL = 3,
    EXIT_BUDGET = 4,
    EXIT_GOLDEN = 5,
    EXIT_EXPERT = 6,
    EXIT_INTERRUPTED = 130, /* Ctrl-C */
    EXIT_TERMINATED = 143   /* SIGTERM */
};
int cli_exit_status(int code); /* of an enum cb_code */

/* Every verb gets the words after its name and returns an exit status. */
typedef int cli_verb_fn(int argc, char **argv);
cli_verb_fn verb_run, verb_check, verb_logits, verb_tokenize, verb_selftest, verb_bench, verb_plan,
    verb_probe, verb_serve, verb_health, verb_expertd, verb_version;

extern uint64_t cli_start_ns; /* when main() began */

#define CLI_ARGS_MAX 64
/* One verb's options as they are put together. */
struct cli_args {
    const char *verb, *summary;
    struct arg arg[CLI_ARGS_MAX];
    size_t n;
    int json; /* --json was given */
    int help;
};
void cli_args_begin(struct cli_args *a, const char *verb, const char *summary);
void cli_args_add(struct cli_args *a, const struct arg *rows, size_t n);
/* Adds --json and --help, parses. *status is the exit status when it returns
 * non-zero: help was printed (0) or the words were wrong (2). */
int cli_args_finish(struct cli_args *a, int argc, char **argv, int *status);

/* Reports an error on stderr, and on stdout as {"error": …} under --json.
 * Returns the exit status. */
int cli_error(const struct cli_args *a, const struct cb_err *err);

/* The engine options that verbs share: --model, --ctx, --threads … */
struct cli_model {
    struct cb_options opt;
    int lock, over_budget, buffered, no_lookahead, hot_swap; /* flags, before they are in opt */
    uint32_t offload_share; /* UINT32_MAX = not given */
    const char *cache_experts; /* "N" or "all" */
    float extra_below;         /* NAN = not given */
};
void cli_model_args(struct cli_args *a, struct cli_model *m);
/* Checks --model, --isa and what does not go together; copies the flags to m->opt. */
int cli_model_check(struct cli_model *m, struct cb_err *err);
/* Those about memory and experts (memory.c). */
void cli_memory_args(struct cli_args *a, struct cli_model *m);
int cli_memory_check(struct cli_model *m, struct cb_err *err);
/* Those about the offload link, and what is said of it (offload.c): one line
 * when there is a link, "offload": {…} or null. */
void cli_offload_args(struct cli_args *a, struct cli_model *m);
int cli_offload_check(struct cli_model *m, struct cb_err *err);
void cli_print_offload(FILE *f, const struct cb_engine *e, const struct cb_counters *c);
void cli_json_offload(struct json *j, const struct cb_engine *e, const struct cb_counters *c);
/* "scalar" … of a build that has it; CB_EINVAL names those that it has. */
int cli_isa_check(const char *isa, struct cb_err *err);

/* Runs the golden and compares it with the manifest's; hex gets the hash that
 * came out. CB_EGOLDEN with both hashes when they differ or none is promised. */
int cli_golden(struct cb_engine *e, char hex[65], uint64_t *ns, struct cb_err *err);

/* As cli_error for a failed cb_engine_open or cb_plan: over the budget it also
 * names the largest line and the flags that would help, on stderr before the
 * error and under "largest" and "advice" in the JSON. */
int cli_open_error(const struct cli_args *a, const struct cli_model *m, const struct cb_err *err);
/* The same two keys into an object, the same words to a stream. l: the sum that
 * does not fit. */
void cli_json_advice(struct json *j, const struct cli_model *m, const struct cb_ledger *l);
void cli_print_advice(FILE *f, const struct cli_model *m, const struct cb_ledger *l);

void cli_print_ledger(FILE *f, const struct cb_ledger *l);
/* The lines at start: model, experts, memory. */
void cli_print_start(FILE *f, const struct cb_engine *e, const struct cli_model *m);
void cli_json_ledger(struct json *j, const char *key, const struct cb_ledger *l);
void cli_json_model(struct json *j, const struct cb_info *i);

/* now - before; unhealthy and swaps stay totals since the start. */
void cli_counters_since(const struct cb_engine *e, const struct cb_counters *before,
                        struct cb_counters *since);
/* What the expert cache did, one line; what made the output another than the
 * model's own and experts that failed, loudly, only when there are any. */
void cli_print_cache(FILE *f, const struct cli_model *m, const struct cb_counters *c);
void cli_print_lossy(FILE *f, const struct cli_model *m, const struct cb_counters *c);
/* "cache": {mode, slots … and with c the figures}. */
void cli_json_cache(struct json *j, const struct cli_model *m, const struct cb_ledger *l,
                    const struct cb_counters *c);
/* "lossy", "degraded", "zeros", "extra", "unhealthy". */
void cli_json_lossy(struct json *j, const struct cb_counters *c);
const char *cli_kv_name(uint32_t kv_type);

const char *cli_finish_name(int finish);
const char *cli_size(uint64_t bytes, char buf[32]); /* "512.0 MiB" */
double cli_per_second(uint64_t n, uint64_t ns);

/* Token i of the fixed sequence that the golden, bench and probe use. */
int32_t cli_fixed_token(uint32_t i, uint32_t n_vocab);

#endif

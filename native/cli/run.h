/* run.h — `colibri run`, in parts: cmd_run.c (options, the loop), run_prompt.c
 * (prompt to ids), run_report.c (what is said before and after). */
#ifndef CLI_RUN_H
#define CLI_RUN_H

#include "cli.h"
#include "exptrace.h"
#include "sys.h"

struct run {
    struct cli_args args;
    struct cli_model model;
    struct cb_sampling sampling;
    struct arg_list stop;
    const char *prompt, *prompt_file, *prompts, *system, *trace_file;
    uint32_t n_new;
    int chat, strict, trace;

    struct cb_engine *e;
    struct cb_info info;
    char golden[65];
    uint64_t ns_load, ns_golden;
    uint64_t unhealthy_gone; /* counted in releases that are not in use (any more) */
    struct exptrace experts;

    /* The prompt at work. With --prompts the buffers are made once, for the longest. */
    char *chat_text;
    size_t chat_cap;
    int32_t *ids;
    size_t ids_cap;
    uint32_t n_ids, n_shown;
    char *text; /* the answer, --json only */
    size_t n_text, text_cap;
};

/* Bytes of the one prompt of --prompt or --prompt-file, malloc'ed; refused when
 * empty or not UTF-8. */
int run_read_prompt(const struct run *r, char **text, size_t *n, struct cb_err *err);
/* CB_EINVAL when empty, CB_EUTF8 when it has to be UTF-8 and is not. */
int run_check_prompt(const struct run *r, const char *text, size_t n, struct cb_err *err);
/* Buffers for prompts of at most n bytes. */
int run_reserve(struct run *r, size_t n, struct cb_err *err);
/* Chat template, BOS, ids; text is NUL-terminated. CB_ECONTEXT when too long. */
int run_encode(struct run *r, const char *text, size_t n, struct cb_err *err);
void run_free(struct run *r);

void run_collect_routes(const struct run *r); /* routing times of the last cb_eval */
void run_trace_token(const struct run *r, int32_t id);
void run_print_start(const struct run *r);
/* c: the counters of this answer. */
void run_print_end(const struct run *r, const struct cb_gen_result *g, const struct cb_counters *c);
void run_print_json(const struct run *r, const struct cb_gen_result *g, const struct cb_counters *c);
void run_forget_routes(void);

#endif

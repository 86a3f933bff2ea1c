/* cmd_run.c — `colibri run`: prompt in, text out.
 *
 * The golden is checked before the first token; an engine with wrong bits does
 * not answer. Text goes to stdout as it comes, everything else to stderr. With
 * --prompts the process lives on from line to line: a bad prompt or a failed
 * expert costs its own answer only, and SIGHUP takes over the model folder
 * again between two answers. */
#include <stdlib.h>
#include <string.h>

#include "core/os.h"
#include "run.h"

#define TEXT_MAX (8u << 20) /* bytes of answer kept for --json */
#define TOKEN_BYTES 64u     /* room a token gets there */

static void set_up_args(struct run *r)
{
    cli_args_begin(&r->args, "run", "Generates text after a prompt.");
    cb_sampling_default(&r->sampling);
    r->n_new = 256;
    r->strict = 1;
    r->stop.max = CB_STOP_MAX;
    const struct arg prompt[] = {
        {.group = "Prompt", .name = "--prompt", .alias = "-p", .kind = ARG_TEXT, .out = &r->prompt,
         .meta = "TEXT", .help = "the prompt"},
        {.name = "--prompt-file", .alias = "-f", .kind = ARG_TEXT, .out = &r->prompt_file,
         .meta = "FILE", .help = "read the prompt from FILE, - for standard input"},
        {.name = "--prompts", .kind = ARG_TEXT, .out = &r->prompts, .meta = "FILE",
         .help = "one prompt a line, - for standard input; answers one after the other"},
        {.name = "--chat", .kind = ARG_FLAG, .out = &r->chat, .flag_value = 1,
         .help = "put the prompt into the model's chat template"},
        {.name = "--system", .kind = ARG_TEXT, .out = &r->system, .meta = "TEXT",
         .help = "system message (with --chat)"},
        {.name = "--strict-utf8", .kind = ARG_FLAG, .out = &r->strict, .flag_value = 1,
         .help = "refuse a prompt that is not UTF-8 (default)"},
        {.name = "--no-strict-utf8", .kind = ARG_FLAG, .out = &r->strict, .flag_value = 0,
         .help = "take stray bytes as they are"},
    };
    const struct arg rest[] = {
        {.group = "Generation", .name = "--n-predict", .alias = "-n", .kind = ARG_U32,
         .out = &r->n_new, .lo = 1, .hi = 1 << 24, .meta = "N", .help = "most tokens to generate (default 256)"},
        {.name = "--stop", .kind = ARG_LIST, .out = &r->stop, .meta = "TEXT",
         .help = "end before this text; up to 4 times"},
        {.name = "--temp", .kind = ARG_FLOAT, .out = &r->sampling.temperature, .lo = 0, .hi = 100,
         .meta = "X", .help = "temperature; 0 = always the likeliest token (default)"},
        {.name = "--top-k", .kind = ARG_U32, .out = &r->sampling.top_k, .lo = 0, .hi = 1 << 24,
         .meta = "N", .help = "only the N likeliest; 0 = all (default 40)"},
        {.name = "--top-p", .kind = ARG_FLOAT, .out = &r->sampling.top_p, .lo = 0, .hi = 1,
         .meta = "X", .help = "only the likeliest that make up X (default 0.95)"},
        {.name = "--min-p", .kind = ARG_FLOAT, .out = &r->sampling.min_p, .lo = 0, .hi = 1,
         .meta = "X", .help = "only those at least X times as likely as the likeliest (default 0.05)"},
        {.name = "--repeat-penalty", .kind = ARG_FLOAT, .out = &r->sampling.repeat_penalty,
         .lo = 0.01, .hi = 100, .meta = "X", .help = "1 = none (default)"},
        {.name = "--repeat-last-n", .kind = ARG_U32, .out = &r->sampling.repeat_last_n, .lo = 0,
         .hi = 1024, .meta = "N", .help = "tokens that the penalty looks back on (default 64)"},
        {.name = "--seed", .kind = ARG_U64, .out = &r->sampling.seed, .meta = "N",
         .help = "same seed, same text, on every board (default 0)"},
        {.group = "Diagnosis", .name = "--trace", .kind = ARG_FLAG, .out = &r->trace, .flag_value = 1,
         .help = "show the experts of every layer and token, with weights, on stderr"},
        {.name = "--trace-experts", .kind = ARG_TEXT, .out = &r->trace_file, .meta = "FILE",
         .help = "record the experts of every token, for colibri-kit trace"},
    };
    cli_args_add(&r->args, prompt, sizeof prompt / sizeof prompt[0]);
    cli_model_args(&r->args, &r->model);
    cli_args_add(&r->args, rest, sizeof rest / sizeof rest[0]);
}

static int check_words(const struct run *r, struct cb_err *err)
{
    if ((r->prompt != NULL) + (r->prompt_file != NULL) + (r->prompts != NULL) != 1)
        return cb_fail(err, CB_EINVAL, "give either --prompt TEXT or --prompt-file FILE or "
                       "--prompts FILE");
    if (r->system && !r->chat)
        return cb_fail(err, CB_EINVAL, "--system needs --chat");
    return CB_OK;
}

static int on_text(void *ud, const char *text, size_t len, int32_t id)
{
    struct run *r = ud;
    if (id >= 0) {
        r->n_shown++;
        if (r->n_shown > 1) /* the first token's routing was the whole prompt's */
            run_collect_routes(r);
        if (r->trace)
            run_trace_token(r, id);
    }
    if (r->text) {
        size_t room = r->text_cap - r->n_text;
        len = len < room ? len : room;
        memcpy(r->text + r->n_text, text, len);
        r->n_text += len;
    } else if (len > 0) {
        if (fwrite(text, 1, len, stdout) != len || fflush(stdout) != 0)
            return 1; /* the reader went away */
    }
    return sys_interrupted();
}

/* One answer for the ids in r, from position 0. */
static int answer(struct run *r, struct cb_gen_result *g, struct cb_err *err)
{
    struct cb_counters before, c;
    run_forget_routes();
    r->n_shown = 0;
    r->n_text = 0;
    cb_reset(r->e);
    cb_engine_counters(r->e, &before);
    int rc = cb_generate_observed(r->e, r->ids, r->n_ids, r->n_new, &r->sampling, r->stop.item,
                                  r->stop.n, on_text, r, r->experts.f ? &r->experts.see : NULL, g,
                                  err);
    cli_counters_since(r->e, &before, &c);
    c.unhealthy -= r->unhealthy_gone;
    if (rc < 0) {
        if (!r->args.json && r->n_shown > 0)
            putchar('\n');
        cli_print_lossy(stderr, &r->model, &c);
        return rc;
    }
    if (r->args.json) {
        run_print_json(r, g, &c);
        cli_print_lossy(stderr, &r->model, &c);
    } else {
        putchar('\n');
        fflush(stdout);
        run_print_end(r, g, &c);
    }
    return exptrace_flush(&r->experts, err);
}

/* SIGHUP: whatever --model names now, links followed anew. */
static void swap_if_wanted(struct run *r)
{
    struct cb_err err = {0, ""};
    struct cb_counters before, after;
    if (!sys_reload_wanted())
        return;
    cb_engine_counters(r->e, &before);
    uint64_t start = cb_os_now_ns();
    int rc = cb_swap(r->e, r->model.opt.model_dir, &err);
    cb_engine_info(r->e, &r->info);
    cb_engine_counters(r->e, &after);
    if (rc < 0) {
        r->unhealthy_gone += after.unhealthy - before.unhealthy;
        fprintf(stderr, "swap refused: %s (old model stays)\n", err.msg);
    } else {
        memcpy(r->golden, r->info.golden, sizeof r->golden);
        r->unhealthy_gone = after.unhealthy;
        fprintf(stderr, "swapped to %s, model id %s, golden ok %.12s… (%.2f s)\n", r->info.name,
                r->info.model_id, r->golden, (double)(cb_os_now_ns() - start) / 1e9);
    }
    fflush(stderr);
}

/* One line of --prompts; returns an exit status, *stop when the run has to end. */
static int answer_line(struct run *r, int got, const char *line, size_t n, size_t cap, int *stop)
{
    struct cb_gen_result g = {0};
    struct cb_err err = {0, ""};
    int rc = got == SYS_LINE_LONG
                 ? cb_fail(&err, CB_ECONTEXT, "a prompt of more than %zu bytes", cap)
                 : run_check_prompt(r, line, n, &err);
    if (rc == CB_OK)
        rc = run_encode(r, line, n, &err);
    if (rc == CB_OK)
        rc = answer(r, &g, &err);
    int status = rc < 0 ? cli_error(&r->args, &err) : EXIT_OK;
    fflush(stdout);
    *stop = ferror(stdout) || (rc == CB_OK && g.finish == CB_FINISH_CANCEL);
    if (*stop && status == EXIT_OK)
        status = sys_interrupted() ? sys_interrupt_status() : EXIT_RUNTIME;
    return status;
}

/* Answers line after line; the status of the first that failed, or of the end. */
static int serve_lines(struct run *r, struct cb_err *err)
{
    struct sys_lines lines;
    uint32_t longest = r->info.ctx > 4096 ? r->info.ctx : 4096;
    size_t cap = (size_t)longest * 16, n = 0;
    char *line = NULL;
    int status = EXIT_OK, stop = 0;
    int rc = sys_lines_open(&lines, r->prompts, cap, err);
    if (rc == CB_OK)
        rc = run_reserve(r, cap, err);
    if (r->model.hot_swap)
        sys_catch_reload();
    while (rc == CB_OK && !stop && !sys_interrupted()) {
        swap_if_wanted(r);
        int got = sys_lines_next(&lines, &line, &n, err);
        if (got < 0 || got == SYS_LINE_END) {
            rc = got < 0 ? got : rc;
            break;
        }
        if (got == SYS_LINE_SIGNAL || (got == SYS_LINE_GOT && n == 0))
            continue; /* empty lines ask nothing */
        swap_if_wanted(r);
        int one = answer_line(r, got, line, n, cap, &stop);
        status = status == EXIT_OK || stop ? one : status;
    }
    sys_lines_close(&lines);
    if (rc < 0)
        return cli_error(&r->args, err);
    return sys_interrupted() ? sys_interrupt_status() : status;
}

static int answer_one(struct run *r, const char *text, size_t n)
{
    struct cb_gen_result g = {0};
    struct cb_err err = {0, ""};
    int rc = run_reserve(r, n, &err);
    if (rc == CB_OK)
        rc = run_encode(r, text, n, &err);
    if (rc == CB_OK)
        rc = answer(r, &g, &err);
    if (rc < 0)
        return cli_error(&r->args, &err);
    if (g.finish != CB_FINISH_CANCEL)
        return EXIT_OK;
    return sys_interrupted() ? sys_interrupt_status() : EXIT_RUNTIME;
}

/* Engine, golden, and room for everything that the answers need. */
static int load(struct run *r, struct cb_err *err)
{
    uint64_t start = cb_os_now_ns();
    int rc = cb_engine_open(&r->model.opt, &r->e, err);
    r->ns_load = cb_os_now_ns() - start;
    if (rc < 0)
        return rc;
    cb_engine_info(r->e, &r->info);
    rc = cli_golden(r->e, r->golden, &r->ns_golden, err);
    if (rc == CB_OK && r->trace_file)
        rc = exptrace_open(&r->experts, r->trace_file, &r->info, err);
    if (rc < 0 || !r->args.json)
        return rc;
    uint64_t want = (uint64_t)r->n_new * TOKEN_BYTES;
    r->text_cap = want < TEXT_MAX ? (size_t)want : TEXT_MAX;
    r->text = malloc(r->text_cap);
    if (r->text == NULL)
        return cb_fail(err, CB_EIO, "no memory for the answer");
    memset(r->text, 0, r->text_cap); /* resident before the first token */
    return CB_OK;
}

int verb_run(int argc, char **argv)
{
    static struct run run; /* static: zeroed, and off the stack */
    struct run *r = &run;
    struct cb_err err = {0, ""};
    char *text = NULL;
    size_t n = 0;
    int status = EXIT_OK;

    set_up_args(r);
    if (cli_args_finish(&r->args, argc, argv, &status))
        return status;
    int rc = cli_model_check(&r->model, &err);
    if (rc == CB_OK)
        rc = check_words(r, &err);
    if (rc == CB_OK && !r->prompts)
        rc = run_read_prompt(r, &text, &n, &err);
    if (rc < 0)
        return cli_error(&r->args, &err);
    rc = load(r, &err);
    if (rc < 0) {
        status = cli_open_error(&r->args, &r->model, &err);
    } else {
        if (!r->args.json)
            run_print_start(r);
        sys_catch_interrupt();
        status = r->prompts ? serve_lines(r, &err) : answer_one(r, text, n);
    }
    cb_engine_close(r->e);
    exptrace_close(&r->experts);
    run_free(r);
    free(text);
    return status;
}

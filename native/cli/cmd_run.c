/* cmd_run.c — `colibri run`: prompt in, text out.
 *
 * The golden is checked before the first token; an engine with wrong bits does
 * not answer. Text goes to stdout as it comes, everything else to stderr. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "core/os.h"
#include "model/chat.h"
#include "stats.h"
#include "sys.h"
#include "text/text.h"

#define PROMPT_MAX (16u << 20)  /* bytes */
#define ROUTE_SAMPLES 65536u    /* (layer, token) pairs kept for the closing line */
#define TEXT_MAX (8u << 20)     /* bytes of answer kept for --json */
#define TOKEN_BYTES 64u         /* room a token gets there */

struct run {
    struct cli_args args;
    struct cli_model model;
    struct cb_sampling sampling;
    struct arg_list stop;
    const char *prompt, *prompt_file, *system;
    uint32_t n_new;
    int chat, strict, trace;

    struct cb_engine *e;
    struct cb_info info;
    char golden[65];
    uint64_t ns_load, ns_golden;
    int32_t *ids;
    uint32_t n_ids, n_shown;
    char *text; /* --json only */
    size_t n_text, text_cap;
};

/* Fixed, so that nothing is allocated while tokens run. */
static uint64_t route_ns[ROUTE_SAMPLES];
static size_t n_route;

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
    };
    cli_args_add(&r->args, prompt, sizeof prompt / sizeof prompt[0]);
    cli_model_args(&r->args, &r->model);
    cli_args_add(&r->args, rest, sizeof rest / sizeof rest[0]);
}

/* The prompt's bytes, malloc'ed; refused when empty or not UTF-8. */
static int read_prompt(const struct run *r, char **text, size_t *n, struct cb_err *err)
{
    int rc = CB_OK;
    if (!r->prompt == !r->prompt_file)
        return cb_fail(err, CB_EINVAL, "give either --prompt TEXT or --prompt-file FILE");
    if (r->system && !r->chat)
        return cb_fail(err, CB_EINVAL, "--system needs --chat");
    if (r->prompt) {
        *n = strlen(r->prompt);
        *text = malloc(*n + 1);
        if (*text == NULL)
            return cb_fail(err, CB_EIO, "no memory for the prompt");
        memcpy(*text, r->prompt, *n + 1);
    } else if (strcmp(r->prompt_file, "-") == 0) {
        rc = sys_read_all(stdin, "standard input", PROMPT_MAX, text, n, err);
    } else {
        FILE *f = sys_open(r->prompt_file, "rb");
        if (f == NULL)
            return cb_fail(err, CB_EINVAL, "cannot open %s: %s", r->prompt_file, strerror(errno));
        rc = sys_read_all(f, r->prompt_file, PROMPT_MAX, text, n, err);
        fclose(f);
    }
    if (rc < 0)
        return rc;
    if (*n == 0)
        rc = cb_fail(err, CB_EINVAL, "the prompt is empty");
    else if (r->strict && cb_utf8_check(*text, *n) != *n)
        rc = cb_fail(err, CB_EUTF8,
                     "the prompt is not UTF-8: byte 0x%02x at offset %zu; --no-strict-utf8 takes it "
                     "as it is",
                     (unsigned char)(*text)[cb_utf8_check(*text, *n)], cb_utf8_check(*text, *n));
    if (rc < 0)
        free(*text);
    return rc;
}

/* Replaces *text by the chat template around it. */
static int apply_chat(const struct run *r, char **text, size_t *n, struct cb_err *err)
{
    if (memchr(*text, 0, *n) != NULL)
        return cb_fail(err, CB_EINVAL, "with --chat the prompt may not hold NUL bytes");
    size_t cap = *n + (r->system ? strlen(r->system) : 0) + 16 * CB_CHAT_PART;
    char *buf = malloc(cap);
    if (buf == NULL)
        return cb_fail(err, CB_EIO, "no memory for the prompt");
    int rc = cb_chat_render(r->e, r->system, *text, buf, cap, n, err);
    if (rc < 0) {
        free(buf);
        return rc;
    }
    free(*text);
    *text = buf;
    return CB_OK;
}

static int encode(struct run *r, const char *text, size_t n, struct cb_err *err)
{
    size_t cap = n + 2;
    r->ids = malloc(cap * sizeof *r->ids);
    if (r->ids == NULL)
        return cb_fail(err, CB_EIO, "no memory for the prompt");
    int got = cb_encode(r->e, text, n, 1, r->strict, r->ids + 1, cap - 1, err);
    if (got < 0)
        return got;
    r->n_ids = (uint32_t)got;
    int has_bos = got > 0 && (uint32_t)r->ids[1] == r->info.bos;
    if (r->info.add_bos && r->info.bos != UINT32_MAX && !has_bos) {
        r->ids[0] = (int32_t)r->info.bos;
        r->n_ids++;
    } else {
        memmove(r->ids, r->ids + 1, (size_t)got * sizeof *r->ids);
    }
    if (r->n_ids > r->info.ctx)
        return cb_fail(err, CB_ECONTEXT,
                       "the prompt has %u tokens, the context holds %u; raise --ctx (the model knows "
                       "up to %u)",
                       r->n_ids, r->info.ctx, r->info.ctx_train);
    return CB_OK;
}

static void trace_token(const struct run *r, int32_t id)
{
    size_t len = 0;
    const char *bytes = cb_token_bytes(r->e, id, 1, &len);
    const int32_t *expert = cb_last_experts(r->e);
    const float *weight = cb_last_weights(r->e);
    const uint64_t *ns = cb_route_ns(r->e);
    struct json j = {stderr, 0};
    fprintf(stderr, "token %u: id %d ", r->n_shown, id);
    json_text(&j, NULL, bytes, len);
    fputc('\n', stderr);
    for (uint32_t l = 0; l < r->info.n_moe_layer; l++) {
        fprintf(stderr, "  MoE layer %u: experts activated", l);
        for (uint32_t k = 0; k < r->info.n_expert_used; k++) {
            size_t at = (size_t)l * r->info.n_expert_used + k;
            fprintf(stderr, " %d (%.3f)", expert[at], (double)weight[at]);
        }
        fprintf(stderr, ", routed in %.1f us\n", (double)ns[l] / 1e3);
    }
}

static void collect_routes(const struct run *r)
{
    const uint64_t *ns = cb_route_ns(r->e);
    for (uint32_t l = 0; l < r->info.n_moe_layer && n_route < ROUTE_SAMPLES; l++)
        route_ns[n_route++] = ns[l];
}

static int on_text(void *ud, const char *text, size_t len, int32_t id)
{
    struct run *r = ud;
    if (id >= 0) {
        r->n_shown++;
        if (r->n_shown > 1) /* the first token's routing was the whole prompt's */
            collect_routes(r);
        if (r->trace)
            trace_token(r, id);
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

static void print_routes(FILE *f)
{
    stats_sort(route_ns, n_route);
    fprintf(f, "routing latency: p50 %.1f us, p99 %.1f us, max %.1f us a layer (%zu samples)\n",
            (double)stats_rank(route_ns, n_route, 50) / 1e3,
            (double)stats_rank(route_ns, n_route, 99) / 1e3,
            (double)stats_rank(route_ns, n_route, 100) / 1e3, n_route);
}

static void print_start(const struct run *r)
{
    cli_print_start(stderr, r->e);
    fprintf(stderr, "golden ok %.12s… (%.2f s)\n", r->golden, (double)r->ns_golden / 1e9);
    if (r->info.n_moe_layer) {
        collect_routes(r);
        print_routes(stderr);
        n_route = 0;
    }
}

static void print_end(const struct cb_gen_result *g, const struct cb_counters *c)
{
    if (n_route)
        print_routes(stderr);
    fprintf(stderr,
            "prefill %u tokens %.1f tok/s, decode %" PRIu64 " tokens %.1f tok/s, first token %.0f ms, "
            "finish: %s\n",
            g->n_prompt, cli_per_second(c->tokens_prefill, c->ns_prefill), c->tokens_decode,
            cli_per_second(c->tokens_decode, c->ns_decode), (double)g->ns_first / 1e6,
            cli_finish_name(g->finish));
}

static void print_json(const struct run *r, const struct cb_gen_result *g,
                       const struct cb_counters *c)
{
    struct json j = {stdout, 0};
    struct cb_ledger ledger;
    cb_engine_ledger(r->e, &ledger);
    json_begin(&j, NULL, '{');
    json_text(&j, "text", r->text, r->n_text);
    json_begin(&j, "tokens", '{');
    json_u64(&j, "prompt", g->n_prompt);
    json_u64(&j, "generated", g->n_gen);
    json_end(&j, '}');
    json_word(&j, "finish", cli_finish_name(g->finish));
    json_begin(&j, "timings", '{');
    json_u64(&j, "load_ns", r->ns_load);
    json_u64(&j, "golden_ns", r->ns_golden);
    json_u64(&j, "first_token_ns", g->ns_first);
    json_u64(&j, "total_ns", g->ns_total);
    json_float(&j, "prefill_tok_s", cli_per_second(c->tokens_prefill, c->ns_prefill));
    json_float(&j, "decode_tok_s", cli_per_second(c->tokens_decode, c->ns_decode));
    json_end(&j, '}');
    cli_json_ledger(&j, "ledger", &ledger);
    cli_json_model(&j, &r->info);
    json_begin(&j, "golden", '{');
    json_bool(&j, "ok", 1);
    json_word(&j, "sha256", r->golden);
    json_end(&j, '}');
    json_end(&j, '}');
    putchar('\n');
}

static int generate(struct run *r, struct cb_gen_result *g, struct cb_err *err)
{
    struct cb_counters before, c;
    if (r->args.json) {
        uint64_t want = (uint64_t)r->n_new * TOKEN_BYTES;
        r->text_cap = want < TEXT_MAX ? (size_t)want : TEXT_MAX;
        r->text = malloc(r->text_cap);
        if (r->text == NULL)
            return cb_fail(err, CB_EIO, "no memory for the answer");
        memset(r->text, 0, r->text_cap); /* resident before the first token */
    }
    if (!r->args.json)
        print_start(r);
    cb_engine_counters(r->e, &before);
    sys_catch_interrupt();
    int rc = cb_generate(r->e, r->ids, r->n_ids, r->n_new, &r->sampling, r->stop.item, r->stop.n,
                         on_text, r, g, err);
    if (rc < 0)
        return rc;
    cb_engine_counters(r->e, &c);
    c.tokens_prefill -= before.tokens_prefill;
    c.tokens_decode -= before.tokens_decode;
    c.ns_prefill -= before.ns_prefill;
    c.ns_decode -= before.ns_decode;
    if (r->args.json) {
        print_json(r, g, &c);
    } else {
        putchar('\n');
        fflush(stdout);
        print_end(g, &c);
    }
    return CB_OK;
}

static int load(struct run *r, struct cb_err *err)
{
    uint64_t start = cb_os_now_ns();
    int rc = cb_engine_open(&r->model.opt, &r->e, err);
    r->ns_load = cb_os_now_ns() - start;
    if (rc < 0)
        return rc;
    cb_engine_info(r->e, &r->info);
    return CB_OK;
}

int verb_run(int argc, char **argv)
{
    static struct run run; /* static: zeroed, and off the stack */
    struct run *r = &run;
    struct cb_gen_result g = {0};
    struct cb_err err = {0, ""};
    char *text = NULL;
    size_t n = 0;
    int status = EXIT_OK;

    set_up_args(r);
    if (cli_args_finish(&r->args, argc, argv, &status))
        return status;
    int rc = cli_model_check(&r->model, &err);
    if (rc == CB_OK)
        rc = read_prompt(r, &text, &n, &err);
    if (rc < 0)
        return cli_error(&r->args, &err);
    rc = load(r, &err);
    if (rc == CB_OK && r->chat)
        rc = apply_chat(r, &text, &n, &err);
    if (rc == CB_OK)
        rc = encode(r, text, n, &err);
    if (rc == CB_OK)
        rc = cli_golden(r->e, r->golden, &r->ns_golden, &err);
    if (rc == CB_OK)
        rc = generate(r, &g, &err);
    status = rc < 0 ? cli_error(&r->args, &err) : EXIT_OK;
    if (rc == CB_OK && g.finish == CB_FINISH_CANCEL)
        status = sys_interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
    cb_engine_close(r->e);
    free(r->ids);
    free(r->text);
    free(text);
    return status;
}

/* cmd_logits.c — `colibri logits` and `colibri tokenize`. */
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "npy.h"
#include "sys.h"

struct logits {
    struct cli_args args;
    struct cli_model model;
    const char *in, *out, *experts_out;
    struct cb_engine *e;
    struct cb_info info;
    int32_t *ids;        /* [n] */
    uint32_t n;
    float *chunk;        /* [batch][n_vocab] */
    int32_t *chosen;     /* [n_moe_layer][batch][n_expert_used] of one chunk */
    int32_t *experts;    /* [n_moe_layer][n][n_expert_used] */
    struct npy_out file;
};

static int check_ids(const struct logits *l, struct cb_err *err)
{
    if (l->n > l->info.ctx)
        return cb_fail(err, CB_ECONTEXT, "%s holds %u tokens, the context %u", l->in, l->n,
                       l->info.ctx);
    for (uint32_t i = 0; i < l->n; i++)
        if (l->ids[i] < 0 || (uint32_t)l->ids[i] >= l->info.n_vocab)
            return cb_fail(err, CB_EINVAL, "token %u of %s is %d, outside the vocabulary of %u", i,
                           l->in, l->ids[i], l->info.n_vocab);
    return CB_OK;
}

static int allocate(struct logits *l, struct cb_err *err)
{
    uint64_t used = l->info.n_expert_used, moe = l->info.n_moe_layer, batch = l->info.batch;
    l->chunk = calloc((size_t)batch * l->info.n_vocab, sizeof *l->chunk);
    if (moe * used > 0 && l->experts_out) {
        l->chosen = calloc((size_t)(moe * batch * used), sizeof *l->chosen);
        l->experts = calloc((size_t)(moe * l->n * used), sizeof *l->experts);
    }
    if (!l->chunk || (l->experts_out && moe * used > 0 && (!l->chosen || !l->experts)))
        return cb_fail(err, CB_EIO, "no memory for the logits of %u tokens", l->info.batch);
    return CB_OK;
}

/* Rows [at, at + n) of every layer out of a chunk's [layer][n][used]. */
static void place_experts(struct logits *l, uint32_t at, uint32_t n)
{
    size_t used = l->info.n_expert_used;
    for (uint32_t layer = 0; layer < l->info.n_moe_layer; layer++)
        memcpy(l->experts + ((size_t)layer * l->n + at) * used,
               l->chosen + (size_t)layer * n * used, n * used * sizeof *l->experts);
}

static int evaluate(struct logits *l, struct cb_err *err)
{
    uint64_t dim[2] = {l->n, l->info.n_vocab};
    int rc = npy_create(&l->file, l->out, "<f4", dim, 2, err);
    for (uint32_t at = 0; rc == CB_OK && at < l->n; at += l->info.batch) {
        uint32_t n = l->n - at < l->info.batch ? l->n - at : l->info.batch;
        rc = cb_eval(l->e, l->ids + at, n, l->chunk, l->chosen, err);
        if (rc == CB_OK && l->experts)
            place_experts(l, at, n);
        if (rc == CB_OK)
            rc = npy_write(&l->file, l->chunk, (uint64_t)n * l->info.n_vocab, err);
        if (rc == CB_OK && sys_interrupted())
            rc = cb_fail(err, CB_ECANCEL, "interrupted; nothing was written");
    }
    if (rc == CB_OK)
        rc = npy_commit(&l->file, err);
    else
        npy_abort(&l->file);
    return rc;
}

static int save_experts(const struct logits *l, struct cb_err *err)
{
    struct npy_out f;
    uint64_t dim[3] = {l->info.n_moe_layer, l->n, l->info.n_expert_used};
    int rc = npy_create(&f, l->experts_out, "<i4", dim, 3, err);
    if (rc == CB_OK && l->experts)
        rc = npy_write(&f, l->experts, dim[0] * dim[1] * dim[2], err);
    return rc == CB_OK ? npy_commit(&f, err) : rc;
}

static int logits_work(struct logits *l, struct cb_err *err)
{
    int rc = cli_model_check(&l->model, err);
    if (rc == CB_OK && (!l->in || !l->out))
        rc = cb_fail(err, CB_EINVAL, "--tokens IN.npy and -o OUT.npy are needed");
    if (rc == CB_OK)
        rc = npy_read_i32(l->in, &l->ids, &l->n, err);
    if (rc < 0)
        return rc;
    rc = cb_engine_open(&l->model.opt, &l->e, err);
    if (rc < 0)
        return rc;
    cb_engine_info(l->e, &l->info);
    sys_catch_interrupt();
    rc = check_ids(l, err);
    if (rc == CB_OK && l->experts_out && l->info.n_moe_layer == 0)
        rc = cb_fail(err, CB_EINVAL, "--experts: the model is dense");
    if (rc == CB_OK)
        rc = allocate(l, err);
    if (rc == CB_OK)
        rc = evaluate(l, err);
    if (rc == CB_OK && l->experts_out)
        rc = save_experts(l, err);
    return rc;
}

static void logits_report(const struct logits *l)
{
    struct cb_counters c;
    cb_engine_counters(l->e, &c);
    double rate = cli_per_second(c.tokens_prefill + c.tokens_decode, c.ns_prefill + c.ns_decode);
    if (!l->args.json) {
        cli_print_cache(stderr, &l->model, &c);
        cli_print_offload(stderr, l->e, &c);
        fprintf(stderr, "%u tokens, %.1f tok/s (%s, threads: %u) -> %s\n", l->n, rate, l->info.isa,
                l->info.threads, l->out);
        cli_print_lossy(stderr, &l->model, &c);
        return;
    }
    struct json j = {stdout, 0};
    struct cb_ledger ledger;
    cb_engine_ledger(l->e, &ledger);
    json_begin(&j, NULL, '{');
    json_u64(&j, "tokens", l->n);
    json_word(&j, "logits", l->out);
    json_word(&j, "experts", l->experts_out);
    json_float(&j, "tok_s", rate);
    cli_json_lossy(&j, &c);
    cli_json_cache(&j, &l->model, &ledger, &c);
    cli_json_offload(&j, l->e, &c);
    cli_json_model(&j, &l->info);
    json_end(&j, '}');
    putchar('\n');
}

int verb_logits(int argc, char **argv)
{
    static struct logits l;
    struct cb_err err = {0, ""};
    int status = EXIT_OK;
    cli_args_begin(&l.args, "logits",
                   "Runs token ids (int32 .npy, one dimension) through the model from position 0 and\n"
                   "saves the logits, float32 [tokens, vocabulary]. The golden is not checked: this is\n"
                   "the tool to find out why it fails.");
    const struct arg rows[] = {
        {.group = "Files", .name = "--tokens", .kind = ARG_TEXT, .out = &l.in, .meta = "IN.npy",
         .help = "token ids"},
        {.name = "--output", .alias = "-o", .kind = ARG_TEXT, .out = &l.out, .meta = "OUT.npy",
         .help = "logits; appears by rename when complete"},
        {.name = "--experts", .kind = ARG_TEXT, .out = &l.experts_out, .meta = "OUT.npy",
         .help = "chosen experts in rank order, int32 [MoE layers, tokens, used]"},
    };
    cli_args_add(&l.args, rows, sizeof rows / sizeof rows[0]);
    cli_model_args(&l.args, &l.model);
    if (cli_args_finish(&l.args, argc, argv, &status))
        return status;
    int rc = logits_work(&l, &err);
    if (rc < 0)
        status = cli_open_error(&l.args, &l.model, &err);
    else
        logits_report(&l);
    cb_engine_close(l.e);
    free(l.ids);
    free(l.chunk);
    free(l.chosen);
    free(l.experts);
    return status;
}

static void print_ids(const struct cli_args *a, const int32_t *ids, int n)
{
    struct json j = {stdout, 0};
    if (a->json) {
        json_begin(&j, NULL, '{');
        json_begin(&j, "ids", '[');
        for (int i = 0; i < n; i++)
            json_i64(&j, NULL, ids[i]);
        json_end(&j, ']');
        json_u64(&j, "n", (uint64_t)n);
        json_end(&j, '}');
    } else {
        for (int i = 0; i < n; i++)
            printf("%s%d", i ? " " : "", ids[i]);
    }
    putchar('\n');
}

int verb_tokenize(int argc, char **argv)
{
    struct cli_args a;
    struct cli_model m;
    struct cb_engine *e = NULL;
    struct cb_err err = {0, ""};
    char *text = NULL;
    int32_t *ids = NULL;
    size_t n = 0;
    int special = 1, strict = 1, status = EXIT_OK;
    const struct arg rows[] = {
        {.group = "Text", .name = "--no-special", .kind = ARG_FLAG, .out = &special, .flag_value = 0,
         .help = "special tokens' names in the text are plain text"},
        {.name = "--no-strict-utf8", .kind = ARG_FLAG, .out = &strict, .flag_value = 0,
         .help = "take stray bytes as they are"},
    };
    cli_args_begin(&a, "tokenize", "Prints the token ids of the text on standard input; no BOS is added.");
    cli_args_add(&a, rows, sizeof rows / sizeof rows[0]);
    cli_model_args(&a, &m);
    if (cli_args_finish(&a, argc, argv, &status))
        return status;
    int rc = cli_model_check(&m, &err);
    if (rc == CB_OK)
        rc = sys_read_all(stdin, "standard input", 16u << 20, &text, &n, &err);
    if (rc == CB_OK)
        rc = cb_engine_open(&m.opt, &e, &err);
    if (rc == CB_OK) {
        ids = malloc((n + 1) * sizeof *ids);
        rc = ids ? cb_encode(e, text, n, special, strict, ids, n + 1, &err)
                 : cb_fail(&err, CB_EIO, "no memory for the token ids");
    }
    if (rc < 0)
        status = cli_open_error(&a, &m, &err);
    else
        print_ids(&a, ids, rc);
    cb_engine_close(e);
    free(ids);
    free(text);
    return status;
}

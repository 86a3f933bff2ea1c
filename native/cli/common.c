/* common.c — options, messages and figures that several verbs share. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "cli.h"
#include "core/os.h"
#include "sys.h"

int cli_exit_status(int code)
{
    switch (code) {
    case CB_OK:
        return EXIT_OK;
    case CB_EINVAL:
    case CB_EUTF8:
    case CB_ECONTEXT:
        return EXIT_USAGE;
    case CB_EFORMAT:
    case CB_EUNSUPPORTED:
        return EXIT_MODEL;
    case CB_EBUDGET:
        return EXIT_BUDGET;
    case CB_EGOLDEN:
        return EXIT_GOLDEN;
    case CB_EEXPERT:
        return EXIT_EXPERT;
    case CB_ECANCEL:
        return sys_interrupted() ? sys_interrupt_status() : EXIT_INTERRUPTED;
    default:
        return EXIT_RUNTIME;
    }
}

int cli_error(const struct cli_args *a, const struct cb_err *err)
{
    int status = cli_exit_status(err->code);
    fflush(stdout);
    if (a->json) {
        struct json j = {stdout, 0};
        json_begin(&j, NULL, '{');
        json_begin(&j, "error", '{');
        json_word(&j, "code", cb_code_name(err->code));
        json_word(&j, "message", err->msg);
        json_i64(&j, "exit_status", status);
        json_end(&j, '}');
        json_end(&j, '}');
        putchar('\n');
        fflush(stdout);
    }
    fprintf(stderr, "colibri %s: error: %s\n", a->verb, err->msg);
    return status;
}

void cli_model_args(struct cli_args *a, struct cli_model *m)
{
    memset(m, 0, sizeof *m);
    m->extra_below = NAN;
    const struct arg rows[] = {
        {.group = "Model", .name = "--model", .alias = "-m", .kind = ARG_TEXT, .out = &m->opt.model_dir,
         .meta = "DIR", .help = "the NAME.coli folder"},
        {.name = "--ctx", .kind = ARG_U32, .out = &m->opt.ctx, .lo = 1, .hi = 1 << 24, .meta = "N",
         .help = "context in tokens (default: the model's, at most 4096)"},
        {.name = "--kv", .kind = ARG_CHOICE, .out = &m->opt.kv_type,
         .meta = "f16|f32|q8_0", .help = "type of the key/value cache (default f16)"},
        {.group = "Machine", .name = "--threads", .alias = "-t", .kind = ARG_U32,
         .out = &m->opt.threads, .lo = 1, .hi = 64, .meta = "N",
         .help = "default: one a physical core"},
        {.name = "--batch", .kind = ARG_U32, .out = &m->opt.batch, .lo = 1, .hi = 256, .meta = "N",
         .help = "prompt tokens computed together (default 32)"},
        {.name = "--isa", .kind = ARG_TEXT, .out = &m->opt.isa, .meta = "NAME",
         .help = "kernels to use: scalar, sse41, avx2, neon (default: the best this CPU runs)"},
        {.group = "Memory", .name = "--budget", .kind = ARG_SIZE, .out = &m->opt.budget,
         .meta = "SIZE", .help = "the most it may take, as 512MiB (default: what is available)"},
        {.name = "--over-budget", .kind = ARG_FLAG, .out = &m->over_budget, .flag_value = 1,
         .help = "go on although the plan exceeds what is available"},
        {.name = "--lock", .kind = ARG_FLAG, .out = &m->lock, .flag_value = 1,
         .help = "keep it all in RAM (mlock)"},
    };
    cli_args_add(a, rows, sizeof rows / sizeof rows[0]);
    cli_memory_args(a, m);
    cli_offload_args(a, m);
}

int cli_isa_check(const char *isa, struct cb_err *err)
{
    const char *list = cb_isa_list();
    size_t len = isa ? strlen(isa) : 0;
    if (isa == NULL)
        return CB_OK;
    for (const char *at = list; *at;) {
        size_t n = strcspn(at, ",");
        if (n == len && memcmp(at, isa, n) == 0)
            return CB_OK;
        at += n + (at[n] == ',');
    }
    return cb_fail(err, CB_EINVAL, "--isa %.20s: this build has %s", isa, list);
}

/* A missing folder is a bad model, not a failing disk: exit status 3. */
static int manifest_there(const char *dir, struct cb_err *err)
{
    char path[1024];
    struct cb_os_file f;
    if (snprintf(path, sizeof path, "%s/manifest.json", dir) >= (int)sizeof path)
        return cb_fail(err, CB_EINVAL, "--model: the path is too long");
    if (cb_os_open(&f, path, NULL) < 0)
        return cb_fail(err, CB_EFORMAT, "%.180s is not a model: it has no readable manifest.json", dir);
    cb_os_close(&f);
    return CB_OK;
}

int cli_model_check(struct cli_model *m, struct cb_err *err)
{
    if (m->opt.model_dir == NULL || m->opt.model_dir[0] == '\0')
        return cb_fail(err, CB_EINVAL, "--model DIR is missing");
    m->opt.lock = (uint32_t)m->lock;
    m->opt.over_budget = (uint32_t)m->over_budget;
    int rc = cli_isa_check(m->opt.isa, err);
    if (rc == CB_OK)
        rc = cli_memory_check(m, err);
    if (rc == CB_OK)
        rc = cli_offload_check(m, err);
    return rc < 0 ? rc : manifest_there(m->opt.model_dir, err);
}

int cli_golden(struct cb_engine *e, char hex[65], uint64_t *ns, struct cb_err *err)
{
    struct cb_info info;
    cb_engine_info(e, &info);
    uint64_t start = cb_os_now_ns();
    int rc = cb_golden(e, hex, err);
    *ns = cb_os_now_ns() - start;
    if (rc < 0)
        return rc;
    if (info.golden[0] == '\0')
        return cb_fail(err, CB_EGOLDEN,
                       "the manifest promises no golden; this engine computes %s. Convert the model again",
                       hex);
    if (strcmp(hex, info.golden) != 0)
        return cb_fail(err, CB_EGOLDEN,
                       "golden mismatch: promised %s, computed %s (%s, %u threads): bad memory, a "
                       "damaged file or a wrong kernel; do not serve",
                       info.golden, hex, info.isa, info.threads);
    return CB_OK;
}

const char *cli_size(uint64_t bytes, char buf[32])
{
    if (bytes >= UINT64_C(1) << 30)
        snprintf(buf, 32, "%.2f GiB", (double)bytes / (1 << 30));
    else if (bytes >= 1 << 20)
        snprintf(buf, 32, "%.1f MiB", (double)bytes / (1 << 20));
    else
        snprintf(buf, 32, "%.1f KiB", (double)bytes / 1024);
    return buf;
}

double cli_per_second(uint64_t n, uint64_t ns)
{
    return ns ? (double)n * 1e9 / (double)ns : 0.0;
}

void cli_print_ledger(FILE *f, const struct cb_ledger *l)
{
    char buf[32];
    for (int i = 0; i < CB_L_COUNT; i++)
        if (l->bytes[i])
            fprintf(f, "  %-18s %12s\n", cb_ledger_name(i), cli_size(l->bytes[i], buf));
    fprintf(f, "  %-18s %12s\n", "total", cli_size(l->total, buf));
    if (l->budget)
        fprintf(f, "  %-18s %12s\n", "budget", cli_size(l->budget, buf));
    if (l->available != UINT64_MAX)
        fprintf(f, "  %-18s %12s\n", "available", cli_size(l->available, buf));
}

void cli_json_ledger(struct json *j, const char *key, const struct cb_ledger *l)
{
    json_begin(j, key, '{');
    for (int i = 0; i < CB_L_COUNT; i++)
        json_u64(j, cb_ledger_name(i), l->bytes[i]);
    json_u64(j, "total", l->total);
    json_u64(j, "budget", l->budget);
    if (l->available == UINT64_MAX)
        json_null(j, "available");
    else
        json_u64(j, "available", l->available);
    json_end(j, '}');
}

void cli_json_model(struct json *j, const struct cb_info *i)
{
    json_begin(j, "model", '{');
    json_word(j, "name", i->name);
    json_word(j, "arch", i->arch);
    json_word(j, "model_id", i->model_id);
    json_u64(j, "n_layer", i->n_layer);
    json_u64(j, "n_moe_layer", i->n_moe_layer);
    json_u64(j, "n_expert", i->n_expert);
    json_u64(j, "n_expert_used", i->n_expert_used);
    json_u64(j, "experts_loaded", i->experts_loaded);
    json_u64(j, "n_vocab", i->n_vocab);
    json_end(j, '}');
    json_word(j, "version", CB_VERSION);
    json_word(j, "isa", i->isa);
    json_u64(j, "threads", i->threads);
    json_u64(j, "batch", i->batch);
    json_u64(j, "ctx", i->ctx);
}

const char *cli_finish_name(int finish)
{
    static const char *const names[] = {"length", "eog", "stop", "cancel", "context"};
    return finish >= 0 && finish <= CB_FINISH_CONTEXT ? names[finish] : "unknown";
}

int32_t cli_fixed_token(uint32_t i, uint32_t n_vocab)
{
    return (int32_t)((i * 2654435761u + 12345u) % n_vocab);
}

/* cmd_check.c — `colibri check`, `plan` and `version`. */
#include <string.h>

#include "cli.h"
#include "core/os.h"

static void check_report(const struct cli_args *a, const struct cli_model *m,
                         const struct cb_engine *e, const char *hex, int ok, uint64_t ns_load,
                         uint64_t ns_golden)
{
    struct cb_info info;
    struct cb_ledger ledger;
    struct cb_counters c;
    struct json j = {stdout, 0};
    cb_engine_info(e, &info);
    cb_engine_ledger(e, &ledger);
    cb_engine_counters(e, &c);
    if (!a->json) {
        cli_print_cache(stdout, m, &c);
        cli_print_offload(stdout, e, &c);
        cli_print_lossy(stdout, m, &c);
        if (ok)
            printf("golden ok %s (%s, %u thread%s, %.2f s)\n", hex, info.isa, info.threads,
                   info.threads == 1 ? "" : "s", (double)ns_golden / 1e9);
        return;
    }
    json_begin(&j, NULL, '{');
    json_begin(&j, "golden", '{');
    json_bool(&j, "ok", ok);
    json_word(&j, "sha256", hex);
    json_word(&j, "promised", info.golden[0] ? info.golden : NULL);
    json_u64(&j, "ns", ns_golden);
    json_end(&j, '}');
    json_u64(&j, "load_ns", ns_load);
    cli_json_model(&j, &info);
    cli_json_lossy(&j, &c);
    cli_json_cache(&j, m, &ledger, &c);
    cli_json_offload(&j, e, &c);
    cli_json_ledger(&j, "ledger", &ledger);
    json_end(&j, '}');
    putchar('\n');
}

int verb_check(int argc, char **argv)
{
    struct cli_args a;
    struct cli_model m;
    struct cb_engine *e = NULL;
    struct cb_err err = {0, ""};
    char hex[65] = "";
    uint64_t ns_golden = 0;
    int status = EXIT_OK;

    cli_args_begin(&a, "check", "Loads the model and computes its golden: a hash of logits for fixed tokens\n"
                                "that must equal the one in the manifest, bit for bit.");
    cli_model_args(&a, &m);
    if (cli_args_finish(&a, argc, argv, &status))
        return status;
    int rc = cli_model_check(&m, &err);
    uint64_t start = cb_os_now_ns();
    if (rc == CB_OK)
        rc = cb_engine_open(&m.opt, &e, &err);
    uint64_t ns_load = cb_os_now_ns() - start;
    if (rc < 0)
        return cli_open_error(&a, &m, &err);
    if (!a.json)
        cli_print_start(stdout, e, &m);
    rc = cli_golden(e, hex, &ns_golden, &err);
    if (rc == CB_OK || rc == CB_EGOLDEN)
        check_report(&a, &m, e, hex, rc == CB_OK, ns_load, ns_golden);
    if (rc < 0) {
        a.json = a.json && rc != CB_EGOLDEN; /* the report is the one object */
        status = cli_error(&a, &err);
    }
    cb_engine_close(e);
    return status;
}

static void print_plan(const struct cli_model *m, const struct cb_info *info,
                       const struct cb_ledger *l)
{
    char buf[32];
    printf("%s (%s), context %u, KV %s, %u thread%s\n", info->name, info->arch, info->ctx,
           cli_kv_name(m->opt.kv_type), info->threads, info->threads == 1 ? "" : "s");
    cli_print_ledger(stdout, l);
    if (l->slots)
        printf("  %u of %u experts have a slot of %s\n", l->slots, l->records,
               cli_size(l->slot_bytes, buf));
}

int verb_plan(int argc, char **argv)
{
    struct cli_args a;
    struct cli_model m;
    struct cb_ledger ledger;
    struct cb_info info;
    struct cb_err err = {0, ""};
    int status = EXIT_OK;

    memset(&ledger, 0, sizeof ledger);
    memset(&info, 0, sizeof info);
    cli_args_begin(&a, "plan", "Shows what the model will take of memory, without loading it.");
    cli_model_args(&a, &m);
    if (cli_args_finish(&a, argc, argv, &status))
        return status;
    int rc = cli_model_check(&m, &err);
    if (rc == CB_OK)
        rc = cb_plan(&m.opt, &ledger, &info, &err);
    if (rc < 0 && rc != CB_EBUDGET)
        return cli_error(&a, &err);
    if (a.json) {
        struct json j = {stdout, 0};
        json_begin(&j, NULL, '{');
        json_bool(&j, "fits", rc == CB_OK);
        if (rc < 0 && ledger.total > 0)
            cli_json_advice(&j, &m, &ledger);
        cli_json_cache(&j, &m, &ledger, NULL);
        cli_json_ledger(&j, "ledger", &ledger);
        cli_json_model(&j, &info);
        json_end(&j, '}');
        putchar('\n');
        a.json = 0; /* one object is enough; the error goes to stderr */
    } else {
        print_plan(&m, &info, &ledger);
        if (rc < 0 && ledger.total > 0)
            cli_print_advice(stdout, &m, &ledger);
    }
    return rc < 0 ? cli_error(&a, &err) : EXIT_OK;
}

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#if defined(__clang__)
#define COMPILER "clang " TEXT(__clang_major__) "." TEXT(__clang_minor__) "." TEXT(__clang_patchlevel__)
#elif defined(__GNUC__)
#define COMPILER "gcc " TEXT(__GNUC__) "." TEXT(__GNUC_MINOR__) "." TEXT(__GNUC_PATCHLEVEL__)
#else
#define COMPILER "unknown"
#endif
#if defined(__aarch64__)
#define ARCH "aarch64"
#elif defined(__x86_64__)
#define ARCH "x86_64"
#else
#define ARCH "unknown"
#endif
#if defined(_WIN32)
#define SYSTEM "windows"
#elif defined(__linux__)
#define SYSTEM "linux"
#else
#define SYSTEM "unknown"
#endif

int verb_version(int argc, char **argv)
{
    struct cli_args a;
    int status = EXIT_OK;
    cli_args_begin(&a, "version", "Version, ABI and instruction sets of this build.");
    if (cli_args_finish(&a, argc, argv, &status))
        return status;
    if (a.json) {
        struct json j = {stdout, 0};
        json_begin(&j, NULL, '{');
        json_word(&j, "version", CB_VERSION);
        json_u64(&j, "abi", cb_abi());
        json_word(&j, "isas", cb_isa_list());
        json_word(&j, "isa_best", cb_isa_best());
        json_word(&j, "compiler", COMPILER);
        json_word(&j, "target", ARCH "-" SYSTEM);
        json_end(&j, '}');
        putchar('\n');
    } else {
        printf("colibri %s, ABI %u\ninstruction sets: %s; this CPU: %s\nbuilt with %s for %s\n",
               CB_VERSION, cb_abi(), cb_isa_list(), cb_isa_best(), COMPILER, ARCH "-" SYSTEM);
    }
    return EXIT_OK;
}

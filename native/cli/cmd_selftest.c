/* cmd_selftest.c — `colibri selftest`: every kernel against the scalar one. */
#include "cli.h"
#include "tests/checkkern/checkkern.h"

struct report {
    struct json j;
    int json;
};

static void on_line(void *ud, const char *text)
{
    struct report *r = ud;
    if (r->json) {
        json_word(&r->j, NULL, text);
    } else {
        puts(text);
        fflush(stdout);
    }
}

int verb_selftest(int argc, char **argv)
{
    struct cli_args a;
    struct cb_err err = {0, ""};
    struct report r = {{stdout, 0}, 0};
    const char *isa = NULL, *kernel = NULL;
    uint64_t seed = 0;
    int bench = 0, status = EXIT_OK;
    const struct arg rows[] = {
        {.group = "What", .name = "--isa", .kind = ARG_TEXT, .out = &isa, .meta = "NAME",
         .help = "only this instruction set"},
        {.name = "--kernel", .kind = ARG_TEXT, .out = &kernel, .meta = "PART",
         .help = "only kernels whose name holds PART, as gemm_q4"},
        {.name = "--seed", .kind = ARG_U64, .out = &seed, .meta = "N", .help = "of the random data"},
        {.name = "--bench", .kind = ARG_FLAG, .out = &bench, .flag_value = 1,
         .help = "time them instead of comparing"},
    };
    cli_args_begin(&a, "selftest", "Holds every kernel that this CPU runs to the scalar reference, bit for bit,\n"
                                   "and the reference to recorded hashes.");
    cli_args_add(&a, rows, sizeof rows / sizeof rows[0]);
    if (cli_args_finish(&a, argc, argv, &status))
        return status;
    if (cli_isa_check(isa, &err) < 0)
        return cli_error(&a, &err);
    r.json = a.json;
    if (a.json) {
        json_begin(&r.j, NULL, '{');
        json_begin(&r.j, "lines", '[');
    }
    int failed = cb_checkkern(isa, kernel, bench, seed, on_line, &r);
    if (a.json) {
        json_end(&r.j, ']');
        json_i64(&r.j, "failed", failed);
        json_bool(&r.j, "ok", failed == 0);
        json_end(&r.j, '}');
        putchar('\n');
        a.json = 0;
    } else if (failed >= 0) {
        printf("%s: %d failed\n", failed ? "FAIL" : "ok", failed);
    }
    if (failed < 0) {
        cb_fail(&err, CB_EINVAL, "no kernel matches --isa and --kernel on this CPU");
        return cli_error(&a, &err);
    }
    return failed ? EXIT_RUNTIME : EXIT_OK;
}

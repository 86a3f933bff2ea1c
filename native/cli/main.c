/* main.c — the `colibri` tool: finds the verb and hands it the rest. */
#include <string.h>

#include "cli.h"
#include "core/os.h"
#include "sys.h"

uint64_t cli_start_ns;

static const struct verb {
    const char *group, *name, *help;
    cli_verb_fn *fn;
} verbs[] = {
    {"Use", "run", "generate text", verb_run},
    {NULL, "serve", "answer over HTTP, for months", verb_serve},
    {NULL, "health", "ask a running service how it is", verb_health},
    {NULL, "tokenize", "turn text from stdin into token ids", verb_tokenize},
    {NULL, "logits", "run token ids through the model and save the logits", verb_logits},
    {NULL, "expertd", "compute experts for a board at the other end of a link", verb_expertd},
    {"Check", "check", "load the model and reproduce its golden", verb_check},
    {NULL, "plan", "show what the model will take of memory, without loading it", verb_plan},
    {NULL, "selftest", "hold every kernel to the scalar reference", verb_selftest},
    {"Measure", "probe", "latency, speed, memory and page faults on this machine", verb_probe},
    {NULL, "bench", "prefill and decode sweep, memory bandwidth, kernels", verb_bench},
    {"About", "version", "version, ABI and instruction sets of this build", verb_version},
};
#define N_VERBS (sizeof verbs / sizeof verbs[0])

static void print_usage(FILE *f)
{
    fprintf(f, "colibri %s: Mixture-of-Experts language models on small boards\n\n"
               "Usage: colibri VERB [options]\n",
            CB_VERSION);
    for (size_t i = 0; i < N_VERBS; i++) {
        if (verbs[i].group)
            fprintf(f, "\n%s\n", verbs[i].group);
        fprintf(f, "  %-10s %s\n", verbs[i].name, verbs[i].help);
    }
    fprintf(f, "\ncolibri VERB --help lists the options of a verb.\n");
}

static int unknown_verb(const char *word)
{
    const char *names[N_VERBS];
    for (size_t i = 0; i < N_VERBS; i++)
        names[i] = verbs[i].name;
    const char *near = args_nearest(word, names, N_VERBS);
    fprintf(stderr, "colibri: error: unknown verb \"%.40s\"%s%s%s\n", word,
            near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
    return EXIT_USAGE;
}

int main(int argc, char **argv)
{
    cli_start_ns = cb_os_now_ns();
    sys_begin(&argv);
    if (argc < 2) {
        print_usage(stderr);
        return EXIT_USAGE;
    }
    const char *word = argv[1];
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "help") == 0) {
        print_usage(stdout);
        return EXIT_OK;
    }
    if (strcmp(word, "--version") == 0)
        word = "version";
    for (size_t i = 0; i < N_VERBS; i++) {
        if (strcmp(word, verbs[i].name) != 0)
            continue;
        int status = verbs[i].fn(argc - 2, argv + 2);
        if (fflush(stdout) != 0 || ferror(stdout)) {
            fprintf(stderr, "colibri: error: cannot write to standard output\n");
            return status ? status : EXIT_RUNTIME;
        }
        return status;
    }
    return unknown_verb(word);
}

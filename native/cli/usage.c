/* usage.c — puts a verb's options together, parses them, prints their help. */
#include <string.h>

#include "cli.h"

void cli_args_begin(struct cli_args *a, const char *verb, const char *summary)
{
    memset(a, 0, sizeof *a);
    a->verb = verb;
    a->summary = summary;
}

void cli_args_add(struct cli_args *a, const struct arg *rows, size_t n)
{
    for (size_t i = 0; i < n && a->n < CLI_ARGS_MAX; i++)
        a->arg[a->n++] = rows[i];
}

static void print_help(const struct cli_args *a)
{
    printf("Usage: colibri %s [options]\n\n%s\n", a->verb, a->summary);
    for (size_t i = 0; i < a->n; i++) {
        const struct arg *o = &a->arg[i];
        char left[64];
        if (o->group)
            printf("\n%s\n", o->group);
        snprintf(left, sizeof left, "%s%s%s%s%s", o->alias ? o->alias : "", o->alias ? ", " : "",
                 o->name, o->kind == ARG_FLAG ? "" : " ", o->kind == ARG_FLAG ? "" : o->meta);
        printf("  %-26s %s\n", left, o->help);
    }
    printf("\nExit status: 0 ok, 1 error, 2 usage, 3 model files bad, 4 over budget, 5 golden "
           "mismatch, 6 an expert failed, 130 interrupted, 143 terminated\n");
}

int cli_args_finish(struct cli_args *a, int argc, char **argv, int *status)
{
    const struct arg rows[] = {
        {.group = "Output", .name = "--json", .kind = ARG_FLAG, .out = &a->json, .flag_value = 1,
         .help = "one JSON object on stdout"},
        {.name = "--help", .alias = "-h", .kind = ARG_FLAG, .out = &a->help, .flag_value = 1,
         .help = "this text"},
    };
    struct cb_err err = {0, ""};
    cli_args_add(a, rows, sizeof rows / sizeof rows[0]);
    for (int i = 0; i < argc; i++) /* known before parsing, so that errors obey it */
        a->json |= strcmp(argv[i], "--json") == 0;
    int rc = args_parse(a->arg, a->n, argc, argv, &err);
    if (rc < 0) {
        *status = cli_error(a, &err);
        if (!a->json)
            fprintf(stderr, "try: colibri %s --help\n", a->verb);
        return 1;
    }
    if (a->help) {
        print_help(a);
        *status = EXIT_OK;
        return 1;
    }
    return 0;
}

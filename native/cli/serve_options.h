/* serve_options.h — the options of `colibri serve`: from the command line, from
 * --options FILE, and once more from that file on SIGHUP. */
#ifndef CLI_SERVE_OPTIONS_H
#define CLI_SERVE_OPTIONS_H

#include "cli.h"
#include "serve/serve.h"

#define SERVE_OPTIONS_BYTES 65536u /* of the file, at most */

struct serve {
    struct cli_args args;
    struct cli_model model;
    struct cb_serve_options opt;
    struct arg_list hosts;
    const char *listen, *options;
    uint32_t log_json, give_up, watchdog_s;
    int supervise_flag;
    size_t n_lines;              /* the first of args, which lines may name */
    uint64_t mark[CLI_ARGS_MAX]; /* what each of those was at the start */
    int argc;
    char **argv;
    struct serve *other;         /* where they are read again */
    char text[SERVE_OPTIONS_BYTES + 1]; /* the file; values point into it */
};

/* Fills v->args with the table and v with the defaults. */
void serve_options_table(struct serve *v);
/* After the words: the file's lines, then the checks of all. */
int serve_options_take(struct serve *v, struct cb_err *err);
/* Words and file once more, into *v->other. */
int serve_options_again(struct serve *v, struct cb_err *err);

#endif

/* args.h — strict command-line options.
 *
 * A verb lists its options in a table; parsing fills the variables that the
 * table points to and refuses everything it does not know, with a message that
 * says what was expected. Nothing is allocated. */
#ifndef CLI_ARGS_H
#define CLI_ARGS_H

#include <stddef.h>
#include <stdint.h>

#include "colibri.h"

enum arg_kind {
    ARG_FLAG,   /* int *, set to flag_value */
    ARG_TEXT,   /* const char ** */
    ARG_LIST,   /* struct arg_list *: may be repeated */
    ARG_U32,    /* uint32_t *, lo … hi */
    ARG_U64,    /* uint64_t *, any */
    ARG_SIZE,   /* uint64_t *, bytes; suffixes KiB MiB GiB (K M G mean the same) */
    ARG_FLOAT,  /* float *, lo … hi */
    ARG_CHOICE  /* uint32_t *, index into the words of meta, "f16|f32" */
};

#define ARG_LIST_MAX 16
struct arg_list {
    const char *item[ARG_LIST_MAX];
    uint32_t n;
    uint32_t max; /* at most ARG_LIST_MAX */
};

struct arg {
    const char *group;   /* heading in the usage text; NULL = as the one before */
    const char *name;    /* "--model" */
    const char *alias;   /* "-m" or NULL */
    enum arg_kind kind;
    void *out;
    double lo, hi;       /* for U32 and FLOAT; hi == 0 && lo == 0: the type's range */
    int flag_value;
    const char *meta;    /* value in the usage text, "N" */
    const char *help;
    int seen;
};

/* argv[0..argc) are the words after the verb. --x=V and --x V mean the same; a
 * lone "-" is a value. Returns CB_OK, or CB_EINVAL with the message. */
int args_parse(struct arg *args, size_t n_args, int argc, char **argv, struct cb_err *err);

/* Options from a file: one "name value" a line, long names without their dashes,
 * a flag by its name alone, # and empty lines passed over. What the command line
 * gave stays as it is. text[0..n] is cut into strings, so it must have room for a
 * NUL and live as long as the values; the message names file and line. */
int args_lines(struct arg *args, size_t n_args, char *text, size_t n, const char *file,
               struct cb_err *err);

/* Bytes from "512MiB", "1.5GiB", "4096". Returns 0 or CB_EINVAL. */
int args_size(const char *text, uint64_t *bytes);

/* The candidate closest to word by edit distance, NULL when none is close. */
const char *args_nearest(const char *word, const char *const *candidates, size_t n);

#endif

/* exptrace.h — `run --trace-experts`: which experts each token used, as a file
 * (docs/streaming.md) for `colibri-kit trace`. */
#ifndef CLI_EXPTRACE_H
#define CLI_EXPTRACE_H

#include <stdint.h>
#include <stdio.h>

#include "colibri.h"
#include "core/generate.h"

struct exptrace {
    FILE *f;
    const char *path;
    struct cb_observer see;
    int32_t *chosen;  /* [n_moe_layer][batch + 1][n_used] */
    uint8_t *row;     /* one token as it is written: uint16 [n_moe_layer][n_used] */
    uint32_t n_layer, n_used, batch;
    uint64_t n_token;
    int saved_errno;  /* of the first write that failed; nothing is written after it */
};

/* Creates the file and writes its header. CB_EINVAL for a dense model. */
int exptrace_open(struct exptrace *t, const char *path, const struct cb_info *info,
                  struct cb_err *err);
/* What is held back goes out; CB_EIO when this or an earlier write failed. */
int exptrace_flush(struct exptrace *t, struct cb_err *err);
void exptrace_close(struct exptrace *t); /* fine when never opened */

#endif

/* layout.h — the memory plan: what is taken, in which order, on which line. */
#ifndef CB_LAYOUT_H
#define CB_LAYOUT_H

#include "core/container.h"
#include "model/engine.h"

/* What the files say, read and checked before any memory is planned. Lies in a
 * scratch mapping that is given back at the end of cb_engine_open(). */
struct cb_files {
    const char *dir;               /* NAME.coli */
    struct cb_manifest *m;
    struct cb_header dense, tokenizer;
    uint8_t *dense_dir;            /* its directory, checked */
    uint64_t dense_dir_bytes;
    uint64_t tokenizer_bytes;      /* whole file */
    struct cb_header *shard;       /* [n_shard] */
    struct cb_expert_entry *record; /* [n_moe_layer][n_expert] */
    uint32_t *record_shard;        /* shard of each record */
    struct cb_os_file *shard_file; /* [n_shard], open */
    struct cb_os_file dense_file, tokenizer_file;
    void *scratch;
    uint64_t scratch_bytes;
};

int cb_files_open(struct cb_files *f, const char *dir, struct cb_err *err);
void cb_files_close(struct cb_files *f);

/* Fills in the defaults of *opt against the model and checks ranges. */
int cb_options_resolve(struct cb_options *opt, const struct cb_manifest *m, struct cb_err *err);

/* Takes everything from the arena in one fixed order (counting when its base is
 * NULL) and sets e's pointers. *e need only have opt set, and kern. */
int cb_layout(struct cb_engine *e, struct cb_arena *a, const struct cb_files *f,
              struct cb_err *err);
/* Directory entry of dense tensor `name`: the first one, UINT32_MAX = none. */
uint32_t cb_dense_find(const struct cb_files *f, const char *name);
/* The part of it that belongs to one release of the weights. */
int cb_release_layout(struct cb_engine *e, struct cb_release *rel, struct cb_arena *a,
                      const struct cb_files *f, struct cb_err *err);

/* Reads dense tensors and tokenizer into the places that the layout gave rel,
 * checking CRCs, and opens the tokenizer. */
int cb_load(struct cb_engine *e, struct cb_release *rel, const struct cb_files *f,
            struct cb_err *err);

/* What may be taken: the budget or what the machine has, whichever is less. */
uint64_t cb_memory_limit(const struct cb_options *opt);

/* Compares the sum with budget and machine; the message shows the sum. */
int cb_ledger_check(const struct cb_options *opt, struct cb_ledger *l, struct cb_err *err);

#endif

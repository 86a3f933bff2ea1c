/* swap.c — takes over a new release of the weights without stopping.
 *
 * The new dense weights and tokenizer go into the second release's room while
 * the old ones stay; the expert store then reads from the new files, and the
 * new golden is computed. When anything fails, the old release is put back: its
 * dense weights were never touched, its shard files are still open. */
#include <string.h>

#include "model/forward.h"
#include "model/layout.h"
#include "offload/offload.h"

static int same_geometry(const struct cb_manifest *a, const struct cb_manifest *b)
{
    return a->n_layer == b->n_layer && a->n_embd == b->n_embd && a->n_head == b->n_head &&
           a->n_head_kv == b->n_head_kv && a->head_dim == b->head_dim &&
           a->n_vocab == b->n_vocab && a->n_ff == b->n_ff && a->n_expert == b->n_expert &&
           a->n_used == b->n_used && a->n_expert_ff == b->n_expert_ff &&
           a->n_shexp_ff == b->n_shexp_ff && a->n_dense_layer == b->n_dense_layer &&
           a->rope_dim == b->rope_dim && a->rope == b->rope && a->qk_norm == b->qk_norm &&
           a->n_shard == b->n_shard && a->ctx_train == b->ctx_train && a->window == b->window &&
           memcmp(a->windowed, b->windowed, sizeof a->windowed) == 0;
}

static int check_new(const struct cb_engine *e, const struct cb_files *f, struct cb_err *err)
{
    const struct cb_manifest *m = f->m;
    if (!same_geometry(&e->rel->m, m))
        return cb_fail(err, CB_EINVAL, "%.60s has another geometry than %.60s: start it afresh",
                       m->name, e->rel->m.name);
    if (m->golden[0] == '\0')
        return cb_fail(err, CB_EGOLDEN, "the new release promises no golden; convert it again");
    uint64_t n = (uint64_t)e->store.n_layer * e->store.n_expert;
    for (uint64_t i = 0; e->store.n_slot > 0 && i < n; i++)
        if (f->record[i].size > e->slot_bytes)
            return cb_fail(err, CB_EBUDGET, "the new release's experts need %llu bytes a slot, "
                           "there are %llu", (unsigned long long)f->record[i].size,
                           (unsigned long long)e->slot_bytes);
    return 0;
}

/* Dense weights and tokenizer of f into the room of rel. */
static int load_release(struct cb_engine *e, struct cb_release *rel, const struct cb_files *f,
                        struct cb_err *err)
{
    struct cb_arena a;
    memset(&a, 0, sizeof a);
    a.base = rel->room;
    a.size = rel->room_bytes;
    int rc = cb_release_layout(e, rel, &a, f, err);
    if (rc == 0 && a.overflow)
        rc = cb_fail(err, CB_EBUDGET, "the new release's dense weights are larger than the old ones");
    if (rc != 0)
        return rc;
    for (uint32_t il = 0; il < rel->m.n_layer; il++) { /* one KV cache for both */
        rel->layer[il].k_cache = e->rel->layer[il].k_cache;
        rel->layer[il].v_cache = e->rel->layer[il].v_cache;
    }
    return cb_load(e, rel, f, err);
}

static int check_golden(struct cb_engine *e, struct cb_err *err)
{
    char hex[65];
    int rc = cb_golden(e, hex, err);
    if (rc == 0 && strcmp(hex, e->rel->m.golden) != 0)
        rc = cb_fail(err, CB_EGOLDEN, "the new release's golden is %.12s…, this board computes "
                     "%.12s…", e->rel->m.golden, hex);
    return rc;
}

static int take_over(struct cb_engine *e, struct cb_files *f, struct cb_err *err)
{
    struct cb_release *old = e->rel, *new = e->rel == &e->release[0] ? &e->release[1]
                                                                     : &e->release[0];
    struct cb_err ignored;
    int rc = check_new(e, f, err);
    if (rc == 0)
        rc = load_release(e, new, f, err);
    if (rc != 0)
        return rc;
    rc = cb_store_exchange(&e->store, f, err);
    if (rc == 0) {
        e->rel = new;
        cb_offload_model_changed(e);
        rc = cb_forward_prepare(e, err);
    }
    if (rc == 0) {
        rc = check_golden(e, err);
    }
    if (rc == 0) {
        e->counters.swaps++;
        return 0;
    }
    /* Back: the old shard files wait in f. */
    e->rel = old;
    cb_store_restore(&e->store, f, &ignored);
    cb_forward_prepare(e, &ignored);
    cb_offload_model_changed(e);
    return rc;
}

int cb_swap(struct cb_engine *e, const char *model_dir, struct cb_err *err)
{
    struct cb_files f;
    if (!e->opt.hot_swap)
        return cb_fail(err, CB_EINVAL, "the engine was opened without room for a hot swap");
    int rc = cb_files_open(&f, model_dir, err);
    if (rc != 0)
        return rc;
    rc = take_over(e, &f, err);
    cb_files_close(&f);
    for (uint32_t i = 0; i < e->opt.sequences; i++)
        cb_seq_reset(e, i);
    return rc;
}

/* load.c — reads the weights into the arena and checks every CRC. Tensors are
 * shared out over the pool: storage with a queue likes several readers, and the
 * checksums run beside the reads. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "model/layout.h"

struct load_job {
    struct cb_engine *e;
    const struct cb_files *f;
    _Atomic uint32_t next;     /* item: dense tensors, then experts */
    _Atomic int failed;
    struct cb_err err[CB_POOL_MAX]; /* one a thread */
};

static int read_checked(const struct cb_os_file *file, void *to, uint64_t size, uint64_t offset,
                        uint32_t crc, const char *what, struct cb_err *err)
{
    struct cb_err io;
    int rc = cb_os_pread(file, to, size, offset, &io);
    if (rc != 0)
        return cb_fail(err, rc, "%s: %.180s", what, io.msg);
    if (cb_crc32c(0, to, (size_t)size) == crc)
        return 0;
    /* Once more: a flipped bit on the way is worth one retry, a bad medium is not. */
    rc = cb_os_pread(file, to, size, offset, &io);
    if (rc != 0)
        return cb_fail(err, rc, "%s: %.180s", what, io.msg);
    if (cb_crc32c(0, to, (size_t)size) == crc)
        return 0;
    return cb_fail(err, CB_EFORMAT, "%s is damaged (CRC32C, read twice); copy the file again",
                   what);
}

/* Where cb_layout put dense tensor `name`, or NULL when it has no use for it. */
static void *dense_place(const struct cb_engine *e, const char *name)
{
    unsigned il = 0;
    int n = 0;
    const struct {
        const char *name;
        const void *p;
    } top[] = {
        {"token_embd", e->token_embd.data}, {"output_norm", e->output_norm},
        {"output", e->output.data},         {"rope_freqs", e->rope_freqs},
    };
    for (size_t i = 0; i < sizeof top / sizeof top[0]; i++)
        if (strcmp(name, top[i].name) == 0)
            return (void *)(uintptr_t)top[i].p;
    if (sscanf(name, "blk.%u.%n", &il, &n) != 1 || n == 0 || il >= e->m.n_layer)
        return NULL;
    const struct cb_layer *l = &e->layer[il];
    const struct {
        const char *name;
        const void *p;
    } in[] = {
        {"attn_norm", l->attn_norm},     {"attn_q", l->q.data},
        {"attn_k", l->k.data},           {"attn_v", l->v.data},
        {"attn_output", l->o.data},      {"attn_q_bias", l->q_bias},
        {"attn_k_bias", l->k_bias},      {"attn_v_bias", l->v_bias},
        {"attn_output_bias", l->o_bias}, {"attn_q_norm", l->q_norm},
        {"attn_k_norm", l->k_norm},      {"ffn_norm", l->ffn_norm},
        {"ffn_gate", l->ffn.gate.data},  {"ffn_up", l->ffn.up.data},
        {"ffn_down", l->ffn.down.data},  {"router", l->router.data},
        {"shexp_gate", l->shexp.gate.data}, {"shexp_up", l->shexp.up.data},
        {"shexp_down", l->shexp.down.data}, {"shexp_router", l->shexp_router},
    };
    for (size_t i = 0; i < sizeof in / sizeof in[0]; i++)
        if (strcmp(name + n, in[i].name) == 0)
            return (void *)(uintptr_t)in[i].p;
    return NULL;
}

static int load_dense(const struct load_job *job, uint32_t i, struct cb_err *err)
{
    struct cb_dense_entry t;
    char what[80];
    int rc = cb_dense_entry_parse(job->f->dense_dir, i, &job->f->dense, &t, err);
    if (rc != 0)
        return rc;
    void *p = dense_place(job->e, t.name);
    if (p == NULL)
        return cb_fail(err, CB_EUNSUPPORTED, "dense.coli: tensor %s is unknown to this engine",
                       t.name);
    snprintf(what, sizeof what, "dense.coli: %s", t.name);
    return read_checked(&job->f->dense_file, p, t.size, t.offset, t.crc, what, err);
}

static int load_expert(const struct load_job *job, uint64_t i, struct cb_err *err)
{
    const struct cb_expert_entry *r = &job->f->record[i];
    const struct cb_ffn *ffn = &job->e->experts.ffn[i];
    char what[80];
    uint8_t *p = (uint8_t *)(uintptr_t)(ffn->gate.data - r->part[0].offset);
    snprintf(what, sizeof what, "experts-%04u.coli: layer %u, expert %u", job->f->record_shard[i],
             r->layer, r->expert);
    return read_checked(&job->f->shard_file[job->f->record_shard[i]], p, r->size, r->offset,
                        r->crc, what, err);
}

static void load_part(void *arg, uint32_t thread, uint32_t n_threads)
{
    struct load_job *job = arg;
    uint64_t n_dense = job->f->dense.count;
    uint64_t n = n_dense + (uint64_t)job->e->experts.n_layer * job->e->experts.n_expert;
    (void)n_threads;
    while (!atomic_load_explicit(&job->failed, memory_order_relaxed)) {
        uint64_t i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (i >= n)
            return;
        struct cb_err *err = &job->err[thread];
        int rc = i < n_dense ? load_dense(job, (uint32_t)i, err)
                             : load_expert(job, i - n_dense, err);
        if (rc != 0) {
            err->code = rc;
            atomic_store_explicit(&job->failed, 1, memory_order_relaxed);
        }
    }
}

int cb_load(struct cb_engine *e, const struct cb_files *f, struct cb_err *err)
{
    struct load_job job;
    memset(&job, 0, sizeof job);
    job.e = e;
    job.f = f;
    cb_pool_run(&e->pool, load_part, &job);
    for (uint32_t i = 0; i < CB_POOL_MAX; i++)
        if (job.err[i].code != 0) {
            if (err != NULL)
                *err = job.err[i];
            return job.err[i].code;
        }
    return cb_os_pread(&f->tokenizer_file, e->text_file, f->tokenizer_bytes, 0, err);
}

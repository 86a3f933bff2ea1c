/* load.c — reads the dense weights into the arena and checks every CRC. Tensors are
 * shared out over the pool: storage with a queue likes several readers, and the
 * checksums run beside the reads. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/layout.h"

struct load_job {
    const struct cb_release *rel;
    const struct cb_files *f;
    _Atomic uint32_t next;     /* tensor */
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
static void *dense_place(const struct cb_release *rel, const char *name)
{
    const struct {
        const char *name;
        const void *p;
    } top[] = {
        {"token_embd", rel->token_embd.data}, {"output_norm", rel->output_norm},
        {"output", rel->output.data},         {"rope_freqs", rel->rope_freqs},
    };
    for (size_t i = 0; i < sizeof top / sizeof top[0]; i++)
        if (strcmp(name, top[i].name) == 0)
            return (void *)(uintptr_t)top[i].p;
    unsigned long il = strncmp(name, "blk.", 4) == 0 ? strtoul(name + 4, NULL, 10) : rel->m.n_layer;
    if (il >= rel->m.n_layer)
        return NULL;
    char prefix[32]; /* the one way to write it: "blk.00." would be a second name */
    int n = snprintf(prefix, sizeof prefix, "blk.%lu.", il);
    if (strncmp(name, prefix, (size_t)n) != 0)
        return NULL;
    const struct cb_layer *l = &rel->layer[il];
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
    void *p = dense_place(job->rel, t.name);
    if (p == NULL)
        return cb_fail(err, CB_EUNSUPPORTED, "dense.coli: tensor %s is unknown to this engine",
                       t.name);
    /* The layout took room for the first of the name, whatever a second one's size. */
    if (cb_dense_find(job->f, t.name) != i)
        return cb_fail(err, CB_EFORMAT, "dense.coli: tensor %s stands twice", t.name);
    snprintf(what, sizeof what, "dense.coli: %s", t.name);
    return read_checked(&job->f->dense_file, p, t.size, t.offset, t.crc, what, err);
}

static void load_part(void *arg, uint32_t thread, uint32_t n_threads)
{
    struct load_job *job = arg;
    (void)n_threads;
    while (!atomic_load_explicit(&job->failed, memory_order_relaxed)) {
        uint32_t i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (i >= job->f->dense.count)
            return;
        struct cb_err *err = &job->err[thread];
        int rc = load_dense(job, i, err);
        if (rc != 0) {
            err->code = rc;
            atomic_store_explicit(&job->failed, 1, memory_order_relaxed);
        }
    }
}

static int load_text(struct cb_release *rel, const struct cb_files *f, struct cb_err *err)
{
    int rc = cb_os_pread(&f->tokenizer_file, rel->text_file, rel->text_bytes, 0, err);
    if (rc == 0)
        rc = cb_text_open(&rel->text, rel->text_file, (size_t)rel->text_bytes, err);
    if (rc == 0 && cb_text_n_vocab(&rel->text) > rel->m.n_vocab)
        rc = cb_fail(err, CB_EFORMAT, "tokenizer.coli has %u tokens, the model %u",
                     cb_text_n_vocab(&rel->text), rel->m.n_vocab);
    if (rc != 0)
        return rc;
    rel->text_bos = cb_text_bos(&rel->text);
    rel->text_eos = cb_text_eos(&rel->text);
    rel->text_add_bos = (uint32_t)cb_text_add_bos(&rel->text);
    return 0;
}

int cb_load(struct cb_engine *e, struct cb_release *rel, const struct cb_files *f,
            struct cb_err *err)
{
    struct load_job job;
    memset(&job, 0, sizeof job);
    job.rel = rel;
    job.f = f;
    cb_pool_run(&e->pool, load_part, &job);
    for (uint32_t i = 0; i < CB_POOL_MAX; i++)
        if (job.err[i].code != 0) {
            if (err != NULL)
                *err = job.err[i];
            return job.err[i].code;
        }
    return load_text(rel, f, err);
}

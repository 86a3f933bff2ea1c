/* files.c — opens a .coli folder and reads every header and directory. */
#include <stdio.h>
#include <string.h>

#include "model/layout.h"

static int open_in(struct cb_os_file *f, const char *dir, const char *name, struct cb_err *err)
{
    char path[1024];
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
        return cb_fail(err, CB_EINVAL, "the path %s is too long", dir);
    int rc = cb_os_open(f, path, err);
    if (rc == CB_EIO) { /* a file that is not there is a bad model, not a failing disk */
        rc = CB_EFORMAT;
        if (err != NULL)
            err->code = rc;
    }
    return rc;
}

static void shard_name(char name[32], uint32_t i)
{
    snprintf(name, 32, "experts-%04u.coli", i);
}

/* manifest.json into m; text and tokens live in a mapping of their own. */
static int read_manifest(struct cb_files *f, struct cb_manifest *m, struct cb_err *err)
{
    struct cb_os_file file;
    int rc = open_in(&file, f->dir, "manifest.json", err);
    if (rc != 0)
        return rc;
    if (file.size < 2 || file.size > CB_MANIFEST_MAX) {
        rc = cb_fail(err, CB_EFORMAT, "manifest.json: %llu bytes; 2 to %u are allowed",
                     (unsigned long long)file.size, CB_MANIFEST_MAX);
        goto out;
    }
    uint64_t text = (file.size + 15) & ~UINT64_C(15);
    uint64_t bytes = text + cb_manifest_scratch(file.size);
    unsigned char *p = cb_os_map(bytes, 0, err);
    if (p == NULL) {
        rc = CB_EIO;
        goto out;
    }
    rc = cb_os_pread(&file, p, file.size, 0, err);
    if (rc == 0)
        rc = cb_manifest_parse(m, (const char *)p, file.size, p + text, err);
    cb_os_unmap(p, bytes);
out:
    cb_os_close(&file);
    return rc;
}

static int check_model_id(const struct cb_files *f, const struct cb_header *h, const char *name,
                          uint32_t index, struct cb_err *err)
{
    if (memcmp(h->model_id, f->m->model_id, 16) != 0)
        return cb_fail(err, CB_EFORMAT, "%s belongs to another model (its id differs from "
                       "manifest.json's); copy the whole model folder again", name);
    if (h->index != index)
        return cb_fail(err, CB_EFORMAT, "%s says that it is number %u; was it renamed?", name,
                       h->index);
    return 0;
}

static int read_directory(const struct cb_os_file *file, const struct cb_header *h,
                          const char *name, uint32_t entry, uint8_t *dir, struct cb_err *err)
{
    uint64_t bytes = (uint64_t)h->count * entry;
    int rc = cb_os_pread(file, dir, bytes, h->dir_offset, err);
    if (rc == 0 && cb_crc32c(0, dir, (size_t)bytes) != h->dir_crc)
        rc = cb_fail(err, CB_EFORMAT, "%s: the directory is damaged (CRC32C)", name);
    return rc;
}

/* Shard i's records into place; `seen` cells start with size 0. */
static int read_shard(struct cb_files *f, uint32_t i, uint8_t *dir, struct cb_err *err)
{
    const struct cb_manifest *m = f->m;
    char name[32];
    shard_name(name, i);
    int rc = read_directory(&f->shard_file[i], &f->shard[i], name, CB_EXPERT_ENTRY, dir, err);
    for (uint32_t k = 0; rc == 0 && k < f->shard[i].count; k++) {
        struct cb_expert_entry e;
        if ((rc = cb_expert_entry_parse(dir, k, &f->shard[i], &e, err)) != 0)
            break;
        if (e.layer < m->n_dense_layer || e.layer >= m->n_layer || e.expert >= m->n_expert)
            return cb_fail(err, CB_EFORMAT, "%s: holds layer %u, expert %u, which the model does "
                           "not have", name, e.layer, e.expert);
        uint64_t at = (uint64_t)(e.layer - m->n_dense_layer) * m->n_expert + e.expert;
        if (f->record[at].size != 0)
            return cb_fail(err, CB_EFORMAT, "%s: layer %u, expert %u stands twice", name, e.layer,
                           e.expert);
        const struct cb_expert_part *p = e.part;
        if (p[0].rows != m->n_expert_ff || p[0].cols != m->n_embd ||
            p[1].rows != m->n_expert_ff || p[1].cols != m->n_embd || p[2].rows != m->n_embd ||
            p[2].cols != m->n_expert_ff)
            return cb_fail(err, CB_EFORMAT, "%s: layer %u, expert %u has another shape than the "
                           "manifest says", name, e.layer, e.expert);
        f->record[at] = e;
        f->record_shard[at] = i;
    }
    return rc;
}

static int read_shards(struct cb_files *f, uint8_t *dir, struct cb_err *err)
{
    const struct cb_manifest *m = f->m;
    for (uint32_t i = 0; i < m->n_shard; i++) {
        int rc = read_shard(f, i, dir, err);
        if (rc != 0)
            return rc;
    }
    uint64_t n = (uint64_t)cb_manifest_moe_layers(m) * m->n_expert;
    for (uint64_t i = 0; i < n; i++)
        if (f->record[i].size == 0)
            return cb_fail(err, CB_EFORMAT, "layer %u, expert %u stands in no shard: a file is "
                           "missing or from another model",
                           (unsigned)(i / m->n_expert) + m->n_dense_layer,
                           (unsigned)(i % m->n_expert));
    return 0;
}

static int open_headers(struct cb_files *f, struct cb_err *err)
{
    int rc;
    if ((rc = open_in(&f->dense_file, f->dir, "dense.coli", err)) != 0 ||
        (rc = cb_header_read(&f->dense_file, "dense.coli", CB_FILE_DENSE, CB_DENSE_ENTRY,
                             &f->dense, err)) != 0 ||
        (rc = check_model_id(f, &f->dense, "dense.coli", 0, err)) != 0 ||
        (rc = open_in(&f->tokenizer_file, f->dir, "tokenizer.coli", err)) != 0 ||
        (rc = cb_header_read(&f->tokenizer_file, "tokenizer.coli", CB_FILE_TOKENIZER, 0,
                             &f->tokenizer, err)) != 0 ||
        (rc = check_model_id(f, &f->tokenizer, "tokenizer.coli", 0, err)) != 0)
        return rc;
    f->tokenizer_bytes = f->tokenizer_file.size;
    for (uint32_t i = 0; i < f->m->n_shard; i++) {
        char name[32];
        shard_name(name, i);
        if ((rc = open_in(&f->shard_file[i], f->dir, name, err)) != 0 ||
            (rc = cb_header_read(&f->shard_file[i], name, CB_FILE_EXPERTS, CB_EXPERT_ENTRY,
                                 &f->shard[i], err)) != 0 ||
            (rc = check_model_id(f, &f->shard[i], name, i, err)) != 0)
            return rc;
    }
    return 0;
}

/* Scratch for the tables whose sizes the manifest gives. */
static int take_tables(struct cb_files *f, const struct cb_manifest *m, struct cb_err *err)
{
    uint64_t n = (uint64_t)cb_manifest_moe_layers(m) * m->n_expert;
    uint64_t bytes = sizeof *m + 64 + n * (sizeof *f->record + 4) +
                     (uint64_t)m->n_shard * (sizeof *f->shard + sizeof *f->shard_file) + 256;
    unsigned char *p = cb_os_map(bytes, 0, err);
    if (p == NULL)
        return CB_EIO;
    f->scratch = p;
    f->scratch_bytes = bytes;
    f->m = (struct cb_manifest *)(void *)p;
    *f->m = *m;
    p += (sizeof *m + 63) & ~(size_t)63;
    f->record = (struct cb_expert_entry *)(void *)p;
    p += n * sizeof *f->record;
    f->shard = (struct cb_header *)(void *)p;
    p += m->n_shard * sizeof *f->shard;
    f->shard_file = (struct cb_os_file *)(void *)p;
    p += m->n_shard * sizeof *f->shard_file;
    f->record_shard = (uint32_t *)(void *)p;
    for (uint32_t i = 0; i < m->n_shard; i++)
        f->shard_file[i].h = -1;
    return 0;
}

int cb_files_open(struct cb_files *f, const char *dir, struct cb_err *err)
{
    struct cb_manifest m;
    memset(f, 0, sizeof *f);
    f->dir = dir;
    f->dense_file.h = f->tokenizer_file.h = -1;
    int rc = dir == NULL ? cb_fail(err, CB_EINVAL, "no model folder given") : 0;
    if (rc != 0 || (rc = read_manifest(f, &m, err)) != 0 ||
        (rc = take_tables(f, &m, err)) != 0 || (rc = open_headers(f, err)) != 0)
        goto out;
    uint64_t largest = (uint64_t)f->dense.count * CB_DENSE_ENTRY;
    for (uint32_t i = 0; i < m.n_shard; i++)
        if ((uint64_t)f->shard[i].count * CB_EXPERT_ENTRY > largest)
            largest = (uint64_t)f->shard[i].count * CB_EXPERT_ENTRY;
    f->dense_dir_bytes = largest + 1;
    f->dense_dir = cb_os_map(f->dense_dir_bytes, 0, err);
    if (f->dense_dir == NULL) {
        rc = CB_EIO;
        goto out;
    }
    /* The shards' directories pass through first; the dense one stays. */
    if ((rc = read_shards(f, f->dense_dir, err)) == 0)
        rc = read_directory(&f->dense_file, &f->dense, "dense.coli", CB_DENSE_ENTRY,
                            f->dense_dir, err);
out:
    if (rc != 0)
        cb_files_close(f);
    return rc;
}

void cb_files_close(struct cb_files *f)
{
    cb_os_close(&f->dense_file);
    cb_os_close(&f->tokenizer_file);
    for (uint32_t i = 0; f->scratch != NULL && i < f->m->n_shard; i++)
        cb_os_close(&f->shard_file[i]);
    cb_os_unmap(f->dense_dir, f->dense_dir_bytes);
    cb_os_unmap(f->scratch, f->scratch_bytes);
    f->dense_dir = NULL;
    f->scratch = NULL;
}

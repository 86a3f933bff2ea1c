/* npy.h — the two shapes of NumPy file that the tool reads and writes.
 * Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html */
#ifndef CLI_NPY_H
#define CLI_NPY_H

#include <stdint.h>
#include <stdio.h>

#include "colibri.h"

#define NPY_MAX_ITEMS (1u << 24)

/* Reads a one-dimensional little-endian int32 array, C order, format version 1
 * or 2, of 1 … NPY_MAX_ITEMS items; the file must end with the last item.
 * *out is malloc'ed. CB_EIO or CB_EINVAL with the file's name. */
int npy_read_i32(const char *path, int32_t **out, uint32_t *n, struct cb_err *err);

/* A file under way: written beside its place and renamed to it when complete. */
struct npy_out {
    FILE *f;
    const char *path;
    char temp[1024];
    uint64_t left; /* items still to come */
};

/* descr: "<f4" or "<i4"; dim[n_dim], n_dim 1 … 3. */
int npy_create(struct npy_out *o, const char *path, const char *descr, const uint64_t *dim,
               int n_dim, struct cb_err *err);
int npy_write(struct npy_out *o, const void *items, uint64_t n, struct cb_err *err); /* 4-byte items */
int npy_commit(struct npy_out *o, struct cb_err *err);
void npy_abort(struct npy_out *o); /* removes the temporary file; fine after commit */

#endif

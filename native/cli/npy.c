/* npy.c — see npy.h. The engine runs on little-endian machines only, so items
 * go to and from the file as they are. */
#include "npy.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "sys.h"

#define HEADER_MAX 4096u

/* Text of the header, cursor at s. */
static void skip_blanks(const char **s)
{
    *s += strspn(*s, " \t");
}

static int take(const char **s, const char *text)
{
    skip_blanks(s);
    size_t n = strlen(text);
    if (strncmp(*s, text, n) != 0)
        return 0;
    *s += n;
    return 1;
}

static int take_quoted(const char **s, char *out, size_t cap)
{
    skip_blanks(s);
    char quote = **s;
    if (quote != '\'' && quote != '"')
        return 0;
    const char *end = strchr(*s + 1, quote);
    if (end == NULL || (size_t)(end - *s) > cap)
        return 0;
    size_t n = (size_t)(end - *s) - 1;
    memcpy(out, *s + 1, n);
    out[n] = '\0';
    *s = end + 1;
    return 1;
}

/* "(16,)": exactly one dimension. */
static int take_shape(const char **s, uint64_t *n, int *n_dim)
{
    *n_dim = 0;
    if (!take(s, "("))
        return 0;
    while (!take(s, ")")) {
        size_t digits = strspn(*s, "0123456789");
        if (digits == 0 || digits > 18)
            return 0;
        *n = strtoull(*s, NULL, 10);
        *s += digits;
        ++*n_dim;
        if (!take(s, ",")) {
            /* "(16)" is not a tuple, only "(16,)" and "(2, 8)" are */
            if (*n_dim < 2 || !take(s, ")"))
                return 0;
            return 1;
        }
    }
    return 1;
}

/* The dictionary literal with exactly the keys descr, fortran_order, shape. */
static int parse_header(const char *s, char descr[16], int *fortran, uint64_t *n, int *n_dim)
{
    int seen = 0;
    if (!take(&s, "{"))
        return 0;
    while (!take(&s, "}")) {
        char key[16];
        int bit;
        if (!take_quoted(&s, key, sizeof key) || !take(&s, ":"))
            return 0;
        if (strcmp(key, "descr") == 0) {
            bit = 1;
            if (!take_quoted(&s, descr, 16))
                return 0;
        } else if (strcmp(key, "fortran_order") == 0) {
            bit = 2;
            *fortran = take(&s, "True");
            if (!*fortran && !take(&s, "False"))
                return 0;
        } else if (strcmp(key, "shape") == 0) {
            bit = 4;
            if (!take_shape(&s, n, n_dim))
                return 0;
        } else {
            return 0;
        }
        if (seen & bit)
            return 0;
        seen |= bit;
        if (!take(&s, ",")) {
            if (!take(&s, "}"))
                return 0;
            break;
        }
    }
    s += strspn(s, " \t\n");
    return seen == 7 && *s == '\0';
}

/* Magic, version and the header's text, NUL-terminated in text[HEADER_MAX + 1]. */
static int read_header(FILE *f, const char *path, char *text, struct cb_err *err)
{
    unsigned char head[12];
    if (fread(head, 1, 10, f) != 10 || memcmp(head, "\x93NUMPY", 6) != 0)
        return cb_fail(err, CB_EINVAL, "%s is not a .npy file", path);
    size_t n = (size_t)head[8] | (size_t)head[9] << 8;
    if (head[6] == 2) {
        if (fread(head + 10, 1, 2, f) != 2)
            return cb_fail(err, CB_EINVAL, "%s ends inside its header", path);
        n |= (size_t)head[10] << 16 | (size_t)head[11] << 24;
    } else if (head[6] != 1) {
        return cb_fail(err, CB_EINVAL, "%s has .npy format version %d; 1 and 2 are read", path,
                       head[6]);
    }
    if (n > HEADER_MAX)
        return cb_fail(err, CB_EINVAL, "%s has a header of %zu bytes; at most %u are read", path, n,
                       HEADER_MAX);
    if (fread(text, 1, n, f) != n)
        return cb_fail(err, CB_EINVAL, "%s ends inside its header", path);
    text[n] = '\0';
    if (strlen(text) != n)
        return cb_fail(err, CB_EINVAL, "%s has a NUL in its header", path);
    return CB_OK;
}

static int read_items(FILE *f, const char *path, int32_t **out, uint32_t *n, struct cb_err *err)
{
    char text[HEADER_MAX + 1], descr[16] = "";
    uint64_t count = 0;
    int fortran = 0, n_dim = 0;
    int rc = read_header(f, path, text, err);
    if (rc < 0)
        return rc;
    if (!parse_header(text, descr, &fortran, &count, &n_dim))
        return cb_fail(err, CB_EINVAL, "%s has a malformed .npy header", path);
    if (strcmp(descr, "<i4") != 0)
        return cb_fail(err, CB_EINVAL, "%s holds \"%s\"; token ids must be little-endian int32 (\"<i4\")",
                       path, descr);
    if (n_dim != 1)
        return cb_fail(err, CB_EINVAL, "%s has %d dimensions; token ids have one", path, n_dim);
    (void)fortran; /* no difference in one dimension */
    if (count == 0 || count > NPY_MAX_ITEMS)
        return cb_fail(err, CB_EINVAL, "%s holds %" PRIu64 " token ids; 1 to %u are read", path, count,
                       NPY_MAX_ITEMS);
    int32_t *ids = malloc((size_t)count * sizeof *ids);
    if (ids == NULL)
        return cb_fail(err, CB_EIO, "no memory for %" PRIu64 " token ids", count);
    if (fread(ids, sizeof *ids, (size_t)count, f) != (size_t)count || fgetc(f) != EOF) {
        free(ids);
        return cb_fail(err, CB_EINVAL, "%s does not end with its %" PRIu64 " items", path, count);
    }
    *out = ids;
    *n = (uint32_t)count;
    return CB_OK;
}

int npy_read_i32(const char *path, int32_t **out, uint32_t *n, struct cb_err *err)
{
    FILE *f = sys_open(path, "rb");
    if (f == NULL)
        return cb_fail(err, CB_EIO, "cannot open %s: %s", path, strerror(errno));
    int rc = read_items(f, path, out, n, err);
    fclose(f);
    return rc;
}

static int failed(struct npy_out *o, const char *what, struct cb_err *err)
{
    int why = errno;
    npy_abort(o);
    return cb_fail(err, CB_EIO, "cannot %s %s: %s", what, o->path, strerror(why));
}

int npy_create(struct npy_out *o, const char *path, const char *descr, const uint64_t *dim,
               int n_dim, struct cb_err *err)
{
    char text[192];
    uint64_t items = 1;
    size_t n = (size_t)snprintf(text, sizeof text, "{'descr': '%s', 'fortran_order': False, 'shape': (",
                                descr);
    o->f = NULL;
    o->path = path;
    for (int i = 0; i < n_dim; i++) {
        if (dim[i] != 0 && items > UINT64_MAX / 4 / dim[i])
            return cb_fail(err, CB_EINVAL, "%s would be too large", path);
        items *= dim[i];
        n += (size_t)snprintf(text + n, sizeof text - n, "%" PRIu64 "%s", dim[i],
                              i + 1 < n_dim ? ", " : (n_dim == 1 ? ",), }" : "), }"));
    }
    if (snprintf(o->temp, sizeof o->temp, "%s.part%ld", path, sys_pid()) >= (int)sizeof o->temp)
        return cb_fail(err, CB_EINVAL, "the path %.60s… is too long", path);
    /* The data begins at a multiple of 64; the padding ends with a newline. */
    size_t padded = (10 + n + 1 + 63) / 64 * 64 - 10;
    unsigned char head[10] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, (unsigned char)(padded & 0xff),
                              (unsigned char)(padded >> 8)};
    o->left = items;
    o->f = sys_open(o->temp, "wb");
    if (o->f == NULL)
        return failed(o, "create", err);
    if (fwrite(head, 1, sizeof head, o->f) != sizeof head ||
        fprintf(o->f, "%s%*s\n", text, (int)(padded - n - 1), "") < 0)
        return failed(o, "write", err);
    return CB_OK;
}

int npy_write(struct npy_out *o, const void *items, uint64_t n, struct cb_err *err)
{
    if (n > o->left)
        return cb_fail(err, CB_EINVAL, "more items than %s was announced to hold", o->path);
    if (fwrite(items, 4, (size_t)n, o->f) != (size_t)n)
        return failed(o, "write", err);
    o->left -= n;
    return CB_OK;
}

int npy_commit(struct npy_out *o, struct cb_err *err)
{
    if (o->left != 0) {
        npy_abort(o);
        return cb_fail(err, CB_EINVAL, "%s is incomplete", o->path);
    }
    if (fflush(o->f) != 0)
        return failed(o, "write", err);
    int closed = fclose(o->f);
    o->f = NULL;
    if (closed != 0 || sys_replace(o->temp, o->path) != 0) {
        int why = errno;
        remove(o->temp);
        return cb_fail(err, CB_EIO, "cannot write %s: %s", o->path, strerror(why));
    }
    return CB_OK;
}

void npy_abort(struct npy_out *o)
{
    if (o->f == NULL)
        return;
    fclose(o->f);
    o->f = NULL;
    remove(o->temp);
}

/* container.c — see container.h. */
#include "core/container.h"

#include <string.h>

#include "kernels/kernels.h"

static uint32_t le16(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}

static uint32_t le32(const uint8_t *p)
{
    return le16(p) | le16(p + 2) << 16;
}

static uint64_t le64(const uint8_t *p)
{
    return (uint64_t)le32(p) | (uint64_t)le32(p + 4) << 32;
}

static const char *kind_name(uint32_t kind)
{
    static const char *const names[] = {"unknown", "tokenizer", "dense", "experts"};
    return names[kind <= 3 ? kind : 0];
}

static int check_magic(const uint8_t *raw, const char *name, struct cb_err *err)
{
    if (memcmp(raw, "COLI", 4) == 0)
        return 0;
    if (memcmp(raw, "ILOC", 4) == 0)
        return cb_fail(err, CB_EFORMAT,
                       "%s: the magic reads ILOC: its bytes were swapped (32-bit byte order); "
                       "copy the file again without conversion",
                       name);
    return cb_fail(err, CB_EFORMAT, "%s: not a .coli file (magic %02x %02x %02x %02x)", name,
                   raw[0], raw[1], raw[2], raw[3]);
}

int cb_header_parse(const uint8_t raw[64], uint64_t file_size, const char *name,
                    enum cb_file_kind kind, uint32_t entry_bytes, struct cb_header *h,
                    struct cb_err *err)
{
    int rc = check_magic(raw, name, err);
    if (rc != 0)
        return rc;
    if (le16(raw + 4) != CB_FORMAT_VERSION)
        return cb_fail(err, CB_EFORMAT, "%s: format version %u; this engine reads version %u",
                       name, le16(raw + 4), CB_FORMAT_VERSION);
    if (cb_crc32c(0, raw, 60) != le32(raw + 60))
        return cb_fail(err, CB_EFORMAT, "%s: the header is damaged (CRC32C)", name);
    h->kind = le16(raw + 6);
    h->index = le32(raw + 8);
    h->count = le32(raw + 12);
    h->dir_offset = le64(raw + 16);
    h->payload_offset = le64(raw + 24);
    h->payload_size = le64(raw + 32);
    memcpy(h->model_id, raw + 40, 16);
    h->dir_crc = le32(raw + 56);
    if (h->kind != (uint32_t)kind)
        return cb_fail(err, CB_EFORMAT, "%s: is a %s file, expected %s", name,
                       kind_name(h->kind), kind_name((uint32_t)kind));
    uint64_t dir = (uint64_t)h->count * entry_bytes; /* < 2^39 */
    if (h->dir_offset != CB_HEADER_BYTES || dir > CB_DIR_MAX ||
        h->payload_offset < CB_HEADER_BYTES + dir || h->payload_offset > file_size)
        return cb_fail(err, CB_EFORMAT, "%s: directory of %u entries does not fit", name,
                       h->count);
    if (h->payload_size != file_size - h->payload_offset)
        return cb_fail(err, CB_EFORMAT,
                       "%s: is %llu bytes, its header says %llu: truncated or overlong", name,
                       (unsigned long long)file_size,
                       (unsigned long long)(h->payload_offset + h->payload_size));
    return 0;
}

int cb_header_read(const struct cb_os_file *f, const char *name, enum cb_file_kind kind,
                   uint32_t entry_bytes, struct cb_header *h, struct cb_err *err)
{
    uint8_t raw[CB_HEADER_BYTES];
    if (f->size < sizeof raw)
        return cb_fail(err, CB_EFORMAT, "%s: %llu bytes, shorter than a header: truncated", name,
                       (unsigned long long)f->size);
    int rc = cb_os_pread(f, raw, sizeof raw, 0, err);
    if (rc != 0)
        return rc;
    return cb_header_parse(raw, f->size, name, kind, entry_bytes, h, err);
}

/* [offset, offset + size) lies in the payload and begins at a multiple of align. */
static int in_payload(const struct cb_header *h, uint64_t offset, uint64_t size, uint64_t align)
{
    return offset >= h->payload_offset && offset % align == 0 && size <= h->payload_size &&
           offset - h->payload_offset <= h->payload_size - size;
}

int cb_dense_entry_parse(const uint8_t *dir, uint32_t i, const struct cb_header *h,
                         struct cb_dense_entry *e, struct cb_err *err)
{
    const uint8_t *p = dir + (uint64_t)i * CB_DENSE_ENTRY;
    memcpy(e->name, p, 48);
    e->name[48] = '\0';
    e->type = le32(p + 48);
    e->rows = le32(p + 52);
    e->cols = le32(p + 56);
    e->crc = le32(p + 60);
    e->offset = le64(p + 64);
    e->size = le64(p + 72);
    e->layout = le32(p + 80);
    const struct cb_type_info *info = cb_type_info(e->type);
    if (info == NULL)
        return cb_fail(err, CB_EUNSUPPORTED, "dense.coli: %s: unknown tensor type %u", e->name,
                       e->type);
    uint64_t want = cb_mat_bytes(e->type, e->rows, e->cols);
    if (e->rows == 1) /* vectors are F32 and not padded */
        want = e->type == CB_F32 ? 4 * (uint64_t)e->cols : 0;
    if (e->rows == 0 || e->cols == 0 || want == 0 || e->size != want ||
        e->layout != (info->block > 1))
        return cb_fail(err, CB_EFORMAT, "dense.coli: %s: shape %u x %u %s, layout %u, %llu bytes "
                       "do not agree", e->name, e->rows, e->cols, info->name, e->layout,
                       (unsigned long long)e->size);
    if (!in_payload(h, e->offset, e->size, 64))
        return cb_fail(err, CB_EFORMAT, "dense.coli: %s lies outside the file", e->name);
    return 0;
}

static int parse_part(const uint8_t *p, const struct cb_expert_entry *e, struct cb_expert_part *q)
{
    q->type = le32(p);
    q->rows = le32(p + 4);
    q->cols = le32(p + 8);
    q->crc = le32(p + 12);
    q->offset = le64(p + 16);
    q->size = le64(p + 24);
    return cb_type_info(q->type) != NULL && q->size != 0 &&
           q->size == cb_mat_bytes(q->type, q->rows, q->cols) && q->offset % 64 == 0 &&
           q->size <= e->size && q->offset <= e->size - q->size;
}

int cb_expert_entry_parse(const uint8_t *dir, uint32_t i, const struct cb_header *h,
                          struct cb_expert_entry *e, struct cb_err *err)
{
    const uint8_t *p = dir + (uint64_t)i * CB_EXPERT_ENTRY;
    e->layer = le32(p);
    e->expert = le32(p + 4);
    e->offset = le64(p + 8);
    e->size = le64(p + 16);
    e->crc = le32(p + 24);
    if (le32(p + 28) != 3 || !in_payload(h, e->offset, e->size, 16384) || e->size % 16384 != 0 ||
        e->size > UINT32_MAX)
        return cb_fail(err, CB_EFORMAT,
                       "experts-%04u.coli: record %u (layer %u, expert %u): lies outside the file, "
                       "is misaligned or exceeds 4 GiB", h->index, i, e->layer, e->expert);
    uint64_t end = 0; /* of the part before */
    for (int k = 0; k < 3; k++) {
        struct cb_expert_part *q = &e->part[k];
        if (!parse_part(p + 32 + 32 * k, e, q) || q->offset < end)
            return cb_fail(err, CB_EFORMAT,
                           "experts-%04u.coli: layer %u, expert %u: part %d has type %u, %u x %u, "
                           "%llu bytes at %llu that do not agree", h->index, e->layer, e->expert,
                           k, q->type, q->rows, q->cols, (unsigned long long)q->size,
                           (unsigned long long)q->offset);
        end = q->offset + q->size;
    }
    return 0;
}

/* container.h — the 64-byte header and the directories of .coli files
 * (docs/format.md). Everything read is checked before it is believed. */
#ifndef CB_CONTAINER_H
#define CB_CONTAINER_H

#include <stdint.h>

#include "colibri.h"
#include "core/os.h"

#define CB_FORMAT_VERSION 1u
#define CB_HEADER_BYTES 64u
#define CB_DENSE_ENTRY 96u
#define CB_EXPERT_ENTRY 128u
#define CB_DIR_MAX (64u << 20) /* bytes of one directory */

enum cb_file_kind { CB_FILE_TOKENIZER = 1, CB_FILE_DENSE = 2, CB_FILE_EXPERTS = 3 };

struct cb_header {
    uint32_t kind, index, count;
    uint64_t dir_offset, payload_offset, payload_size;
    uint8_t model_id[16];
    uint32_t dir_crc;
};

struct cb_dense_entry {
    char name[49];
    uint32_t type, rows, cols, crc, layout;
    uint64_t offset, size;
};

struct cb_expert_part {
    uint32_t type, rows, cols, crc;
    uint64_t offset, size; /* offset inside the record */
};
struct cb_expert_entry {
    uint32_t layer, expert, crc;
    uint64_t offset, size;
    struct cb_expert_part part[3]; /* gate, up, down */
};

/* Reads and checks a header; entry_bytes is the directory entry's size for this
 * kind (0: no fixed entries). `name` is what messages call the file. */
int cb_header_read(const struct cb_os_file *f, const char *name, enum cb_file_kind kind,
                   uint32_t entry_bytes, struct cb_header *h, struct cb_err *err);
/* The same from memory: raw[0..64) of a file of file_size bytes. */
int cb_header_parse(const uint8_t raw[64], uint64_t file_size, const char *name,
                    enum cb_file_kind kind, uint32_t entry_bytes, struct cb_header *h,
                    struct cb_err *err);

/* Directory entry i from raw directory bytes, checked against the header. */
int cb_dense_entry_parse(const uint8_t *dir, uint32_t i, const struct cb_header *h,
                         struct cb_dense_entry *e, struct cb_err *err);
int cb_expert_entry_parse(const uint8_t *dir, uint32_t i, const struct cb_header *h,
                          struct cb_expert_entry *e, struct cb_err *err);

#endif

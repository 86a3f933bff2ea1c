/* exptrace.c — see exptrace.h. Little-endian, written byte by byte:
 *
 *    0  "COLT"
 *    4  u16 version 1
 *    6  u16 flags: 1 = chunk starts are marked
 *    8  u32 MoE layers
 *   12  u32 experts a layer
 *   16  u32 experts a token uses
 *   20  u32 block number of the first MoE layer
 *   24  16 bytes model id
 *   40  20 zero bytes
 *   60  u32 CRC32C of bytes 0 to 59
 *   64  for each token uint16 [MoE layer][used], in rank order; 0xFFFF = none;
 *       bit 15 of a token's first value: the token begins a chunk */
#include "exptrace.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "sys.h"

#define HEADER 64
#define MARKED 1
#define START 0x8000u
#define EMPTY 0xffffu

static void put16(uint8_t *p, uint32_t v)
{
    p[0] = (uint8_t)(v & 255u);
    p[1] = (uint8_t)(v >> 8 & 255u);
}

static void put32(uint8_t *p, uint32_t v)
{
    put16(p, v);
    put16(p + 2, v >> 16);
}

static int nibble(char c)
{
    return c >= 'a' ? c - 'a' + 10 : c - '0';
}

static void make_header(uint8_t h[HEADER], const struct cb_info *info)
{
    memset(h, 0, HEADER);
    memcpy(h, "COLT", 4);
    put16(h + 4, 1);
    put16(h + 6, MARKED);
    put32(h + 8, info->n_moe_layer);
    put32(h + 12, info->n_expert);
    put32(h + 16, info->n_expert_used);
    put32(h + 20, info->n_layer - info->n_moe_layer);
    for (int i = 0; i < 16; i++)
        h[24 + i] = (uint8_t)(nibble(info->model_id[2 * i]) << 4 | nibble(info->model_id[2 * i + 1]));
    put32(h + 60, cb_crc32c(0, h, 60));
}

static void put(struct exptrace *t, const void *p, size_t n)
{
    if (t->saved_errno == 0 && fwrite(p, 1, n, t->f) != n)
        t->saved_errno = errno != 0 ? errno : EIO;
}

static void on_experts(void *ud, const int32_t *experts, uint32_t n)
{
    struct exptrace *t = ud;
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *to = t->row;
        for (uint32_t l = 0; l < t->n_layer; l++)
            for (uint32_t k = 0; k < t->n_used; k++, to += 2) {
                int32_t x = experts[((size_t)l * n + i) * t->n_used + k];
                uint32_t mark = to == t->row && i % t->batch == 0 ? START : 0;
                put16(to, x < 0 ? EMPTY : (uint32_t)x | mark);
            }
        put(t, t->row, (size_t)t->n_layer * t->n_used * 2);
        t->n_token++;
    }
}

int exptrace_open(struct exptrace *t, const char *path, const struct cb_info *info,
                  struct cb_err *err)
{
    uint8_t head[HEADER];
    memset(t, 0, sizeof *t);
    if (info->n_moe_layer == 0)
        return cb_fail(err, CB_EINVAL, "--trace-experts: the model is dense");
    t->path = path;
    t->n_layer = info->n_moe_layer;
    t->n_used = info->n_expert_used;
    t->batch = info->batch;
    size_t cells = (size_t)t->n_layer * t->n_used;
    t->chosen = calloc(cells * ((size_t)t->batch + 1), sizeof *t->chosen);
    t->row = calloc(cells, 2);
    if (t->chosen == NULL || t->row == NULL)
        return cb_fail(err, CB_EIO, "no memory for the trace of %u tokens", t->batch);
    t->f = sys_open(path, "wb");
    if (t->f == NULL)
        return cb_fail(err, CB_EINVAL, "--trace-experts: cannot create %.160s: %s", path,
                       strerror(errno));
    t->see = (struct cb_observer){t->chosen, on_experts, t};
    make_header(head, info);
    put(t, head, sizeof head);
    return exptrace_flush(t, err);
}

int exptrace_flush(struct exptrace *t, struct cb_err *err)
{
    if (t->f == NULL)
        return CB_OK;
    if (fflush(t->f) != 0 && t->saved_errno == 0)
        t->saved_errno = errno;
    if (t->saved_errno != 0)
        return cb_fail(err, CB_EIO, "writing %.160s: %s", t->path, strerror(t->saved_errno));
    return CB_OK;
}

void exptrace_close(struct exptrace *t)
{
    if (t->f != NULL)
        fclose(t->f);
    free(t->chosen);
    free(t->row);
    memset(t, 0, sizeof *t);
}

/* frame.c — see frame.h. */
#include "offload/frame.h"

#include <string.h>

#include "kernels/kernels.h"

/* Frames with a bad payload inside such a frame: each costs its length, and a
 * hostile peer can nest thousands. Noise makes none at all. */
#define NESTED_MOST 8u

static const uint8_t MAGIC[4] = {0xC5, 'B', 'X', 'P'};

uint32_t cb_frame_seal(uint8_t *p, enum cb_frame_type type, uint32_t seq, uint32_t ref,
                       uint32_t len)
{
    memcpy(p, MAGIC, 4);
    p[4] = (uint8_t)type;
    p[5] = p[6] = p[7] = 0;
    cb_put32(p + 8, seq);
    cb_put32(p + 12, ref);
    cb_put32(p + 16, len);
    cb_put32(p + 20, cb_crc32c(0, p, 20));
    cb_put32(p + CB_FRAME_HEAD + len, cb_crc32c(0, p + CB_FRAME_HEAD, len));
    return CB_FRAME_EXTRA + len;
}

/* ---- bytes to frames ---------------------------------------------------- */

void cb_frames_init(struct cb_frames *f, uint8_t *buf, uint32_t cap, uint32_t max_payload)
{
    memset(f, 0, sizeof *f);
    f->buf = buf;
    f->cap = cap;
    f->max_payload = max_payload;
}

void cb_frames_reset(struct cb_frames *f)
{
    f->at = f->n = f->expect = f->bad = f->bad_end = 0;
    f->in_garbage = 0;
}

uint8_t *cb_frames_room(struct cb_frames *f, uint32_t *room)
{
    /* A whole frame fits behind at == 0, so there always is room after this. */
    if (f->at == f->n)
        f->at = f->n = f->bad_end = 0;
    if (f->at > 0 && f->cap - f->n < CB_FRAME_SLACK / 2) {
        memmove(f->buf, f->buf + f->at, f->n - f->at);
        f->n -= f->at;
        f->bad_end = f->bad_end > f->at ? f->bad_end - f->at : 0;
        f->at = 0;
    }
    *room = f->cap - f->n;
    return f->buf + f->n;
}

void cb_frames_took(struct cb_frames *f, uint32_t n)
{
    f->n += n;
}

/* Leaves a byte behind that begins no frame. */
static void skip(struct cb_frames *f)
{
    f->garbage += !f->in_garbage;
    f->in_garbage = 1;
    f->at++;
}

/* Moves at to the next magic; 0 when there is none whole. */
static int find_magic(struct cb_frames *f)
{
    while (f->n - f->at >= 4) {
        if (memcmp(f->buf + f->at, MAGIC, 4) == 0)
            return 1;
        skip(f);
    }
    /* Fewer than 4 bytes: keep only what may become a magic. */
    while (f->at < f->n && memcmp(f->buf + f->at, MAGIC, f->n - f->at) != 0)
        skip(f);
    return 0;
}

static void give(struct cb_frames *f, const uint8_t *p, uint32_t len, struct cb_frame *out)
{
    *out = (struct cb_frame){p[4], cb_get32(p + 8), cb_get32(p + 12), len, p + CB_FRAME_HEAD};
    f->gaps += f->expect != 0 && out->seq != f->expect;
    f->expect = out->seq + 1u;
    f->frames++;
    f->in_garbage = 0;
    f->at += CB_FRAME_EXTRA + len;
}

int cb_frames_next(struct cb_frames *f, struct cb_frame *out)
{
    while (find_magic(f)) {
        const uint8_t *p = f->buf + f->at;
        uint32_t have = f->n - f->at;
        if (have < CB_FRAME_HEAD)
            return 0;
        f->bad = f->at < f->bad_end ? f->bad : 0;
        uint32_t len = cb_get32(p + 16);
        if (cb_crc32c(0, p, 20) != cb_get32(p + 20) || len > f->max_payload) {
            f->bad_crc++;
            skip(f);
            continue;
        }
        if (f->bad >= NESTED_MOST) {
            skip(f);
            continue;
        }
        if (have - CB_FRAME_HEAD < len + 4u)
            return 0;
        if (cb_crc32c(0, p + CB_FRAME_HEAD, len) == cb_get32(p + CB_FRAME_HEAD + len)) {
            give(f, p, len, out);
            return 1;
        }
        /* A byte was lost or damaged: the next frame may begin inside this one. */
        uint32_t end = f->at + CB_FRAME_EXTRA + len;
        f->bad_end = f->bad_end > end ? f->bad_end : end;
        f->bad++;
        f->bad_crc++;
        skip(f);
    }
    return 0;
}

/* ---- HELLO -------------------------------------------------------------- */

void cb_hello_put(uint8_t p[CB_HELLO_BYTES], const struct cb_hello *h)
{
    const uint32_t words[] = {h->n_layer, h->first_layer, h->n_embd, h->n_expert, h->n_used,
                              h->n_expert_ff, h->max_payload, h->window, h->max_token, h->max_row};
    memset(p, 0, CB_HELLO_BYTES);
    cb_put16(p, h->protocol);
    cb_put16(p + 2, h->role);
    memcpy(p + 4, h->model_id, 16);
    memcpy(p + 20, h->golden, 32);
    for (uint32_t i = 0; i < sizeof words / sizeof words[0]; i++)
        cb_put32(p + 52 + 4 * i, words[i]);
    memcpy(p + 92, h->who, strlen(h->who) + 1);
}

int cb_hello_get(struct cb_hello *h, const uint8_t *p, uint32_t len, struct cb_err *err)
{
    memset(h, 0, sizeof *h);
    if (len < 4)
        return cb_fail(err, CB_EFORMAT, "a HELLO of %u bytes", len);
    h->protocol = cb_get16(p);
    h->role = cb_get16(p + 2);
    if (h->protocol != CB_OFFLOAD_PROTOCOL)
        return 0; /* nothing else of it can be understood */
    if (len != CB_HELLO_BYTES)
        return cb_fail(err, CB_EFORMAT, "a HELLO of %u bytes, not %u", len, CB_HELLO_BYTES);
    uint32_t *const words[] = {&h->n_layer, &h->first_layer, &h->n_embd, &h->n_expert, &h->n_used,
                               &h->n_expert_ff, &h->max_payload, &h->window, &h->max_token,
                               &h->max_row};
    memcpy(h->model_id, p + 4, 16);
    memcpy(h->golden, p + 20, 32);
    for (uint32_t i = 0; i < sizeof words / sizeof words[0]; i++)
        *words[i] = cb_get32(p + 52 + 4 * i);
    memcpy(h->who, p + 92, sizeof h->who);
    h->who[sizeof h->who - 1] = '\0';
    for (char *c = h->who; *c; c++) /* it will be printed */
        if (*c < 32 || *c > 126)
            *c = '?';
    return 0;
}

uint32_t cb_hello_differs(const struct cb_hello *a, const struct cb_hello *b)
{
    if (a->protocol != b->protocol)
        return CB_OFF_VERSION;
    if (memcmp(a->model_id, b->model_id, 16) != 0)
        return CB_OFF_MODEL;
    if (memcmp(a->golden, b->golden, 32) != 0)
        return CB_OFF_GOLDEN;
    if (a->n_layer != b->n_layer || a->first_layer != b->first_layer || a->n_embd != b->n_embd ||
        a->n_expert != b->n_expert || a->n_used != b->n_used || a->n_expert_ff != b->n_expert_ff)
        return CB_OFF_GEOMETRY;
    return CB_OFF_OK;
}

const char *cb_offload_code_name(uint32_t code)
{
    static const char *const names[] = {"ok", "another protocol version", "another model",
                                        "another golden", "another geometry", "malformed",
                                        "too large", "an expert cannot be had", "out of turn"};
    return code < sizeof names / sizeof names[0] ? names[code] : "unknown";
}

/* ---- EXEC and RESULT ---------------------------------------------------- */

uint64_t cb_exec_token_bytes(uint32_t forms, uint32_t n_embd)
{
    uint64_t bytes = 0;
    for (uint32_t act = CB_ACT_F32; act <= CB_ACT_Q8_K; act++) {
        if (!(forms & 1u << act))
            continue;
        uint64_t one = cb_act_bytes((enum cb_act)act, n_embd);
        if (one == 0)
            return 0;
        bytes += one;
    }
    return bytes;
}

void cb_exec_put_head(uint8_t *p, const struct cb_exec *x)
{
    memset(p, 0, (size_t)cb_exec_acts_at(x->n_row));
    cb_put32(p, x->index);
    cb_put16(p + 4, x->layer);
    cb_put16(p + 6, x->n_row);
    cb_put16(p + 8, x->n_token);
    p[10] = (uint8_t)x->forms;
}

void cb_exec_put_row(uint8_t *p, uint32_t i, uint32_t expert, uint32_t token, float weight)
{
    uint32_t bits;
    memcpy(&bits, &weight, 4);
    p += CB_EXEC_HEAD + (size_t)i * CB_EXEC_ROW;
    cb_put16(p, expert);
    cb_put16(p + 2, token);
    cb_put32(p + 4, bits);
}

int cb_exec_get(struct cb_exec *x, const struct cb_frame *f, uint32_t n_embd, uint32_t n_expert,
                struct cb_err *err)
{
    const uint8_t *p = f->payload;
    uint32_t last = 0, same = 0; /* rows of one expert so far */
    if (f->len < CB_EXEC_HEAD)
        return cb_fail(err, CB_EFORMAT, "an EXEC of %u bytes", f->len);
    *x = (struct cb_exec){cb_get32(p), cb_get16(p + 4), cb_get16(p + 6), cb_get16(p + 8), p[10],
                          p + CB_EXEC_HEAD, p};
    uint64_t token = cb_exec_token_bytes(x->forms, n_embd), at = cb_exec_acts_at(x->n_row);
    if (x->n_row == 0 || x->n_token == 0 || x->forms == 0 || x->forms > 7 || token == 0 ||
        f->len != at + x->n_token * token)
        return cb_fail(err, CB_EFORMAT, "an EXEC of %u bytes for %u rows of %u tokens in forms %u",
                       f->len, x->n_row, x->n_token, x->forms);
    x->acts = p + at;
    for (uint32_t i = 0; i < x->n_row; i++) {
        uint32_t expert, t;
        cb_exec_row(x, i, &expert, &t);
        if (expert >= n_expert || t >= x->n_token || expert < last)
            return cb_fail(err, CB_EFORMAT, "EXEC row %u: expert %u, token %u", i, expert, t);
        same = expert == last ? same + 1 : 1;
        if (same > x->n_token) /* a token asks an expert once: the kernels have no more room */
            return cb_fail(err, CB_EFORMAT, "EXEC row %u: expert %u is asked more often than there "
                           "are tokens", i, expert);
        last = expert;
    }
    return 0;
}

int cb_result_get(struct cb_result *r, const struct cb_frame *f, uint32_t n_embd,
                  struct cb_err *err)
{
    if (f->len < CB_RESULT_HEAD)
        return cb_fail(err, CB_EFORMAT, "a RESULT of %u bytes", f->len);
    *r = (struct cb_result){cb_get16(f->payload), cb_get16(f->payload + 2),
                            cb_get32(f->payload + 4), f->payload + CB_RESULT_HEAD};
    if (r->n == 0 || f->len != CB_RESULT_HEAD + (uint64_t)r->n * n_embd * 4u)
        return cb_fail(err, CB_EFORMAT, "a RESULT of %u bytes for %u rows", f->len, r->n);
    return 0;
}

uint64_t cb_offload_payload(uint32_t n_embd, uint64_t n_token, uint64_t n_row)
{
    uint64_t wide = ((uint64_t)n_embd + 255) & ~UINT64_C(255);
    uint64_t token = wide * 4 + cb_act_bytes(CB_ACT_Q8_0, (size_t)wide) +
                     cb_act_bytes(CB_ACT_Q8_K, (size_t)wide);
    uint64_t exec = cb_exec_acts_at(n_row) + n_token * token;
    uint64_t row = CB_RESULT_HEAD + wide * 4, least = 65536;
    uint64_t most = exec > row ? exec : row;
    return most > least ? most : least;
}

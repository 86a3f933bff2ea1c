/* frame.h — the protocol of the offload link (docs/offload.md), byte by byte.
 *
 * A frame is a 24-byte header with a CRC of its own, a payload and the
 * payload's CRC. The header's CRC means that a damaged length is never
 * believed, the rescan after a bad payload that a lost byte costs one frame,
 * not the next one too. All numbers are little-endian; nothing is allocated. */
#ifndef CB_OFFLOAD_FRAME_H
#define CB_OFFLOAD_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "colibri.h"

#define CB_OFFLOAD_PROTOCOL 1u
#define CB_FRAME_HEAD 24u
#define CB_FRAME_EXTRA 28u               /* header and payload CRC */
#define CB_FRAME_SLACK 65536u            /* read ahead beyond one frame */
#define CB_FRAME_PAYLOAD_MAX (16u << 20) /* no side may ask for more */

enum cb_frame_type {
    CB_FRAME_HELLO = 1, CB_FRAME_EXEC = 2, CB_FRAME_RESULT = 3, CB_FRAME_CREDIT = 4,
    CB_FRAME_PING = 5, CB_FRAME_PONG = 6, CB_FRAME_ERROR = 7
};

struct cb_frame {
    uint32_t type, seq, ref, len; /* ref: seq of the frame that this one answers, 0 = none */
    const uint8_t *payload;       /* [len], valid until the next call on the reader */
};

/* Fills in header and CRCs around len payload bytes at p + CB_FRAME_HEAD;
 * returns the bytes of the whole frame. */
uint32_t cb_frame_seal(uint8_t *p, enum cb_frame_type type, uint32_t seq, uint32_t ref,
                       uint32_t len);

/* Bytes in, frames out. */
struct cb_frames {
    uint8_t *buf;                 /* [cap] */
    uint32_t cap, max_payload;
    uint32_t at, n;               /* bytes [at, n) are not looked at yet */
    uint32_t expect;              /* seq of the next frame; 0 = any */
    uint32_t bad, bad_end;        /* nested frames with a bad payload; where they all end */
    int in_garbage;
    uint64_t frames, bad_crc;     /* frames given out; frames dropped for a CRC */
    uint64_t garbage, gaps;       /* runs of bytes that are no frame; jumps in seq */
};
#define CB_FRAMES_CAP(max_payload) ((uint64_t)(max_payload) + CB_FRAME_EXTRA + CB_FRAME_SLACK)

void cb_frames_init(struct cb_frames *f, uint8_t *buf, uint32_t cap, uint32_t max_payload);
/* Forgets what is buffered; counters stay. */
void cb_frames_reset(struct cb_frames *f);
/* Where to read to: at least 1 byte. Then say how many came. */
uint8_t *cb_frames_room(struct cb_frames *f, uint32_t *room);
void cb_frames_took(struct cb_frames *f, uint32_t n);
/* 1 and *out, or 0: more bytes are needed. */
int cb_frames_next(struct cb_frames *f, struct cb_frame *out);

/* ---- payloads ----------------------------------------------------------- */

#define CB_HELLO_BYTES 144u
enum cb_hello_role { CB_HELLO_BOARD = 0, CB_HELLO_MODULE = 1 };
struct cb_hello {
    uint32_t protocol, role;
    uint8_t model_id[16], golden[32];
    uint32_t n_layer, first_layer, n_embd, n_expert, n_used, n_expert_ff;
    uint32_t max_payload, window, max_token, max_row; /* of the side that says it */
    char who[40];                 /* for people; NUL-terminated */
};
void cb_hello_put(uint8_t p[CB_HELLO_BYTES], const struct cb_hello *h);
/* CB_EFORMAT when it is no HELLO; another protocol version still gives protocol. */
int cb_hello_get(struct cb_hello *h, const uint8_t *p, uint32_t len, struct cb_err *err);
/* Whether the two speak of the same weights: enum cb_offload_code, 0 = yes. */
uint32_t cb_hello_differs(const struct cb_hello *a, const struct cb_hello *b);

enum cb_offload_code {
    CB_OFF_OK = 0, CB_OFF_VERSION = 1, CB_OFF_MODEL = 2, CB_OFF_GOLDEN = 3, CB_OFF_GEOMETRY = 4,
    CB_OFF_MALFORMED = 5, CB_OFF_TOO_LARGE = 6, CB_OFF_EXPERT = 7, CB_OFF_STATE = 8
};
const char *cb_offload_code_name(uint32_t code);

/* EXEC: what one layer wants computed. */
#define CB_EXEC_HEAD 16u
#define CB_EXEC_ROW 8u
struct cb_exec {
    uint32_t index;               /* EXECs since HELLO, from 1 */
    uint32_t layer;               /* of the model, dense ones counted */
    uint32_t n_row, n_token;
    uint32_t forms;               /* 1 << enum cb_act */
    const uint8_t *rows, *acts;   /* [n_row][8], [n_token][form bytes] */
};
/* Bytes before the activations, a multiple of 16. */
static inline uint64_t cb_exec_acts_at(uint64_t n_row)
{
    return (CB_EXEC_HEAD + n_row * CB_EXEC_ROW + 15u) & ~UINT64_C(15);
}
/* Bytes of one token's activations in the given forms; 0 when n_embd has no such form. */
uint64_t cb_exec_token_bytes(uint32_t forms, uint32_t n_embd);
void cb_exec_put_head(uint8_t *p, const struct cb_exec *x);
void cb_exec_put_row(uint8_t *p, uint32_t i, uint32_t expert, uint32_t token, float weight);
static inline void cb_exec_row(const struct cb_exec *x, uint32_t i, uint32_t *expert,
                               uint32_t *token)
{
    const uint8_t *p = x->rows + (size_t)i * CB_EXEC_ROW;
    *expert = (uint32_t)(p[0] | p[1] << 8);
    *token = (uint32_t)(p[2] | p[3] << 8);
}
/* Checks every size and that rows stand in ascending order of experts. */
int cb_exec_get(struct cb_exec *x, const struct cb_frame *f, uint32_t n_embd, uint32_t n_expert,
                struct cb_err *err);

/* RESULT: rows [first, first + n) of an EXEC, float32 [n][n_embd]. */
#define CB_RESULT_HEAD 16u
struct cb_result {
    uint32_t first, n;
    uint32_t busy_us;             /* from the EXEC's last byte to this row, at the module */
    const uint8_t *rows;
};
int cb_result_get(struct cb_result *r, const struct cb_frame *f, uint32_t n_embd,
                  struct cb_err *err);

/* Payload bytes that either side must be able to hold for chunks of n_token
 * tokens of which each uses n_used experts; never less than 64 KiB. */
uint64_t cb_offload_payload(uint32_t n_embd, uint64_t n_token, uint64_t n_row);

static inline void cb_put16(uint8_t *p, uint32_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}
static inline void cb_put32(uint8_t *p, uint32_t v)
{
    cb_put16(p, v & 0xffffu);
    cb_put16(p + 2, v >> 16);
}
static inline uint32_t cb_get16(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}
static inline uint32_t cb_get32(const uint8_t *p)
{
    return cb_get16(p) | cb_get16(p + 2) << 16;
}

#endif

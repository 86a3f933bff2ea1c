/* fuzz_frame.c — libFuzzer harness: hostile bytes on the offload link.
 *
 * Input: u8 pieces to feed at once, then records: u8 kind, u8 damage, u16 length,
 * bytes. A kind of 0 is raw garbage, others are sealed as a frame of that type,
 * with right CRCs, or no mutation would get past them; damage then drops or
 * flips one byte. Every payload that comes out is read as HELLO, EXEC and
 * RESULT. Frames that were not damaged must come out, in order.
 *
 *   clang -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined -I. -Iinclude
 *     tests/fuzz/fuzz_frame.c offload/frame.c core/err.c kernels/crc32c.c kernels/types.c
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "offload/frame.h"

#define MAX_PAYLOAD 4096u
#define MAX_STREAM (1u << 18)
#define MAX_FRAMES 4096u
#define N_EMBD 256u
#define N_EXPERT 64u

static uint8_t stream[MAX_STREAM + 2 * (MAX_PAYLOAD + CB_FRAME_EXTRA)];
static uint8_t buf[CB_FRAMES_CAP(MAX_PAYLOAD)];
static uint32_t whole[MAX_FRAMES]; /* seq of frames that were not damaged */
static uint32_t n_whole, met, sum;

static void touch(const uint8_t *p, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        sum += p[i];
}

static void read_payload(const struct cb_frame *f)
{
    struct cb_err err;
    struct cb_hello h;
    struct cb_exec x;
    struct cb_result r;
    uint8_t again[CB_HELLO_BYTES];
    if (cb_hello_get(&h, f->payload, f->len, &err) == 0 && h.protocol == CB_OFFLOAD_PROTOCOL) {
        struct cb_hello copy;
        cb_hello_put(again, &h);
        if (cb_hello_get(&copy, again, sizeof again, &err) != 0 || cb_hello_differs(&h, &copy) != 0)
            abort();
    }
    if (cb_exec_get(&x, f, N_EMBD, N_EXPERT, &err) == 0) {
        for (uint32_t i = 0; i < x.n_row; i++) {
            uint32_t expert, token;
            cb_exec_row(&x, i, &expert, &token);
            if (expert >= N_EXPERT || token >= x.n_token)
                abort();
            touch(x.acts + token * cb_exec_token_bytes(x.forms, N_EMBD),
                  cb_exec_token_bytes(x.forms, N_EMBD));
        }
    }
    if (cb_result_get(&r, f, N_EMBD, &err) == 0)
        touch(r.rows, (uint64_t)r.n * N_EMBD * 4);
}

static void feed(struct cb_frames *f, const uint8_t *p, uint32_t n, uint32_t piece)
{
    struct cb_frame out;
    while (n > 0) {
        uint32_t room, k = n < piece ? n : piece;
        uint8_t *to = cb_frames_room(f, &room);
        if (room == 0 || room > f->cap)
            abort();
        k = k < room ? k : room;
        memcpy(to, p, k);
        cb_frames_took(f, k);
        p += k;
        n -= k;
        while (cb_frames_next(f, &out)) {
            if (out.len > MAX_PAYLOAD)
                abort();
            touch(out.payload, out.len);
            read_payload(&out);
            if (met < n_whole && out.seq == whole[met])
                met++;
        }
    }
}

/* Appends one record to the stream; returns its bytes there. */
static uint32_t add(uint8_t *to, uint8_t kind, uint8_t damage, const uint8_t *p, uint32_t n,
                    uint32_t seq)
{
    if (kind == 0) {
        memcpy(to, p, n);
        return n;
    }
    memcpy(to + CB_FRAME_HEAD, p, n);
    uint32_t size = cb_frame_seal(to, (enum cb_frame_type)kind, seq, seq ^ kind, n);
    if (damage == 0 && n_whole < MAX_FRAMES) {
        whole[n_whole++] = seq;
    } else if (damage & 1) {
        to[damage * 7u % size] ^= (uint8_t)(damage | 1u);
    } else {
        /* Not of the CRC: a frame that lost its last byte may borrow the next one's
         * first, and be whole. */
        uint32_t at = damage * 13u % (size - 4);
        memmove(to + at, to + at + 1, size - at - 1);
        size--;
    }
    return size;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct cb_frames f;
    uint32_t used = 0, seq = 1;
    n_whole = met = 0;
    if (size < 1)
        return 0;
    uint32_t piece = data[0] == 0 ? MAX_STREAM : data[0];
    data++;
    size--;
    while (size >= 4) {
        uint32_t n = (uint32_t)(data[2] | data[3] << 8);
        n = n < size - 4 ? n : (uint32_t)(size - 4);
        n = n < MAX_PAYLOAD ? n : MAX_PAYLOAD;
        if (used + n + CB_FRAME_EXTRA > MAX_STREAM)
            break;
        used += add(stream + used, data[0] % 9u, data[1], data + 4, n, seq++);
        data += 4 + n;
        size -= 4 + n;
    }
    /* What waits for bytes that were lost gets others. */
    memset(stream + used, 0, MAX_PAYLOAD + CB_FRAME_EXTRA);
    used += MAX_PAYLOAD + CB_FRAME_EXTRA;
    cb_frames_init(&f, buf, sizeof buf, MAX_PAYLOAD);
    feed(&f, stream, used, piece);
    if (met != n_whole)
        abort();
    return 0;
}

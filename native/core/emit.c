/* emit.c — stop strings across token borders, UTF-8 never cut. */
#include "emit.h"

#include <string.h>

#include "text/text.h"

int cb_emit_init(struct cb_emit *m, const char *const *stop, uint32_t n_stop, struct cb_err *err)
{
    m->n = 0;
    m->n_stop = 0;
    m->stopped = 0;
    if (n_stop > CB_STOP_MAX)
        return cb_fail(err, CB_EINVAL, "%u stop strings, at most %d", n_stop, CB_STOP_MAX);
    for (uint32_t i = 0; i < n_stop; i++) {
        size_t len = stop[i] ? strlen(stop[i]) : 0;
        if (len == 0)
            return cb_fail(err, CB_EINVAL, "stop string %u is empty", i + 1);
        if (len > CB_STOP_LEN)
            return cb_fail(err, CB_EINVAL, "stop string %u has %zu bytes, at most %d", i + 1, len,
                           CB_STOP_LEN);
        if (cb_utf8_check(stop[i], len) != len)
            return cb_fail(err, CB_EUTF8, "stop string %u is not UTF-8", i + 1);
        m->stop[i] = stop[i];
        m->stop_len[i] = len;
    }
    m->n_stop = n_stop;
    return CB_OK;
}

/* Length of the longest stop string that ends at buf[end), 0 if none. */
static size_t stop_ending_at(const struct cb_emit *m, size_t end)
{
    size_t longest = 0;
    for (uint32_t i = 0; i < m->n_stop; i++) {
        size_t len = m->stop_len[i];
        if (len <= end && len > longest && memcmp(m->buf + end - len, m->stop[i], len) == 0)
            longest = len;
    }
    return longest;
}

/* Length of the longest suffix of buf[0..n) that begins a stop string. */
static size_t may_begin_stop(const struct cb_emit *m)
{
    size_t longest = 0;
    for (uint32_t i = 0; i < m->n_stop; i++) {
        size_t len = m->stop_len[i] - 1 < m->n ? m->stop_len[i] - 1 : m->n;
        for (; len > longest; len--) {
            if (memcmp(m->buf + m->n - len, m->stop[i], len) == 0) {
                longest = len;
                break;
            }
        }
    }
    return longest;
}

static int show(struct cb_emit *m, size_t n, int32_t id, cb_text_fn fn, void *ud)
{
    int rc = fn ? fn(ud, m->buf, n, id) : 0;
    m->n -= n;
    memmove(m->buf, m->buf + n, m->n);
    return rc;
}

int cb_emit_push(struct cb_emit *m, const char *bytes, size_t n, int32_t id, cb_text_fn fn, void *ud)
{
    do {
        size_t part = n < CB_EMIT_CHUNK ? n : CB_EMIT_CHUNK;
        if (m->stopped)
            part = n = 0;
        for (size_t i = 0; i < part && !m->stopped; i++) {
            m->buf[m->n++] = bytes[i];
            size_t len = stop_ending_at(m, m->n);
            if (len > 0) {
                m->n -= len;
                m->stopped = 1;
            }
        }
        size_t ready = m->n - (m->stopped ? 0 : may_begin_stop(m));
        int rc = show(m, cb_utf8_complete(m->buf, ready), id, fn, ud);
        if (rc != 0)
            return rc;
        bytes = part ? bytes + part : bytes;
        n -= part;
    } while (n > 0);
    return 0;
}

int cb_emit_flush(struct cb_emit *m, cb_text_fn fn, void *ud)
{
    return m->n > 0 ? show(m, m->n, -1, fn, ud) : 0;
}

/* log.h — one line an event, to a journal: text or JSON.
 *
 * A journal whose reader stands still must not stop the service: what cannot be
 * written at once is left out and counted, and "journal_lost" says how many lines
 * as soon as one can be written again.
 *
 * A file that nobody rotates must not fill a disk in a year: beyond log.max bytes
 * it keeps, in place, the lines of its later half, and "log_shortened" says so. */
#ifndef CB_SERVE_LOG_H
#define CB_SERVE_LOG_H

#include <stdatomic.h>
#include <stdint.h>

#include "serve/buf.h"

enum cb_log_way {
    CB_LOG_PLAIN,  /* write(): a file, or what was opened here not to wait */
    CB_LOG_SEND,   /* a socket, as systemd gives: send() that does not wait */
    CB_LOG_POLL    /* poll(), then write(): a pipe that takes a page takes a line whole */
};
struct cb_log {
    int fd, json;
    enum cb_log_way way;
    int own;                /* fd was opened here: the same pipe or terminal, not waiting */
    _Atomic uint32_t *lost; /* lines left out; the top bit: the last one is cut off */
    uint64_t max;           /* bytes of a file; 0 = no limit */
};
void cb_log_open(struct cb_log *log, int fd, int json, _Atomic uint32_t *lost);
void cb_log_close(struct cb_log *log);
/* From now on a file keeps at most max bytes (0 = all). Warns when it may be
 * appended to, but not read: it then grows on. */
void cb_log_bound(struct cb_log *log, uint64_t max);

struct cb_line {
    struct cb_log log;
    struct cb_buf b;
    char text[1536];
};
/* level "info", "warning" or "error"; event one word. */
void cb_line_begin(struct cb_line *l, struct cb_log log, const char *level, const char *event);
void cb_line_str(struct cb_line *l, const char *key, const char *value);
void cb_line_u64(struct cb_line *l, const char *key, uint64_t value);
void cb_line_ms(struct cb_line *l, const char *key, uint64_t ns);
void cb_line_end(struct cb_line *l); /* written with one call, or not at all */

/* A line with one more field, "message"; NULL = without. */
void cb_log_say(struct cb_log log, const char *level, const char *event, const char *message);

#endif

/* log.h — one line an event, to a journal: text or JSON. */
#ifndef CB_SERVE_LOG_H
#define CB_SERVE_LOG_H

#include <stdint.h>

#include "serve/buf.h"

struct cb_log {
    int fd, json;
};
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
void cb_line_end(struct cb_line *l); /* written with one write() */

/* A line with one more field, "message"; NULL = without. */
void cb_log_say(struct cb_log log, const char *level, const char *event, const char *message);

#endif

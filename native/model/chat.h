/* chat.h — the chat template as fixed parts: what stands before and after each
 * role's text, and what opens the assistant's turn. The converter checks that
 * the model's own template is exactly that (docs/convert.md). */
#ifndef CB_CHAT_H
#define CB_CHAT_H

#include <stddef.h>

#include "colibri.h"

#define CB_CHAT_PART 1024

enum cb_role { CB_ROLE_SYSTEM, CB_ROLE_USER, CB_ROLE_ASSISTANT, CB_ROLE_COUNT };

struct cb_chat {
    int have;
    char system_default[CB_CHAT_PART]; /* used when the caller gives no system text; may be "" */
    char first[CB_CHAT_PART];          /* before everything (a BOS marker, say) */
    char prefix[CB_ROLE_COUNT][CB_CHAT_PART];
    char suffix[CB_ROLE_COUNT][CB_CHAT_PART];
    char generation[CB_CHAT_PART];     /* opens the answer */
    int trims[CB_ROLE_COUNT];          /* white space around the role's text is left out */
};

/* Bytes of text[0..n) without white space at its ends, *from the first of them.
 * White space is what Jinja's trim takes off: that of Python's str.strip(). */
size_t cb_chat_trim(const char *text, size_t n, size_t *from);

/* Writes the prompt for one exchange to buf[cap], NUL-terminated; *len without
 * the NUL. system may be NULL (then the template's default). CB_EUNSUPPORTED
 * when the model has no chat template that could be used. */
int cb_chat_render(const struct cb_engine *e, const char *system, const char *user, char *buf,
                   size_t cap, size_t *len, struct cb_err *err);

#endif

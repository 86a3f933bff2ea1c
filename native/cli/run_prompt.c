/* run_prompt.c — from --prompt, --prompt-file or a line of --prompts to token ids. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "model/chat.h"
#include "run.h"
#include "text/text.h"

#define PROMPT_MAX (16u << 20) /* bytes */

int run_check_prompt(const struct run *r, const char *text, size_t n, struct cb_err *err)
{
    if (n == 0)
        return cb_fail(err, CB_EINVAL, "the prompt is empty");
    size_t good = r->strict ? cb_utf8_check(text, n) : n;
    if (good != n)
        return cb_fail(err, CB_EUTF8,
                       "the prompt is not UTF-8: byte 0x%02x at offset %zu; --no-strict-utf8 takes it "
                       "as it is",
                       (unsigned char)text[good], good);
    return CB_OK;
}

int run_read_prompt(const struct run *r, char **text, size_t *n, struct cb_err *err)
{
    int rc = CB_OK;
    if (r->prompt) {
        *n = strlen(r->prompt);
        *text = malloc(*n + 1);
        if (*text == NULL)
            return cb_fail(err, CB_EIO, "no memory for the prompt");
        memcpy(*text, r->prompt, *n + 1);
    } else if (strcmp(r->prompt_file, "-") == 0) {
        rc = sys_read_all(stdin, "standard input", PROMPT_MAX, text, n, err);
    } else {
        FILE *f = sys_open(r->prompt_file, "rb");
        if (f == NULL)
            return cb_fail(err, CB_EINVAL, "cannot open %s: %s", r->prompt_file, strerror(errno));
        rc = sys_read_all(f, r->prompt_file, PROMPT_MAX, text, n, err);
        fclose(f);
    }
    if (rc < 0)
        return rc;
    rc = run_check_prompt(r, *text, *n, err);
    if (rc < 0) {
        free(*text);
        *text = NULL;
    }
    return rc;
}

int run_reserve(struct run *r, size_t n, struct cb_err *err)
{
    r->chat_cap = r->chat ? n + (r->system ? strlen(r->system) : 0) + 16 * CB_CHAT_PART : 0;
    r->ids_cap = (r->chat ? r->chat_cap : n) + 2;
    r->chat_text = r->chat ? calloc(r->chat_cap, 1) : NULL;
    r->ids = malloc(r->ids_cap * sizeof *r->ids);
    if (r->ids == NULL || (r->chat && r->chat_text == NULL))
        return cb_fail(err, CB_EIO, "no memory for the prompt");
    memset(r->ids, 0, r->ids_cap * sizeof *r->ids); /* resident before the first token */
    return CB_OK;
}

void run_free(struct run *r)
{
    free(r->chat_text);
    free(r->ids);
    free(r->text);
}

int run_encode(struct run *r, const char *text, size_t n, struct cb_err *err)
{
    if (r->chat) {
        if (memchr(text, 0, n) != NULL)
            return cb_fail(err, CB_EINVAL, "with --chat the prompt may not hold NUL bytes");
        int rc = cb_chat_render(r->e, r->system, text, r->chat_text, r->chat_cap, &n, err);
        if (rc < 0)
            return rc;
        text = r->chat_text;
    }
    int got = cb_encode(r->e, text, n, 1, r->strict, r->ids + 1, r->ids_cap - 1, err);
    if (got < 0)
        return got;
    r->n_ids = (uint32_t)got;
    int has_bos = got > 0 && (uint32_t)r->ids[1] == r->info.bos;
    if (r->info.add_bos && r->info.bos != UINT32_MAX && !has_bos) {
        r->ids[0] = (int32_t)r->info.bos;
        r->n_ids++;
    } else {
        memmove(r->ids, r->ids + 1, (size_t)got * sizeof *r->ids);
    }
    if (r->n_ids > r->info.ctx)
        return cb_fail(err, CB_ECONTEXT,
                       "the prompt has %u tokens, the context holds %u; raise --ctx (the model knows "
                       "up to %u)",
                       r->n_ids, r->info.ctx, r->info.ctx_train);
    return CB_OK;
}

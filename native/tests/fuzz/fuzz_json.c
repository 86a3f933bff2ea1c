/* fuzz_json.c — libFuzzer harness: hostile JSON, and what is written back.
 *
 * First byte: how many tokens there is room for. Whatever parses must have
 * spans inside the text and children that add up; every string that unescapes
 * must come out the same after it was escaped and read once more. */
#include <stdlib.h>
#include <string.h>

#include "core/json.h"
#include "serve/buf.h"
#include "text/text.h"

#define MAX_TEXT 8192u

static void require(int ok)
{
    if (!ok)
        abort();
}

static void check_tree(const struct cb_json *j, size_t n, uint32_t t)
{
    const struct cb_json_tok *k = &j->tok[t];
    require(k->at <= n && k->len <= n - k->at && k->next > t && k->next <= j->n_tok);
    uint32_t at = t + 1, items = k->kind == CB_JSON_OBJECT ? 2 * k->size : k->size;
    if (k->kind != CB_JSON_ARRAY && k->kind != CB_JSON_OBJECT)
        items = 0;
    for (uint32_t i = 0; i < items; i++) {
        require(at < k->next);
        check_tree(j, n, at);
        at = j->tok[at].next;
    }
    require(at == k->next);
}

static void check_string(const struct cb_json *j, uint32_t t)
{
    static char once[MAX_TEXT + 1], twice[MAX_TEXT + 1], quoted[6 * MAX_TEXT + 3];
    struct cb_json_tok tok[2];
    struct cb_json again;
    struct cb_err err;
    if (cb_json_str(j, t, "text", once, sizeof once, &err) < 0)
        return;
    size_t n = strlen(once);
    struct cb_buf b = {quoted, 0, sizeof quoted, 0};
    cb_buf_quoted(&b, once);
    require(!b.full && cb_utf8_check(quoted, b.n) == b.n);
    require(cb_json_parse(&again, quoted, b.n, tok, 2, &err) == 0 && again.n_tok == 1);
    require(cb_json_str(&again, 0, "text", twice, sizeof twice, &err) == 0 || cb_utf8_check(once, n) != n);
    require(cb_utf8_check(once, n) != n || strcmp(once, twice) == 0);
}

static void use(const struct cb_json *j, uint32_t t)
{
    struct cb_err err;
    uint64_t u = 0;
    double d = 0;
    int b = 0;
    (void)cb_json_u64(j, t, 1000, "number", &u, &err);
    (void)cb_json_f64(j, t, "number", &d, &err);
    (void)cb_json_bool(j, t, "flag", &b, &err);
    (void)cb_json_get(j, t, "prompt");
    if (cb_json_is(j, t, CB_JSON_STRING))
        check_string(j, t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct cb_err err;
    struct cb_json j;
    if (n < 1 || n > MAX_TEXT)
        return 0;
    uint32_t cap = data[0] < 64 ? data[0] : 4096;
    struct cb_json_tok *tok = malloc((cap + 1u) * sizeof *tok);
    char *text = malloc(n);
    require(tok != NULL && text != NULL);
    memcpy(text, data + 1, n - 1);
    if (cb_json_parse(&j, text, n - 1, tok, cap, &err) == 0) {
        require(j.n_tok >= 1 && j.n_tok <= cap && tok[0].next == j.n_tok);
        check_tree(&j, n - 1, 0);
        for (uint32_t t = 0; t < j.n_tok; t++)
            use(&j, t);
    }
    free(text);
    free(tok);
    return 0;
}

/* fuzz_api.c — libFuzzer harness: hostile bodies of /v1/completions and
 * /v1/chat/completions.
 *
 * Input: a byte of switches (chat, a template, its system text, a small context),
 * then the body, which lies at the end of a heap block. Buffers have the sizes
 * that setup.c gives them. What is taken must keep every bound that the worker
 * relies on; what is refused must say why. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "serve/server.h"
#include "text/text.h"

#define MAX_BODY 8192u
#define N_VOCAB 300u

static void require(int ok)
{
    if (!ok)
        abort();
}

static void set_template(struct cb_chat *c, int system)
{
    memset(c, 0, sizeof *c);
    c->have = 1;
    if (system)
        strcpy(c->system_default, "Be brief.");
    for (int i = 0; i < CB_ROLE_COUNT; i++) {
        strcpy(c->prefix[i], "<|im_start|>role\n");
        strcpy(c->suffix[i], "<|im_end|>\n");
    }
    strcpy(c->generation, "<|im_start|>assistant\n");
}

static void set_up(struct cb_server *s, struct cb_req *r, unsigned flags)
{
    memset(s, 0, sizeof *s);
    memset(r, 0, sizeof *r);
    pthread_mutex_init(&s->lock, NULL);
    s->opt.ctx = flags & 8u ? 8 : 512;
    s->info.n_vocab = N_VOCAB;
    strcpy(s->info.name, "model");
    if (flags & 2u)
        set_template(&s->chat, (flags & 4u) != 0);
    s->text_cap = MAX_BODY + 4u * CB_CHAT_PART;
    s->n_json = s->opt.ctx + 256 > CB_JSON_TOKENS ? s->opt.ctx + 256 : CB_JSON_TOKENS;
    s->json = malloc(s->n_json * sizeof *s->json);
    r->text = malloc(s->text_cap);
    r->ids = malloc((s->opt.ctx + 2) * sizeof *r->ids);
    r->number = 77;
    require(s->json != NULL && r->text != NULL && r->ids != NULL);
}

static void check_sampling(const struct cb_sampling *p)
{
    require(isfinite(p->temperature) && p->temperature >= 0.0f && p->temperature <= 2.0f);
    require(isfinite(p->top_p) && p->top_p >= 0.0f && p->top_p <= 1.0f);
    require(isfinite(p->min_p) && p->min_p >= 0.0f && p->min_p <= 1.0f);
    require(isfinite(p->repeat_penalty) && p->repeat_penalty > 0.0f);
}

static void check_taken(const struct cb_server *s, const struct cb_req *r)
{
    const struct cb_ask *a = &r->ask;
    const char *stop[CB_STOP_MAX];
    struct cb_emit emit;
    uint32_t ctx = s->opt.ctx;
    require(a->n_text < s->text_cap && (a->n_text > 0 || a->have_ids));
    require(cb_utf8_check(r->text, a->n_text) == a->n_text);
    require(a->n_ids <= ctx && (a->have_ids || a->n_ids == 0));
    for (uint32_t i = 0; i < a->n_ids; i++)
        require(r->ids[i] >= 0 && (uint32_t)r->ids[i] < N_VOCAB);
    require(a->max_new <= ctx && a->top <= CB_TOP_MAX);
    require((uint64_t)a->max_new * a->top <= (uint64_t)ctx * CB_TOP_ROOM);
    require(a->n_stop <= CB_STOP_MAX && (a->stream || !a->include_usage));
    for (uint32_t i = 0; i < a->n_stop; i++) {
        require(a->stop[i][0] != '\0' && strlen(a->stop[i]) <= CB_STOP_LEN);
        stop[i] = a->stop[i];
    }
    require(cb_emit_init(&emit, stop, a->n_stop, NULL) == 0);
    check_sampling(&a->sampling);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct cb_server s;
    static struct cb_req r;
    struct cb_refusal no;
    if (size < 1 || size - 1 > MAX_BODY)
        return 0;
    size_t n = size - 1;
    char *body = malloc(n > 0 ? n : 1);
    require(body != NULL);
    memcpy(body, data + 1, n);
    set_up(&s, &r, data[0]);
    memset(&no, 0, sizeof no);
    if (cb_api_read(&s, &r, data[0] & 1, body, n, &no) == 0)
        check_taken(&s, &r);
    else
        require(no.status >= 400 && no.status < 500 && no.code != NULL && no.msg[0] != '\0' &&
                memchr(no.msg, 0, sizeof no.msg) != NULL &&
                memchr(no.param, 0, sizeof no.param) != NULL);
    free(body);
    free(r.ids);
    free(r.text);
    free(s.json);
    pthread_mutex_destroy(&s.lock);
    return 0;
}

/* status.c — /health and /status, and what is noted of each request. */
#if !defined(_WIN32)
#include <stdio.h>
#include <string.h>

#include "core/os.h"
#include "serve/machine.h"
#include "serve/server.h"

#define HEAT_CHARS 16000u /* of the heat map in /status, one a cell */

static double seconds(uint64_t ns)
{
    return (double)ns / 1e9;
}

void cb_status_health(struct cb_server *s, struct cb_buf *b, int *status)
{
    struct cb_load l;
    char name[64], golden[65];
    uint64_t now = cb_os_now_ns();
    cb_queue_load(s, &l);
    pthread_mutex_lock(&s->lock);
    memcpy(name, s->info.name, sizeof name);
    memcpy(golden, s->info.golden, sizeof golden);
    int swapping = s->swapping;
    pthread_mutex_unlock(&s->lock);
    const char *word = s->health_failed > 0 ? "stuck" : s->draining ? "stopping" : swapping ? "swapping"
                                                                                           : "ok";
    *status = s->health_failed > 0 || s->draining ? 503 : 200;
    cb_buf_fmt(b, "{\"status\":\"%s\",\"model\":", word);
    cb_buf_quoted(b, name);
    cb_buf_fmt(b, ",\"golden\":\"%s\",\"uptime_s\":%.3f,\"active\":%u,\"queued\":%u,\"capacity\":%u,"
                  "\"sequences\":%u,",
               golden, seconds(now - s->t_open), l.active, l.queued,
               s->opt.sequences + s->opt.queue, s->opt.sequences);
    if (l.prompt_total > 0)
        cb_buf_fmt(b, "\"prefill\":{\"done\":%u,\"total\":%u},", l.prompt_done, l.prompt_total);
    else
        cb_buf_str(b, "\"prefill\":null,");
    cb_buf_fmt(b, "\"tokens_per_s\":%.3f,\"failed_checks\":%u}\n", s->speed, s->health_failed);
}

/* ---- a request's end ---------------------------------------------------- */

static const char *finish_word(const struct cb_req *r, int status)
{
    static const char *const names[] = {"length", "eog", "stop", "cancel", "context"};
    return status >= 400 && r->refusal.code != NULL ? r->refusal.code : names[r->finish];
}

static void log_request(const struct cb_server *s, const struct cb_req *r, int status)
{
    struct cb_line l;
    char id[24];
    snprintf(id, sizeof id, "%016llx", (unsigned long long)r->number);
    cb_line_begin(&l, s->log, status >= 500 ? "error" : "info", "request");
    cb_line_str(&l, "id", id);
    cb_line_str(&l, "kind", r->ask.chat ? "chat" : "completion");
    cb_line_u64(&l, "stream", (uint64_t)r->ask.stream);
    cb_line_u64(&l, "status", (uint64_t)status);
    cb_line_str(&l, "finish", finish_word(r, status));
    cb_line_u64(&l, "prompt_tokens", r->n_prompt);
    cb_line_u64(&l, "completion_tokens", r->n_tok);
    if (r->t_start > r->t_arrive)
        cb_line_ms(&l, "queue_ms", r->t_start - r->t_arrive);
    if (r->t_first > r->t_arrive)
        cb_line_ms(&l, "first_token_ms", r->t_first - r->t_arrive);
    cb_line_ms(&l, "total_ms", r->t_end - r->t_arrive);
    if (r->degraded + r->zeros + r->extra > 0) {
        cb_line_u64(&l, "degraded", r->degraded);
        cb_line_u64(&l, "zeros", r->zeros);
        cb_line_u64(&l, "extra", r->extra);
    }
    cb_line_end(&l);
}

void cb_metrics_end(struct cb_server *s, const struct cb_req *r, int status)
{
    struct cb_metrics *m = &s->m;
    struct cb_recent *x = &m->recent[m->n_recent++ % CB_RECENT];
    *x = (struct cb_recent){.number = r->number, .t_end = r->t_end, .n_prompt = r->n_prompt,
                            .n_tok = r->n_tok, .chat = r->ask.chat, .stream = r->ask.stream,
                            .status = status};
    x->total_ns = r->t_end - r->t_arrive;
    x->first_ns = r->t_first > r->t_arrive ? r->t_first - r->t_arrive : 0;
    snprintf(x->finish, sizeof x->finish, "%s", finish_word(r, status));
    if (r->t_start > 0)
        cb_hist_add(&m->queue, r->t_start - r->t_arrive);
    if (r->t_first > 0)
        cb_hist_add(&m->first, r->t_first - r->t_arrive);
    if (status == 200)
        cb_hist_add(&m->total, r->t_end - r->t_arrive);
    m->degraded_answers += r->degraded > 0;
    m->zeros_answers += r->zeros > 0;
    m->extra_answers += r->extra > 0;
    log_request(s, r, status);
}

/* ---- /status ------------------------------------------------------------ */

static void put_ledger(const struct cb_server *s, struct cb_buf *b)
{
    cb_buf_str(b, "\"ledger\":[");
    for (int i = 0; i < CB_L_COUNT; i++)
        cb_buf_fmt(b, "%s[\"%s\",%llu]", i > 0 ? "," : "", cb_ledger_name(i),
                   (unsigned long long)s->ledger.bytes[i]);
    cb_buf_fmt(b, "],\"total\":%llu,\"budget\":%llu,", (unsigned long long)s->ledger.total,
               (unsigned long long)s->ledger.budget);
}

/* One string a layer, one character a cell of 1 or more experts: 0 to 9 in parts
 * of the busiest. Under the lock. */
static void put_heat(const struct cb_server *s, struct cb_buf *b)
{
    uint32_t L = s->info.n_moe_layer, E = s->info.n_expert;
    uint32_t cells = L > 0 && E > HEAT_CHARS / L ? HEAT_CHARS / L : E;
    uint64_t most = 1;
    for (uint64_t i = 0; i < (uint64_t)L * E; i++)
        most = s->heat[i] > most ? s->heat[i] : most;
    cb_buf_str(b, "\"heat\":[");
    for (uint32_t l = 0; l < L; l++) {
        cb_buf_str(b, l > 0 ? ",\"" : "\"");
        for (uint32_t c = 0; c < cells; c++) {
            uint64_t best = 0;
            for (uint64_t x = (uint64_t)c * E / cells; x < (c + UINT64_C(1)) * E / cells; x++)
                best = s->heat[(uint64_t)l * E + x] > best ? s->heat[(uint64_t)l * E + x] : best;
            char digit = (char)('0' + (best * 9 + most - 1) / most);
            cb_buf_add(b, &digit, 1);
        }
        cb_buf_str(b, "\"");
    }
    cb_buf_fmt(b, "],\"heat_experts\":%u,", E);
}

static void put_recent(const struct cb_server *s, struct cb_buf *b, uint64_t now)
{
    const struct cb_metrics *m = &s->m;
    uint32_t n = m->n_recent < CB_RECENT ? m->n_recent : CB_RECENT;
    cb_buf_str(b, "\"recent\":[");
    for (uint32_t i = 0; i < n; i++) {
        const struct cb_recent *x = &m->recent[(m->n_recent - 1 - i) % CB_RECENT];
        cb_buf_fmt(b,
                   "%s{\"id\":\"%016llx\",\"kind\":\"%s\",\"stream\":%s,\"status\":%d,\"finish\":"
                   "\"%s\",\"prompt_tokens\":%u,\"completion_tokens\":%u,\"first_token_ms\":%.3f,"
                   "\"total_ms\":%.3f,\"ago_s\":%.1f}",
                   i > 0 ? "," : "", (unsigned long long)x->number, x->chat ? "chat" : "completion",
                   x->stream ? "true" : "false", x->status, x->finish, x->n_prompt, x->n_tok,
                   (double)x->first_ns / 1e6, (double)x->total_ns / 1e6, seconds(now - x->t_end));
    }
    cb_buf_str(b, "],");
}

static void put_machine(struct cb_buf *b)
{
    struct cb_machine m;
    cb_machine_read(&m);
    cb_buf_str(b, "\"temperature\":[");
    for (uint32_t i = 0; i < m.n_zone; i++) {
        cb_buf_fmt(b, "%s[", i > 0 ? "," : "");
        cb_buf_quoted(b, m.zone[i]);
        cb_buf_fmt(b, ",%.1f]", (double)m.milli_c[i] / 1000.0);
    }
    cb_buf_fmt(b, "],\"rss_anon\":%llu", (unsigned long long)m.rss_anon);
}

void cb_status_json(struct cb_server *s, struct cb_buf *b)
{
    struct cb_load l;
    uint64_t now = cb_os_now_ns();
    cb_queue_load(s, &l);
    pthread_mutex_lock(&s->lock);
    const struct cb_counters *c = &s->counters;
    cb_buf_str(b, "{\"model\":");
    cb_buf_quoted(b, s->info.name);
    cb_buf_fmt(b, ",\"arch\":");
    cb_buf_quoted(b, s->info.arch);
    cb_buf_fmt(b,
               ",\"version\":\"" CB_VERSION "\",\"isa\":\"%s\",\"threads\":%u,\"ctx\":%u,"
               "\"golden\":\"%s\",\"uptime_s\":%.1f,\"sequences\":%u,\"active\":%u,\"queued\":%u,"
               "\"capacity\":%u,\"prefill\":[%u,%u],\"tokens_per_s\":%.3f,\"tokens_prompt\":%llu,"
               "\"tokens_answer\":%llu,",
               s->info.isa, s->info.threads, s->info.ctx, s->info.golden, seconds(now - s->t_open),
               s->opt.sequences, l.active, l.queued, s->opt.sequences + s->opt.queue, l.prompt_done,
               l.prompt_total, s->speed,
               (unsigned long long)s->m.tokens_prompt, (unsigned long long)s->m.tokens_answer);
    put_ledger(s, b);
    cb_buf_fmt(b, "\"slots\":%u,\"records\":%u,\"hits\":%llu,\"misses\":%llu,\"bytes_read\":%llu,"
                  "\"degraded\":%llu,\"zeros\":%llu,\"extra\":%llu,\"unhealthy\":%llu,\"swaps\":%llu,",
               s->ledger.slots, s->ledger.records, (unsigned long long)c->hits,
               (unsigned long long)c->misses, (unsigned long long)c->bytes_read,
               (unsigned long long)c->degraded, (unsigned long long)c->zeros,
               (unsigned long long)c->extra, (unsigned long long)c->unhealthy,
               (unsigned long long)c->swaps);
    put_heat(s, b);
    pthread_mutex_unlock(&s->lock);
    put_recent(s, b, now);
    put_machine(b);
    cb_buf_str(b, "}\n");
}
#else
typedef int cb_serve_status_is_posix;
#endif

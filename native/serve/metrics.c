/* metrics.c — /metrics, in Prometheus' text format 0.0.4. */
#if !defined(_WIN32)
#include <string.h>

#include "core/os.h"
#include "serve/machine.h"
#include "serve/server.h"

static const double bounds[CB_HIST] = {0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
                                       1,     2.5,  5,     10,   30,  60,   300};

void cb_hist_add(struct cb_hist *h, uint64_t ns)
{
    uint32_t i = 0;
    while (i < CB_HIST && (double)ns / 1e9 > bounds[i])
        i++;
    h->n[i]++;
    h->count++;
    h->sum_ns += ns;
}

static void head(struct cb_buf *b, const char *name, const char *type, const char *help)
{
    cb_buf_fmt(b, "# HELP colibri_%s %s\n# TYPE colibri_%s %s\n", name, help, name, type);
}

static void count(struct cb_buf *b, const char *name, const char *help, uint64_t v)
{
    head(b, name, "counter", help);
    cb_buf_fmt(b, "colibri_%s %llu\n", name, (unsigned long long)v);
}

static void gauge(struct cb_buf *b, const char *name, const char *help, double v)
{
    head(b, name, "gauge", help);
    cb_buf_fmt(b, "colibri_%s %.15g\n", name, v);
}

static void hist(struct cb_buf *b, const char *name, const char *help, const struct cb_hist *h)
{
    uint64_t sum = 0;
    head(b, name, "histogram", help);
    for (uint32_t i = 0; i < CB_HIST; i++) {
        sum += h->n[i];
        cb_buf_fmt(b, "colibri_%s_bucket{le=\"%g\"} %llu\n", name, bounds[i], (unsigned long long)sum);
    }
    cb_buf_fmt(b, "colibri_%s_bucket{le=\"+Inf\"} %llu\ncolibri_%s_sum %.9f\ncolibri_%s_count %llu\n",
               name, (unsigned long long)h->count, name, (double)h->sum_ns / 1e9, name,
               (unsigned long long)h->count);
}

static void answers(const struct cb_server *s, struct cb_buf *b)
{
    static const char *const path[CB_EP_COUNT] = {"/v1/completions", "/v1/chat/completions",
                                                  "/v1/models", "/health", "/metrics", "/status", "/",
                                                  "other"};
    head(b, "http_answers_total", "counter", "answers by path and class of status");
    for (int i = 0; i < CB_EP_COUNT; i++)
        for (int k = 2; k < 6; k++)
            if (s->m.answers[i][k] > 0)
                cb_buf_fmt(b, "colibri_http_answers_total{path=\"%s\",status=\"%dxx\"} %llu\n", path[i],
                           k, (unsigned long long)s->m.answers[i][k]);
}

static void requests(const struct cb_server *s, struct cb_buf *b)
{
    const struct cb_metrics *m = &s->m;
    count(b, "tokens_prompt_total", "prompt tokens taken", m->tokens_prompt);
    count(b, "tokens_answer_total", "tokens generated", m->tokens_answer);
    gauge(b, "tokens_per_second", "tokens generated a second, lately", s->speed);
    hist(b, "queue_seconds", "arrival to the first computation", &m->queue);
    hist(b, "first_token_seconds", "arrival to the first token", &m->first);
    hist(b, "request_seconds", "arrival to the last token of whole answers", &m->total);
    hist(b, "step_seconds", "one step of decoding, all sequences together", &m->token);
    count(b, "cancelled_total", "requests whose client left", m->cancelled);
    count(b, "queue_full_total", "requests refused with 429", m->queue_full);
    count(b, "deadline_exceeded_total", "requests over their deadline", m->expired);
    count(b, "unauthorised_total", "requests without a right token", m->unauthorised);
    count(b, "host_refused_total", "requests under a foreign Host or Origin", m->bad_host);
    count(b, "malformed_total", "requests that are not HTTP as served here", m->malformed);
    count(b, "timeouts_total", "connections that were too slow", m->timeouts);
    count(b, "connections_total", "connections taken", m->accepted);
    count(b, "connections_refused_total", "connections turned away: none was free", m->turned_away);
}

/* Under the lock. */
static void engine(const struct cb_server *s, struct cb_buf *b)
{
    const struct cb_counters *c = &s->counters;
    const struct cb_metrics *m = &s->m;
    count(b, "degraded_answers_total", "answers without an unhealthy expert", m->degraded_answers);
    count(b, "zeros_answers_total", "answers with experts left out", m->zeros_answers);
    count(b, "extra_answers_total", "answers with additional experts", m->extra_answers);
    count(b, "failed_expert_answers_total", "requests failed by an expert", m->failed_experts);
    count(b, "degraded_total", "routings that passed over an unhealthy expert", c->degraded);
    count(b, "zeros_total", "expert outputs left out", c->zeros);
    count(b, "extra_total", "routings with one more expert", c->extra);
    gauge(b, "unhealthy_experts", "experts that cannot be used", (double)c->unhealthy);
    count(b, "expert_hits_total", "experts found in memory", c->hits);
    count(b, "expert_misses_total", "experts that had to be read", c->misses);
    count(b, "expert_evictions_total", "experts that gave up their slot", c->evictions);
    count(b, "expert_bytes_read_total", "bytes read for experts", c->bytes_read);
    count(b, "expert_retries_total", "experts read a second time", c->retries);
    head(b, "expert_wait_seconds_total", "counter", "time that computing waited for experts");
    cb_buf_fmt(b, "colibri_expert_wait_seconds_total %.9f\n", (double)c->ns_wait / 1e9);
    count(b, "routes_total", "routings", c->routes);
    count(b, "routes_recomputed_total", "routings computed again in full", c->recomputed);
    count(b, "stuck_tokens_total", "tokens over their deadline", c->stuck);
    count(b, "swaps_total", "releases taken over", c->swaps);
    count(b, "swaps_refused_total", "releases refused", m->swaps_refused);
    head(b, "memory_bytes", "gauge", "the memory ledger");
    for (int i = 0; i < CB_L_COUNT; i++)
        cb_buf_fmt(b, "colibri_memory_bytes{line=\"%s\"} %llu\n", cb_ledger_name(i),
                   (unsigned long long)s->ledger.bytes[i]);
    gauge(b, "memory_planned_bytes", "sum of the ledger", (double)s->ledger.total);
    gauge(b, "memory_budget_bytes", "what it may take", (double)s->ledger.budget);
    gauge(b, "expert_slots", "slots for experts", (double)s->ledger.slots);
}

/* All zero without a link. */
static void offload(const struct cb_counters *c, struct cb_buf *b)
{
    count(b, "offload_experts_total", "experts computed at the other end", c->offload_experts);
    count(b, "offload_local_total", "sent away, computed here after all", c->offload_local);
    count(b, "offload_bytes_out_total", "bytes sent over the link", c->offload_bytes_out);
    count(b, "offload_bytes_in_total", "bytes received over it", c->offload_bytes_in);
    count(b, "offload_connects_total", "greetings that succeeded", c->offload_connects);
    head(b, "offload_trouble_total", "counter", "what went wrong on the link; never the answer");
    const struct {
        const char *kind;
        uint64_t n;
    } trouble[] = {
        {"late", c->offload_late}, {"dropped", c->offload_dropped}, {"cut", c->offload_cut},
        {"crc", c->offload_crc}, {"garbage", c->offload_garbage}, {"gaps", c->offload_gaps},
        {"refused", c->offload_refused}, {"errors", c->offload_errors}, {"wrong", c->offload_wrong},
    };
    for (size_t i = 0; i < sizeof trouble / sizeof trouble[0]; i++)
        cb_buf_fmt(b, "colibri_offload_trouble_total{kind=\"%s\"} %llu\n", trouble[i].kind,
                   (unsigned long long)trouble[i].n);
    head(b, "offload_wait_seconds_total", "counter", "time that layers waited for the link");
    cb_buf_fmt(b, "colibri_offload_wait_seconds_total %.9f\n", (double)c->ns_offload_wait / 1e9);
}

static void machine(struct cb_buf *b)
{
    struct cb_machine m;
    cb_machine_read(&m);
    gauge(b, "resident_anonymous_bytes", "RssAnon of the process", (double)m.rss_anon);
    head(b, "temperature_celsius", "gauge", "thermal zones");
    for (uint32_t i = 0; i < m.n_zone; i++) {
        cb_buf_fmt(b, "colibri_temperature_celsius{zone=\"%u\",type=", i);
        cb_buf_quoted(b, m.zone[i]);
        cb_buf_fmt(b, "} %.3f\n", (double)m.milli_c[i] / 1000.0);
    }
}

void cb_status_metrics(struct cb_server *s, struct cb_buf *b)
{
    struct cb_load l;
    cb_queue_load(s, &l);
    gauge(b, "up_seconds", "since the start", (double)(cb_os_now_ns() - s->t_open) / 1e9);
    gauge(b, "requests_active", "requests being computed", l.active);
    gauge(b, "requests_queued", "requests that wait", l.queued);
    gauge(b, "requests_draining", "answers computed and not yet read", l.draining);
    gauge(b, "prefill_tokens_done", "of the prompts under way", l.prompt_done);
    gauge(b, "prefill_tokens", "of the prompts under way", l.prompt_total);
    gauge(b, "failed_checks", "self-checks failed in a row", s->health_failed);
    answers(s, b);
    pthread_mutex_lock(&s->lock);
    requests(s, b);
    engine(s, b);
    offload(&s->counters, b);
    pthread_mutex_unlock(&s->lock);
    machine(b);
}
#else
typedef int cb_serve_metrics_is_posix;
#endif

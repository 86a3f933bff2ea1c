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

/* Figures of one kind, in a table. */
struct count {
    const char *name, *help;
    uint64_t n;
};
struct gauge {
    const char *name, *help;
    double v;
};
#define ROWS(table) (table), sizeof(table) / sizeof((table)[0])

static void counts(struct cb_buf *b, const struct count *row, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        head(b, row[i].name, "counter", row[i].help);
        cb_buf_fmt(b, "colibri_%s %llu\n", row[i].name, (unsigned long long)row[i].n);
    }
}

static void gauges(struct cb_buf *b, const struct gauge *row, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        head(b, row[i].name, "gauge", row[i].help);
        cb_buf_fmt(b, "colibri_%s %.15g\n", row[i].name, row[i].v);
    }
}

static void seconds(struct cb_buf *b, const char *name, const char *help, uint64_t ns)
{
    head(b, name, "counter", help);
    cb_buf_fmt(b, "colibri_%s %.9f\n", name, (double)ns / 1e9);
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
    const struct count all[] = {
        {"tokens_prompt_total", "prompt tokens taken", m->tokens_prompt},
        {"tokens_answer_total", "tokens generated", m->tokens_answer},
        {"cancelled_total", "requests whose client left", m->cancelled},
        {"queue_full_total", "requests refused with 429", m->queue_full},
        {"deadline_exceeded_total", "requests over their deadline", m->expired},
        {"unauthorised_total", "requests without a right token", m->unauthorised},
        {"host_refused_total", "requests under a foreign Host or Origin", m->bad_host},
        {"malformed_total", "requests that are not HTTP as served here", m->malformed},
        {"timeouts_total", "connections that were too slow", m->timeouts},
        {"connections_total", "connections taken", m->accepted},
        {"connections_refused_total", "connections turned away: none was free", m->turned_away},
        {"degraded_answers_total", "answers without an unhealthy expert", m->degraded_answers},
        {"zeros_answers_total", "answers with experts left out", m->zeros_answers},
        {"extra_answers_total", "answers with additional experts", m->extra_answers},
        {"failed_expert_answers_total", "requests failed by an expert", m->failed_experts},
        {"swaps_refused_total", "releases refused", m->swaps_refused},
    };
    counts(b, ROWS(all));
    hist(b, "queue_seconds", "arrival to the first computation", &m->queue);
    hist(b, "first_token_seconds", "arrival to the first token", &m->first);
    hist(b, "request_seconds", "arrival to the last token of whole answers", &m->total);
    hist(b, "step_seconds", "one step of decoding, all sequences together", &m->token);
}

/* Under the lock. */
static void engine(const struct cb_counters *c, struct cb_buf *b)
{
    const struct count all[] = {
        {"degraded_total", "routings that passed over an unhealthy expert", c->degraded},
        {"zeros_total", "expert outputs left out", c->zeros},
        {"extra_total", "routings with one more expert", c->extra},
        {"expert_hits_total", "experts found in memory", c->hits},
        {"expert_misses_total", "experts that had to be read", c->misses},
        {"expert_evictions_total", "experts that gave up their slot", c->evictions},
        {"expert_bytes_read_total", "bytes read for experts", c->bytes_read},
        {"expert_retries_total", "experts read a second time", c->retries},
        {"routes_total", "routings", c->routes},
        {"routes_recomputed_total", "routings computed again in full", c->recomputed},
        {"stuck_tokens_total", "tokens over their deadline", c->stuck},
        {"swaps_total", "releases taken over", c->swaps},
    };
    counts(b, ROWS(all));
    seconds(b, "expert_wait_seconds_total", "time that computing waited for experts", c->ns_wait);
}

static void memory(const struct cb_server *s, struct cb_buf *b)
{
    head(b, "memory_bytes", "gauge", "the memory ledger");
    for (int i = 0; i < CB_L_COUNT; i++)
        cb_buf_fmt(b, "colibri_memory_bytes{line=\"%s\"} %llu\n", cb_ledger_name(i),
                   (unsigned long long)s->ledger.bytes[i]);
}

/* All zero without a link. */
static void offload(const struct cb_counters *c, struct cb_buf *b)
{
    const struct count all[] = {
        {"offload_experts_total", "experts computed at the other end", c->offload_experts},
        {"offload_local_total", "sent away, computed here after all", c->offload_local},
        {"offload_bytes_out_total", "bytes sent over the link", c->offload_bytes_out},
        {"offload_bytes_in_total", "bytes received over it", c->offload_bytes_in},
        {"offload_connects_total", "greetings that succeeded", c->offload_connects},
    };
    const struct {
        const char *kind;
        uint64_t n;
    } trouble[] = {
        {"late", c->offload_late}, {"dropped", c->offload_dropped}, {"cut", c->offload_cut},
        {"crc", c->offload_crc}, {"garbage", c->offload_garbage}, {"gaps", c->offload_gaps},
        {"refused", c->offload_refused}, {"errors", c->offload_errors}, {"wrong", c->offload_wrong},
    };
    counts(b, ROWS(all));
    head(b, "offload_trouble_total", "counter", "what went wrong on the link; never the answer");
    for (size_t i = 0; i < sizeof trouble / sizeof trouble[0]; i++)
        cb_buf_fmt(b, "colibri_offload_trouble_total{kind=\"%s\"} %llu\n", trouble[i].kind,
                   (unsigned long long)trouble[i].n);
    seconds(b, "offload_wait_seconds_total", "time that layers waited for the link",
            c->ns_offload_wait);
}

static void machine(struct cb_buf *b)
{
    struct cb_machine m;
    cb_machine_read(&m);
    const struct gauge rss = {"resident_anonymous_bytes", "RssAnon of the process", (double)m.rss_anon};
    gauges(b, &rss, 1);
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
    answers(s, b);
    pthread_mutex_lock(&s->lock);
    const struct gauge all[] = {
        {"up_seconds", "since the start", (double)(cb_os_now_ns() - s->t_open) / 1e9},
        {"requests_active", "requests being computed", l.active},
        {"requests_queued", "requests that wait", l.queued},
        {"requests_draining", "answers computed and not yet read", l.draining},
        {"prefill_tokens_done", "of the prompts under way", l.prompt_done},
        {"prefill_tokens", "of the prompts under way", l.prompt_total},
        {"failed_checks", "self-checks failed in a row", s->health_failed},
        {"tokens_per_second", "tokens generated a second, lately", s->speed},
        {"unhealthy_experts", "experts that cannot be used", (double)s->counters.unhealthy},
        {"memory_planned_bytes", "sum of the ledger", (double)s->ledger.total},
        {"memory_budget_bytes", "what it may take", (double)s->ledger.budget},
        {"expert_slots", "slots for experts", (double)s->ledger.slots},
    };
    gauges(b, ROWS(all));
    requests(s, b);
    engine(&s->counters, b);
    memory(s, b);
    offload(&s->counters, b);
    pthread_mutex_unlock(&s->lock);
    machine(b);
}
#else
typedef int cb_serve_metrics_is_posix;
#endif

/* probe_report.c — the probe's figures as JSON or as a table. Percentiles are
 * nearest-rank (stats.h); a mean is never given. */
#include <inttypes.h>

#include "probe.h"
#include "stats.h"

#define PROBE_SCHEMA 1

static void json_stat(struct json *j, const char *key, uint64_t *v, uint64_t n)
{
    if (n == 0) {
        json_null(j, key);
        return;
    }
    stats_sort(v, (size_t)n);
    json_begin(j, key, '{');
    json_u64(j, "n", n);
    json_u64(j, "min", v[0]);
    json_u64(j, "p50", stats_rank(v, (size_t)n, 50));
    json_u64(j, "p90", stats_rank(v, (size_t)n, 90));
    json_u64(j, "p99", stats_rank(v, (size_t)n, 99));
    json_u64(j, "max", v[n - 1]);
    json_end(j, '}');
}

/* Tokens a second of runs that took v[run]: the median run, the slowest, the fastest. */
static void json_rate(struct json *j, const char *key, uint64_t *v, uint32_t runs, uint32_t tokens)
{
    stats_sort(v, runs);
    json_begin(j, key, '{');
    json_float(j, "min", cli_per_second(tokens, v[runs - 1]));
    json_float(j, "p50", cli_per_second(tokens, stats_rank(v, runs, 50)));
    json_float(j, "max", cli_per_second(tokens, v[0]));
    json_end(j, '}');
}

static void json_maybe(struct json *j, const char *key, uint64_t v)
{
    if (v == UINT64_MAX)
        json_null(j, key);
    else
        json_u64(j, key, v);
}

static void json_memory(struct json *j, const char *key, const struct sys_memory *m)
{
    json_begin(j, key, '{');
    json_maybe(j, "rss_anon", m->rss_anon);
    json_maybe(j, "rss_file", m->rss_file);
    json_maybe(j, "peak", m->peak);
    json_end(j, '}');
}

static void json_machine(struct json *j, const char *key, const struct sys_machine *m)
{
    json_begin(j, key, '{');
    json_begin(j, "cpu_khz", '[');
    for (uint32_t i = 0; i < m->n_cpu; i++)
        json_maybe(j, NULL, m->khz[i] ? m->khz[i] : UINT64_MAX);
    json_end(j, ']');
    json_maybe(j, "cpu_khz_max", m->khz_max ? m->khz_max : UINT64_MAX);
    json_word(j, "governor", m->governor[0] ? m->governor : NULL);
    json_begin(j, "temperature_mc", '[');
    for (uint32_t i = 0; i < m->n_zone; i++) {
        json_begin(j, NULL, '{');
        json_word(j, "zone", m->zone[i]);
        json_i64(j, "value", m->milli_c[i]);
        json_end(j, '}');
    }
    json_end(j, ']');
    json_maybe(j, "throttled_bits", m->has_throttled ? m->throttled : UINT64_MAX);
    json_maybe(j, "throttle_count", m->has_throttle_count ? m->throttle_count : UINT64_MAX);
    if (m->load1 < 0)
        json_null(j, "load1");
    else
        json_float(j, "load1", m->load1);
    json_end(j, '}');
}

/* In the order they were taken; so before the sorting. */
static void json_samples(struct json *j, const struct probe *p)
{
    json_begin(j, "samples", '{');
    json_u64s(j, "route_ns", p->route, (size_t)p->n_route);
    json_u64s(j, "token_ns", p->token, (size_t)p->n_token);
    json_u64s(j, "first_token_ns", p->first, p->runs);
    json_u64s(j, "prefill_ns", p->prefill, p->runs);
    json_u64s(j, "decode_ns", p->decode, p->runs);
    json_end(j, '}');
}

static uint64_t sum(const uint64_t *v, uint32_t n)
{
    uint64_t s = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (v[i] == UINT64_MAX)
            return UINT64_MAX;
        s += v[i];
    }
    return s;
}

static void json_faults(struct json *j, const char *key, const uint64_t *v, const struct probe *p)
{
    uint64_t total = sum(v, p->runs);
    if (total == UINT64_MAX)
        json_null(j, key);
    else
        json_float(j, key, (double)total / (double)p->n_token);
}

void probe_json(struct probe *p)
{
    struct json j = {stdout, 0};
    struct cb_ledger ledger;
    cb_engine_ledger(p->e, &ledger);
    json_begin(&j, NULL, '{');
    json_u64(&j, "schema", PROBE_SCHEMA);
    cli_json_model(&j, &p->info);
    json_word(&j, "kv", cli_kv_name(p->model.opt.kv_type));
    json_u64(&j, "runs", p->runs);
    json_u64(&j, "tokens", p->tokens);
    json_u64(&j, "prompt_tokens", p->prompt);
    json_begin(&j, "golden", '{');
    json_bool(&j, "ok", 1);
    json_word(&j, "sha256", p->golden);
    json_end(&j, '}');
    json_begin(&j, "cold", '{');
    json_u64(&j, "load_ns", p->ns_load);
    json_u64(&j, "golden_ns", p->ns_golden);
    json_u64(&j, "first_token_ns", p->ns_cold);
    json_word(&j, "page_cache", "not dropped");
    json_end(&j, '}');
    if (p->with_samples)
        json_samples(&j, p);
    json_stat(&j, "first_token_ns", p->first, p->runs);
    json_stat(&j, "token_ns", p->token, p->n_token);
    json_stat(&j, "route_ns", p->route, p->n_route);
    json_rate(&j, "prefill_tok_s", p->prefill, p->runs, p->prompt);
    json_rate(&j, "decode_tok_s", p->decode, p->runs, p->tokens);
    json_faults(&j, "minor_faults_per_token", p->minor, p);
    json_faults(&j, "major_faults_per_token", p->major, p);
    cli_json_lossy(&j, &p->counters);
    cli_json_cache(&j, &p->model, &ledger, &p->counters);
    cli_json_offload(&j, p->e, &p->counters);
    json_begin(&j, "memory", '{');
    json_memory(&j, "before", &p->memory_before);
    json_memory(&j, "after", &p->memory_after);
    cli_json_ledger(&j, "ledger", &ledger);
    json_end(&j, '}');
    json_begin(&j, "machine", '{');
    json_machine(&j, "before", &p->machine_before);
    json_machine(&j, "after", &p->machine_after);
    json_end(&j, '}');
    json_end(&j, '}');
    putchar('\n');
}

static void row(const char *name, uint64_t *v, uint64_t n, double unit_ns, const char *unit)
{
    if (n == 0)
        return;
    stats_sort(v, (size_t)n);
    printf("%-18s %10.2f %10.2f %10.2f %10.2f  %-3s %8" PRIu64 "\n", name,
           (double)stats_rank(v, (size_t)n, 50) / unit_ns, (double)stats_rank(v, (size_t)n, 90) / unit_ns,
           (double)stats_rank(v, (size_t)n, 99) / unit_ns, (double)v[n - 1] / unit_ns, unit, n);
}

void probe_table(struct probe *p)
{
    char anon[32], file[32], peak[32];
    cli_print_start(stdout, p->e, &p->model);
    printf("golden ok %.12s…\n\n%-18s %10s %10s %10s %10s  %-3s %8s\n", p->golden, "", "p50", "p90", "p99",
           "max", "", "samples");
    row("routing, a layer", p->route, p->n_route, 1e3, "us");
    row("token", p->token, p->n_token, 1e6, "ms");
    row("first token, warm", p->first, p->runs, 1e6, "ms");
    printf("first token, cold  %10.2f ms (load %.2f, golden %.2f; page cache not dropped)\n",
           (double)p->ns_cold / 1e6, (double)p->ns_load / 1e6, (double)p->ns_golden / 1e6);
    stats_sort(p->prefill, p->runs);
    stats_sort(p->decode, p->runs);
    printf("prefill %.1f tok/s, decode %.1f tok/s (median run of %u)\n",
           cli_per_second(p->prompt, stats_rank(p->prefill, p->runs, 50)),
           cli_per_second(p->tokens, stats_rank(p->decode, p->runs, 50)), p->runs);
    cli_print_cache(stdout, &p->model, &p->counters);
    cli_print_offload(stdout, p->e, &p->counters);
    cli_print_lossy(stdout, &p->model, &p->counters);
    if (p->memory_after.rss_anon != UINT64_MAX)
        printf("memory: anonymous %s, file %s, peak %s; grew %" PRId64 " bytes while measuring\n",
               cli_size(p->memory_after.rss_anon, anon), cli_size(p->memory_after.rss_file, file),
               cli_size(p->memory_after.peak, peak),
               (int64_t)(p->memory_after.rss_anon - p->memory_before.rss_anon));
    if (sum(p->minor, p->runs) != UINT64_MAX)
        printf("page faults a token: minor %.2f, major %.2f\n",
               (double)sum(p->minor, p->runs) / (double)p->n_token,
               (double)sum(p->major, p->runs) / (double)p->n_token);
}

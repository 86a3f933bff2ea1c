/* run_report.c — what `colibri run` says beside the text. */
#include <inttypes.h>

#include "run.h"
#include "stats.h"

#define ROUTE_SAMPLES 65536u /* (layer, token) pairs kept for the closing line */

/* Fixed, so that nothing is allocated while tokens run. */
static uint64_t route_ns[ROUTE_SAMPLES];
static size_t n_route;

void run_forget_routes(void)
{
    n_route = 0;
}

void run_collect_routes(const struct run *r)
{
    const uint64_t *ns = cb_route_ns(r->e);
    for (uint32_t l = 0; l < r->info.n_moe_layer && n_route < ROUTE_SAMPLES; l++)
        route_ns[n_route++] = ns[l];
}

void run_trace_token(const struct run *r, int32_t id)
{
    size_t len = 0;
    const char *bytes = cb_token_bytes(r->e, id, 1, &len);
    const int32_t *expert = cb_last_experts(r->e);
    const float *weight = cb_last_weights(r->e);
    const uint64_t *ns = cb_route_ns(r->e);
    struct json j = {stderr, 0};
    fprintf(stderr, "token %u: id %d ", r->n_shown, id);
    json_text(&j, NULL, bytes, len);
    fputc('\n', stderr);
    for (uint32_t l = 0; l < r->info.n_moe_layer; l++) {
        fprintf(stderr, "  MoE layer %u: experts activated", l);
        for (uint32_t k = 0; k < r->info.n_expert_used; k++) {
            size_t at = (size_t)l * r->info.n_expert_used + k;
            if (expert[at] < 0) /* on_miss = zeros */
                fprintf(stderr, " left out (%.3f)", (double)weight[at]);
            else
                fprintf(stderr, " %d (%.3f)", expert[at], (double)weight[at]);
        }
        fprintf(stderr, ", routed in %.1f us\n", (double)ns[l] / 1e3);
    }
}

static void print_routes(FILE *f)
{
    stats_sort(route_ns, n_route);
    fprintf(f, "routing latency: p50 %.1f us, p99 %.1f us, max %.1f us a layer (%zu samples)\n",
            (double)stats_rank(route_ns, n_route, 50) / 1e3,
            (double)stats_rank(route_ns, n_route, 99) / 1e3,
            (double)stats_rank(route_ns, n_route, 100) / 1e3, n_route);
}

void run_print_start(const struct run *r)
{
    cli_print_start(stderr, r->e, &r->model);
    fprintf(stderr, "golden ok %.12s… (%.2f s)\n", r->golden, (double)r->ns_golden / 1e9);
    if (r->info.n_moe_layer) {
        run_collect_routes(r);
        print_routes(stderr);
        n_route = 0;
    }
}

void run_print_end(const struct run *r, const struct cb_gen_result *g, const struct cb_counters *c)
{
    if (n_route)
        print_routes(stderr);
    cli_print_cache(stderr, &r->model, c);
    cli_print_offload(stderr, r->e, c);
    fprintf(stderr,
            "prefill %u tokens %.1f tok/s, decode %" PRIu64 " tokens %.1f tok/s, first token %.0f ms, "
            "finish: %s\n",
            g->n_prompt, cli_per_second(c->tokens_prefill, c->ns_prefill), c->tokens_decode,
            cli_per_second(c->tokens_decode, c->ns_decode), (double)g->ns_first / 1e6,
            cli_finish_name(g->finish));
    cli_print_lossy(stderr, &r->model, c);
}

void run_print_json(const struct run *r, const struct cb_gen_result *g, const struct cb_counters *c)
{
    struct json j = {stdout, 0};
    struct cb_ledger ledger;
    cb_engine_ledger(r->e, &ledger);
    json_begin(&j, NULL, '{');
    json_text(&j, "text", r->text, r->n_text);
    json_begin(&j, "tokens", '{');
    json_u64(&j, "prompt", g->n_prompt);
    json_u64(&j, "generated", g->n_gen);
    json_end(&j, '}');
    json_word(&j, "finish", cli_finish_name(g->finish));
    json_begin(&j, "timings", '{');
    json_u64(&j, "load_ns", r->ns_load);
    json_u64(&j, "golden_ns", r->ns_golden);
    json_u64(&j, "first_token_ns", g->ns_first);
    json_u64(&j, "total_ns", g->ns_total);
    json_float(&j, "prefill_tok_s", cli_per_second(c->tokens_prefill, c->ns_prefill));
    json_float(&j, "decode_tok_s", cli_per_second(c->tokens_decode, c->ns_decode));
    json_end(&j, '}');
    cli_json_lossy(&j, c);
    cli_json_cache(&j, &r->model, &ledger, c);
    cli_json_offload(&j, r->e, c);
    cli_json_ledger(&j, "ledger", &ledger);
    cli_json_model(&j, &r->info);
    json_begin(&j, "golden", '{');
    json_bool(&j, "ok", 1);
    json_word(&j, "sha256", r->golden);
    json_end(&j, '}');
    json_end(&j, '}');
    putchar('\n');
}

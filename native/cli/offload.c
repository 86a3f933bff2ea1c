/* offload.c — options of the offload link and what is said about it. */
#include <inttypes.h>
#include <string.h>

#include "cli.h"

void cli_offload_args(struct cli_args *a, struct cli_model *m)
{
    m->offload_share = UINT32_MAX;
    const struct arg rows[] = {
        {.group = "Offload", .name = "--offload", .kind = ARG_TEXT, .out = &m->opt.offload,
         .meta = "LINK", .help = "experts may be computed at the other end of /dev/…, unix:PATH or "
                                 "tcp:ADDRESS:PORT"},
        {.name = "--offload-deadline", .kind = ARG_U32, .out = &m->opt.offload_deadline_ms, .lo = 1,
         .hi = 60000, .meta = "MS",
         .help = "a layer waits this long, then computes here (default: from measurements)"},
        {.name = "--offload-share", .kind = ARG_U32, .out = &m->offload_share, .lo = 0, .hi = 100,
         .meta = "PERCENT", .help = "for tests: this part of the experts goes, whatever it costs"},
    };
    cli_args_add(a, rows, sizeof rows / sizeof rows[0]);
}

int cli_offload_check(struct cli_model *m, struct cb_err *err)
{
    if (m->opt.offload == NULL && (m->offload_share != UINT32_MAX || m->opt.offload_deadline_ms))
        return cb_fail(err, CB_EINVAL, "--offload-share and --offload-deadline go with --offload");
    m->opt.offload_force = m->offload_share != UINT32_MAX ? m->offload_share + 1 : 0;
    return CB_OK;
}

void cli_print_offload(FILE *f, const struct cb_engine *e, const struct cb_counters *c)
{
    struct cb_offload_info i;
    cb_engine_offload(e, &i);
    if (strcmp(i.state, "off") == 0)
        return;
    fprintf(f, "offload: %s, %" PRIu64 " experts there, %" PRIu64 " sent but computed here, waited "
               "%.1f ms", i.state, c->offload_experts, c->offload_local,
            (double)c->ns_offload_wait / 1e6);
    if (i.bytes_s)
        fprintf(f, "; latency %.3f ms, %.1f MB/s", (double)i.latency_ns / 1e6,
                (double)i.bytes_s / 1e6);
    if (i.why[0])
        fprintf(f, "; last trouble: %s", i.why);
    fputc('\n', f);
}

void cli_json_offload(struct json *j, const struct cb_engine *e, const struct cb_counters *c)
{
    struct cb_offload_info i;
    cb_engine_offload(e, &i);
    if (strcmp(i.state, "off") == 0) {
        json_null(j, "offload");
        return;
    }
    json_begin(j, "offload", '{');
    json_word(j, "state", i.state);
    json_word(j, "why", i.why[0] ? i.why : NULL);
    json_word(j, "module", i.who[0] ? i.who : NULL);
    json_u64(j, "latency_ns", i.latency_ns);
    json_u64(j, "bytes_s", i.bytes_s);
    json_u64(j, "expert_here_ns", i.expert_here_ns);
    json_u64(j, "expert_there_ns", i.expert_there_ns);
    json_u64(j, "experts", c->offload_experts);
    json_u64(j, "bytes_out", c->offload_bytes_out);
    json_u64(j, "bytes_in", c->offload_bytes_in);
    json_u64(j, "wait_ns", c->ns_offload_wait);
    json_u64(j, "connects", c->offload_connects);
    json_u64(j, "local", c->offload_local);
    json_u64(j, "late", c->offload_late);
    json_u64(j, "dropped", c->offload_dropped);
    json_u64(j, "cut", c->offload_cut);
    json_u64(j, "crc", c->offload_crc);
    json_u64(j, "garbage", c->offload_garbage);
    json_u64(j, "gaps", c->offload_gaps);
    json_u64(j, "refused", c->offload_refused);
    json_u64(j, "errors", c->offload_errors);
    json_u64(j, "wrong", c->offload_wrong);
    json_end(j, '}');
}

/* cmd_probe.c — `colibri probe`: what this machine really does.
 *
 * Inside the timing windows:
 *   cold first token   from the start of main(): mapping and reading the model,
 *                      its checks, the golden, the prompt, the first choice. The
 *                      page cache is not dropped: files read before come from RAM
 *   warm first token   the prompt's cb_eval and the choice of the first token
 *   token              one decoding step: cb_eval of one token and the choice
 *   routing            the engine's own clock around router product and top-k,
 *                      one sample a (MoE layer, decoded token)
 * Outside: everything else. Token ids are the golden's fixed sequence, the choice
 * is greedy, end-of-text tokens do not end a run. Nothing is allocated and no
 * file is read between the first and the last sample. */
#include <string.h>

#include "core/os.h"
#include "probe.h"

static uint64_t *carve(uint64_t **at, uint64_t n)
{
    uint64_t *p = *at;
    *at += n;
    return p;
}

/* One mapped and touched block for all samples: no page fault of ours counts. */
static int take_room(struct probe *p, struct cb_err *err)
{
    uint64_t tokens = (uint64_t)p->runs * p->tokens;
    uint64_t routes = tokens * p->info.n_moe_layer;
    if (routes > PROBE_SAMPLES_MAX || tokens > PROBE_SAMPLES_MAX)
        return cb_fail(err, CB_EINVAL,
                       "%u runs of %u tokens over %u MoE layers are more than %u samples; lower "
                       "--runs or --tokens",
                       p->runs, p->tokens, p->info.n_moe_layer, PROBE_SAMPLES_MAX);
    uint64_t words = routes + tokens + 5 * (uint64_t)p->runs + p->prompt;
    p->block_bytes = words * sizeof(uint64_t);
    p->block = cb_os_map(p->block_bytes, 0, err);
    if (p->block == NULL)
        return err->code;
    uint64_t *at = p->block;
    p->route = carve(&at, routes);
    p->token = carve(&at, tokens);
    p->first = carve(&at, p->runs);
    p->prefill = carve(&at, p->runs);
    p->decode = carve(&at, p->runs);
    p->minor = carve(&at, p->runs);
    p->major = carve(&at, p->runs);
    p->ids = (int32_t *)(void *)at;
    for (uint32_t i = 0; i < p->prompt; i++)
        p->ids[i] = cli_fixed_token(i, p->info.n_vocab);
    return CB_OK;
}

static int choose(struct probe *p, int32_t *id, struct cb_err *err)
{
    struct cb_sampling greedy;
    cb_sampling_default(&greedy);
    return cb_sample(p->e, cb_logits(p->e), &greedy, 0, NULL, 0, id, err);
}

/* Prompt and first token; *ns_prefill gets the cb_eval alone. */
static int first_token(struct probe *p, int32_t *id, uint64_t *ns_prefill, struct cb_err *err)
{
    cb_reset(p->e);
    uint64_t start = cb_os_now_ns();
    int rc = cb_eval(p->e, p->ids, p->prompt, NULL, NULL, err);
    *ns_prefill = cb_os_now_ns() - start;
    return rc < 0 ? rc : choose(p, id, err);
}

static int one_run(struct probe *p, uint32_t run, struct cb_err *err)
{
    struct sys_faults before, after;
    int32_t id = 0;
    uint64_t start = cb_os_now_ns();
    int rc = first_token(p, &id, &p->prefill[run], err);
    p->first[run] = cb_os_now_ns() - start;
    if (rc < 0)
        return rc;
    sys_faults(&before);
    uint64_t begin = cb_os_now_ns(), last = begin;
    for (uint32_t t = 0; t < p->tokens; t++) {
        rc = cb_eval(p->e, &id, 1, NULL, NULL, err);
        if (rc == CB_OK)
            rc = choose(p, &id, err);
        if (rc < 0)
            return rc;
        uint64_t now = cb_os_now_ns();
        p->token[p->n_token++] = now - last;
        memcpy(p->route + p->n_route, cb_route_ns(p->e), p->info.n_moe_layer * sizeof *p->route);
        p->n_route += p->info.n_moe_layer;
        if (sys_interrupted())
            return cb_fail(err, CB_ECANCEL, "interrupted");
        last = cb_os_now_ns(); /* the copying is not the engine's time */
    }
    p->decode[run] = 0;
    for (uint32_t t = 0; t < p->tokens; t++)
        p->decode[run] += p->token[p->n_token - p->tokens + t];
    sys_faults(&after);
    int known = before.minor != UINT64_MAX;
    p->minor[run] = known ? after.minor - before.minor : UINT64_MAX;
    p->major[run] = known ? after.major - before.major : UINT64_MAX;
    return CB_OK;
}

static int measure(struct probe *p, struct cb_err *err)
{
    uint64_t start = cb_os_now_ns(), ns_prefill = 0;
    int32_t id = 0;
    struct cb_counters before;
    int rc = cb_engine_open(&p->model.opt, &p->e, err);
    p->ns_load = cb_os_now_ns() - start;
    if (rc < 0)
        return rc;
    cb_engine_info(p->e, &p->info);
    if ((uint64_t)p->prompt + p->tokens > p->info.ctx)
        return cb_fail(err, CB_ECONTEXT, "%u prompt tokens and %u more do not fit the context of %u",
                       p->prompt, p->tokens, p->info.ctx);
    rc = cli_golden(p->e, p->golden, &p->ns_golden, err);
    if (rc == CB_OK)
        rc = take_room(p, err);
    if (rc == CB_OK)
        rc = first_token(p, &id, &ns_prefill, err);
    p->ns_cold = cb_os_now_ns() - cli_start_ns;
    if (rc < 0)
        return rc;
    sys_catch_interrupt();
    sys_machine(&p->machine_before);
    sys_memory(&p->memory_before);
    cb_engine_counters(p->e, &before);
    for (uint32_t run = 0; rc == CB_OK && run < p->runs; run++)
        rc = one_run(p, run, err);
    cli_counters_since(p->e, &before, &p->counters);
    sys_memory(&p->memory_after);
    sys_machine(&p->machine_after);
    return rc;
}

int verb_probe(int argc, char **argv)
{
    static struct probe probe;
    struct probe *p = &probe;
    struct cb_err err = {0, ""};
    int status = EXIT_OK;
    p->runs = 5;
    p->tokens = 64;
    p->prompt = 32;
    const struct arg rows[] = {
        {.group = "Measurement", .name = "--runs", .kind = ARG_U32, .out = &p->runs, .lo = 1,
         .hi = 1000, .meta = "N", .help = "runs (default 5)"},
        {.name = "--tokens", .kind = ARG_U32, .out = &p->tokens, .lo = 1, .hi = 100000, .meta = "N",
         .help = "tokens decoded in each run (default 64)"},
        {.name = "--prompt-tokens", .kind = ARG_U32, .out = &p->prompt, .lo = 1, .hi = 100000,
         .meta = "N", .help = "prompt of each run (default 32)"},
        {.name = "--samples", .kind = ARG_FLAG, .out = &p->with_samples, .flag_value = 1,
         .help = "with --json: every sample too"},
    };
    cli_args_begin(&p->args, "probe", "Measures latency, speed, memory and page faults on this machine.");
    cli_args_add(&p->args, rows, sizeof rows / sizeof rows[0]);
    cli_model_args(&p->args, &p->model);
    if (cli_args_finish(&p->args, argc, argv, &status))
        return status;
    int rc = cli_model_check(&p->model, &err);
    if (rc == CB_OK)
        rc = measure(p, &err);
    if (rc < 0)
        status = cli_open_error(&p->args, &p->model, &err);
    else if (p->args.json)
        probe_json(p);
    else
        probe_table(p);
    cb_engine_close(p->e);
    cb_os_unmap(p->block, p->block_bytes);
    return status;
}

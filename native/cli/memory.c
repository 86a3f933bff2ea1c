/* memory.c — options about memory and experts, and what is said about them:
 * where experts live, how the cache did, what made an answer lossy, which flags
 * would make a refused plan fit. */
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "core/os.h"

static const char *const weights_names[] = {"arena", "mmap", "lazy", "preload"};
static const char *const policy_names[] = {"slru", "lru", "lfu"};

const char *cli_kv_name(uint32_t kv_type)
{
    static const char *const names[] = {"f16", "f32", "q8_0"};
    return kv_type <= CB_KV_Q8_0 ? names[kv_type] : "?";
}

/* ---- options ------------------------------------------------------------ */

/* From the watchdog's thread; stdio locks its stream. */
static void say_stuck(void *ud, uint32_t layer, int32_t expert, uint64_t ms)
{
    (void)ud;
    if (expert >= 0)
        fprintf(stderr, "stuck: layer %u, expert %d, %" PRIu64 " ms\n", layer, expert, ms);
    else
        fprintf(stderr, "stuck: layer %u, no expert awaited, %" PRIu64 " ms\n", layer, ms);
}

void cli_memory_args(struct cli_args *a, struct cli_model *m)
{
    const struct arg rows[] = {
        {.group = "Experts", .name = "--weights", .kind = ARG_CHOICE, .out = &m->opt.weights,
         .meta = "arena|mmap|lazy|preload", .help = "where experts live (default arena: slots)"},
        {.name = "--cache-experts", .kind = ARG_TEXT, .out = &m->cache_experts, .meta = "N|0|all",
         .help = "slots at most; 0 = only those in use (default all that the budget holds)"},
        {.name = "--cache-policy", .kind = ARG_CHOICE, .out = &m->opt.cache_policy,
         .meta = "slru|lru|lfu", .help = "which expert gives up its slot (default slru)"},
        {.name = "--pin-file", .kind = ARG_TEXT, .out = &m->opt.pin_file, .meta = "FILE",
         .help = "experts that keep their slots: lines of \"layer expert\""},
        {.name = "--readers", .kind = ARG_U32, .out = &m->opt.readers, .lo = 1, .hi = 16,
         .meta = "N", .help = "threads that read experts (default 2)"},
        {.name = "--buffered", .kind = ARG_FLAG, .out = &m->buffered, .flag_value = 1,
         .help = "read through the page cache, never O_DIRECT"},
        {.name = "--no-lookahead", .kind = ARG_FLAG, .out = &m->no_lookahead, .flag_value = 1,
         .help = "read no expert before it is asked for"},
        {.name = "--lazy-block", .kind = ARG_U32, .out = &m->opt.lazy_block_mib, .lo = 1, .hi = 64,
         .meta = "MIB", .help = "what one fault maps with --weights lazy (default 16)"},
        {.name = "--on-bad-expert", .kind = ARG_CHOICE, .out = &m->opt.on_bad, .meta = "fail|next",
         .help = "a damaged expert: fail, or let the next-ranked one answer (lossy)"},
        {.name = "--on-miss", .kind = ARG_CHOICE, .out = &m->opt.on_miss, .meta = "wait|zeros",
         .help = "an expert that is not there yet: wait, or leave it out (lossy)"},
        {.name = "--extra-expert-below", .kind = ARG_FLOAT, .out = &m->extra_below, .lo = -1e6,
         .hi = 1e6, .meta = "T",
         .help = "one more expert when the top router logit is below T (lossy)"},
        {.name = "--token-deadline", .kind = ARG_U32, .out = &m->opt.token_deadline_ms, .lo = 1,
         .meta = "MS", .help = "say on stderr which layer and expert a slower token is stuck in"},
        {.name = "--hot-swap", .kind = ARG_FLAG, .out = &m->hot_swap, .flag_value = 1,
         .help = "room for a second set of dense weights; see run --prompts"},
    };
    cli_args_add(a, rows, sizeof rows / sizeof rows[0]);
}

/* "--cache-experts N|0|all" */
static int cache_experts(struct cli_model *m, struct cb_err *err)
{
    const char *text = m->cache_experts;
    if (text == NULL || strcmp(text, "all") == 0)
        return CB_OK;
    size_t digits = strspn(text, "0123456789");
    unsigned long v = digits > 0 && digits < 9 && text[digits] == '\0' ? strtoul(text, NULL, 10)
                                                                        : ULONG_MAX;
    if (v > 1u << 24)
        return cb_fail(err, CB_EINVAL,
                       "--cache-experts must be a whole number up to %u, 0 (only the experts in "
                       "use) or all, not \"%.40s\"", 1u << 24, text);
    m->opt.cache_experts = (uint32_t)v;
    m->opt.cache_none = v == 0;
    return CB_OK;
}

/* Options that the weight mode gives no meaning to. */
static int check_mode(const struct cli_model *m, struct cb_err *err)
{
    const struct {
        int given;
        const char *name;
    } arena[] = {
        {m->cache_experts != NULL, "--cache-experts"},
        {m->opt.cache_policy != CB_CACHE_SLRU, "--cache-policy"},
        {m->opt.readers != 0, "--readers"},
        {m->buffered, "--buffered"},
        {m->no_lookahead, "--no-lookahead"},
        {m->opt.pin_file != NULL, "--pin-file"},
        {m->opt.on_miss != CB_MISS_WAIT, "--on-miss zeros"},
    };
    if (m->opt.lazy_block_mib != 0 && m->opt.weights != CB_WEIGHTS_LAZY)
        return cb_fail(err, CB_EINVAL, "--lazy-block goes with --weights lazy");
    for (size_t i = 0; i < sizeof arena / sizeof arena[0]; i++)
        if (arena[i].given && m->opt.weights != CB_WEIGHTS_ARENA)
            return cb_fail(err, CB_EINVAL, "%s goes with --weights arena, not %s", arena[i].name,
                           weights_names[m->opt.weights]);
    return CB_OK;
}

int cli_memory_check(struct cli_model *m, struct cb_err *err)
{
    m->opt.buffered = (uint32_t)m->buffered;
    m->opt.no_lookahead = (uint32_t)m->no_lookahead;
    m->opt.hot_swap = (uint32_t)m->hot_swap;
    m->opt.on_stuck = say_stuck;
    if (!isnan(m->extra_below)) {
        m->opt.extra_expert = 1;
        m->opt.extra_below = m->extra_below;
    }
    int rc = cache_experts(m, err);
    if (rc == CB_OK)
        rc = check_mode(m, err);
    if (rc == CB_OK && m->opt.pin_file != NULL) {
        struct cb_os_file f;
        if (cb_os_open(&f, m->opt.pin_file, NULL) < 0)
            return cb_fail(err, CB_EINVAL, "--pin-file: cannot open %.180s", m->opt.pin_file);
        cb_os_close(&f);
    }
    return rc;
}

/* ---- at start ----------------------------------------------------------- */

static int is_mapped(const struct cli_model *m)
{
    return m->opt.weights == CB_WEIGHTS_MMAP || m->opt.weights == CB_WEIGHTS_LAZY;
}

static void print_experts(FILE *f, const struct cli_model *m, const struct cb_info *i,
                          const struct cb_ledger *l)
{
    char slot[32];
    const char *mode = weights_names[m->opt.weights];
    if (i->n_moe_layer == 0) {
        fprintf(f, "experts loaded: 0 (a dense model)\n");
        return;
    }
    fprintf(f, "experts loaded: %u of %u resident", i->experts_loaded, l->records);
    if (is_mapped(m))
        fprintf(f, " (mapped as they are touched), %u a layer, %u used; weights %s, the %s\n",
                i->n_expert, i->n_expert_used, mode,
                m->opt.weights == CB_WEIGHTS_MMAP ? "page cache decides what stays"
                                                  : "oldest block is unmapped first");
    else
        fprintf(f, " (%u slots of %s), %u a layer, %u used; weights %s, cache %s\n", l->slots,
                cli_size(l->slot_bytes, slot), i->n_expert, i->n_expert_used, mode,
                policy_names[m->opt.cache_policy]);
}

void cli_print_start(FILE *f, const struct cb_engine *e, const struct cli_model *m)
{
    struct cb_info i;
    struct cb_ledger l;
    char total[32], part[32];
    cb_engine_info(e, &i);
    cb_engine_ledger(e, &l);
    fprintf(f, "model: %s (%s), %u layers, context %u, KV %s; kernels %s, %u thread%s\n", i.name,
            i.arch, i.n_layer, i.ctx, cli_kv_name(m->opt.kv_type), i.isa, i.threads,
            i.threads == 1 ? "" : "s");
    print_experts(f, m, &i, &l);
    fprintf(f, "memory total: %s", cli_size(l.total, total));
    const char *sep = " =";
    for (int k = 0; k < CB_L_COUNT; k++) {
        if (l.bytes[k] == 0)
            continue;
        fprintf(f, "%s %s %s", sep, cb_ledger_name(k), cli_size(l.bytes[k], part));
        sep = " +";
    }
    fprintf(f, "; budget %s\n", cli_size(l.budget ? l.budget : l.available, part));
}

/* ---- at the end --------------------------------------------------------- */

void cli_counters_since(const struct cb_engine *e, const struct cb_counters *before,
                        struct cb_counters *since)
{
    struct cb_counters now;
    uint64_t a[sizeof now / sizeof(uint64_t)], b[sizeof now / sizeof(uint64_t)];
    cb_engine_counters(e, &now);
    memcpy(a, before, sizeof a); /* a struct of nothing but uint64_t */
    memcpy(b, &now, sizeof b);
    for (size_t i = 0; i < sizeof a / sizeof a[0]; i++)
        b[i] -= a[i];
    memcpy(since, b, sizeof b);
    since->unhealthy = now.unhealthy;
    since->swaps = now.swaps;
}

void cli_print_cache(FILE *f, const struct cli_model *m, const struct cb_counters *c)
{
    char bytes[32];
    uint64_t looked = c->hits + c->misses;
    if (c->routes == 0)
        return;
    fprintf(f, "experts: ");
    if (!is_mapped(m) && looked > 0)
        fprintf(f, "hit rate %.1f %% (%" PRIu64 " of %" PRIu64 "), ",
                100.0 * (double)c->hits / (double)looked, c->hits, looked);
    fprintf(f, "read %s, waited %.1f ms, ", cli_size(c->bytes_read, bytes),
            (double)c->ns_wait / 1e6);
    if (!is_mapped(m) && m->opt.weights != CB_WEIGHTS_PRELOAD)
        fprintf(f, "look-ahead %" PRIu64 " useful %" PRIu64 " wasted, ", c->ahead_useful,
                c->ahead_wasted);
    fprintf(f, "%" PRIu64 " of %" PRIu64 " routes recomputed\n", c->recomputed, c->routes);
    if (c->retries)
        fprintf(f, "reads repeated after an error: %" PRIu64 "\n", c->retries);
    if (c->stuck)
        fprintf(f, "tokens over their deadline: %" PRIu64 "\n", c->stuck);
}

void cli_print_lossy(FILE *f, const struct cli_model *m, const struct cb_counters *c)
{
    if (c->degraded)
        fprintf(f, "LOSSY: degraded: %" PRIu64 " routings passed over an unhealthy expert; the "
                   "answer is not the model's own\n", c->degraded);
    if (c->zeros)
        fprintf(f, "LOSSY: zeros: %" PRIu64 " expert outputs were left out (--on-miss zeros); the "
                   "answer is not the model's own\n", c->zeros);
    if (c->extra)
        fprintf(f, "LOSSY: extra: %" PRIu64 " routings had one more expert (--extra-expert-below "
                   "%g); the answer is not the model's own\n", c->extra, (double)m->extra_below);
    if (c->unhealthy)
        fprintf(f, "UNHEALTHY: %" PRIu64 " expert%s cannot be used since the start\n", c->unhealthy,
                c->unhealthy == 1 ? "" : "s");
}

void cli_json_lossy(struct json *j, const struct cb_counters *c)
{
    json_bool(j, "lossy", c->degraded > 0 || c->zeros > 0 || c->extra > 0);
    json_u64(j, "degraded", c->degraded);
    json_u64(j, "zeros", c->zeros);
    json_u64(j, "extra", c->extra);
    json_u64(j, "unhealthy", c->unhealthy);
}

static void json_figures(struct json *j, const struct cli_model *m, const struct cb_counters *c)
{
    uint64_t looked = c->hits + c->misses;
    if (is_mapped(m) || looked == 0)
        json_null(j, "hit_rate"); /* the kernel's page cache does not tell */
    else
        json_float(j, "hit_rate", (double)c->hits / (double)looked);
    json_u64(j, "hits", c->hits);
    json_u64(j, "misses", c->misses);
    json_u64(j, "evictions", c->evictions);
    json_u64(j, "bytes_read", c->bytes_read);
    json_u64(j, "wait_ns", c->ns_wait);
    json_u64(j, "ahead_issued", c->ahead_issued);
    json_u64(j, "ahead_useful", c->ahead_useful);
    json_u64(j, "ahead_wasted", c->ahead_wasted);
    json_u64(j, "retries", c->retries);
    json_u64(j, "routes", c->routes);
    json_u64(j, "recomputed", c->recomputed);
    json_u64(j, "stuck", c->stuck);
    json_u64(j, "swaps", c->swaps);
}

void cli_json_cache(struct json *j, const struct cli_model *m, const struct cb_ledger *l,
                    const struct cb_counters *c)
{
    json_begin(j, "cache", '{');
    json_word(j, "weights", weights_names[m->opt.weights]);
    json_word(j, "policy", policy_names[m->opt.cache_policy]);
    json_u64(j, "slots", l->slots);
    json_u64(j, "records", l->records);
    json_u64(j, "slot_bytes", l->slot_bytes);
    if (c != NULL)
        json_figures(j, m, c);
    json_end(j, '}');
}

/* ---- a plan that does not fit ------------------------------------------- */

#define ADVICE_MAX 8
struct advice {
    char flag[48];
    uint64_t saves;
    int fits;
};

/* Plans with other options; keeps what lowers the sum. Slots take what is left
 * of the budget, so the sums are compared with the fewest. */
static void try_one(struct advice *list, uint32_t *n, const struct cb_options *opt,
                    const struct cb_ledger *l, const char *flag)
{
    struct cb_ledger there;
    struct cb_err ignored;
    struct cb_options o = *opt;
    memset(&there, 0, sizeof there);
    o.cache_none = o.weights == CB_WEIGHTS_ARENA;
    int rc = cb_plan(&o, &there, NULL, &ignored);
    if (*n == ADVICE_MAX || (rc != CB_OK && rc != CB_EBUDGET) || there.total >= l->total)
        return;
    struct advice *a = &list[(*n)++];
    snprintf(a->flag, sizeof a->flag, "%s", flag);
    a->saves = l->total - there.total;
    a->fits = rc == CB_OK;
}

/* Halves one number until it fits; keeps the last one asked. */
static void try_less(struct advice *list, uint32_t *n, const struct cb_options *opt,
                     const struct cb_ledger *l, const char *name, uint32_t now, uint32_t least)
{
    uint32_t first = *n;
    for (uint32_t v = now / 2; v >= least; v /= 2) {
        struct cb_options o = *opt;
        char flag[48];
        *(strcmp(name, "--ctx") == 0 ? &o.ctx : &o.batch) = v;
        snprintf(flag, sizeof flag, "%s %u", name, v);
        *n = first;
        try_one(list, n, &o, l, flag);
        if (*n > first && list[first].fits)
            return;
    }
}

/* Everything that shrinks at once, for when no flag alone is enough. */
static void try_all(struct advice *list, uint32_t *n, const struct cb_options *opt,
                    const struct cb_ledger *l, uint32_t ctx)
{
    uint32_t before = *n;
    for (int q8 = 1; q8 >= 0 && *n == before; q8--) { /* not every head length has Q8_0 */
        struct cb_options o = *opt;
        char flag[48];
        o.ctx = ctx < 256 ? ctx : 256;
        o.batch = 1;
        o.kv_type = q8 ? CB_KV_Q8_0 : o.kv_type;
        snprintf(flag, sizeof flag, "--ctx %u --batch 1%s", o.ctx, q8 ? " --kv q8_0" : "");
        try_one(list, n, &o, l, flag);
    }
}

/* What each flag would save, by the engine's own arithmetic. */
static uint32_t advise(const struct cli_model *m, const struct cb_ledger *l,
                       struct advice list[ADVICE_MAX])
{
    struct cb_options o = m->opt;
    struct cb_ledger ignored;
    struct cb_info info;
    struct cb_err err;
    uint32_t n = 0;
    memset(&info, 0, sizeof info);
    (void)cb_plan(&m->opt, &ignored, &info, &err);
    try_less(list, &n, &m->opt, l, "--ctx", info.ctx, 256);
    try_less(list, &n, &m->opt, l, "--batch", info.batch, 1);
    o.kv_type = CB_KV_Q8_0;
    if (m->opt.kv_type != CB_KV_Q8_0)
        try_one(list, &n, &o, l, "--kv q8_0");
    o = m->opt;
    o.weights = CB_WEIGHTS_ARENA;
    o.lazy_block_mib = 0;
    if (m->opt.weights != CB_WEIGHTS_ARENA)
        try_one(list, &n, &o, l, "--weights arena --cache-experts 0");
    o = m->opt;
    o.hot_swap = 0;
    if (m->opt.hot_swap)
        try_one(list, &n, &o, l, "no --hot-swap");
    for (uint32_t i = 0; i < n; i++)
        if (list[i].fits)
            return n;
    try_all(list, &n, &m->opt, l, info.ctx);
    return n;
}

static int largest_line(const struct cb_ledger *l)
{
    int best = 0;
    for (int i = 1; i < CB_L_COUNT; i++)
        if (l->bytes[i] > l->bytes[best])
            best = i;
    return best;
}

void cli_json_advice(struct json *j, const struct cli_model *m, const struct cb_ledger *l)
{
    struct advice list[ADVICE_MAX];
    uint32_t n = advise(m, l, list);
    json_word(j, "largest", cb_ledger_name(largest_line(l)));
    json_begin(j, "advice", '[');
    for (uint32_t i = 0; i < n; i++) {
        json_begin(j, NULL, '{');
        json_word(j, "flag", list[i].flag);
        json_u64(j, "saves", list[i].saves);
        json_bool(j, "fits", list[i].fits);
        json_end(j, '}');
    }
    json_end(j, ']');
}

void cli_print_advice(FILE *f, const struct cli_model *m, const struct cb_ledger *l)
{
    struct advice list[ADVICE_MAX];
    char size[32];
    uint32_t n = advise(m, l, list), fit = 0;
    int big = largest_line(l);
    fprintf(f, "the largest line is %s: %s\n", cb_ledger_name(big), cli_size(l->bytes[big], size));
    for (uint32_t i = 0; i < n; i++) {
        fprintf(f, "  %s saves %s%s\n", list[i].flag, cli_size(list[i].saves, size),
                list[i].fits ? ", then it fits" : ", not enough alone");
        fit += (uint32_t)list[i].fits;
    }
    if (fit == 0)
        fprintf(f, "  no flag makes it fit: it needs a larger budget or a smaller quantisation\n");
}

int cli_open_error(const struct cli_args *a, const struct cli_model *m, const struct cb_err *err)
{
    struct cb_ledger l;
    struct cb_err ignored;
    memset(&l, 0, sizeof l);
    if (err->code != CB_EBUDGET || cb_plan(&m->opt, &l, NULL, &ignored) != CB_EBUDGET ||
        l.total == 0)
        return cli_error(a, err);
    cli_print_advice(stderr, m, &l);
    if (!a->json)
        return cli_error(a, err);
    struct json j = {stdout, 0};
    json_begin(&j, NULL, '{');
    json_begin(&j, "error", '{');
    json_word(&j, "code", cb_code_name(err->code));
    json_word(&j, "message", err->msg);
    json_i64(&j, "exit_status", EXIT_BUDGET);
    cli_json_advice(&j, m, &l);
    json_end(&j, '}');
    json_end(&j, '}');
    putchar('\n');
    fflush(stdout);
    fprintf(stderr, "colibri %s: error: %s\n", a->verb, err->msg);
    return EXIT_BUDGET;
}

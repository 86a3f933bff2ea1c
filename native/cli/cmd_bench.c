/* cmd_bench.c — `colibri bench`: CSV figures to compare builds and boards.
 *
 * Inside the timing window: cb_eval() (prefill), cb_eval() plus greedy sampling
 * (decode), the loop over the buffer (memory), the kernel call (kernel).
 * Outside: loading, filling buffers, quantising activations, printing. Token
 * ids are the golden's fixed sequence in prefill; decode feeds back the
 * likeliest token and does not end at an end-of-text token. Each line is the
 * median and the least of `reps` repetitions; the first, cold one is dropped. */
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "core/os.h"
#include "core/pool.h"
#include "kernels/kernels.h"
#include "stats.h"
#include "sys.h"

#define REPS_MAX 64u
#define DECODE_TOKENS 32u
#define KERNEL_BYTES (32u << 20) /* weights a kernel walks: beyond any cache of a board */
#define KERNEL_COLS 2048u
#define KERNEL_TOKENS 8u

enum part { PART_ALL, PART_MODEL, PART_MEMORY, PART_KERNEL };

struct bench {
    struct cli_args args;
    struct cli_model model;
    uint32_t part, reps, max_tokens;
    uint64_t mem_bytes;
    uint64_t ns[REPS_MAX];
    uint32_t n;
};

/* One CSV line; amount of `unit`s were done in each repetition. */
static void line(struct bench *b, const char *part, const char *name, uint32_t n, uint32_t threads,
                 const char *isa, double amount, const char *unit)
{
    stats_sort(b->ns, b->n);
    double median = (double)stats_rank(b->ns, b->n, 50), least = (double)b->ns[0];
    printf("%s,%s,%u,%u,%s,%u,%.6f,%.6f,%.4g,%s/s\n", part, name, n, threads, isa, b->n, median / 1e9,
           least / 1e9, median > 0 ? amount * 1e9 / median : 0.0, unit);
    fflush(stdout);
    b->n = 0;
}

static int prefill(struct bench *b, struct cb_engine *e, const struct cb_info *info,
                   const int32_t *ids, uint32_t n, struct cb_err *err)
{
    for (uint32_t rep = 0; rep <= b->reps; rep++) {
        cb_reset(e);
        uint64_t start = cb_os_now_ns();
        int rc = cb_eval(e, ids, n, NULL, NULL, err);
        uint64_t ns = cb_os_now_ns() - start;
        if (rc < 0)
            return rc;
        if (sys_interrupted())
            return cb_fail(err, CB_ECANCEL, "interrupted");
        if (rep > 0)
            b->ns[b->n++] = ns;
    }
    line(b, "model", "prefill", n, info->threads, info->isa, n, "tok");
    return CB_OK;
}

/* DECODE_TOKENS after a prompt of `depth` tokens. */
static int decode(struct bench *b, struct cb_engine *e, const struct cb_info *info,
                  const int32_t *ids, uint32_t depth, struct cb_err *err)
{
    struct cb_sampling greedy;
    cb_sampling_default(&greedy);
    for (uint32_t rep = 0; rep <= b->reps; rep++) {
        cb_reset(e);
        int rc = cb_eval(e, ids, depth, NULL, NULL, err);
        uint64_t start = cb_os_now_ns();
        for (uint32_t i = 0; rc == CB_OK && i < DECODE_TOKENS; i++) {
            int32_t id = 0;
            rc = cb_sample(e, cb_logits(e), &greedy, i, NULL, 0, &id, err);
            if (rc == CB_OK)
                rc = cb_eval(e, &id, 1, NULL, NULL, err);
        }
        uint64_t ns = cb_os_now_ns() - start;
        if (rc < 0)
            return rc;
        if (sys_interrupted())
            return cb_fail(err, CB_ECANCEL, "interrupted");
        if (rep > 0)
            b->ns[b->n++] = ns;
    }
    line(b, "model", "decode", depth, info->threads, info->isa, DECODE_TOKENS, "tok");
    return CB_OK;
}

static int bench_model(struct bench *b, struct cb_err *err)
{
    static const uint32_t sizes[] = {8, 32, 128, 512, 2048};
    static const uint32_t depths[] = {1, 128, 512, 2048};
    struct cb_engine *e = NULL;
    struct cb_info info;
    int rc = cli_model_check(&b->model, err);
    if (rc == CB_OK)
        rc = cb_engine_open(&b->model.opt, &e, err);
    if (rc < 0)
        return rc;
    cb_engine_info(e, &info);
    int32_t *ids = malloc((size_t)info.ctx * sizeof *ids);
    if (ids == NULL)
        rc = cb_fail(err, CB_EIO, "no memory for the token ids");
    for (uint32_t i = 0; rc == CB_OK && i < info.ctx; i++)
        ids[i] = cli_fixed_token(i, info.n_vocab);
    for (size_t i = 0; rc == CB_OK && i < sizeof sizes / sizeof sizes[0]; i++)
        if (sizes[i] <= info.ctx && sizes[i] <= b->max_tokens)
            rc = prefill(b, e, &info, ids, sizes[i], err);
    for (size_t i = 0; rc == CB_OK && i < sizeof depths / sizeof depths[0]; i++)
        if (depths[i] <= b->max_tokens && (uint64_t)depths[i] + DECODE_TOKENS <= info.ctx)
            rc = decode(b, e, &info, ids, depths[i], err);
    cb_engine_close(e);
    free(ids);
    return rc;
}

struct reader {
    const uint64_t *words; /* [n] */
    uint64_t n;
    uint64_t sum[CB_POOL_MAX];
};

static void read_share(void *arg, uint32_t thread, uint32_t n_threads)
{
    struct reader *r = arg;
    uint64_t lo = 0, hi = 0, s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    cb_share(r->n / 4, thread, n_threads, &lo, &hi);
    for (uint64_t i = lo * 4; i < hi * 4; i += 4) {
        s0 += r->words[i];
        s1 += r->words[i + 1];
        s2 += r->words[i + 2];
        s3 += r->words[i + 3];
    }
    r->sum[thread] = s0 + s1 + s2 + s3;
}

/* Sequential reads of one large buffer, 1 thread and then all. */
static int bench_memory(struct bench *b, struct cb_err *err)
{
    static struct cb_pool pool;
    static struct reader r;
    uint32_t all = b->model.opt.threads ? b->model.opt.threads : cb_os_physical_cores();
    uint64_t bytes = b->mem_bytes / 32 * 32;
    uint64_t *buf = cb_os_map(bytes, 0, err);
    if (buf == NULL)
        return err->code;
    for (uint64_t i = 0; i < bytes / 8; i++)
        buf[i] = i;
    r.words = buf;
    r.n = bytes / 8;
    volatile uint64_t keep = 0; /* the sums are used, so the loops stay */
    int rc = CB_OK;
    for (uint32_t threads = 1; rc == CB_OK; threads = all) {
        rc = cb_pool_open(&pool, threads, err);
        if (rc < 0)
            break;
        for (uint32_t rep = 0; rep <= b->reps; rep++) {
            uint64_t start = cb_os_now_ns();
            cb_pool_run(&pool, read_share, &r);
            uint64_t ns = cb_os_now_ns() - start;
            for (uint32_t t = 0; t < threads; t++)
                keep += r.sum[t];
            if (rep > 0)
                b->ns[b->n++] = ns;
        }
        cb_pool_close(&pool);
        line(b, "memory", "read", (uint32_t)(bytes >> 20), threads, "scalar", (double)bytes / 1e9, "GB");
        if (threads == all)
            break;
    }
    (void)keep;
    cb_os_unmap(buf, bytes);
    return rc;
}

/* n_tok identical activation rows as the type wants them, in act. */
static void prepare_row(const struct cb_kernels *k, enum cb_act act, const float *x, void *row)
{
    if (act == CB_ACT_Q8_0)
        k->quant_q8_0(row, x, KERNEL_COLS);
    else if (act == CB_ACT_Q8_K)
        k->quant_q8_k(row, x, KERNEL_COLS);
    else
        memcpy(row, x, KERNEL_COLS * sizeof *x);
}

static void bench_type(struct bench *b, const struct cb_kernels *k, uint32_t type, uint8_t *weights,
                       float *y, void *row)
{
    static float x[KERNEL_COLS];
    const struct cb_type_info *info = cb_type_info(type);
    uint64_t group = cb_mat_bytes(type, CB_GROUP, KERNEL_COLS);
    size_t n_groups = (size_t)(KERNEL_BYTES / group);
    float *out[KERNEL_TOKENS];
    const void *in[KERNEL_TOKENS];
    for (uint32_t i = 0; i < KERNEL_COLS; i++)
        x[i] = (float)(i % 17) - 8.0f;
    prepare_row(k, info->act, x, row);
    for (uint32_t t = 0; t < KERNEL_TOKENS; t++) {
        out[t] = y + (size_t)t * n_groups * CB_GROUP;
        in[t] = row;
    }
    for (uint32_t n_tok = 1; n_tok <= KERNEL_TOKENS; n_tok = n_tok == 1 ? KERNEL_TOKENS : n_tok + 1) {
        for (uint32_t rep = 0; rep <= b->reps; rep++) {
            uint64_t start = cb_os_now_ns();
            k->gemm[type](out, in, n_tok, weights, n_groups, KERNEL_COLS);
            uint64_t ns = cb_os_now_ns() - start;
            if (rep > 0)
                b->ns[b->n++] = ns;
        }
        line(b, "kernel", info->name, n_tok, 1, k->isa, (double)n_groups * (double)group / 1e9, "GB");
    }
}

/* GB of weights a second through each product kernel, one thread. */
static int bench_kernels(struct bench *b, struct cb_err *err)
{
    static struct cb_kernels k;
    const char *why = "";
    if (cb_kernels_init(&k, b->model.opt.isa, &why) != 0)
        return cb_fail(err, CB_EUNSUPPORTED, "%s", why);
    /* The narrowest type (4.5 bits) has the most rows in KERNEL_BYTES. */
    uint64_t rows = (uint64_t)KERNEL_BYTES * 2 / KERNEL_COLS;
    uint64_t y_bytes = rows * KERNEL_TOKENS * sizeof(float);
    uint64_t row_bytes = KERNEL_COLS * sizeof(float) * 2;
    uint8_t *block = cb_os_map(KERNEL_BYTES + y_bytes + row_bytes, 0, err);
    if (block == NULL)
        return err->code;
    /* 0x11 in every byte: a small normal number as F32, F16, BF16 and as scale. */
    memset(block, 0x11, KERNEL_BYTES);
    for (uint32_t type = 0; type < CB_TYPE_MAX; type++)
        if (k.gemm[type] != NULL && cb_type_info(type) != NULL)
            bench_type(b, &k, type, block, (float *)(void *)(block + KERNEL_BYTES),
                       block + KERNEL_BYTES + y_bytes);
    cb_os_unmap(block, KERNEL_BYTES + y_bytes + row_bytes);
    return CB_OK;
}

int verb_bench(int argc, char **argv)
{
    static struct bench b;
    struct cb_err err = {0, ""};
    int rc = CB_OK, status = EXIT_OK;
    cli_args_begin(&b.args, "bench", "Prefill and decode sweep (with --model), memory bandwidth and kernels, as CSV.");
    b.reps = 5;
    b.max_tokens = 512;
    b.mem_bytes = 128u << 20;
    const struct arg rows[] = {
        {.group = "Sweep", .name = "--part", .kind = ARG_CHOICE, .out = &b.part,
         .meta = "all|model|memory|kernel", .help = "what to measure (default all)"},
        {.name = "--reps", .kind = ARG_U32, .out = &b.reps, .lo = 1, .hi = REPS_MAX, .meta = "N",
         .help = "repetitions after one cold one (default 5)"},
        {.name = "--max-tokens", .kind = ARG_U32, .out = &b.max_tokens, .lo = 1, .hi = 1 << 24,
         .meta = "N", .help = "longest prompt of the sweep (default 512)"},
        {.name = "--mem-bytes", .kind = ARG_SIZE, .out = &b.mem_bytes, .meta = "SIZE",
         .help = "buffer of the bandwidth test (default 128MiB)"},
    };
    cli_args_add(&b.args, rows, sizeof rows / sizeof rows[0]);
    cli_model_args(&b.args, &b.model);
    if (cli_args_finish(&b.args, argc, argv, &status))
        return status;
    rc = cli_isa_check(b.model.opt.isa, &err);
    if (rc == CB_OK && b.args.json)
        rc = cb_fail(&err, CB_EINVAL, "bench writes CSV; there is no --json");
    if (rc == CB_OK && (b.mem_bytes < 1 << 20 || b.mem_bytes > UINT64_C(1) << 36))
        rc = cb_fail(&err, CB_EINVAL, "--mem-bytes must lie between 1MiB and 64GiB");
    if (rc == CB_OK && b.part == PART_MODEL && b.model.opt.model_dir == NULL)
        rc = cb_fail(&err, CB_EINVAL, "--model DIR is missing");
    if (rc < 0)
        return cli_error(&b.args, &err);
    sys_catch_interrupt();
    puts("part,name,n,threads,isa,reps,median_s,least_s,rate,unit");
    if (b.part == PART_ALL || b.part == PART_MEMORY)
        rc = bench_memory(&b, &err);
    if (rc == CB_OK && (b.part == PART_ALL || b.part == PART_KERNEL))
        rc = bench_kernels(&b, &err);
    if (rc == CB_OK && b.model.opt.model_dir && (b.part == PART_ALL || b.part == PART_MODEL))
        rc = bench_model(&b, &err);
    return rc < 0 ? cli_open_error(&b.args, &b.model, &err) : EXIT_OK;
}

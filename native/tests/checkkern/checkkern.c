/* checkkern.c — runs the cases, compares, times. */
#include "checkkern.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "ck.h"

static void *ck_slot_ptr(const struct cb_kernels *k, const struct ck_slot *s)
{
    void *p;
    memcpy(&p, (const char *)k + s->offset, sizeof p);
    return p;
}

static uint8_t *ck_out_at(uint8_t *area) { return area + CK_GUARD + 4; }

/* NaN of any sign and payload counts as NaN: an ISA may choose which operand's it keeps. */
static int ck_same_f32(uint32_t a, uint32_t b)
{
    return a == b || ((a & 0x7FFFFFFFu) > 0x7F800000u && (b & 0x7FFFFFFFu) > 0x7F800000u);
}

static int ck_same_f16(uint32_t a, uint32_t b)
{
    return a == b || ((a & 0x7FFFu) > 0x7C00u && (b & 0x7FFFu) > 0x7C00u);
}

/* Offset of the first difference in the whole areas, guards included; -1 = none. */
static long ck_first_diff(const uint8_t *ref, const uint8_t *new_, enum ck_out kind)
{
    const size_t step = kind == CK_OUT_F32 ? 4 : kind == CK_OUT_F16 ? 2 : 1;
    for (size_t i = 0; i < CK_OUT_BYTES; i += step) {
        uint32_t a = 0, b = 0;
        memcpy(&a, ref + i, step);
        memcpy(&b, new_ + i, step);
        const int same = kind == CK_OUT_F32   ? ck_same_f32(a, b)
                         : kind == CK_OUT_F16 ? ck_same_f16(a, b)
                                              : a == b;
        if (!same) {
            return (long)i;
        }
    }
    return -1;
}

/* First guard byte that the reference wrote over; -1 = none. */
static long ck_guard_hit(const uint8_t *area, size_t used)
{
    for (size_t i = 0; i < CK_OUT_BYTES; i++) {
        const int inside = i >= CK_GUARD + 4 && i < CK_GUARD + 4 + used;
        if (!inside && area[i] != CK_GUARD_BYTE) {
            return (long)i;
        }
    }
    return -1;
}

/* CRC32C of the output with one NaN for all. */
static uint32_t ck_hash(uint32_t crc, const uint8_t *out, size_t n, enum ck_out kind)
{
    static const uint8_t nan4[4] = {0, 0, 0xC0, 0x7F};
    static const uint8_t nan2[2] = {0, 0x7E};
    const size_t step = kind == CK_OUT_F32 ? 4 : kind == CK_OUT_F16 ? 2 : 1;
    for (size_t i = 0; i < n; i += step) {
        uint32_t a = 0;
        memcpy(&a, out + i, step);
        const uint8_t *p = out + i;
        if (kind == CK_OUT_F32 && ck_same_f32(a, 0x7FC00000u)) {
            p = nan4;
        } else if (kind == CK_OUT_F16 && ck_same_f16(a, 0x7E00u)) {
            p = nan2;
        }
        crc = cb_crc32c(crc, p, step);
    }
    return crc;
}

static void ck_report_diff(struct ck *c, const char *isa, const struct ck_slot *s,
                           const struct ck_case *cs, long at, const char *what)
{
    char text[320];
    const long rel = at - (long)CK_GUARD - 4;
    uint32_t a = 0, b = 0;
    const size_t word = (size_t)at & ~(size_t)3;
    memcpy(&a, c->out_ref + word, 4);
    memcpy(&b, c->out_new + word, 4);
    snprintf(text, sizeof text,
             "FAIL %s %s: %s at byte %ld (word %ld): expected 0x%08x, got 0x%08x; n %lu, "
             "tokens %lu, groups %lu, mode %d, variant %d, seed 0x%llx",
             isa, s->name, what, rel, rel >= 0 ? rel / 4 : -1L, (unsigned)a, (unsigned)b,
             (unsigned long)cs->n, (unsigned long)cs->n_tok, (unsigned long)cs->n_groups,
             (int)cs->mode, cs->variant, (unsigned long long)c->seed);
    c->line(c->ud, text);
}

static void ck_prepare(struct ck *c, const struct ck_slot *s, size_t i, const struct ck_case *cs)
{
    /* by name, so that a new slot changes nobody's data */
    c->rng = c->seed ^ ((uint64_t)cb_crc32c(0, s->name, strlen(s->name)) << 32) ^ (uint64_t)i;
    s->fill(c, s, cs);
    memset(c->out_ref, CK_GUARD_BYTE, sizeof c->out_ref);
    memset(c->out_new, CK_GUARD_BYTE, sizeof c->out_new);
}

/* All cases of one slot; stops at the first failure. Returns 1 if it failed. */
static int ck_check_slot(struct ck *c, const struct cb_kernels *k, const struct ck_slot *s)
{
    struct ck_case cs;
    char text[128];
    uint32_t hash = 0;
    size_t n = 0;
    const int is_ref = ck_slot_ptr(k, s) == ck_slot_ptr(c->ref, s);
    for (; s->nth_case(s, n, &cs); n++) {
        const size_t used = s->out_bytes(s, &cs);
        ck_prepare(c, s, n, &cs);
        s->run(c->ref, c, s, &cs, ck_out_at(c->out_ref));
        hash = ck_hash(hash, ck_out_at(c->out_ref), used, s->out);
        const long guard = ck_guard_hit(c->out_ref, used);
        if (guard >= 0) {
            ck_report_diff(c, "scalar", s, &cs, guard, "wrote outside its output");
            return 1;
        }
        if (is_ref) {
            continue;
        }
        s->run(k, c, s, &cs, ck_out_at(c->out_new));
        const long diff = ck_first_diff(c->out_ref, c->out_new, s->out);
        if (diff >= 0) {
            ck_report_diff(c, k->isa, s, &cs, diff, "first difference");
            return 1;
        }
    }
    if (is_ref && c->seed == CB_CHECKKERN_SEED && hash != s->hash) {
        snprintf(text, sizeof text, "FAIL scalar %s: hash 0x%08X, recorded 0x%08X", s->name,
                 (unsigned)hash, (unsigned)s->hash);
        c->line(c->ud, text);
        return 1;
    }
    snprintf(text, sizeof text, "ok   %s %s: %lu cases, hash 0x%08X", k->isa, s->name,
             (unsigned long)n, (unsigned)hash);
    c->line(c->ud, text);
    return 0;
}

static double ck_now_ns(void)
{
    struct timespec ts;
    timespec_get(&ts, TIME_UTC);
    return (double)ts.tv_sec * 1e9 + (double)ts.tv_nsec;
}

/* ns per call: the least of 7 runs of at least 2 ms each. */
static double ck_time(struct ck *c, const struct cb_kernels *k, const struct ck_slot *s,
                      const struct ck_case *cs)
{
    double best = 1e300;
    size_t reps = 1;
    for (int round = 0; round < 7;) {
        const double t0 = ck_now_ns();
        for (size_t i = 0; i < reps; i++) {
            s->run(k, c, s, cs, ck_out_at(c->out_new));
        }
        const double t = ck_now_ns() - t0;
        if (t < 2e6 && reps < ((size_t)1 << 24)) {
            reps *= 2; /* too short to trust: more calls, same round */
            continue;
        }
        best = t / (double)reps < best ? t / (double)reps : best;
        round++;
    }
    return best;
}

static void ck_bench_slot(struct ck *c, const struct cb_kernels *k, const struct ck_slot *s)
{
    static const uint8_t toks[2] = {1, 4};
    const int gemm = s->bench.n_groups != 0;
    for (int i = 0; i < (gemm ? 2 : 1); i++) {
        struct ck_case cs = s->bench;
        char text[160];
        cs.n_tok = gemm ? toks[i] : cs.n_tok;
        ck_prepare(c, s, 0, &cs);
        const double ref = ck_time(c, c->ref, s, &cs);
        const int is_ref = ck_slot_ptr(k, s) == ck_slot_ptr(c->ref, s);
        const double ns = is_ref ? ref : ck_time(c, k, s, &cs);
        const double bytes = (double)cb_mat_bytes(s->type, cs.n_groups * CB_GROUP, cs.n);
        int len = snprintf(text, sizeof text, "%-6s %-14s n %4lu x%-3lu %10.0f ns %7.2fx scalar",
                           k->isa, s->name, (unsigned long)cs.n, (unsigned long)cs.n_tok, ns,
                           ref / ns);
        if (gemm && len > 0) {
            snprintf(text + len, sizeof text - (size_t)len, "  %.2f GB/s of weights", bytes / ns);
        }
        c->line(c->ud, text);
    }
}

/* One ISA: each slot that it does not share with a weaker one. Returns slots seen. */
static int ck_isa(struct ck *c, const struct cb_kernels *k, const struct cb_kernels *weaker,
                  const char *kernel_filter, int bench, int *failed)
{
    int seen = 0;
    for (size_t i = 0; i < CK_N_GEMM + CK_N_VEC; i++) {
        const struct ck_slot *s = i < CK_N_GEMM ? &CK_GEMM[i] : &CK_VEC[i - CK_N_GEMM];
        if (kernel_filter != NULL && strstr(s->name, kernel_filter) == NULL) {
            continue;
        }
        seen++;
        if (weaker != NULL && ck_slot_ptr(k, s) == ck_slot_ptr(weaker, s)) {
            continue;
        }
        if (bench) {
            ck_bench_slot(c, k, s);
        } else {
            *failed += ck_check_slot(c, k, s);
        }
    }
    return seen;
}

int cb_checkkern(const char *isa_filter, const char *kernel_filter, int bench, uint64_t seed,
                 void (*line)(void *ud, const char *text), void *ud)
{
    static const char *const isas[] = {"scalar", "sse41", "avx2", "neon"};
    struct ck c;
    struct cb_kernels table[2];
    const char *why = NULL;
    int failed = 0, seen = 0, cur = 0;
    if (cb_kernels_init(&table[1], "scalar", &why) != 0) {
        return -1;
    }
    struct cb_kernels ref = table[1];
    memset(&c, 0, sizeof c);
    c.line = line;
    c.ud = ud;
    c.seed = seed != 0 ? seed : CB_CHECKKERN_SEED;
    c.ref = &ref;
    for (size_t i = 0; i < sizeof isas / sizeof isas[0]; i++) {
        char text[96];
        struct cb_kernels *k = &table[cur];
        if (cb_kernels_init(k, isas[i], &why) != 0) {
            snprintf(text, sizeof text, "skip %s: %s", isas[i], why);
            line(ud, text);
            continue;
        }
        if (isa_filter == NULL || strcmp(isa_filter, isas[i]) == 0) {
            seen += ck_isa(&c, k, i > 0 ? &table[1 - cur] : NULL, kernel_filter, bench, &failed);
        }
        cur = 1 - cur;
    }
    return seen > 0 ? failed : -1;
}

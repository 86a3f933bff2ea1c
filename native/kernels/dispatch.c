/* dispatch.c — picks the kernels: was it built in, and does this CPU have it?
 * The build defines CB_HAVE_SSE41, CB_HAVE_AVX2, CB_HAVE_NEON for the ISA
 * folders that it compiles. */
#include <string.h>

#include "impl.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* The OS saves the upper halves of the vector registers. */
static int cb_os_has_ymm(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    (void)hi;
    return (lo & 6u) == 6u;
}

static int cb_cpu_has_sse41(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) {
        return 0;
    }
    return (c & bit_SSSE3) != 0 && (c & bit_SSE4_1) != 0;
}

/* AVX2, FMA and F16C, and an OS that keeps their registers. */
static int cb_cpu_has_avx2(void)
{
    unsigned a, b, c, d;
    const unsigned need = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & need) != need || !cb_os_has_ymm()) {
        return 0;
    }
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2) != 0;
}
#else
static int cb_cpu_has_sse41(void) { return 0; }
static int cb_cpu_has_avx2(void) { return 0; }
#endif

static int cb_cpu_has_scalar(void) { return 1; }

static int cb_cpu_has_neon(void)
{
#if defined(__aarch64__)
    return 1; /* part of ARMv8-A */
#else
    return 0;
#endif
}

struct cb_isa {
    const char *name;
    void (*init)(struct cb_kernels *k); /* NULL = not built in */
    int (*cpu_has)(void);
};

#ifdef CB_HAVE_SSE41
#define CB_INIT_SSE41 cb_kernels_init_sse41
#define CB_NAME_SSE41 ",sse41"
#else
#define CB_INIT_SSE41 NULL
#define CB_NAME_SSE41 ""
#endif
#ifdef CB_HAVE_AVX2
#define CB_INIT_AVX2 cb_kernels_init_avx2
#define CB_NAME_AVX2 ",avx2"
#else
#define CB_INIT_AVX2 NULL
#define CB_NAME_AVX2 ""
#endif
#ifdef CB_HAVE_NEON
#define CB_INIT_NEON cb_kernels_init_neon
#define CB_NAME_NEON ",neon"
#else
#define CB_INIT_NEON NULL
#define CB_NAME_NEON ""
#endif

/* Weak to strong. */
static const struct cb_isa ISAS[] = {
    {"scalar", cb_kernels_init_scalar, cb_cpu_has_scalar},
    {"sse41", CB_INIT_SSE41, cb_cpu_has_sse41},
    {"avx2", CB_INIT_AVX2, cb_cpu_has_avx2},
    {"neon", CB_INIT_NEON, cb_cpu_has_neon},
};
#define CB_N_ISAS (sizeof ISAS / sizeof ISAS[0])

static int cb_refuse(const char **why, const char *phrase)
{
    if (why != NULL) {
        *why = phrase;
    }
    return -1;
}

int cb_kernels_init(struct cb_kernels *k, const char *isa, const char **why)
{
    size_t last = CB_N_ISAS;
    for (size_t i = 0; isa != NULL && i < CB_N_ISAS; i++) {
        if (strcmp(isa, ISAS[i].name) == 0) {
            last = i;
        }
    }
    if (isa != NULL) {
        if (last == CB_N_ISAS) {
            return cb_refuse(why, "unknown instruction set");
        }
        if (ISAS[last].init == NULL) {
            return cb_refuse(why, "not built into this engine");
        }
        if (!ISAS[last].cpu_has()) {
            return cb_refuse(why, "this CPU does not have it");
        }
    }
    for (size_t i = 0; i < CB_N_ISAS && i <= last; i++) {
        if (ISAS[i].init != NULL && ISAS[i].cpu_has()) {
            ISAS[i].init(k);
            k->isa = ISAS[i].name;
        }
    }
    return 0;
}

const char *cb_kernels_built(void)
{
    return "scalar" CB_NAME_SSE41 CB_NAME_AVX2 CB_NAME_NEON;
}

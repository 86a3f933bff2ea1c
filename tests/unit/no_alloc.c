/* no_alloc.c — generates tokens with every way to get memory shut.
 *
 * no_alloc MODEL TOKENS [cheat | LINK]: opens the model, then forbids mmap, mremap and
 * brk by seccomp (the kernel kills the process on the first one) and counts the
 * calls of malloc, calloc, realloc, free and mmap, generates answers until there
 * are TOKENS tokens and prints what it saw. With "cheat" it allocates itself, to show that the
 * trap works. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "colibri.h"

static int counting;
static _Atomic long calls;

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t m);
extern void *__libc_realloc(void *p, size_t n);
extern void __libc_free(void *p);

void *malloc(size_t n)
{
    calls += counting;
    return __libc_malloc(n);
}
void *calloc(size_t n, size_t m)
{
    calls += counting;
    return __libc_calloc(n, m);
}
void *realloc(void *p, size_t n)
{
    calls += counting;
    return __libc_realloc(p, n);
}
void free(void *p)
{
    calls += counting && p != NULL;
    __libc_free(p);
}
void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    calls += counting;
    return (void *)syscall(SYS_mmap, at, n, prot, flags, fd, offset);
}

static int shut(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mremap, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_brk, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog prog = {sizeof code / sizeof code[0], code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
        return -1;
    /* TSYNC: the pool's threads too */
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &prog);
}

static long rss_anon_kib(void)
{
    static char buf[8192];
    int fd = open("/proc/self/status", O_RDONLY);
    ssize_t n = read(fd, buf, sizeof buf - 1);
    close(fd);
    buf[n > 0 ? n : 0] = '\0';
    const char *at = strstr(buf, "RssAnon:");
    return at ? atol(at + 8) : -1;
}

static long shown;

static int on_text(void *ud, const char *text, size_t len, int32_t id)
{
    (void)ud;
    (void)text;
    (void)len;
    shown += id >= 0;
    return 0;
}

/* One answer of at most n tokens; sampled, so that all of the sampler runs */
static int generate(struct cb_engine *e, uint32_t n, uint64_t seed, struct cb_gen_result *res,
                    struct cb_err *err)
{
    static const int32_t prompt[] = {5, 9, 77, 101, 3, 200, 14};
    static const char *const stop[] = {"\x01never\x02"};
    struct cb_sampling s;
    cb_sampling_default(&s);
    s.temperature = 1.2f;
    s.repeat_penalty = 1.1f;
    s.seed = seed;
    cb_reset(e);
    return cb_generate(e, prompt, 7, n, &s, stop, 1, on_text, NULL, res, err);
}

int main(int argc, char **argv)
{
    struct cb_options opt = {.model_dir = argc > 1 ? argv[1] : "", .threads = 2};
    int cheat = argc > 3 && strcmp(argv[3], "cheat") == 0;
    if (argc > 3 && !cheat) { /* half of the experts at the other end */
        opt.offload = argv[3];
        opt.offload_force = 51;
    }
    struct cb_engine *e = NULL;
    struct cb_err err = {0, ""};
    struct cb_gen_result res;
    char golden[65];
    uint32_t n = argc > 2 ? (uint32_t)atoi(argv[2]) : 0;
    if (cb_engine_open(&opt, &e, &err) < 0 || cb_golden(e, golden, &err) < 0) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    static char out[256];
    setvbuf(stdout, out, _IOFBF, sizeof out);
    long before = rss_anon_kib();
    if (shut() != 0) {
        fprintf(stderr, "seccomp: %s\n", strerror(errno));
        return 77;
    }
    counting = 1;
    int rc = 0;
    for (uint64_t seed = 0; rc == 0 && shown < (long)n && seed < 1000; seed++)
        rc = generate(e, n, seed, &res, &err);
    if (cheat && malloc((size_t)64 << 20) == NULL)
        return 2;
    counting = 0;
    printf("rc=%d calls=%ld tokens=%ld rss_before=%ld rss_after=%ld\n", rc, calls, shown, before,
           rss_anon_kib());
    fflush(stdout);
    if (rc < 0)
        fprintf(stderr, "%s\n", err.msg);
    _exit(rc < 0);
}

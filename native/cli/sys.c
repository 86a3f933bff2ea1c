/* sys.c — see sys.h. Linux tells through /proc and /sys; elsewhere the fields
 * stay unknown. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#endif
#include "sys.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <corecrt_startup.h>
#include <fcntl.h>
#include <io.h>
#include <process.h>
#else
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

static volatile sig_atomic_t interrupted; /* the signal's number */
static volatile sig_atomic_t reload;

int sys_interrupted(void)
{
    return interrupted != 0;
}

int sys_interrupt_status(void)
{
    return interrupted != 0 ? 128 + (int)interrupted : 0;
}

int sys_reload_pending(void)
{
    return reload != 0;
}

int sys_reload_wanted(void)
{
    int wanted = reload != 0;
    reload = 0;
    return wanted;
}

static void on_interrupt(int sig)
{
    interrupted = sig;
    signal(sig, SIG_DFL); /* the second one is not asked */
}

#if defined(_WIN32)
long sys_pid(void)
{
    return (long)_getpid();
}

/* UTF-8 to UTF-16, malloc'ed; NULL on failure. */
static wchar_t *widen(const char *text)
{
    int n = MultiByteToWideChar(CP_UTF8, 0, text, -1, NULL, 0);
    wchar_t *wide = n > 0 ? malloc((size_t)n * sizeof *wide) : NULL;
    if (wide != NULL)
        (void)MultiByteToWideChar(CP_UTF8, 0, text, -1, wide, n);
    return wide;
}

int sys_replace(const char *from, const char *to)
{
    wchar_t *a = widen(from), *b = widen(to);
    int done = a != NULL && b != NULL && MoveFileExW(a, b, MOVEFILE_REPLACE_EXISTING);
    free(a);
    free(b);
    if (!done)
        errno = EACCES;
    return done ? 0 : -1;
}

FILE *sys_open(const char *path, const char *mode)
{
    wchar_t *wide_path = widen(path), *wide_mode = widen(mode);
    FILE *f = wide_path != NULL && wide_mode != NULL ? _wfopen(wide_path, wide_mode) : NULL;
    free(wide_path);
    free(wide_mode);
    return f;
}

/* The command line as the system keeps it, in UTF-8; lives as long as we do. */
static char **utf8_args(void)
{
    if (_configure_wide_argv(_crt_argv_unexpanded_arguments) != 0 || __p___wargv() == NULL)
        return NULL;
    wchar_t **wide = *__p___wargv();
    size_t n = 0;
    while (wide != NULL && wide[n] != NULL)
        n++;
    char **args = n > 0 ? calloc(n + 1, sizeof *args) : NULL;
    for (size_t i = 0; args != NULL && i < n; i++) {
        int bytes = WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, NULL, 0, NULL, NULL);
        args[i] = bytes > 0 ? malloc((size_t)bytes) : NULL;
        if (args[i] == NULL)
            return NULL;
        (void)WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, args[i], bytes, NULL, NULL);
    }
    return args;
}

void sys_begin(char ***argv)
{
    (void)_setmode(_fileno(stdin), _O_BINARY);
    (void)_setmode(_fileno(stdout), _O_BINARY);
    (void)SetConsoleOutputCP(CP_UTF8);
    char **args = utf8_args();
    if (args != NULL)
        *argv = args;
}

void sys_catch_interrupt(void)
{
    signal(SIGINT, on_interrupt);
    signal(SIGTERM, on_interrupt);
}

void sys_catch_reload(void)
{
}

void sys_memory(struct sys_memory *m)
{
    m->rss_anon = m->rss_file = m->peak = UINT64_MAX;
}

void sys_faults(struct sys_faults *f)
{
    f->minor = f->major = UINT64_MAX;
}

void sys_machine(struct sys_machine *m)
{
    memset(m, 0, sizeof *m);
    m->load1 = -1.0;
}
#else
long sys_pid(void)
{
    return (long)getpid();
}

int sys_replace(const char *from, const char *to)
{
    return rename(from, to);
}

FILE *sys_open(const char *path, const char *mode)
{
    return fopen(path, mode);
}

void sys_begin(char ***argv)
{
    (void)argv;
}

void sys_catch_interrupt(void)
{
    struct sigaction sa;
    memset(&sa, 0, sizeof sa);
    sa.sa_handler = on_interrupt;
    sa.sa_flags = SA_RESTART;
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
}

static void on_reload(int sig)
{
    reload = sig;
}

void sys_catch_reload(void)
{
    struct sigaction sa;
    memset(&sa, 0, sizeof sa);
    sa.sa_handler = on_reload;
    sa.sa_flags = SA_RESTART;
    sigaction(SIGHUP, &sa, NULL);
}

/* Whole of a small file, NUL-terminated; read(2) only, so nothing is allocated. */
static int slurp(const char *path, char *buf, size_t cap)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    size_t n = 0;
    for (ssize_t got; n + 1 < cap && (got = read(fd, buf + n, cap - 1 - n)) > 0;)
        n += (size_t)got;
    close(fd);
    while (n > 0 && buf[n - 1] == '\n')
        n--;
    buf[n] = '\0';
    return n > 0;
}

static uint64_t status_field(const char *status, const char *key)
{
    const char *at = strstr(status, key);
    return at ? strtoull(at + strlen(key), NULL, 10) * 1024u : UINT64_MAX;
}

void sys_memory(struct sys_memory *m)
{
    char buf[8192];
    if (!slurp("/proc/self/status", buf, sizeof buf))
        buf[0] = '\0';
    m->rss_anon = status_field(buf, "RssAnon:");
    m->rss_file = status_field(buf, "RssFile:");
    m->peak = status_field(buf, "VmHWM:");
}

void sys_faults(struct sys_faults *f)
{
    struct rusage u;
    if (getrusage(RUSAGE_SELF, &u) != 0) {
        f->minor = f->major = UINT64_MAX;
        return;
    }
    f->minor = (uint64_t)u.ru_minflt;
    f->major = (uint64_t)u.ru_majflt;
}

static uint64_t slurp_u64(const char *path)
{
    char buf[64];
    return slurp(path, buf, sizeof buf) ? strtoull(buf, NULL, 10) : 0;
}

static void read_clocks(struct sys_machine *m)
{
    char path[96], buf[32];
    long n = sysconf(_SC_NPROCESSORS_CONF);
    for (long i = 0; i < n && i < SYS_CPUS; i++) {
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%ld/cpufreq/scaling_cur_freq", i);
        m->khz[m->n_cpu++] = slurp_u64(path);
        snprintf(path, sizeof path,
                 "/sys/devices/system/cpu/cpu%ld/thermal_throttle/core_throttle_count", i);
        if (slurp(path, buf, sizeof buf)) {
            m->has_throttle_count = 1;
            m->throttle_count += strtoull(buf, NULL, 10);
        }
    }
    m->khz_max = slurp_u64("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq");
    if (!slurp("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", m->governor,
               sizeof m->governor))
        m->governor[0] = '\0';
}

void sys_machine(struct sys_machine *m)
{
    char path[96], buf[64];
    memset(m, 0, sizeof *m);
    read_clocks(m);
    for (int i = 0; i < 32 && m->n_zone < SYS_ZONES; i++) {
        snprintf(path, sizeof path, "/sys/class/thermal/thermal_zone%d/temp", i);
        if (!slurp(path, buf, sizeof buf))
            continue;
        m->milli_c[m->n_zone] = strtoll(buf, NULL, 10);
        snprintf(path, sizeof path, "/sys/class/thermal/thermal_zone%d/type", i);
        if (!slurp(path, m->zone[m->n_zone], sizeof m->zone[0]))
            m->zone[m->n_zone][0] = '\0';
        m->n_zone++;
    }
    if (slurp("/sys/devices/platform/soc/soc:firmware/get_throttled", buf, sizeof buf)) {
        m->has_throttled = 1;
        m->throttled = (uint32_t)strtoul(buf, NULL, 16);
    }
    m->load1 = slurp("/proc/loadavg", buf, sizeof buf) ? strtod(buf, NULL) : -1.0;
}
#endif

int sys_read_all(FILE *f, const char *name, size_t cap, char **out, size_t *n, struct cb_err *err)
{
    size_t room = 4096, used = 0;
    char *buf = malloc(room + 1);
    while (buf != NULL) {
        used += fread(buf + used, 1, room - used, f);
        if (used < room || room > cap)
            break;
        room *= 2;
        char *more = realloc(buf, room + 1);
        if (more == NULL)
            free(buf);
        buf = more;
    }
    if (buf == NULL)
        return cb_fail(err, CB_EIO, "no memory to read %s", name);
    if (ferror(f) || used > cap) {
        free(buf);
        if (used > cap)
            return cb_fail(err, CB_EINVAL, "%s is longer than %zu bytes", name, cap);
        return cb_fail(err, CB_EIO, "cannot read %s: %s", name, strerror(errno));
    }
    buf[used] = '\0';
    *out = buf;
    *n = used;
    return CB_OK;
}

/* sys.h — what the tool wants from the operating system beyond core/os.h. */
#ifndef CLI_SYS_H
#define CLI_SYS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "colibri.h"

long sys_pid(void);
int sys_replace(const char *from, const char *to); /* rename over; 0 or -1 with errno */
FILE *sys_open(const char *path, const char *mode); /* fopen; paths are UTF-8 everywhere */

/* Windows: no CR LF translation, a UTF-8 console, and *argv in UTF-8 instead of
 * the ANSI code page (stays as it is when that fails). Nothing elsewhere. */
void sys_begin(char ***argv);

/* The first Ctrl-C or SIGTERM after this only sets the flag, the second one ends us. */
void sys_catch_interrupt(void);
int sys_interrupted(void);
int sys_interrupt_status(void); /* exit status for it: 130 or 143; 0 = not interrupted */

/* SIGHUP only sets a flag from here on; nothing where there is no such signal. */
void sys_catch_reload(void);
int sys_reload_pending(void);
int sys_reload_wanted(void); /* as pending, and clears the flag */

/* Lines of a file or of standard input, with room for the longest taken at once.
 * Waiting for more ends when a signal comes. */
struct sys_lines {
    int fd;
    char *buf;             /* [cap + 1] */
    size_t cap, n, at;     /* bytes held; where the next line begins */
    int eof, skipping;
};
enum sys_line { SYS_LINE_END, SYS_LINE_GOT, SYS_LINE_LONG, SYS_LINE_SIGNAL };
/* path "-" = standard input. cap: bytes of the longest line. */
int sys_lines_open(struct sys_lines *l, const char *path, size_t cap, struct cb_err *err);
/* enum sys_line or a negative code. The line is NUL-terminated, without its end
 * (LF or CR LF), and stays until the next call. */
int sys_lines_next(struct sys_lines *l, char **line, size_t *n, struct cb_err *err);
void sys_lines_close(struct sys_lines *l);

/* Reads a stream to its end, at most cap bytes: *out is malloc'ed and
 * NUL-terminated. CB_EINVAL when there is more, CB_EIO otherwise. */
int sys_read_all(FILE *f, const char *name, size_t cap, char **out, size_t *n, struct cb_err *err);

/* UINT64_MAX where the system does not tell. */
struct sys_memory {
    uint64_t rss_anon, rss_file, peak; /* bytes; RssAnon, RssFile, VmHWM of /proc/self/status */
};
void sys_memory(struct sys_memory *m);
struct sys_faults {
    uint64_t minor, major;
};
void sys_faults(struct sys_faults *f);

#define SYS_CPUS 64
#define SYS_ZONES 8
struct sys_machine {
    uint32_t n_cpu;               /* entries of khz */
    uint64_t khz[SYS_CPUS];       /* current clock of each CPU; 0 = unknown */
    uint64_t khz_max;             /* of CPU 0; 0 = unknown */
    char governor[32];            /* of CPU 0; "" = unknown */
    uint32_t n_zone;
    char zone[SYS_ZONES][32];     /* type of the thermal zone */
    int64_t milli_c[SYS_ZONES];   /* its temperature in 1/1000 °C */
    int has_throttled;            /* Raspberry Pi firmware: get_throttled */
    uint32_t throttled;           /* its bits */
    int has_throttle_count;       /* x86: thermal_throttle */
    uint64_t throttle_count;      /* events since boot, all cores */
    double load1;                 /* one-minute load average; < 0 = unknown */
};
void sys_machine(struct sys_machine *m); /* opens files: call outside of timing */

#endif

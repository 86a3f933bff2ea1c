/* machine.c — see machine.h. read(2) only: nothing is allocated. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include "serve/machine.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int slurp(const char *path, char *buf, size_t cap)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, buf, cap - 1) : -1;
    if (fd >= 0)
        close(fd);
    if (n > 0 && buf[n - 1] == '\n')
        n--;
    buf[n > 0 ? n : 0] = '\0';
    return n > 0;
}

void cb_machine_read(struct cb_machine *m)
{
    char path[80], buf[4096];
    memset(m, 0, sizeof *m);
    for (int i = 0; i < 32 && m->n_zone < CB_ZONES; i++) {
        snprintf(path, sizeof path, "/sys/class/thermal/thermal_zone%d/temp", i);
        if (!slurp(path, buf, 64))
            continue;
        m->milli_c[m->n_zone] = strtoll(buf, NULL, 10);
        snprintf(path, sizeof path, "/sys/class/thermal/thermal_zone%d/type", i);
        (void)slurp(path, m->zone[m->n_zone], sizeof m->zone[0]);
        m->n_zone++;
    }
    if (slurp("/proc/self/status", buf, sizeof buf)) {
        const char *at = strstr(buf, "RssAnon:");
        m->rss_anon = at != NULL ? strtoull(at + 8, NULL, 10) * 1024u : 0;
    }
}
#else
typedef int cb_serve_machine_is_posix;
#endif

/* notify.c — see notify.h. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include "serve/notify.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define SUPERVISED_INTERVAL_NS UINT64_C(1000000000)

static int connect_socket(const char *path)
{
    struct sockaddr_un a;
    size_t n = strlen(path);
    if ((path[0] != '/' && path[0] != '@') || n >= sizeof a.sun_path)
        return -1;
    memset(&a, 0, sizeof a);
    a.sun_family = AF_UNIX;
    memcpy(a.sun_path, path, n);
    if (path[0] == '@')
        a.sun_path[0] = '\0'; /* the abstract name space */
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&a, len) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

void cb_notify_open(struct cb_notify *n, int beat_fd)
{
    const char *path = getenv("NOTIFY_SOCKET"), *usec = getenv("WATCHDOG_USEC");
    const char *pid = getenv("WATCHDOG_PID");
    *n = (struct cb_notify){.fd = -1, .beat_fd = beat_fd};
    if (beat_fd >= 0) {
        n->interval_ns = SUPERVISED_INTERVAL_NS;
        return;
    }
    if (path != NULL)
        n->fd = connect_socket(path);
    if (n->fd >= 0 && usec != NULL && (pid == NULL || strtol(pid, NULL, 10) == (long)getpid())) {
        unsigned long long us = strtoull(usec, NULL, 10);
        if (us > 0 && us < UINT64_MAX / 1000)
            n->interval_ns = (uint64_t)us * 1000 / 3; /* three beats a period */
    }
}

void cb_notify_close(struct cb_notify *n)
{
    if (n->fd >= 0)
        close(n->fd);
    n->fd = -1;
}

/* 0 = a manager that is busy has no room for it now. */
static int tell(struct cb_notify *n, const char *text, char beat)
{
    int heard = 1;
    if (n->fd >= 0 && text != NULL)
        heard = send(n->fd, text, strlen(text), MSG_NOSIGNAL | MSG_DONTWAIT) >= 0 ||
                (errno != EAGAIN && errno != ENOBUFS);
    if (n->beat_fd >= 0 && beat != 0) {
        ssize_t done = write(n->beat_fd, &beat, 1);
        (void)done; /* a pipe that is full holds beats enough */
    }
    return heard;
}

void cb_notify_ready(struct cb_notify *n)
{
    char text[64];
    snprintf(text, sizeof text, "READY=1\nMAINPID=%ld", (long)getpid());
    n->unheard = !tell(n, text, CB_BEAT_READY);
}

void cb_notify_again(struct cb_notify *n)
{
    if (n->unheard)
        cb_notify_ready(n);
}

void cb_notify_beat(struct cb_notify *n)
{
    (void)tell(n, n->interval_ns != 0 ? "WATCHDOG=1" : NULL, CB_BEAT_ALIVE);
}

void cb_notify_stopping(struct cb_notify *n)
{
    (void)tell(n, "STOPPING=1", CB_BEAT_STOPPING);
}

void cb_notify_status(struct cb_notify *n, const char *text)
{
    char line[256];
    snprintf(line, sizeof line, "STATUS=%.200s", text);
    (void)tell(n, line, 0);
}
#else
typedef int cb_serve_notify_is_posix;
#endif

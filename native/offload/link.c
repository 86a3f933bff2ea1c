/* link.c — see link.h. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include "offload/link.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <termios.h>
#include <unistd.h>

#include "core/os.h"

/* ---- names -------------------------------------------------------------- */

static const struct {
    uint32_t baud;
    speed_t speed;
} SPEEDS[] = {
    {9600, B9600}, {115200, B115200}, {230400, B230400}, {460800, B460800}, {921600, B921600},
    {1000000, B1000000}, {2000000, B2000000}, {3000000, B3000000}, {4000000, B4000000},
};
#define N_SPEED (sizeof SPEEDS / sizeof SPEEDS[0])

static int take_path(struct cb_link_addr *a, const char *text, size_t n, struct cb_err *err)
{
    if (n == 0 || n >= sizeof a->path)
        return cb_fail(err, CB_EINVAL, "offload: a path has 1 to %zu bytes", sizeof a->path - 1);
    memcpy(a->path, text, n);
    a->path[n] = '\0';
    return 0;
}

static int parse_tty(struct cb_link_addr *a, const char *text, struct cb_err *err)
{
    const char *at = strrchr(text, '@');
    a->kind = CB_LINK_TTY;
    if (at == NULL)
        return take_path(a, text, strlen(text), err);
    char *end;
    unsigned long baud = strtoul(at + 1, &end, 10);
    for (size_t i = 0; i < N_SPEED && *end == '\0'; i++)
        if (SPEEDS[i].baud == baud)
            a->baud = (uint32_t)baud;
    if (a->baud == 0)
        return cb_fail(err, CB_EINVAL, "offload: no such baud rate: %.20s", at + 1);
    return take_path(a, text, (size_t)(at - text), err);
}

/* Loopback, private and link-local networks. */
static int is_near(uint32_t host)
{
    return host >> 24 == 127 || host >> 24 == 10 || host >> 20 == 0xac1 || host >> 16 == 0xc0a8 ||
           host >> 16 == 0xa9fe;
}

static int parse_tcp(struct cb_link_addr *a, const char *text, struct cb_err *err)
{
    char host[16];
    struct in_addr in;
    char *end;
    const char *colon = strrchr(text, ':');
    size_t n = colon != NULL ? (size_t)(colon - text) : 0;
    unsigned long port = colon != NULL ? strtoul(colon + 1, &end, 10) : 0;
    if (colon == NULL || n == 0 || n >= sizeof host || colon[1] < '0' || colon[1] > '9' ||
        *end != '\0' || port == 0 || port > 65535)
        return cb_fail(err, CB_EINVAL, "offload: tcp:ADDRESS:PORT, with a numeric IPv4 address, "
                       "not tcp:%.60s", text);
    memcpy(host, text, n);
    host[n] = '\0';
    if (inet_pton(AF_INET, host, &in) != 1)
        return cb_fail(err, CB_EINVAL, "offload: %s is no numeric IPv4 address", host);
    a->kind = CB_LINK_TCP;
    a->host = ntohl(in.s_addr);
    a->port = (uint16_t)port;
    if (!is_near(a->host))
        return cb_fail(err, CB_EINVAL, "offload: %s is neither loopback nor a private network; the "
                       "protocol has no authentication", host);
    return 0;
}

int cb_link_parse(struct cb_link_addr *a, const char *text, struct cb_err *err)
{
    static const char *const named[] = {"pcie:", "usb4:", "altmode:"};
    memset(a, 0, sizeof *a);
    for (size_t i = 0; i < sizeof named / sizeof named[0]; i++)
        if (strncmp(text, named[i], strlen(named[i])) == 0)
            return cb_fail(err, CB_EUNSUPPORTED, "offload: the transport %.*s has no implementation; "
                           "there are /dev/…, unix: and tcp:", (int)strlen(named[i]) - 1, text);
    if (strncmp(text, "unix:", 5) == 0) {
        a->kind = CB_LINK_UNIX;
        return take_path(a, text + 5, strlen(text + 5), err);
    }
    if (strncmp(text, "tcp:", 4) == 0)
        return parse_tcp(a, text + 4, err);
    if (strncmp(text, "tty:", 4) == 0)
        return parse_tty(a, text + 4, err);
    if (text[0] == '/')
        return parse_tty(a, text, err);
    return cb_fail(err, CB_EINVAL, "offload: %.60s is neither /dev/…, unix:PATH nor "
                   "tcp:ADDRESS:PORT", text);
}

/* ---- opening ------------------------------------------------------------ */

/* *before gets the mode that was set. */
static int raw_mode(int fd, uint32_t baud, struct termios *before)
{
    struct termios t;
    if (tcgetattr(fd, &t) != 0)
        return -1;
    *before = t;
    cfmakeraw(&t);
    t.c_cflag |= CLOCAL | CREAD;
    t.c_cflag &= (tcflag_t)~CRTSCTS;
    t.c_cc[VMIN] = 1;
    t.c_cc[VTIME] = 0;
    for (size_t i = 0; i < N_SPEED; i++)
        if (SPEEDS[i].baud == baud)
            cfsetspeed(&t, SPEEDS[i].speed);
    if (tcsetattr(fd, TCSANOW, &t) != 0)
        return -1;
    return tcflush(fd, TCIOFLUSH);
}

static int open_tty(struct cb_link *l, const struct cb_link_addr *a, struct cb_err *err)
{
    l->fd = open(a->path, O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    if (l->fd < 0)
        return cb_fail(err, CB_EIO, "opening %.120s: %s", a->path, strerror(errno));
    int rc = 0;
    if (flock(l->fd, LOCK_EX | LOCK_NB) != 0)
        rc = cb_fail(err, CB_EIO, "%.120s is in use by another program", a->path);
    else if (raw_mode(l->fd, a->baud, &l->before) != 0)
        rc = cb_fail(err, CB_EIO, "%.120s is no serial device: %s", a->path, strerror(errno));
    else
        l->is_tty = 1;
    if (l->is_tty)
        return 0;
    cb_link_close(l);
    return rc;
}

union address {
    struct sockaddr any;
    struct sockaddr_un un;
    struct sockaddr_in in;
};

static socklen_t socket_address(union address *to, const struct cb_link_addr *a)
{
    memset(to, 0, sizeof *to);
    if (a->kind == CB_LINK_UNIX) {
        to->un.sun_family = AF_UNIX;
        memcpy(to->un.sun_path, a->path, sizeof a->path);
        return sizeof to->un;
    }
    to->in.sin_family = AF_INET;
    to->in.sin_addr.s_addr = htonl(a->host);
    to->in.sin_port = htons(a->port);
    return sizeof to->in;
}

/* "unix:/run/x" or "tcp:10.0.0.1:7790", for messages. */
static const char *name_of(char out[128], const struct cb_link_addr *a)
{
    if (a->kind == CB_LINK_TCP)
        snprintf(out, 128, "tcp:%u.%u.%u.%u:%u", a->host >> 24, a->host >> 16 & 255,
                 a->host >> 8 & 255, a->host & 255, a->port);
    else
        snprintf(out, 128, "%s%s", a->kind == CB_LINK_UNIX ? "unix:" : "", a->path);
    return out;
}

static int new_socket(const struct cb_link_addr *a)
{
    int one = 1, fd = socket(a->kind == CB_LINK_UNIX ? AF_UNIX : AF_INET, SOCK_STREAM, 0);
    if (fd < 0)
        return -1;
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    (void)fcntl(fd, F_SETFL, O_NONBLOCK);
    if (a->kind == CB_LINK_TCP)
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

/* Waits for a connection under way. */
static int finish_connect(int fd, int wake, int timeout_ms)
{
    struct pollfd p[2] = {{fd, POLLOUT, 0}, {wake, POLLIN, 0}};
    int why = 0;
    socklen_t len = sizeof why;
    int n = poll(p, wake >= 0 ? 2 : 1, timeout_ms);
    if (n <= 0 || p[0].revents == 0)
        return n == 0 ? ETIMEDOUT : EINTR;
    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &len) == 0 ? why : errno;
}

int cb_link_dial(struct cb_link *l, const struct cb_link_addr *a, int wake, int timeout_ms,
                 struct cb_err *err)
{
    union address to;
    char name[128];
    memset(l, 0, sizeof *l);
    l->fd = -1;
    if (a->kind == CB_LINK_TTY)
        return open_tty(l, a, err);
    socklen_t len = socket_address(&to, a);
    l->fd = new_socket(a);
    int why = l->fd < 0 || connect(l->fd, &to.any, len) != 0 ? errno : 0;
    if (l->fd >= 0 && why == EINPROGRESS)
        why = finish_connect(l->fd, wake, timeout_ms);
    if (why == 0)
        return 0;
    cb_link_close(l);
    return cb_fail(err, CB_EIO, "connecting to the module at %s: %s", name_of(name, a),
                   strerror(why));
}

int cb_link_listen(int *fd, const struct cb_link_addr *a, struct cb_err *err)
{
    union address to;
    struct stat st;
    char name[128];
    int one = 1;
    *fd = -1;
    if (a->kind == CB_LINK_TTY)
        return cb_fail(err, CB_EINVAL, "offload: a serial device is opened, not listened on");
    socklen_t len = socket_address(&to, a);
    if (a->kind == CB_LINK_UNIX && lstat(a->path, &st) == 0 && S_ISSOCK(st.st_mode)) {
        if (cb_os_unix_answers(a->path))
            return cb_fail(err, CB_EIO, "listening on %s: another program does", name_of(name, a));
        (void)unlink(a->path);
    }
    *fd = new_socket(a);
    if (*fd >= 0 && a->kind == CB_LINK_TCP)
        (void)setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (*fd >= 0 && bind(*fd, &to.any, len) == 0 && listen(*fd, 1) == 0)
        return 0;
    int rc = cb_fail(err, CB_EIO, "listening on %s: %s", name_of(name, a), strerror(errno));
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
    return rc;
}

void cb_link_unlisten(int fd, const struct cb_link_addr *a)
{
    if (fd < 0)
        return;
    close(fd);
    if (a->kind == CB_LINK_UNIX)
        (void)unlink(a->path);
}

/* Whether accept() may succeed later. Without descriptors or memory it fails at
 * once while somebody waits: not asked again before the time is over. */
static int refused_for_now(int error, int timeout_ms)
{
    if (error != EMFILE && error != ENFILE && error != ENOBUFS && error != ENOMEM)
        return error == EAGAIN || error == EINTR || error == ECONNABORTED;
    (void)poll(NULL, 0, timeout_ms);
    return 1;
}

int cb_link_accept(struct cb_link *l, int fd, int timeout_ms, struct cb_err *err)
{
    struct pollfd p = {fd, POLLIN, 0};
    int one = 1;
    memset(l, 0, sizeof *l);
    l->fd = -1;
    if (poll(&p, 1, timeout_ms) <= 0)
        return 0;
    l->fd = accept(fd, NULL, NULL);
    if (l->fd < 0)
        return refused_for_now(errno, timeout_ms)
                   ? 0
                   : cb_fail(err, CB_EIO, "accepting: %s", strerror(errno));
    (void)fcntl(l->fd, F_SETFD, FD_CLOEXEC);
    (void)fcntl(l->fd, F_SETFL, O_NONBLOCK);
    (void)setsockopt(l->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return 1;
}

void cb_link_close(struct cb_link *l)
{
    if (l->fd >= 0 && l->is_tty) {
        (void)tcflush(l->fd, TCIOFLUSH);
        (void)tcsetattr(l->fd, TCSANOW, &l->before);
    }
    if (l->fd >= 0)
        close(l->fd);
    l->fd = -1;
    l->is_tty = 0;
}

/* ---- bytes -------------------------------------------------------------- */

static long moved(ssize_t n)
{
    if (n > 0)
        return (long)n;
    return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? 0 : -1;
}

long cb_link_read(const struct cb_link *l, void *p, size_t n)
{
    return l->fd < 0 ? -1 : moved(read(l->fd, p, n));
}

long cb_link_write(const struct cb_link *l, const void *p, size_t n)
{
    if (l->fd < 0)
        return -1;
    ssize_t done = l->is_tty ? write(l->fd, p, n) : send(l->fd, p, n, MSG_NOSIGNAL);
    return done == 0 ? 0 : moved(done);
}

int cb_link_wait(const struct cb_link *l, int want, int wake, int timeout_ms)
{
    short ask = (short)((want & CB_LINK_READ ? POLLIN : 0) | (want & CB_LINK_WRITE ? POLLOUT : 0));
    struct pollfd p[2] = {{wake, POLLIN, 0}, {l->fd, ask, 0}};
    int got = 0; /* poll passes over negative descriptors */
    if (poll(p, 2, timeout_ms) <= 0)
        return 0;
    if (p[0].revents != 0)
        got |= CB_LINK_WOKEN;
    if (p[1].revents & POLLIN)
        got |= CB_LINK_READ;
    if (p[1].revents & POLLOUT)
        got |= CB_LINK_WRITE;
    if (p[1].revents & (POLLHUP | POLLERR | POLLNVAL))
        got |= want;
    return got;
}

int cb_wake_open(int wake[2], struct cb_err *err)
{
    if (pipe(wake) != 0)
        return cb_fail(err, CB_EIO, "making a pipe: %s", strerror(errno));
    for (int i = 0; i < 2; i++) {
        (void)fcntl(wake[i], F_SETFD, FD_CLOEXEC);
        (void)fcntl(wake[i], F_SETFL, O_NONBLOCK);
    }
    return 0;
}

void cb_wake_up(const int wake[2])
{
    ssize_t ignored = write(wake[1], "", 1); /* full = already woken */
    (void)ignored;
}

void cb_wake_clear(const int wake[2])
{
    char bytes[64];
    while (read(wake[0], bytes, sizeof bytes) > 0)
        ;
}

void cb_wake_close(int wake[2])
{
    for (int i = 0; i < 2; i++) {
        if (wake[i] >= 0)
            close(wake[i]);
        wake[i] = -1;
    }
}
#else
typedef int cb_link_is_empty_here;
#endif

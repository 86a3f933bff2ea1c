/* link.h — byte streams that the offload protocol runs over.
 *
 *   /dev/ttyGS0, tty:/dev/ttyS1@921600   a serial device in raw mode
 *   unix:/run/expertd.sock               a Unix socket
 *   tcp:127.0.0.1:7790                   TCP, loopback or private addresses only: there is no
 *                                        authentication, the cable is the boundary
 *   pcie:…, usb4:…, altmode:…            refused by name: no transport behind them yet
 *
 * Nothing here blocks longer than it is told to. */
#ifndef CB_OFFLOAD_LINK_H
#define CB_OFFLOAD_LINK_H

#include <stddef.h>
#include <stdint.h>
#if !defined(_WIN32)
#include <termios.h>
#endif

#include "colibri.h"

enum cb_link_kind { CB_LINK_TTY, CB_LINK_UNIX, CB_LINK_TCP };
struct cb_link_addr {
    enum cb_link_kind kind;
    char path[108];   /* of a tty or a Unix socket */
    uint32_t host;    /* IPv4, host byte order */
    uint16_t port;
    uint32_t baud;    /* 0 = as it is: USB does not care */
};
/* CB_EINVAL, or CB_EUNSUPPORTED for a transport that is only named. */
int cb_link_parse(struct cb_link_addr *a, const char *text, struct cb_err *err);

struct cb_link {
    int fd;           /* -1 = closed */
    int is_tty;
#if !defined(_WIN32)
    struct termios before; /* of a tty: put back when it is closed */
#endif
};
enum cb_link_event { CB_LINK_READ = 1, CB_LINK_WRITE = 2, CB_LINK_WOKEN = 4 };

/* Opens a tty, which must not be in use, or connects; gives up after timeout_ms
 * or when wake becomes readable. */
int cb_link_dial(struct cb_link *l, const struct cb_link_addr *a, int wake, int timeout_ms,
                 struct cb_err *err);
/* *fd of a listening socket; replaces a Unix socket that nobody listens on. */
int cb_link_listen(int *fd, const struct cb_link_addr *a, struct cb_err *err);
/* Removes the Unix socket too. */
void cb_link_unlisten(int fd, const struct cb_link_addr *a);
/* 1 = *l is connected, 0 = nobody came in time. */
int cb_link_accept(struct cb_link *l, int fd, int timeout_ms, struct cb_err *err);
/* Drops what was not sent yet: waiting for a tty to take it may last half a minute. */
void cb_link_close(struct cb_link *l);

/* Bytes moved, 0 = not now, -1 = the other end is gone. */
long cb_link_read(const struct cb_link *l, void *p, size_t n);
long cb_link_write(const struct cb_link *l, const void *p, size_t n);
/* Waits for what want says (CB_LINK_READ, CB_LINK_WRITE or both), or for wake
 * (-1 = none) to be readable: bits of enum cb_link_event. A hang-up counts as
 * whatever is wanted. timeout_ms < 0 = for ever. */
int cb_link_wait(const struct cb_link *l, int want, int wake, int timeout_ms);

/* A pipe to wake a waiting thread with. */
int cb_wake_open(int wake[2], struct cb_err *err);
void cb_wake_up(const int wake[2]);
void cb_wake_clear(const int wake[2]);
void cb_wake_close(int wake[2]);

#endif

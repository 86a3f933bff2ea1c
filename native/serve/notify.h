/* notify.h — tells a service manager how it goes: systemd's protocol
 * (sd_notify(3)), or one byte a message down a supervisor's pipe. */
#ifndef CB_SERVE_NOTIFY_H
#define CB_SERVE_NOTIFY_H

#include <stdint.h>

#define CB_BEAT_READY 'R'
#define CB_BEAT_ALIVE 'B'
#define CB_BEAT_STOPPING 'S'

struct cb_notify {
    int fd;               /* datagram socket, -1 = none */
    int beat_fd;          /* pipe, -1 = none */
    uint64_t interval_ns; /* between two beats; 0 = nobody asked for any */
    int unheard;          /* READY could not be said yet: the manager's socket is full */
};

/* Reads NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID. beat_fd >= 0 instead
 * means a supervisor, which speaks with the manager itself. */
void cb_notify_open(struct cb_notify *n, int beat_fd);
void cb_notify_close(struct cb_notify *n);
void cb_notify_ready(struct cb_notify *n);
void cb_notify_again(struct cb_notify *n); /* what was not heard */
void cb_notify_beat(struct cb_notify *n);
void cb_notify_stopping(struct cb_notify *n);
void cb_notify_status(struct cb_notify *n, const char *text); /* one line */

#endif

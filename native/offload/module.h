/* module.h — the other end of the offload link: takes EXEC, computes with the
 * engine's own kernels, answers RESULT. One connection at a time. */
#ifndef CB_OFFLOAD_MODULE_H
#define CB_OFFLOAD_MODULE_H

#include <stdint.h>

#include "colibri.h"

struct cb_module_stats {
    uint64_t connections, refused, execs, rows, failed;
    uint64_t bytes_in, bytes_out, crc, garbage, ns_busy;
};
/* what: "listening", "greeted", "gone", "refused: …". May be NULL. */
typedef void (*cb_module_note_fn)(void *ud, const char *what);

struct cb_module_options {
    const char *device;      /* a serial device, or … */
    const char *listen;      /* … unix:PATH or tcp:ADDRESS:PORT */
    uint32_t once;           /* end with the first connection */
    int (*stop)(void *ud);   /* asked at least five times a second */
    cb_module_note_fn note;
    void *ud;
};

/* Serves e until stop says so. golden: as this machine computed it, e's
 * manifest promises the same. e must not be used by others meanwhile. */
int cb_module_serve(struct cb_engine *e, const struct cb_module_options *opt,
                    struct cb_module_stats *stats, struct cb_err *err);

#endif

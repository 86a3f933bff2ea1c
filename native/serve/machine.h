/* machine.h — what Linux says of this machine and process; unknown elsewhere. */
#ifndef CB_SERVE_MACHINE_H
#define CB_SERVE_MACHINE_H

#include <stdint.h>

#define CB_ZONES 8u

struct cb_machine {
    uint32_t n_zone;
    char zone[CB_ZONES][32];   /* type of the thermal zone */
    int64_t milli_c[CB_ZONES]; /* 1/1000 degree Celsius */
    uint64_t rss_anon;         /* bytes; 0 = unknown */
};
void cb_machine_read(struct cb_machine *m);

#endif

/* internal.h — between client.c (layers), pack.c (their frames) and io.c
 * (the link's thread). The mutex is held in all of these. */
#ifndef CB_OFFLOAD_INTERNAL_H
#define CB_OFFLOAD_INTERNAL_H

#include "offload/offload.h"

/* Room for a frame of len payload bytes at the end of tx, or NULL. */
uint8_t *cb_off_room(struct cb_offload *o, uint32_t len);
/* Seals what was written there; returns its seq. */
uint32_t cb_off_put(struct cb_offload *o, enum cb_frame_type type, uint32_t ref, uint32_t len);
/* Writes what the link takes now. */
void cb_off_flush(struct cb_offload *o);
/* Not trusted for a while; the connection stays. why NULL: as it was said. */
void cb_off_demote(struct cb_offload *o, const char *why);
void *cb_off_thread(void *arg);

/* How many of o->order go. *expect gets how long the link should take, *alone how
 * long the layer would take without it, ns. */
uint32_t cb_off_choose(struct cb_offload *o, const struct cb_chunk *c, uint32_t n, double *expect,
                       double *alone);
/* The experts with remote[i] into frames; remote[i] = 0 for those that do not fit. */
void cb_off_send_all(struct cb_offload *o, const struct cb_chunk *c, uint32_t n, uint8_t *remote);
/* The first row of one expert, to be computed here as well. */
void cb_off_send_trial(struct cb_offload *o, const struct cb_chunk *c);

#endif

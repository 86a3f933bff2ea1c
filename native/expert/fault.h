/* fault.h — faults inside an expert's weights do not end the process.
 *
 * SIGSEGV and SIGBUS go to one handler. A fault in a lazy mapping is served; a
 * fault while a thread computes inside cb_guard() jumps back there, and the
 * expert counts as unhealthy; any other fault is reported and ends the process
 * as it would have. A signal handler has no argument to find its engine by: the
 * table of mappings in fault.c is the one piece of global state outside cli/. */
#ifndef CB_EXPERT_FAULT_H
#define CB_EXPERT_FAULT_H

#include "expert/mapped.h"

typedef void cb_guarded_fn(void *arg);

/* Runs fn(arg). Returns 0, or -1 when it hit a fault that was nobody's mapping. */
int cb_guard(cb_guarded_fn *fn, void *arg);

/* Installs the handler, once; the previous one is kept for other faults. */
int cb_fault_install(struct cb_err *err);

/* Makes m known to the handler / unknown again. */
int cb_fault_add(struct cb_mapped *m, struct cb_err *err);
void cb_fault_remove(struct cb_mapped *m);

#endif

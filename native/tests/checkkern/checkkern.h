/* checkkern.h — every kernel against the scalar reference, bit by bit. */
#ifndef CB_CHECKKERN_H
#define CB_CHECKKERN_H

#include <stdint.h>

#define CB_CHECKKERN_SEED 0x0C011B121ull /* the seed whose reference hashes are known */

/* Checks (or with bench: times) the kernels of each instruction set that is
 * built in and that this CPU has.
 *   isa_filter:    one ISA by name, or NULL for all
 *   kernel_filter: part of a slot's name ("gemm_q4", "softmax"), or NULL for all
 *   seed:          0 = CB_CHECKKERN_SEED
 *   line(ud, text): gets each line of the report, without newline
 * The scalar reference itself is held to hashes recorded on x86-64: with the
 * known seed it must give the same bits on every CPU.
 * Returns the number of failed slots; -1 when a filter selects nothing.
 * Needs about 220 KiB of stack and nothing else. */
int cb_checkkern(const char *isa_filter, const char *kernel_filter, int bench, uint64_t seed,
                 void (*line)(void *ud, const char *text), void *ud);

#endif

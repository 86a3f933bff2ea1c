/* unicode.h — the class of a code point; tables by gen_unicode.py. */
#ifndef CB_UNICODE_H
#define CB_UNICODE_H

#include <stdint.h>

/* \p{L}, \p{N}, \p{M}, \p{P}, \p{S}; white space is taken out of them. */
enum cb_uc { CB_UC_OTHER, CB_UC_L, CB_UC_N, CB_UC_M, CB_UC_P, CB_UC_S, CB_UC_SPACE };

extern const char cb_uc_version[];
extern const uint8_t cb_uc_index[];  /* [0x110000 / 128] */
extern const uint8_t cb_uc_blocks[]; /* [][64]: two code points a byte, low nibble first */

/* cp <= U+10FFFF */
static inline unsigned cb_uc_class(uint32_t cp)
{
    uint8_t two = cb_uc_blocks[64u * cb_uc_index[cp >> 7] + ((cp & 127) >> 1)];
    return (unsigned)(two >> (4 * (cp & 1))) & 15u;
}

#endif

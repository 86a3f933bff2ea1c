/* crc32c.c — CRC32C (Castagnoli; RFC 3720, appendix B.4). The instruction is
 * used only where the compile target guarantees it, else slicing by 8. */
#include <string.h>

#include "kernels.h"

#if defined(__SSE4_2__) && defined(__x86_64__)
#include <nmmintrin.h>
#define CB_CRC_8(crc, v) ((uint32_t)_mm_crc32_u64((crc), (v)))
#define CB_CRC_1(crc, v) _mm_crc32_u8((crc), (v))
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define CB_CRC_8(crc, v) __crc32cd((crc), (v))
#define CB_CRC_1(crc, v) __crc32cb((crc), (v))
#else
#include "crc32c_table.h"

static uint32_t cb_crc_8(uint32_t crc, uint64_t v)
{
    const uint64_t x = v ^ crc;
    return CB_CRC32C[7][x & 255] ^ CB_CRC32C[6][(x >> 8) & 255] ^
           CB_CRC32C[5][(x >> 16) & 255] ^ CB_CRC32C[4][(x >> 24) & 255] ^
           CB_CRC32C[3][(x >> 32) & 255] ^ CB_CRC32C[2][(x >> 40) & 255] ^
           CB_CRC32C[1][(x >> 48) & 255] ^ CB_CRC32C[0][x >> 56];
}

static uint32_t cb_crc_1(uint32_t crc, uint8_t v)
{
    return (crc >> 8) ^ CB_CRC32C[0][(crc ^ v) & 255];
}
#define CB_CRC_8(crc, v) cb_crc_8((crc), (v))
#define CB_CRC_1(crc, v) cb_crc_1((crc), (v))
#endif

uint32_t cb_crc32c(uint32_t crc, const void *p, size_t n)
{
    const uint8_t *b = p;
    crc = ~crc;
    for (; n >= 8; n -= 8, b += 8) {
        uint64_t v;
        memcpy(&v, b, sizeof v);
        crc = CB_CRC_8(crc, v);
    }
    for (; n > 0; n--, b++) {
        crc = CB_CRC_1(crc, *b);
    }
    return ~crc;
}

/* data.c — random and edge numbers, the same on every machine. */
#include "ck.h"

#include <string.h>

/* splitmix64 (Steele, Lea, Flood 2014), upper half. */
uint32_t ck_rand(struct ck *c)
{
    uint64_t z = (c->rng += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}

static float ck_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* [-4, 4) in steps of 2^-21. */
static float ck_plain(struct ck *c)
{
    return (float)((int32_t)(ck_rand(c) >> 8) - (1 << 23)) * 0x1p-21f;
}

float ck_float(struct ck *c, enum ck_mode mode)
{
    static const uint32_t special[8] = {0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
                                        0x7F7FFFFF, 0xFF7FFFFF, 0x00000000, 0x80000000};
    const uint32_t r = ck_rand(c);
    switch (mode) {
    case CK_EXTREME: /* any finite number */
        return ck_from_bits((r & 0x807FFFFFu) | ((ck_rand(c) % 255u) << 23));
    case CK_SPECIAL:
        return r % 16 == 0 ? ck_from_bits(special[(r >> 8) % 8]) : ck_plain(c);
    case CK_TINY:
        if (r % 8 == 0) {
            return ck_from_bits((r >> 8) << 31);
        }
        return ck_from_bits(ck_rand(c) & (r % 8 == 1 ? 0x80FFFFFFu : 0x807FFFFFu));
    case CK_TIES:
        return (float)((int32_t)(r % 509u) - 254) * 0.5f;
    default:
        return ck_plain(c);
    }
}

void ck_floats(struct ck *c, float *x, size_t n, enum ck_mode mode)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = ck_float(c, mode);
        if (mode == CK_TIES && i % 32 == 5) {
            x[i] = i % 64 == 5 ? 127.0f : -127.0f; /* inverse scale 1: the halves tie */
        }
    }
}

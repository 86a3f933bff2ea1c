/* dot_neon.h — the 32-lane dot product for F32, F16 and BF16 operands. */
#ifndef CB_DOT_NEON_H
#define CB_DOT_NEON_H

#include "util_neon.h"

enum wide_neon { WIDE_F32, WIDE_F16, WIDE_BF16 };

CB_INLINE_NEON size_t wide_bytes_neon(enum wide_neon kind)
{
    return kind == WIDE_F32 ? 4 : 2;
}

/* Elements i .. i+3 as binary32. */
CB_INLINE_NEON float32x4_t wide_load_neon(enum wide_neon kind, const void *p, size_t i)
{
    if (kind == WIDE_F32) {
        return vld1q_f32((const float *)p + i);
    }
    const uint16x4_t v = vld1_u16((const uint16_t *)p + i);
    return kind == WIDE_F16 ? vcvt_f32_f16(vreinterpret_f16_u16(v))
                            : vreinterpretq_f32_u32(vshll_n_u16(v, 16));
}

/* Elements i .. i+n-1, n = 1..3, then zeros. */
CB_INLINE_NEON float32x4_t wide_tail_neon(enum wide_neon kind, const void *p, size_t i, size_t n)
{
    if (kind == WIDE_F32) {
        return tail_f32_neon((const float *)p + i, n);
    }
    const uint16x4_t v = tail_u16_neon((const uint16_t *)p + i, n);
    return kind == WIDE_F16 ? vcvt_f32_f16(vreinterpret_f16_u16(v))
                            : vreinterpretq_f32_u32(vshll_n_u16(v, 16));
}

/* The last n < 32 columns, from column i on, into their lanes. */
CB_INLINE_NEON void dot_tail_neon(struct lanes_neon *l, enum wide_neon kind, const void *a,
                                  const float *b, size_t i, size_t n)
{
    for (size_t j = 0; 4 * j < n; j++) {
        const size_t at = i + 4 * j, k = n - 4 * j;
        if (k >= 4) {
            l->q[j] = vfmaq_f32(l->q[j], wide_load_neon(kind, a, at), vld1q_f32(b + at));
        } else {
            const float32x4_t v = vfmaq_f32(l->q[j], wide_tail_neon(kind, a, at, k),
                                            tail_f32_neon(b + at, k));
            l->q[j] = vbslq_f32(tail_mask_neon(k), v, l->q[j]);
        }
    }
}

/* Out of line: few matrices have such columns. */
#define DOT_TAIL_NEON(NAME, KIND)                                                                 \
    static __attribute__((noinline, unused)) void NAME(struct lanes_neon *l, const void *a,       \
                                                       const float *b, size_t i, size_t n)        \
    {                                                                                             \
        dot_tail_neon(l, KIND, a, b, i, n);                                                       \
    }
DOT_TAIL_NEON(dot_tail_f32_neon, WIDE_F32)
DOT_TAIL_NEON(dot_tail_f16_neon, WIDE_F16)
DOT_TAIL_NEON(dot_tail_bf16_neon, WIDE_BF16)

/* By value, so that the lanes of the caller's loop stay in registers. */
CB_INLINE_NEON struct lanes_neon dot_rest_neon(struct lanes_neon l, enum wide_neon kind,
                                               const void *a, const float *b, size_t i, size_t n)
{
    struct lanes_neon t = l;
    if (kind == WIDE_F32) {
        dot_tail_f32_neon(&t, a, b, i, n);
    } else if (kind == WIDE_F16) {
        dot_tail_f16_neon(&t, a, b, i, n);
    } else {
        dot_tail_bf16_neon(&t, a, b, i, n);
    }
    return t;
}

/* dot(a, b, n) down to lanes 0..3; a of `kind`, b binary32 */
CB_INLINE_NEON float32x4_t dot_fold_neon(enum wide_neon kind, const void *a, const float *b,
                                         size_t n)
{
    struct lanes_neon l = lanes_zero_neon();
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        fetch_bytes_neon((const uint8_t *)a + i * wide_bytes_neon(kind),
                         32 * wide_bytes_neon(kind));
        _Pragma("GCC unroll 8")
        for (size_t j = 0; j < 8; j++) {
            l.q[j] = vfmaq_f32(l.q[j], wide_load_neon(kind, a, i + 4 * j),
                               vld1q_f32(b + i + 4 * j));
        }
    }
    if (i < n) {
        l = dot_rest_neon(l, kind, a, b, i, n - i);
    }
    return lanes_fold_neon(&l);
}

#endif

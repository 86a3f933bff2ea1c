/* gemm_q6_k.c — Q6_K × Q8_K activations (AVX2; determinism.md §3).
 *
 * Super-block of 8 rows: d f16[8] · scales i8[16] a row · qh 4 × 128 · ql 8 × 128. Chunk c of ql
 * holds elements 128·(c/4) + 16·(c%4) + i in its low nibbles and those 64 later in the high ones;
 * the two upper bits of the weight stand in qh chunk 2·(c/4) + c%2.
 *
 * S = Σ sc·Σ(w - 32)q = Σ sc·Σwq - 32·Σ sc·bsum. 16-bit sums: two products are at most
 * 2·63·127 = 16 002, so two additions fit (32 004) and are multiplied by the scale (int8, any
 * value) at once. |Σ sc·Σwq| <= 256·63·127·128 and 32·|Σ sc·bsum| <= 32·16·2 032·128 < 2^29.
 */
#include "avx2.h"

#define CB_Q6_BYTES 1680 /* of a super-block */

/* Signed byte j of each dword in both 16-bit halves. */
CB_INLINE __m256i cb_sspread_avx2(__m256i v, int j, int k)
{
    const __m256i at = _mm256_setr_epi32(0, 0x04000400, 0x08000800, 0x0C000C00,
                                         0, 0x04000400, 0x08000800, 0x0C000C00);
    const int idx = (int)(0x00800080u | (unsigned)j << 8 | (unsigned)k << 24);
    const __m256i high = _mm256_shuffle_epi8(v, _mm256_add_epi8(at, _mm256_set1_epi32(idx)));
    return _mm256_srai_epi16(high, 8);
}

struct cb_q6_scales_avx2 {
    __m256i sc[16];  /* [g] = (sc_g, sc_g) */
    __m256i pair[8]; /* [i] = (sc_2i, sc_2i+1) */
};

CB_INLINE void cb_q6_scales_avx2(const uint8_t *scales, struct cb_q6_scales_avx2 *o)
{
    __m256i v[4];
    cb_transpose_avx2(scales, v);
    for (size_t k = 0; k < 4; k++) {
        o->sc[4 * k] = cb_sspread_avx2(v[k], 0, 0);
        o->sc[4 * k + 1] = cb_sspread_avx2(v[k], 1, 1);
        o->sc[4 * k + 2] = cb_sspread_avx2(v[k], 2, 2);
        o->sc[4 * k + 3] = cb_sspread_avx2(v[k], 3, 3);
        o->pair[2 * k] = cb_sspread_avx2(v[k], 0, 1);
        o->pair[2 * k + 1] = cb_sspread_avx2(v[k], 2, 3);
    }
}

/* 32·Σ sc_g·bsum_g */
CB_INLINE __m256i cb_q6_offset_avx2(const __m256i pair[8], const int16_t bsum[16])
{
    __m256i a = _mm256_madd_epi16(pair[0], cb_bcast32_avx2(bsum));
    __m256i b = _mm256_madd_epi16(pair[1], cb_bcast32_avx2(bsum + 2));
    a = _mm256_add_epi32(a, _mm256_madd_epi16(pair[2], cb_bcast32_avx2(bsum + 4)));
    b = _mm256_add_epi32(b, _mm256_madd_epi16(pair[3], cb_bcast32_avx2(bsum + 6)));
    a = _mm256_add_epi32(a, _mm256_madd_epi16(pair[4], cb_bcast32_avx2(bsum + 8)));
    b = _mm256_add_epi32(b, _mm256_madd_epi16(pair[5], cb_bcast32_avx2(bsum + 10)));
    a = _mm256_add_epi32(a, _mm256_madd_epi16(pair[6], cb_bcast32_avx2(bsum + 12)));
    b = _mm256_add_epi32(b, _mm256_madd_epi16(pair[7], cb_bcast32_avx2(bsum + 14)));
    return _mm256_slli_epi32(_mm256_add_epi32(a, b), 5);
}

/* Eight weights of each row of one group: w0 at element `at`, w1 at at + 4. */
CB_INLINE void cb_q6_step_avx2(__m256i w0, __m256i w1, const int8_t *const *q, size_t at,
                               __m256i sc, __m256i *s, const int T)
{
    CB_EACH(T, s[t] = _mm256_add_epi32(
                   s[t], _mm256_madd_epi16(
                             cb_mac_avx2(_mm256_maddubs_epi16(w0, cb_bcast32_avx2(q[t] + at)), w1,
                                         q[t] + at + 4),
                             sc)));
}

/* Bits 4 and 5 of the weight from the two upper bits in h, already shifted into place. */
CB_INLINE __m256i cb_q6_join_avx2(__m256i low, __m256i h)
{
    return _mm256_or_si256(low, _mm256_and_si256(h, _mm256_set1_epi8(48)));
}

/* Dwords k and k+1 of ql chunks a (elements 0, 64 later) and b (32, 96 later) with qh chunk h. */
CB_INLINE void cb_q6_quads_avx2(const __m256i a[2], const __m256i b[2], const __m256i h[2],
                                const int8_t *const *q, size_t at, const __m256i *sc, __m256i *s,
                                const int T)
{
    cb_q6_step_avx2(cb_q6_join_avx2(cb_lo4_avx2(a[0]), _mm256_slli_epi16(h[0], 4)),
                    cb_q6_join_avx2(cb_lo4_avx2(a[1]), _mm256_slli_epi16(h[1], 4)), q, at, sc[0],
                    s, T);
    cb_q6_step_avx2(cb_q6_join_avx2(cb_lo4_avx2(b[0]), _mm256_slli_epi16(h[0], 2)),
                    cb_q6_join_avx2(cb_lo4_avx2(b[1]), _mm256_slli_epi16(h[1], 2)), q, at + 32,
                    sc[2], s, T);
    cb_q6_step_avx2(cb_q6_join_avx2(cb_hi4_avx2(a[0]), h[0]),
                    cb_q6_join_avx2(cb_hi4_avx2(a[1]), h[1]), q, at + 64, sc[4], s, T);
    cb_q6_step_avx2(cb_q6_join_avx2(cb_hi4_avx2(b[0]), _mm256_srli_epi16(h[0], 2)),
                    cb_q6_join_avx2(cb_hi4_avx2(b[1]), _mm256_srli_epi16(h[1], 2)), q, at + 96,
                    sc[6], s, T);
}

/* A quarter of the next super-block. This type is read in three places at once, forwards
 * and backwards, which hardware prefetchers do not follow: without this, weights come from memory
 * at a quarter of its speed. A prefetch past the end does nothing (the address is an integer, as a
 * pointer may not leave its object). */
CB_INLINE void cb_q6_ahead_avx2(const uint8_t *w, size_t quarter)
{
    const char *p = (const char *)((uintptr_t)w + CB_Q6_BYTES + 448 * quarter);
    _mm_prefetch(p, _MM_HINT_T0);
    _mm_prefetch(p + 64, _MM_HINT_T0);
    _mm_prefetch(p + 128, _MM_HINT_T0);
    _mm_prefetch(p + 192, _MM_HINT_T0);
    _mm_prefetch(p + 256, _MM_HINT_T0);
    _mm_prefetch(p + 320, _MM_HINT_T0);
    _mm_prefetch(p + 384, _MM_HINT_T0);
}

CB_INLINE void cb_q6_k_tile_avx2(float *const *y, const void *const *x, size_t row,
                                 const uint8_t *w, size_t n_blocks, const int T)
{
    const struct cb_q8_k *a[CB_TILE];
    __m256 acc[CB_TILE];
    CB_EACH(T, a[t] = x[t]; acc[t] = _mm256_setzero_ps());
    for (size_t blk = 0; blk < n_blocks; blk++, w += CB_Q6_BYTES) {
        const __m256 d = cb_rows16_avx2(w);
        struct cb_q6_scales_avx2 f;
        const int8_t *q[CB_TILE];
        __m256i s[CB_TILE];
        cb_q6_scales_avx2(w + 16, &f);
        CB_EACH(T, q[t] = a[t][blk].q; s[t] = _mm256_setzero_si256());
        for (size_t i = 0; i < 4; i++) { /* half i/2 of the block, chunk i%2 in it */
            const uint8_t *ql = w + 656 + 512 * (i / 2) + 128 * (i % 2);
            const size_t at = 128 * (i / 2) + 16 * (i % 2);
            const __m256i *sc = f.sc + 8 * (i / 2) + i % 2;
            __m256i va[4], vb[4], vh[4];
            cb_q6_ahead_avx2(w, i);
            cb_transpose_avx2(ql, va);
            cb_transpose_avx2(ql + 256, vb);
            cb_transpose_avx2(w + 144 + 128 * i, vh);
            cb_q6_quads_avx2(va, vb, vh, q, at, sc, s, T);
            cb_q6_quads_avx2(va + 2, vb + 2, vh + 2, q, at + 8, sc, s, T);
        }
        CB_EACH(T, s[t] = _mm256_sub_epi32(s[t], cb_q6_offset_avx2(f.pair, a[t][blk].bsum)));
        CB_EACH(T, acc[t] = _mm256_fmadd_ps(_mm256_mul_ps(d, _mm256_set1_ps(a[t][blk].d)),
                                            _mm256_cvtepi32_ps(s[t]), acc[t]));
    }
    CB_EACH(T, cb_store_rows_avx2(y[t] + row, acc[t]));
}

CB_DEFINE_GEMM(q6_k, 256, 210)

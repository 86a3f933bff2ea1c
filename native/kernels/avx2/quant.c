/* quant.c — activations to Q8_0 and Q8_K (AVX2; determinism.md §3).
 *
 * A block so small that its inverse scale overflows counts as zero, as in the scalar file.
 */
#include <float.h>

#include "lanes.h"

CB_INLINE __m256 cb_abs_avx2(__m256 v)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
}

CB_INLINE float cb_hmax_avx2(__m256 v)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

CB_INLINE __m256 cb_absmax32_avx2(const __m256 v[4])
{
    return _mm256_max_ps(_mm256_max_ps(cb_abs_avx2(v[0]), cb_abs_avx2(v[1])),
                         _mm256_max_ps(cb_abs_avx2(v[2]), cb_abs_avx2(v[3])));
}

/* 32 floats times k, rounded to nearest even, saturated at 127, in order. */
CB_INLINE __m256i cb_quant32_avx2(const __m256 v[4], float scale)
{
    const __m256 k = _mm256_set1_ps(scale);
    const __m256i i0 = _mm256_cvtps_epi32(_mm256_mul_ps(k, v[0]));
    const __m256i i1 = _mm256_cvtps_epi32(_mm256_mul_ps(k, v[1]));
    const __m256i i2 = _mm256_cvtps_epi32(_mm256_mul_ps(k, v[2]));
    const __m256i i3 = _mm256_cvtps_epi32(_mm256_mul_ps(k, v[3]));
    const __m256i b = _mm256_packs_epi16(_mm256_packs_epi32(i0, i1), _mm256_packs_epi32(i2, i3));
    return _mm256_permutevar8x32_epi32(b, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* Sums of the 16 bytes of each half, as two ints. */
CB_INLINE __m128i cb_sum16_avx2(__m256i q)
{
    const __m256i w = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), q),
                                        _mm256_set1_epi16(1));
    const __m128i lo = _mm256_castsi256_si128(w), hi = _mm256_extracti128_si256(w, 1);
    const __m128i p = _mm_hadd_epi32(lo, hi); /* two of lo, two of hi */
    return _mm_hadd_epi32(p, p);              /* lo, hi, lo, hi */
}

void cb_quant_q8_0_avx2(struct cb_q8_0 *y, const float *x, size_t n)
{
    for (size_t b = 0; b < n / 32; b++, x += 32, y++) {
        __m256 v[4];
        __m128i s;
        __m256i q;
        float amax, id;
        cb_load32_avx2(x, v);
        amax = cb_hmax_avx2(cb_absmax32_avx2(v));
        id = amax > 0.0f ? 127.0f / amax : 0.0f;
        id = id <= FLT_MAX ? id : 0.0f;
        q = cb_quant32_avx2(v, id);
        s = cb_sum16_avx2(q);
        y->d = _cvtsh_ss(_cvtss_sh(amax / 127.0f, _MM_FROUND_TO_NEAREST_INT));
        y->sum = _mm_cvtsi128_si32(s) + _mm_extract_epi32(s, 1);
        _mm256_storeu_si256((__m256i *)(void *)y->q, q);
    }
}

/* The first x of magnitude amax (there is one). */
CB_INLINE float cb_first_avx2(const float *x, float amax)
{
    const __m256 m = _mm256_set1_ps(amax);
    for (size_t i = 0;; i += 8) {
        const __m256 eq = _mm256_cmp_ps(cb_abs_avx2(_mm256_loadu_ps(x + i)), m, _CMP_EQ_OQ);
        const unsigned hit = (unsigned)_mm256_movemask_ps(eq);
        if (hit != 0 || i == 248) {
            return x[i + (hit != 0 ? (size_t)__builtin_ctz(hit) : 0)];
        }
    }
}

void cb_quant_q8_k_avx2(struct cb_q8_k *y, const float *x, size_t n)
{
    for (size_t b = 0; b < n / 256; b++, x += 256, y++) {
        __m256 v[4], m = _mm256_setzero_ps();
        float amax, iscale, mag;
        for (size_t i = 0; i < 256; i += 32) {
            cb_load32_avx2(x + i, v);
            m = _mm256_max_ps(m, cb_absmax32_avx2(v));
        }
        amax = cb_hmax_avx2(m);
        iscale = amax > 0.0f ? -127.0f / cb_first_avx2(x, amax) : 0.0f;
        mag = iscale < 0.0f ? -iscale : iscale;
        if (!(mag > 0.0f && mag <= FLT_MAX)) {
            memset(y, 0, sizeof *y);
            continue;
        }
        y->d = 1.0f / iscale;
        for (size_t i = 0; i < 256; i += 32) {
            __m256i q;
            __m128i s;
            cb_load32_avx2(x + i, v);
            q = cb_quant32_avx2(v, iscale);
            s = cb_sum16_avx2(q);
            y->bsum[i / 16] = (int16_t)_mm_cvtsi128_si32(s);
            y->bsum[i / 16 + 1] = (int16_t)_mm_extract_epi32(s, 1);
            _mm256_storeu_si256((__m256i *)(void *)(y->q + i), q);
        }
    }
}

/* Helpers for AVX-512's bfloat16 dot product, which multiplies and adds pairs of neighbouring elements. A sum along a
   row needs no rearrangement. A sum over rows interleaves two rows first:

       rows   a0 a1 a2 ... a31       interleaved, low    a0 b0 .. a3 b3   a8 b8 .. a11 b11   a16 ..   a24 ..
              b0 b1 b2 ... b31                    high   a4 b4 .. a7 b7   a12 b12 ..         a20 ..   a28 ..

   Sums over interleaved rows stay in interleaved order; store_interleaved restores the natural order. */
#ifndef TANDEM_BF16_PRODUCTS_H
#define TANDEM_BF16_PRODUCTS_H

#include <immintrin.h>

#include "vectors.h"

#define WIDE 32 /* bfloat16 elements in a vector */

INLINE __m512bh load_wide(const void *from) { return (__m512bh)_mm512_loadu_si512(from); }

/* The two elements at `from` and `from + 1`, in every lane. */
INLINE __m512bh splat_pair(const uint16_t *from) {
    int32_t pair;
    memcpy(&pair, from, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

INLINE __m512bh interleave_low(__m512bh a, __m512bh b) {
    return (__m512bh)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
}

INLINE __m512bh interleave_high(__m512bh a, __m512bh b) {
    return (__m512bh)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
}

/* Stores 32 sums of interleaved rows as bfloat16 in natural order. */
INLINE void store_interleaved(void *to, __m512 low, __m512 high) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi64(order, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
}

INLINE __m512 sum_four_within(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
}

INLINE __m512 sum_halves(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* The sums of sixteen vectors' lanes, in order. */
INLINE __m512 sum_sixteen(const __m512 v[16]) {
    const __m512 a = sum_four_within(v[0], v[1], v[2], v[3]), b = sum_four_within(v[4], v[5], v[6], v[7]);
    const __m512 c = sum_four_within(v[8], v[9], v[10], v[11]), d = sum_four_within(v[12], v[13], v[14], v[15]);
    return sum_halves(sum_halves(a, b), sum_halves(c, d));
}

/* 2 to the power of x, with a relative error of at most 3e-6: far below the rounding to bfloat16 that follows.
   Underflows to 0. x = n + f with n whole and 0 <= f < 1; a minimax polynomial (of the relative error) gives 2^f. */
INLINE __m512 power_of_two(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 series = _mm512_fmadd_ps(f, _mm512_set1_ps(0.0135341678f), _mm512_set1_ps(0.0520114608f));
    series = _mm512_fmadd_ps(series, f, _mm512_set1_ps(0.241442757f));
    series = _mm512_fmadd_ps(series, f, _mm512_set1_ps(0.693003834f));
    series = _mm512_fmadd_ps(series, f, _mm512_set1_ps(1.00000259f));
    return _mm512_scalef_ps(series, x); /* times 2^n: scalef rounds x down to n */
}

#define LOG2_E 1.44269504f

/* x / (1 + e^-x) by a reciprocal within 2^-14: enough for results that are rounded to bfloat16. */
INLINE __m512 rough_silu(__m512 x) {
    const __m512 power = power_of_two(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E)));
    return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(power, _mm512_set1_ps(1.0f))));
}

#endif

/* Helpers for products of bfloat16, which multiply and add pairs of neighbouring elements. A sum along a row needs no
   rearrangement. A sum over rows interleaves two rows first:

       rows   a0 a1 a2 ... a31       interleaved, low    a0 b0 .. a3 b3   a8 b8 .. a11 b11   a16 ..   a24 ..
              b0 b1 b2 ... b31                    high   a4 b4 .. a7 b7   a12 b12 ..         a20 ..   a28 ..

   Sums over interleaved rows stay in interleaved order; store_interleaved restores the natural order. Plain C, for CPUs
   without AVX-512, interleaves without that detour: low has the elements 0 to 15. */
#ifndef TANDEM_BF16_PRODUCTS_H
#define TANDEM_BF16_PRODUCTS_H

#include "vectors.h"

#define WIDE 32 /* bfloat16 elements in a vector of AVX-512 */
#define LOG2_E 1.44269504f

#if WIDE_VECTORS

/* 2 to the power of x, with a relative error of at most 3e-6: far below the rounding to bfloat16 that follows.
   Underflows to 0. x = n + f with n whole and 0 <= f < 1; a minimax polynomial (of the relative error) gives 2^f. */
INLINE vfloat power_of_two(vfloat x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 series = _mm512_fmadd_ps(f, _mm512_set1_ps(0.0135341678f), _mm512_set1_ps(0.0520114608f));
    series = _mm512_fmadd_ps(series, f, _mm512_set1_ps(0.241442757f));
    series = _mm512_fmadd_ps(series, f, _mm512_set1_ps(0.693003834f));
    series = _mm512_fmadd_ps(series, f, _mm512_set1_ps(1.00000259f));
    return _mm512_scalef_ps(series, x); /* times 2^n: scalef rounds x down to n */
}

INLINE float sum_vector(vfloat values) { return _mm512_reduce_add_ps(values); }

#else

INLINE vfloat power_of_two(vfloat x) { return exponential(x * 0.693147181f); }

INLINE float sum_vector(vfloat values) { return sum_lanes(values); }

#endif

#ifdef __AVX512BF16__

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

/* Interleaves WIDE elements of two rows. */
INLINE void interleave_rows(const void *first, const void *second, uint16_t *to) {
    const __m512bh a = load_wide(first), b = load_wide(second);
    _mm512_storeu_si512(to, (__m512i)interleave_low(a, b));
    _mm512_storeu_si512(to + WIDE, (__m512i)interleave_high(a, b));
}

/* Stores 32 sums of interleaved rows as bfloat16 in natural order. */
INLINE void store_interleaved(void *to, __m512 low, __m512 high) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi64(order, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
}

/* Stores 32 floats as bfloat16. */
INLINE void store_rounded(uint16_t *to, vfloat low, vfloat high) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

INLINE __m512 sum_halves(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

#else

INLINE void interleave_rows(const void *first, const void *second, uint16_t *to) {
    const uint16_t *a = first, *b = second;
    for (int i = 0; i < WIDE; i++) to[2 * i] = a[i], to[2 * i + 1] = b[i];
}

INLINE void store_rounded(uint16_t *to, vfloat low, vfloat high) {
    store_row(to, 0, 1, low);
    store_row(to, LANES, 1, high);
}

INLINE void store_interleaved(void *to, vfloat low, vfloat high) { store_rounded(to, low, high); }

#endif
#endif

/* Vectors of LANES floats, in the compiler's vector types: one source for AVX-512, AVX2 and all other targets.

   Rows of the model are float or bfloat16. Rows are read in pairs of vectors, 2 * LANES elements at a time. The order
   of elements depends on the dtype; each order is the cheapest to unpack:

       float      first = elements 0 .. LANES-1        second = elements LANES .. 2*LANES-1
       bfloat16   first = elements 0, 2, 4, ...        second = elements 1, 3, 5, ...

   A dot product is correct if both operands are read by pairs. Sums over rows read by pairs must be stored by pairs. */
#ifndef TANDEM_VECTORS_H
#define TANDEM_VECTORS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef LANES /* 8 or 16; the build chooses for the target */
#define LANES 8
#endif

#if defined(__AVX512F__) && LANES == 16
#include <immintrin.h>
#define WIDE_VECTORS 1 /* vectors are AVX-512's */
#else
#define WIDE_VECTORS 0
#endif

/* Whether products of bfloat16 are computed by vdpbf16ps. -DWIDEN_BF16 is for CPUs that issue it every second cycle
   (Intel's): there widening to float and multiplying is faster. */
#if WIDE_VECTORS && defined(__AVX512BF16__) && !defined(WIDEN_BF16)
#define BF16_PRODUCTS 1
#else
#define BF16_PRODUCTS 0
#endif

#define PAIR (2 * LANES)
#define LINE_BYTES 64 /* of a cache line */
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef int32_t vint __attribute__((vector_size(LANES * 4)));
typedef uint16_t vshort __attribute__((vector_size(LANES * 2)));
typedef float vfloat8 __attribute__((vector_size(32)));
typedef float vfloat4 __attribute__((vector_size(16)));
typedef int32_t vint8 __attribute__((vector_size(32)));

#ifdef __clang__
#define SHUFFLE8(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE8(a, b, ...) __builtin_shuffle(a, b, (vint8){__VA_ARGS__})
#endif

INLINE vfloat splat(float value) { return value - (vfloat){0}; }

INLINE vfloat load_floats(const float *from) {
    vfloat loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

INLINE void store_floats(float *to, vfloat values) { memcpy(to, &values, sizeof values); }

INLINE size_t element_bytes(int is_bf16) { return is_bf16 ? 2 : 4; }

INLINE const void *element(const void *base, size_t index, int is_bf16) {
    return (const char *)base + index * element_bytes(is_bf16);
}

/* Each float rounded to bfloat16, in the upper half of its 32 bits: nearest, ties to even; NaN stays NaN. */
INLINE vint round_to_bf16(vfloat values) {
#ifdef __AVX512BF16__
    return (vint)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values)), 16);
#endif
    vint bits = (vint)values;
    vint rounded = bits + 0x7fff + ((bits >> 16) & 1);
    vint is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return (rounded & ~is_nan) | ((bits | 0x400000) & is_nan);
}

#if WIDE_VECTORS
/* Each float rounded to bfloat16. */
INLINE __m256i round_vector(vfloat values) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(values);
#else
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)round_to_bf16(values), 16));
#endif
}
#endif

INLINE void load_pair(const void *base, size_t index, int is_bf16, vfloat *first, vfloat *second) {
    const void *from = element(base, index, is_bf16);
    if (is_bf16) {
        vint raw;
        memcpy(&raw, from, sizeof raw);
        *first = (vfloat)(raw << 16);
        *second = (vfloat)(raw & (int32_t)0xffff0000);
    } else {
        *first = load_floats((const float *)from);
        *second = load_floats((const float *)from + LANES);
    }
}

INLINE void store_pair(void *base, size_t index, int is_bf16, vfloat first, vfloat second) {
    char *to = (char *)base + index * element_bytes(is_bf16);
    if (is_bf16) {
        vint low = round_to_bf16(first), high = round_to_bf16(second);
        vint raw = ((low >> 16) & 0xffff) | (high & (int32_t)0xffff0000);
        memcpy(to, &raw, sizeof raw);
    } else {
        store_floats((float *)to, first);
        store_floats((float *)to + LANES, second);
    }
}

/* LANES elements in their natural order, for operations that combine elements from distant places of a row. */
INLINE vfloat load_row(const void *base, size_t index, int is_bf16) {
    const void *from = element(base, index, is_bf16);
    if (!is_bf16) return load_floats((const float *)from);
    vshort raw;
    memcpy(&raw, from, sizeof raw);
    return (vfloat)(__builtin_convertvector(raw, vint) << 16);
}

INLINE void store_row(void *base, size_t index, int is_bf16, vfloat values) {
    char *to = (char *)base + index * element_bytes(is_bf16);
    if (is_bf16) {
        vshort raw = __builtin_convertvector(round_to_bf16(values) >> 16, vshort);
        memcpy(to, &raw, sizeof raw);
    } else {
        store_floats((float *)to, values);
    }
}

INLINE float load_one(const void *base, size_t index, int is_bf16) {
    if (!is_bf16) return ((const float *)base)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)base)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void store_one(void *base, size_t index, int is_bf16, float value) {
    if (is_bf16) {
        ((uint16_t *)base)[index] = (uint16_t)((uint32_t)round_to_bf16(splat(value))[0] >> 16);
    } else {
        ((float *)base)[index] = value;
    }
}

INLINE vfloat larger(vfloat a, vfloat b) {
#if WIDE_VECTORS
    return _mm512_max_ps(a, b);
#endif
    vint take = a > b;
    return (vfloat)(((vint)a & take) | ((vint)b & ~take));
}

INLINE vfloat8 fold_to_8(vfloat values) {
#if LANES == 16
    vfloat8 halves[2];
    memcpy(halves, &values, sizeof halves);
    return halves[0] + halves[1];
#else
    return values;
#endif
}

/* The sums of four vectors' lanes. */
INLINE vfloat4 sum_four(vfloat a, vfloat b, vfloat c, vfloat d) {
    vfloat8 a8 = fold_to_8(a), b8 = fold_to_8(b), c8 = fold_to_8(c), d8 = fold_to_8(d);
    vfloat8 ab = SHUFFLE8(a8, b8, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE8(a8, b8, 2, 10, 3, 11, 6, 14, 7, 15);
    vfloat8 cd = SHUFFLE8(c8, d8, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE8(c8, d8, 2, 10, 3, 11, 6, 14, 7, 15);
    vfloat8 abcd = SHUFFLE8(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE8(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    vfloat4 halves[2];
    memcpy(halves, &abcd, sizeof halves);
    return halves[0] + halves[1];
}

INLINE float sum_lanes(vfloat values) {
    vfloat4 sums = sum_four(values, values, values, values);
    return sums[0];
}

INLINE float largest_lane(vfloat values) {
#if WIDE_VECTORS
    return _mm512_reduce_max_ps(values);
#endif
    float largest = values[0];
    for (int lane = 1; lane < LANES; lane++) largest = values[lane] > largest ? values[lane] : largest;
    return largest;
}

/* e to the power of x, within 2 units in the last place for x in [-87, 88]; 0 below -87, also for minus infinity.
   x = n ln 2 + r with |r| <= ln 2 / 2; the Taylor series up to r^7 / 5040 gives e^r. */
INLINE vfloat exponential(vfloat x) {
    vint vanishes = x < -87.0f;
    x = (vfloat)(((vint)x & ~vanishes) | ((vint)splat(-87.0f) & vanishes));
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    vfloat shifted = x * 1.44269504f + shift;
    vint n = (vint)shifted - (vint)splat(shift);
    vfloat whole = shifted - shift;
    vfloat r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vfloat series = r * (1.0f / 5040) + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    return (vfloat)((vint)(series * (vfloat)((n + 127) << 23)) & ~vanishes);
}

#endif

/* The tile of decode_tile.h by bfloat16 products: queries, keys, weights and values are bfloat16, sums are float. */
#ifndef TANDEM_DECODE_TILE_BF16_H
#define TANDEM_DECODE_TILE_BF16_H

#include "bf16_products.h"
#include "decode_tile.h"

#define STEP 16 /* positions scored together; a tile's rows are padded to a multiple of STEP */

/* Writes each pair of the query's elements twice, because `score_step` interleaves two key rows by pairs. */
INLINE void double_pairs(const uint16_t *query, int num_elements, uint16_t *doubled) {
    for (int d = 0; d < num_elements; d += WIDE) {
        const __m512i part = _mm512_loadu_si512(query + d);
        _mm512_storeu_si512(doubled + 2 * d, _mm512_unpacklo_epi32(part, part));
        _mm512_storeu_si512(doubled + 2 * d + WIDE, _mm512_unpackhi_epi32(part, part));
    }
}

/* sums[h] += query[h] . two key rows; lanes alternate between the two rows. */
INLINE void score_two_rows(const char *first, const char *second, const uint16_t *query, const int head_dim,
                           const int heads, __m512 sums[MAX_TILE_HEADS]) {
    for (int d = 0; d < head_dim; d += WIDE) {
        const __m512i a = _mm512_loadu_si512(first + 2 * d), b = _mm512_loadu_si512(second + 2 * d);
        const __m512bh low = (__m512bh)_mm512_unpacklo_epi32(a, b), high = (__m512bh)_mm512_unpackhi_epi32(a, b);
        for (int h = 0; h < heads; h++) {
            const uint16_t *part = query + 2 * (h * head_dim + d);
            sums[h] = _mm512_dpbf16_ps(sums[h], low, load_wide(part));
            sums[h] = _mm512_dpbf16_ps(sums[h], high, load_wide(part + WIDE));
        }
    }
}

/* scores[h][i] = query[h] . key row p + i, for STEP rows. head_dim and heads are constants. */
INLINE void score_step(const uint16_t *query, const int head_dim, const struct course *course, int p,
                       const int heads, float *scores) {
    const struct place *here = &course->here;
    __m512 fours[STEP / 4][MAX_TILE_HEADS];
    for (int four = 0; four < STEP / 4; four++, p += 4) {
        __m512 sums[2][MAX_TILE_HEADS];
        for (int two = 0; two < 2; two++) {
            const char *const *rows = here->rows + p + 2 * two;
            for (int h = 0; h < heads; h++) sums[two][h] = _mm512_setzero_ps();
            for (int i = 0; i < 2; i++) fetch_while_scoring(course, p + 2 * two + i, 2 * head_dim);
            score_two_rows(rows[0] + here->keys, rows[1] + here->keys, query, head_dim, heads, sums[two]);
        }
        for (int h = 0; h < heads; h++) {
            const __m512d a = _mm512_castps_pd(sums[0][h]), b = _mm512_castps_pd(sums[1][h]);
            fours[four][h] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                           _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
        }
    }
    for (int h = 0; h < heads; h++)
        _mm512_storeu_ps(scores + h * TILE, sum_halves(sum_halves(fours[0][h], fours[1][h]),
                                                       sum_halves(fours[2][h], fours[3][h])));
}

/* Turns scores into bfloat16 weights relative to the running maximum; returns the factor for earlier sums.
   Scores are not scaled yet: exponent = scale * log2(e). total: [LANES]; the caller sums the lanes at the end. */
INLINE float weigh_scores_bf16(float *scores, int count, float exponent, float *maximum, float *total,
                               uint16_t *weights) {
    for (int p = count; p % WIDE; p++) scores[p] = -INFINITY;
    __m512 tops = _mm512_loadu_ps(scores);
    for (int p = LANES; p < count; p += LANES) tops = _mm512_max_ps(tops, _mm512_loadu_ps(scores + p));
    const float before = *maximum, top = _mm512_reduce_max_ps(tops);
    *maximum = top > before ? top : before;
    const __m512 factor = _mm512_set1_ps(exponent), shift = _mm512_set1_ps(-exponent * *maximum);
    const __m512 rescale = power_of_two(_mm512_set1_ps(exponent * (before - *maximum)));
    __m512 sums = _mm512_mul_ps(_mm512_loadu_ps(total), rescale);
    for (int p = 0; p < count; p += WIDE) {
        const __m512 low = power_of_two(_mm512_fmadd_ps(_mm512_loadu_ps(scores + p), factor, shift));
        const __m512 high = power_of_two(_mm512_fmadd_ps(_mm512_loadu_ps(scores + p + LANES), factor, shift));
        _mm512_storeu_si512(weights + p, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        sums = _mm512_add_ps(sums, _mm512_add_ps(low, high));
    }
    _mm512_storeu_ps(total, sums);
    return _mm512_cvtss_f32(rescale);
}

/* Adds two interleaved value rows times their two weights. */
INLINE void add_two_rows(const char *first, const char *second, const uint16_t *weights, const int heads,
                         __m512 sums[MAX_TILE_HEADS][2]) {
    const __m512bh a = load_wide(first), b = load_wide(second);
    const __m512bh low = interleave_low(a, b), high = interleave_high(a, b);
    for (int h = 0; h < heads; h++) {
        const __m512bh pair = splat_pair(weights + h * TILE);
        sums[h][0] = _mm512_dpbf16_ps(sums[h][0], low, pair);
        sums[h][1] = _mm512_dpbf16_ps(sums[h][1], high, pair);
    }
}

/* sums[h] = sums[h] * rescale[h] + weights[h] . value rows, in the order of interleaved rows. */
INLINE void add_values_bf16(const struct course *course, int count, const uint16_t *weights, const float *rescale,
                            int head_dim, const int heads, float *sums) {
    const struct place *here = &course->here;
    for (int d = 0; d < head_dim; d += WIDE) {
        __m512 even[MAX_TILE_HEADS][2], odd[MAX_TILE_HEADS][2]; /* two shorter dependency chains */
        for (int h = 0; h < heads; h++) {
            for (int half = 0; half < 2; half++) {
                const __m512 before = _mm512_loadu_ps(sums + h * head_dim + d + half * LANES);
                even[h][half] = _mm512_mul_ps(before, _mm512_set1_ps(rescale[h]));
                odd[h][half] = _mm512_setzero_ps();
            }
        }
        const size_t at = here->values + 2 * d;
        for (int p = 0; p < count; p += 4) { /* a padded row has the weight 0 */
            const char *const *rows = here->rows + p;
            for (int i = 0; i < 4; i++) fetch_while_adding(course, p + i, 2 * d, 2 * WIDE);
            add_two_rows(rows[0] + at, rows[1] + at, weights + p, heads, even);
            add_two_rows(rows[2] + at, rows[3] + at, weights + p + 2, heads, odd);
        }
        for (int h = 0; h < heads; h++)
            for (int half = 0; half < 2; half++)
                _mm512_storeu_ps(sums + h * head_dim + d + half * LANES, _mm512_add_ps(even[h][half], odd[h][half]));
    }
}

/* One tile of one KV head for `heads` (a constant) of its query heads. query: bfloat16 [heads, 2 * head_dim]. */
INLINE void attend_tile_bf16(const struct kv_cache *cache, const struct course *course, int count, const int heads,
                             const uint16_t *query, float *sums, float *maxima, float *totals) {
    float scores[MAX_TILE_HEADS * TILE], rescale[MAX_TILE_HEADS];
    uint16_t weights[MAX_TILE_HEADS * TILE];
    const int head_dim = cache->head_dim;
    for (int p = 0; p < count; p += STEP) {
        if (head_dim == 64)
            score_step(query, 64, course, p, heads, scores + p);
        else
            score_step(query, head_dim, course, p, heads, scores + p);
    }
    for (int h = 0; h < heads; h++)
        rescale[h] = weigh_scores_bf16(scores + h * TILE, count, cache->scale * LOG2_E, maxima + h,
                                       totals + h * LANES, weights + h * TILE);
    add_values_bf16(course, count, weights, rescale, head_dim, heads, sums);
}

#endif

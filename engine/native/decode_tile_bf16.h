/* The same tile by bfloat16 products: queries, keys, weights and values are multiplied as bfloat16, sums are float. */
#ifndef TANDEM_DECODE_TILE_BF16_H
#define TANDEM_DECODE_TILE_BF16_H

#include "bf16_products.h"
#include "decode_tile.h"

#define STEP 16 /* positions that are scored together; a tile's rows are padded to a multiple of it */

/* scores[p] = query . key row p, for STEP rows that begin at rows[p] + offset, or stride bytes apart from the first. */
INLINE void score_step(const uint16_t *query, const int head_dim, const char *const *rows, size_t offset,
                       const size_t stride, float *scores) {
    __m512 sums[STEP];
    for (int p = 0; p < STEP; p++) sums[p] = _mm512_setzero_ps();
    for (int d = 0; d < head_dim; d += WIDE) {
        const __m512bh part = load_wide(query + d);
        for (int p = 0; p < STEP; p++) {
            const char *row = stride ? rows[0] + p * stride : rows[p];
            sums[p] = _mm512_dpbf16_ps(sums[p], load_wide(row + offset + 2 * d), part);
        }
    }
    _mm512_storeu_ps(scores, sum_sixteen(sums));
}

/* Functions of their own: inlined, the steps of several heads are mixed up and their sums do not stay in registers. */
static __attribute__((noinline)) void score_step_64(const uint16_t *query, const char *const *rows, size_t offset,
                                                    float *scores) {
    score_step(query, 64, rows, offset, 2 * 64, scores);
}

static __attribute__((noinline)) void score_step_128(const uint16_t *query, const char *const *rows, size_t offset,
                                                     float *scores) {
    score_step(query, 128, rows, offset, 2 * 128, scores);
}

static __attribute__((noinline)) void score_step_any(const uint16_t *query, int head_dim, const char *const *rows,
                                                     size_t offset, float *scores) {
    score_step(query, head_dim, rows, offset, 0, scores);
}

/* Turns scores into bfloat16 weights relative to the running maximum; returns what earlier sums are multiplied by.
   Scores are not scaled yet: exponent = scale * log2(e). */
INLINE float weigh_scores_bf16(float *scores, int count, float exponent, float *maximum, float *total,
                               uint16_t *weights) {
    for (int p = count; p % WIDE; p++) scores[p] = -INFINITY;
    __m512 tops = _mm512_loadu_ps(scores);
    for (int p = LANES; p < count; p += LANES) tops = _mm512_max_ps(tops, _mm512_loadu_ps(scores + p));
    const float before = *maximum, top = _mm512_reduce_max_ps(tops);
    *maximum = top > before ? top : before;
    const __m512 factor = _mm512_set1_ps(exponent), shift = _mm512_set1_ps(-exponent * *maximum);
    __m512 sums = _mm512_setzero_ps();
    for (int p = 0; p < count; p += WIDE) {
        const __m512 low = power_of_two(_mm512_fmadd_ps(_mm512_loadu_ps(scores + p), factor, shift));
        const __m512 high = power_of_two(_mm512_fmadd_ps(_mm512_loadu_ps(scores + p + LANES), factor, shift));
        _mm512_storeu_si512(weights + p, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        sums = _mm512_add_ps(sums, _mm512_add_ps(low, high));
    }
    const float rescale = _mm512_cvtss_f32(power_of_two(_mm512_set1_ps(exponent * (before - *maximum))));
    *total = *total * rescale + _mm512_reduce_add_ps(sums);
    return rescale;
}

/* Two value rows, interleaved, times their two weights. */
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
INLINE void add_values_bf16(const struct tile *tile, struct fetch *fetch, size_t offset, const uint16_t *weights,
                            const float *rescale, int head_dim, const int heads, float *sums) {
    for (int d = 0; d < head_dim; d += WIDE) {
        __m512 even[MAX_TILE_HEADS][2], odd[MAX_TILE_HEADS][2]; /* two chains of sums: shorter waits */
        for (int h = 0; h < heads; h++) {
            for (int half = 0; half < 2; half++) {
                const __m512 before = _mm512_loadu_ps(sums + h * head_dim + d + half * LANES);
                even[h][half] = _mm512_mul_ps(before, _mm512_set1_ps(rescale[h]));
                odd[h][half] = _mm512_setzero_ps();
            }
        }
        const size_t at = offset + 2 * d;
        for (int p = 0; p < tile->count; p += 4) { /* a padded row has the weight 0 */
            fetch_ahead(fetch, 4 * 2 * WIDE);
            add_two_rows(tile->rows[p] + at, tile->rows[p + 1] + at, weights + p, heads, even);
            add_two_rows(tile->rows[p + 2] + at, tile->rows[p + 3] + at, weights + p + 2, heads, odd);
        }
        for (int h = 0; h < heads; h++)
            for (int half = 0; half < 2; half++)
                _mm512_storeu_ps(sums + h * head_dim + d + half * LANES, _mm512_add_ps(even[h][half], odd[h][half]));
    }
}

/* One tile of one KV head for `heads` (a constant) of its query heads. query: bfloat16 [heads, head_dim]. */
INLINE void attend_tile_bf16(const struct kv_cache *cache, const struct tile *tile, struct fetch *fetch,
                             size_t key_offset, const int heads, const uint16_t *query, float *sums, float *maxima,
                             float *totals) {
    float scores[MAX_TILE_HEADS * TILE], rescale[MAX_TILE_HEADS];
    uint16_t weights[MAX_TILE_HEADS * TILE];
    const int head_dim = cache->head_dim, in_order = cache->block_size % STEP == 0;
    for (int p = 0; p < tile->count; p += STEP) {
        for (int h = 0; h < heads; h++) {
            const uint16_t *q = query + h * head_dim;
            if (in_order && head_dim == 64)
                score_step_64(q, tile->rows + p, key_offset, scores + h * TILE + p);
            else if (in_order && head_dim == 128)
                score_step_128(q, tile->rows + p, key_offset, scores + h * TILE + p);
            else
                score_step_any(q, head_dim, tile->rows + p, key_offset, scores + h * TILE + p);
            fetch_ahead(fetch, 2 * STEP * head_dim / heads);
        }
    }
    for (int h = 0; h < heads; h++)
        rescale[h] = weigh_scores_bf16(scores + h * TILE, tile->count, cache->scale * LOG2_E, maxima + h, totals + h,
                                       weights + h * TILE);
    add_values_bf16(tile, fetch, key_offset + cache->value_stride, weights, rescale, head_dim, heads, sums);
}

#endif

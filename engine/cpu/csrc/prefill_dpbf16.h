/* The products of prefill_bf16.c by vdpbf16ps: a pair of a query or of weights, broadcast to all lanes, times a vector of
   packed pairs. Each lane belongs to another element of the result. */
#ifndef TANDEM_PREFILL_DPBF16_H
#define TANDEM_PREFILL_DPBF16_H

#include "bf16_products.h"
#include "prefill_span.h"

#define SUMMED_TOGETHER 2 /* positions whose values one instruction adds */
#define SCORE_VECTORS (TILE / LANES)

/* sums[r] += rows[r] . packed, for BF16_ROWS rows of at least one pair and `vectors` (a constant) vectors of results. */
INLINE void multiply_rows(const uint16_t *rows, int row_stride, int num_pairs, const uint16_t *packed,
                          int packed_stride, const int vectors, __m512 sums[BF16_ROWS][SCORE_VECTORS]) {
    int pair = 0;
    do { /* with a loop that may run zero times, the compiler keeps a copy of the sums in memory */
        __m512bh parts[SCORE_VECTORS];
        for (int v = 0; v < vectors; v++) parts[v] = load_wide(packed + pair * packed_stride + v * WIDE);
        for (int r = 0; r < BF16_ROWS; r++) {
            const __m512bh both = splat_pair(rows + r * row_stride + 2 * pair);
            for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], parts[v], both);
        }
    } while (++pair < num_pairs);
}

/* Computes scores of `vectors` (a constant) vectors of positions. */
INLINE void score_part(const uint16_t *query, const uint16_t *keys, int head_dim, const int vectors, float *scores) {
    __m512 sums[BF16_ROWS][SCORE_VECTORS];
    for (int r = 0; r < BF16_ROWS; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_setzero_ps();
    multiply_rows(query, head_dim, head_dim / 2, keys, 2 * TILE, vectors, sums);
    for (int r = 0; r < BF16_ROWS; r++)
        for (int v = 0; v < vectors; v++) _mm512_storeu_ps(scores + r * WIDE_TILE + v * LANES, sums[r][v]);
}

/* Scores the first `used` positions of WIDE_TILE, rounded up to a multiple of 32. */
APART void score_positions(const uint16_t *query, const uint16_t *keys, int head_dim, int used, float *scores) {
    for (; used > TILE / 2; used -= TILE, keys += head_dim * TILE, scores += TILE)
        score_part(query, keys, head_dim, SCORE_VECTORS, scores);
    if (used > 0) score_part(query, keys, head_dim, SCORE_VECTORS / 2, scores);
}

/* Updates `vectors` (a constant) vectors of each row's sums. */
INLINE void add_part(const uint16_t *weights, const uint16_t *values, int count, const float *rescale, int head_dim,
                     const int vectors, float *sums) {
    __m512 added[BF16_ROWS][SCORE_VECTORS];
    for (int r = 0; r < BF16_ROWS; r++)
        for (int v = 0; v < vectors; v++)
            added[r][v] = _mm512_mul_ps(_mm512_loadu_ps(sums + r * head_dim + v * LANES), _mm512_set1_ps(rescale[r]));
    multiply_rows(weights, WIDE_TILE, (count + 1) / 2, values, 2 * head_dim, vectors, added);
    for (int r = 0; r < BF16_ROWS; r++)
        for (int v = 0; v < vectors; v++) _mm512_storeu_ps(sums + r * head_dim + v * LANES, added[r][v]);
}

APART void add_values(const uint16_t *weights, const uint16_t *values, int count, const float *rescale, int head_dim,
                       float *sums) {
    int d = 0;
    for (; d + 2 * WIDE <= head_dim; d += 2 * WIDE)
        add_part(weights, values + 2 * d, count, rescale, head_dim, 4, sums + d);
    if (d < head_dim) add_part(weights, values + 2 * d, count, rescale, head_dim, 2, sums + d);
}

#endif

/* The products of prefill_bf16.c by tiles: 16 rows of queries or weights by four tiles of packed pairs. */
#ifndef TANDEM_PREFILL_TILES_H
#define TANDEM_PREFILL_TILES_H

#include "prefill_span.h"

#define SUMMED_TOGETHER TILE_INPUTS /* positions whose values one instruction adds */

/* Multiplies tile 4, of rows, by `four` (a constant: 4, else 2) tiles side by side, into as many tiles of sums. */
INLINE void multiply_four(const uint16_t *packed, int row_bytes, const int four) {
    LOAD_TILE(6, packed, row_bytes);
    MULTIPLY_TILES(0, 4, 6);
    LOAD_TILE(7, packed + TILE_INPUTS, row_bytes);
    MULTIPLY_TILES(1, 4, 7);
    if (four != 4) return;
    LOAD_TILE(6, packed + 2 * TILE_INPUTS, row_bytes);
    MULTIPLY_TILES(2, 4, 6);
    LOAD_TILE(7, packed + 3 * TILE_INPUTS, row_bytes);
    MULTIPLY_TILES(3, 4, 7);
}

INLINE void store_sums(float *to, int row_bytes, const int four) {
    STORE_TILE(0, to, row_bytes);
    STORE_TILE(1, to + LANES, row_bytes);
    if (four != 4) return;
    STORE_TILE(2, to + 2 * LANES, row_bytes);
    STORE_TILE(3, to + 3 * LANES, row_bytes);
}

/* Scores the first `used` positions of WIDE_TILE, rounded up to a multiple of TILE. */
APART void score_positions(const uint16_t *query, const uint16_t *keys, int head_dim, int used, float *scores) {
    for (; used > 0; used -= TILE, keys += head_dim * TILE, scores += TILE) {
        ZERO_TILE(0);
        ZERO_TILE(1);
        ZERO_TILE(2);
        ZERO_TILE(3);
        for (int d = 0; d < head_dim; d += TILE_INPUTS) {
            LOAD_TILE(4, query + d, 2 * head_dim);
            multiply_four(keys + d * TILE, 4 * TILE, 4);
        }
        store_sums(scores, 4 * WIDE_TILE, 4);
    }
}

/* Updates `four` (a constant: 4, else 2) tiles of sums. */
INLINE void add_part(const uint16_t *weights, const uint16_t *values, int count, int head_dim, const int four,
                     float *sums) {
    const int row_bytes = 4 * head_dim; /* of sums, and of a pair of positions' values */
    LOAD_TILE(0, sums, row_bytes);
    LOAD_TILE(1, sums + LANES, row_bytes);
    if (four == 4) {
        LOAD_TILE(2, sums + 2 * LANES, row_bytes);
        LOAD_TILE(3, sums + 3 * LANES, row_bytes);
    }
    for (int p = 0; p < count; p += SUMMED_TOGETHER) {
        LOAD_TILE(4, weights + p, 2 * WIDE_TILE);
        multiply_four(values + p * head_dim, row_bytes, four);
    }
    store_sums(sums, row_bytes, four);
}

APART void add_values(const uint16_t *weights, const uint16_t *values, int count, const float *rescale, int head_dim,
                      float *sums) {
    for (int r = 0; r < BF16_ROWS; r++) {
        float *row = sums + r * head_dim;
        for (int d = 0; d < head_dim; d += LANES) store_floats(row + d, load_floats(row + d) * rescale[r]);
    }
    int d = 0;
    for (; d + 4 * LANES <= head_dim; d += 4 * LANES) add_part(weights, values + 2 * d, count, head_dim, 4, sums + d);
    if (d < head_dim) add_part(weights, values + 2 * d, count, head_dim, 2, sums + d);
}

#endif

/* A product with a packed bfloat16 matrix, for one row or thousands: out = inputs . weight' + bias, sums in float.

   The weight [out, in] lies in panels of PANEL of its rows (the last padded with zeros), pairs of `in` side by side:

       [ceil(out / PANEL), in / 2, PANEL, 2]

   so one instruction multiplies a pair of an input row, in every lane, by 16 rows of the weight. A tile is up to
   TILE_ROWS input rows by one panel, all in registers: a panel passes through the first cache once for that many rows,
   and memory once for all. What a row of the inputs gets depends on that row alone, in one order of summing, however
   many rows there are. Only for CPUs with AVX-512's bfloat16 products. */
#include "vectors.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

#define PANEL 32
#define TILE_ROWS 12     /* times two vectors of sums: 24 of the 32 registers */
#define BLOCK_ROWS 480   /* of inputs that pass by a panel before the next is taken: they stay in the second cache */
#define AHEAD_BYTES 4096 /* how far before its use a panel is asked for, where each is used but once */
#define LINE_BYTES 64

struct product {
    const uint16_t *inputs, *weight;
    const float *bias; /* or NULL */
    uint16_t *out;
    int64_t num_rows, out_size, in_size;
};

INLINE __m512 start_sum(const struct product *product, int64_t column, int vector) {
    if (product->bias == NULL) return _mm512_setzero_ps();
    const int64_t from = column + vector * 16, left = product->out_size - from;
    return _mm512_maskz_loadu_ps(left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0, product->bias + from);
}

/* `rows` (a constant) input rows from `row` on by the panel of the output's `column`. Meanwhile the bytes
   [ahead, ahead + ahead_bytes) are fetched; a fixed distance ahead of the panel where ahead is NULL. */
INLINE void multiply_tile(const struct product *product, int64_t row, int64_t column, const int rows,
                          const char *ahead, int64_t ahead_bytes) {
    const int64_t in_size = product->in_size, num_pairs = in_size / 2;
    const uint16_t *input = product->inputs + row * in_size, *panel = product->weight + column * in_size;
    __m512 sums[TILE_ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) sums[r][v] = start_sum(product, column, v);
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        const uint16_t *weights = panel + pair * 2 * PANEL;
        if (ahead == NULL) {
            _mm_prefetch((const char *)weights + AHEAD_BYTES, _MM_HINT_T0);
            _mm_prefetch((const char *)weights + AHEAD_BYTES + LINE_BYTES, _MM_HINT_T0);
        } else if (pair * LINE_BYTES < ahead_bytes) {
            _mm_prefetch(ahead + pair * LINE_BYTES, _MM_HINT_T1);
        }
        const __m512bh first = (__m512bh)_mm512_loadu_si512(weights);
        const __m512bh second = (__m512bh)_mm512_loadu_si512(weights + PANEL);
        for (int r = 0; r < rows; r++) {
            int32_t both;
            memcpy(&both, input + r * in_size + 2 * pair, sizeof both);
            const __m512bh inputs = (__m512bh)_mm512_set1_epi32(both);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], first, inputs);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], second, inputs);
        }
    }
    const int64_t left = product->out_size - column;
    const __mmask32 mask = left >= PANEL ? 0xffffffffu : (1u << left) - 1;
    for (int r = 0; r < rows; r++)
        _mm512_mask_storeu_epi16(product->out + (row + r) * product->out_size + column, mask,
                                 (__m512i)_mm512_cvtne2ps_pbh(sums[r][1], sums[r][0]));
}

/* A panel by input rows [from, until), in tiles of nearly the same height. */
static void multiply_panel(const struct product *product, int64_t from, int64_t until, int64_t column) {
    const int64_t num_rows = until - from, num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t panel_bytes = product->in_size * PANEL * 2, share = (panel_bytes / num_tiles + LINE_BYTES - 1);
    const char *next = (const char *)(product->weight + column * product->in_size) + panel_bytes;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        const int64_t row = from + num_rows * tile / num_tiles;
        const char *ahead = num_tiles == 1 ? NULL : next + share * tile;
        switch (from + num_rows * (tile + 1) / num_tiles - row) {
#define ROWS(n) \
    case n: multiply_tile(product, row, column, n, ahead, share); break;
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#undef ROWS
        }
    }
}

/* inputs: [num_rows, in_size], in_size even. weight: packed as above. bias: [out_size] or NULL.
   out: [num_rows, out_size]. */
EXPORT void tandem_bf16_linear(const uint16_t *inputs, const uint16_t *weight, const float *bias, uint16_t *out,
                               int64_t num_rows, int64_t out_size, int64_t in_size, int num_threads) {
    const struct product product = {inputs, weight, bias, out, num_rows, out_size, in_size};
    for (int64_t from = 0; from < num_rows; from += BLOCK_ROWS) {
        const int64_t until = from + BLOCK_ROWS < num_rows ? from + BLOCK_ROWS : num_rows;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(static)
        for (int64_t column = 0; column < out_size; column += PANEL) multiply_panel(&product, from, until, column);
    }
}
#endif

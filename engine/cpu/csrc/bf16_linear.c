/* Products of product.h with AVX-512, for one to thousands of input rows.

   One instruction multiplies a broadcast pair of an input row by 16 rows of the weight. A tile is up to TILE_ROWS
   input rows by one panel, with all sums in registers. A panel is read from L1 once per tile and from memory once per
   BLOCK_ROWS rows. The result of an input row depends on that row alone: the order of summing is the same for any
   number of rows. CPUs with AMX use tile_linear.c. */
#include "tiles.h"

#if WIDE_VECTORS && !TILES
#include "product.h"
#include "threads.h"

#define TILE_ROWS 12     /* times two vectors of sums: 24 of the 32 registers */
#define BLOCK_ROWS 480   /* input rows per pass over the panels: so many stay in L2 */
#define AHEAD_BYTES 4096 /* prefetch distance within a panel that has one tile; such prefetches bypass L2 */

/* sums + the products of 16 pairs of bfloat16. */
INLINE __m512 add_pairs(__m512 sums, __m512i a, __m512i b) {
#if BF16_PRODUCTS
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
#else
    const __m512i upper = _mm512_set1_epi32((int32_t)0xffff0000);
    sums = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), sums);
    return _mm512_fmadd_ps((__m512)_mm512_and_si512(a, upper), (__m512)_mm512_and_si512(b, upper), sums);
#endif
}

/* The pair of elements at `from`, in every lane. */
INLINE __m512i every_pair(const char *from) {
    int32_t pair;
    memcpy(&pair, from, sizeof pair);
    return _mm512_set1_epi32(pair);
}

/* Stops the compiler from keeping one address register per row: twelve rows would need too many. */
#define OPAQUE(pointer) __asm__("" : "+r"(pointer))

/* Multiplies `rows` (a constant) input rows from `row` on by a panel, and prefetches the bytes
   [ahead, ahead + ahead_bytes). If ahead is NULL, the prefetch runs AHEAD_BYTES ahead in the panel. */
INLINE void multiply_tile(const struct product *product, int64_t row, int64_t panel, const int rows,
                          const char *ahead, int64_t ahead_bytes) {
    const int64_t row_bytes = 2 * product->in_size;
    const uint16_t *weights = panel_at(product, panel), *end = weights + PANEL * product->in_size;
    const char *ahead_end = ahead == NULL ? NULL : ahead + ahead_bytes;
    const char *threes[TILE_ROWS / 3]; /* row 3 * i: one base register plus an index addresses three rows */
    __m512 sums[TILE_ROWS][2];
    for (int i = 0; 3 * i < rows; i++) threes[i] = (const char *)product->inputs + (row + 3 * i) * row_bytes;
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    if (ahead != NULL) fetch_results(product, row, panel, rows);
    for (; weights < end; weights += 2 * PANEL) {
        if (ahead == NULL) {
            _mm_prefetch((const char *)weights + AHEAD_BYTES, _MM_HINT_NTA);
            _mm_prefetch((const char *)weights + AHEAD_BYTES + LINE_BYTES, _MM_HINT_NTA);
        } else if (ahead < ahead_end) {
            _mm_prefetch(ahead, _MM_HINT_T1);
            ahead += LINE_BYTES;
        }
        const __m512i first = _mm512_loadu_si512(weights), second = _mm512_loadu_si512(weights + PANEL);
        for (int r = 0; r < rows; r++) {
            const __m512i both = every_pair(threes[r / 3] + r % 3 * row_bytes);
            sums[r][0] = add_pairs(sums[r][0], first, both);
            sums[r][1] = add_pairs(sums[r][1], second, both);
        }
        for (int i = 0; 3 * i < rows; i++) {
            threes[i] += 4;
            OPAQUE(threes[i]);
        }
    }
    FOR_ENDING(product->ending, for (int r = 0; r < rows; r++)
        finish_row(product, row + r, panel, sums[r][0], sums[r][1], e);)
}

/* Multiplies input rows [from, until) by a panel, in tiles of nearly equal height. */
static void multiply_panel(const struct product *product, int64_t from, int64_t until, int64_t panel) {
    const int64_t num_rows = until - from, num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t panel_bytes = product->in_size * PANEL * 2, share = panel_bytes / num_tiles + LINE_BYTES - 1;
    const char *next = (const char *)panel_at(product, panel + 1);
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        const int64_t row = from + num_rows * tile / num_tiles;
        const char *ahead = num_tiles == 1 ? NULL : next + share * tile;
        switch (from + num_rows * (tile + 1) / num_tiles - row) {
#define ROWS(n) \
    case n: multiply_tile(product, row, panel, n, ahead, share); break;
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#undef ROWS
        }
    }
}

/* `struct product` describes the arguments. */
EXPORT void tandem_bf16_linear(const uint16_t *inputs, const uint16_t *weight, const float *bias, void *out,
                               int64_t num_rows, int64_t out_size, int64_t in_size, int ending, int num_threads) {
    const struct product product = {inputs, weight, bias, out, num_rows, out_size, in_size, (enum ending)ending};
    for (int64_t from = 0; from < num_rows; from += BLOCK_ROWS) {
        const int64_t until = from + BLOCK_ROWS < num_rows ? from + BLOCK_ROWS : num_rows;
        FOR_EACH(panel, num_panels(&product), num_threads, multiply_panel(&product, from, until, panel););
    }
}
#endif

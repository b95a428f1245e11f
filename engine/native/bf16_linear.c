/* A product with a packed bfloat16 matrix, for one row or thousands: out = inputs . weight' + bias, sums in float.

   How the weight lies and what the sums become is in bf16_panels.h. One instruction multiplies a pair of an input row,
   in every lane, by 16 rows of the weight. A tile is up to TILE_ROWS input rows by one panel, all in registers: a panel
   passes through the first cache once for that many rows, and memory once for all. What a row of the inputs gets
   depends on that row alone, in one order of summing, however many rows there are. Only for CPUs with AVX-512's
   bfloat16 products. */
#include "vectors.h"

#ifdef __AVX512BF16__
#include "bf16_panels.h"
#include "threads.h"

#define TILE_ROWS 12     /* times two vectors of sums: 24 of the 32 registers */
#define BLOCK_ROWS 480   /* of inputs that pass by a panel before the next is taken: they stay in the second cache */
#define AHEAD_BYTES 4096 /* how far before its use a panel is asked for, past the second cache, where it has but one */

/* Keeps the compiler from addressing every row by a register of its own: there are too few for twelve. */
#define OPAQUE(pointer) __asm__("" : "+r"(pointer))

/* Asks for the lines that a tile's results begin in: they have no room in the second cache beside the inputs of many
   rows, and a store waits for its line. */
INLINE void fetch_results(const struct product *product, int64_t row, int64_t panel, const int rows) {
    const int64_t element = product->ending == TO_FLOAT ? 4 : 2, row_bytes = product->out_size * element;
    const char *to = (const char *)product->out + row * row_bytes + panel * panel_columns(product) * element;
    for (int r = 0; r < rows; r++) __builtin_prefetch(to + r * row_bytes, 1, 2);
}

/* `rows` (a constant) input rows from `row` on by a panel. Meanwhile the bytes [ahead, ahead + ahead_bytes) are
   fetched; a fixed distance ahead of the panel where ahead is NULL. */
INLINE void multiply_tile(const struct product *product, int64_t row, int64_t panel, const int rows,
                          const char *ahead, int64_t ahead_bytes) {
    const int64_t row_bytes = 2 * product->in_size;
    const uint16_t *weights = panel_at(product, panel), *end = weights + PANEL * product->in_size;
    const char *ahead_end = ahead == NULL ? NULL : ahead + ahead_bytes;
    const char *threes[TILE_ROWS / 3]; /* rows 3 * i and two that follow: offsets that an address can hold */
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
        const __m512bh first = load_wide(weights), second = load_wide(weights + PANEL);
        for (int r = 0; r < rows; r++) {
            const __m512bh both = splat_pair((const uint16_t *)(threes[r / 3] + r % 3 * row_bytes));
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], first, both);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], second, both);
        }
        for (int i = 0; 3 * i < rows; i++) {
            threes[i] += 4;
            OPAQUE(threes[i]);
        }
    }
    switch (product->ending) {
#define ENDING(e) \
    case e: \
        for (int r = 0; r < rows; r++) finish_row(product, row + r, panel, sums[r][0], sums[r][1], e); \
        break;
        ENDING(TO_BF16) ENDING(TO_FLOAT) ENDING(TO_GATED)
#undef ENDING
    }
}

/* A panel by input rows [from, until), in tiles of nearly the same height. */
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

/* What the arguments are: `struct product`. */
EXPORT void tandem_bf16_linear(const uint16_t *inputs, const uint16_t *weight, const float *bias, void *out,
                               int64_t num_rows, int64_t out_size, int64_t in_size, int ending, int num_threads) {
    const struct product product = {inputs, weight, bias, out, num_rows, out_size, in_size, (enum ending)ending};
    for (int64_t from = 0; from < num_rows; from += BLOCK_ROWS) {
        const int64_t until = from + BLOCK_ROWS < num_rows ? from + BLOCK_ROWS : num_rows;
        FOR_EACH(panel, num_panels(&product), num_threads, multiply_panel(&product, from, until, panel););
    }
}
#endif

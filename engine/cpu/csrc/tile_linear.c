/* Products of product.h by tiles, for any number of rows.

   A block is up to BLOCK_ROWS input rows by one panel: two tiles of inputs by the two halves of the panel, with all
   sums in tiles. Panels are packed as the tiles of weights want them. A panel is read from the cache once per block and
   from memory once per PASS_ROWS rows. The blocks of a pass have equal heights, because a thread shapes its tiles once;
   the last block overlaps the one before, and computes some rows twice. A row's sums are added in the order of the
   inputs and depend on no other row, so the results are the same for any number of rows. */
#include "tiles.h"

#if TILES
#include "product.h"
#include "threads.h"

#define BLOCK_ROWS (2 * TILE_ROWS)
#define PASS_ROWS 512    /* input rows per pass over the panels: so many stay in L2 */
#define AHEAD_BYTES 4096 /* prefetch distance within a panel */

struct pass {
    const struct product *product;
    int64_t from, until; /* input rows */
    int upper, lower;    /* rows of a block's two tiles of inputs; lower may be 0 */
};

/* Adds the products of up to TILE_INPUTS inputs of each row. The second tile begins `second` elements after the first. */
INLINE void add_inputs(const uint16_t *inputs, int64_t row_bytes, int64_t second, const uint16_t *weights,
                       const int has_lower) {
    LOAD_TILE(6, weights, 4 * PANEL);
    LOAD_TILE(4, inputs, row_bytes);
    LOAD_TILE(7, weights + PANEL, 4 * PANEL);
    if (has_lower) LOAD_TILE(5, inputs + second, row_bytes);
    MULTIPLY_TILES(0, 4, 6);
    MULTIPLY_TILES(1, 4, 7);
    if (!has_lower) return;
    MULTIPLY_TILES(2, 5, 6);
    MULTIPLY_TILES(3, 5, 7);
}

/* The last inputs of a row that does not fill its last tile: padded with zeros, and so are the weights. */
INLINE void add_last_inputs(const uint16_t *inputs, int64_t in_size, int count, int rows, int upper,
                            const uint16_t *weights, const int has_lower) {
    uint16_t padded[BLOCK_ROWS][TILE_INPUTS] = {{0}}, padded_weights[TILE_INPUTS * PANEL] = {0};
    for (int r = 0; r < rows; r++) memcpy(padded[r], inputs + r * in_size, 2 * count);
    memcpy(padded_weights, weights, 2 * count * PANEL);
    add_inputs(padded[0], TILE_BYTES, upper * TILE_INPUTS, padded_weights, has_lower);
}

INLINE void multiply_block(const struct pass *pass, int64_t row, int64_t panel, const int has_lower) {
    const struct product *product = pass->product;
    const int64_t in_size = product->in_size, second = pass->upper * in_size, whole = in_size / TILE_INPUTS;
    const int rows = pass->upper + pass->lower, left = (int)(in_size % TILE_INPUTS);
    const uint16_t *inputs = product->inputs + row * in_size, *weights = panel_at(product, panel);
    float sums[BLOCK_ROWS][PANEL] __attribute__((aligned(LINE_BYTES)));
    fetch_results(product, row, panel, rows);
    ZERO_TILE(0);
    ZERO_TILE(1);
    if (has_lower) {
        ZERO_TILE(2);
        ZERO_TILE(3);
    }
    for (int64_t k = 0; k < whole; k++, inputs += TILE_INPUTS, weights += TILE_INPUTS * PANEL) {
        __builtin_prefetch((const char *)weights + AHEAD_BYTES, 0, 3);
        add_inputs(inputs, 2 * in_size, second, weights, has_lower);
    }
    if (left) add_last_inputs(inputs, in_size, left, rows, pass->upper, weights, has_lower);
    STORE_TILE(0, &sums[0][0], sizeof sums[0]);
    STORE_TILE(1, &sums[0][HALF_PANEL], sizeof sums[0]);
    if (has_lower) {
        STORE_TILE(2, &sums[pass->upper][0], sizeof sums[0]);
        STORE_TILE(3, &sums[pass->upper][HALF_PANEL], sizeof sums[0]);
    }
    FOR_ENDING(product->ending, for (int r = 0; r < rows; r++)
        finish_row(product, row + r, panel, load_floats(sums[r]), load_floats(sums[r] + HALF_PANEL), e);)
}

/* Multiplies a pass's rows by the panels [from, until). */
static void multiply_panels(const struct pass *pass, int64_t from, int64_t until) {
    const int64_t height = pass->upper + pass->lower, last = pass->until - height;
    shape_tiles(pass->upper, pass->lower ? pass->lower : pass->upper);
    for (int64_t panel = from; panel < until; panel++) {
        for (int64_t row = pass->from; row < pass->until; row += height) {
            const int64_t first = row < last ? row : last;
            if (pass->lower)
                multiply_block(pass, first, panel, 1);
            else
                multiply_block(pass, first, panel, 0);
        }
    }
    release_tiles();
}

/* `struct product` describes the arguments. */
EXPORT void tandem_bf16_linear(const uint16_t *inputs, const uint16_t *weight, const float *bias, void *out,
                               int64_t num_rows, int64_t out_size, int64_t in_size, int ending, int num_threads) {
    const struct product product = {inputs, weight, bias, out, num_rows, out_size, in_size, (enum ending)ending};
    const int64_t panels = num_panels(&product), num_passes = (num_rows + PASS_ROWS - 1) / PASS_ROWS;
    for (int64_t i = 0; i < num_passes; i++) {
        struct pass pass = {&product, num_rows * i / num_passes, num_rows * (i + 1) / num_passes, 0, 0};
        const int64_t rows = pass.until - pass.from, num_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int height = (int)((rows + num_blocks - 1) / num_blocks);
        pass.upper = height <= TILE_ROWS ? height : (height + 1) / 2;
        pass.lower = height - pass.upper;
        FOR_EACH(share, num_threads, num_threads, {
            multiply_panels(&pass, panels * share / num_threads, panels * (share + 1) / num_threads);
        });
    }
}
#endif

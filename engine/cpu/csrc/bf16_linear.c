/* Multiplies one to thousands of input rows by a packed bfloat16 matrix: out = inputs . weight' + bias, sums in float.

   A weight [out, in] is packed in panels of PANEL rows (the last padded with zeros), pairs of `in` side by side:

       [ceil(out / PANEL), in / 2, PANEL, 2]

   A gated weight combines the gate and up matrices, [size, in] each. A panel holds 16 rows of gate and the same 16 rows
   of up (both padded with zeros). An input row's sums by one panel then suffice for 16 results of SwiGLU:

       [ceil(size / 16), in / 2, 16 of gate + 16 of up, 2]

   One instruction multiplies a broadcast pair of an input row by 16 rows of the weight. A tile is up to TILE_ROWS
   input rows by one panel, with all sums in registers. A panel is read from L1 once per tile and from memory once per
   BLOCK_ROWS rows. The result of an input row depends on that row alone: the order of summing is the same for any
   number of rows. Sums are rounded once, after the bias and the activation. This file needs AVX-512's bfloat16
   products. */
#include "vectors.h"

#ifdef __AVX512BF16__
#include "bf16_products.h"
#include "threads.h"

#define PANEL 32
#define HALF_PANEL 16
#define TILE_ROWS 12     /* times two vectors of sums: 24 of the 32 registers */
#define BLOCK_ROWS 480   /* input rows per pass over the panels: so many stay in L2 */
#define AHEAD_BYTES 4096 /* prefetch distance within a panel that has one tile; such prefetches bypass L2 */

enum ending { /* the form of a product's results; the numbers match class Ending of engine/cpu/kernels.py */
    TO_BF16 = 0,
    TO_FLOAT = 1,
    TO_GATED = 2, /* silu(gate) * up, as bfloat16; without a bias */
};

struct product {
    const uint16_t *inputs; /* [num_rows, in_size], in_size even */
    const uint16_t *weight; /* packed as above */
    const float *bias;      /* [out_size], or NULL */
    void *out;              /* [num_rows, out_size], float for TO_FLOAT */
    int64_t num_rows, out_size, in_size;
    enum ending ending;
};

/* The number of output columns per panel. */
INLINE int64_t panel_columns(const struct product *product) {
    return product->ending == TO_GATED ? HALF_PANEL : PANEL;
}

INLINE int64_t num_panels(const struct product *product) {
    return (product->out_size + panel_columns(product) - 1) / panel_columns(product);
}

INLINE const uint16_t *panel_at(const struct product *product, int64_t panel) {
    return product->weight + panel * PANEL * product->in_size;
}

/* A mask of the first `left` lanes. */
INLINE __mmask16 first_lanes(int64_t left) { return left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0; }

INLINE void store_half(uint16_t *to, __m512 values, int64_t left) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(values);
    if (left >= HALF_PANEL)
        _mm256_storeu_si256((__m256i *)to, rounded);
    else
        _mm256_mask_storeu_epi16(to, first_lanes(left), rounded);
}

/* Stores the results of input row `row` by a panel from its sums. `ending` equals product->ending but is a constant:
   the caller branches once for many rows. */
INLINE void finish_row(const struct product *product, int64_t row, int64_t panel, __m512 first, __m512 second,
                       const enum ending ending) {
    const int64_t column = panel * (ending == TO_GATED ? HALF_PANEL : PANEL), left = product->out_size - column;
    if (ending == TO_GATED) {
        store_half((uint16_t *)product->out + row * product->out_size + column,
                   _mm512_mul_ps(rough_silu(first), second), left);
        return;
    }
    if (product->bias) {
        first = _mm512_add_ps(first, _mm512_maskz_loadu_ps(first_lanes(left), product->bias + column));
        second = _mm512_add_ps(second, _mm512_maskz_loadu_ps(first_lanes(left - 16), product->bias + column + 16));
    }
    if (ending == TO_FLOAT) {
        float *to = (float *)product->out + row * product->out_size + column;
        _mm512_mask_storeu_ps(to, first_lanes(left), first);
        _mm512_mask_storeu_ps(to + 16, first_lanes(left - 16), second);
        return;
    }
    uint16_t *to = (uint16_t *)product->out + row * product->out_size + column;
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    if (left >= PANEL)
        _mm512_storeu_si512(to, rounded);
    else
        _mm512_mask_storeu_epi16(to, (1u << left) - 1, rounded);
}

/* Stops the compiler from keeping one address register per row: twelve rows would need too many. */
#define OPAQUE(pointer) __asm__("" : "+r"(pointer))

/* Prefetches the first line of each row's results: a store waits for its line, and the inputs of many rows evict the
   results from L2. */
INLINE void fetch_results(const struct product *product, int64_t row, int64_t panel, const int rows) {
    const int64_t element = product->ending == TO_FLOAT ? 4 : 2, row_bytes = product->out_size * element;
    const char *to = (const char *)product->out + row * row_bytes + panel * panel_columns(product) * element;
    for (int r = 0; r < rows; r++) __builtin_prefetch(to + r * row_bytes, 1, 2);
}

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

/* A product with a packed bfloat16 matrix, for one row or thousands: out = inputs . weight' + bias, sums in float.

   A weight [out, in] lies in panels of PANEL of its rows (the last padded with zeros), pairs of `in` side by side:

       [ceil(out / PANEL), in / 2, PANEL, 2]

   A gated one, of gate and up matrices [size, in] each, has 16 rows of the gate and the same 16 of up in a panel (both
   padded with zeros). The sums of a row by one panel then hold all that 16 results of SwiGLU need:

       [ceil(size / 16), in / 2, 16 of gate + 16 of up, 2]

   One instruction multiplies a pair of an input row, in every lane, by 16 rows of the weight. A tile is up to TILE_ROWS
   input rows by one panel, all in registers: a panel passes through the first cache once for that many rows, and memory
   once for all. The result of an input row depends on that row alone, in one order of summing, however many rows there
   are. Sums are rounded once: after the bias, after the activation. Only for CPUs with AVX-512's bfloat16 products. */
#include "vectors.h"

#ifdef __AVX512BF16__
#include "bf16_products.h"
#include "threads.h"

#define PANEL 32
#define HALF_PANEL 16
#define TILE_ROWS 12     /* times two vectors of sums: 24 of the 32 registers */
#define BLOCK_ROWS 480   /* of inputs that pass by a panel before the next is taken: they stay in the second cache */
#define AHEAD_BYTES 4096 /* how far before its use a panel is asked for, past the second cache, where it has but one */

enum ending { /* what a product's results are: numbered as class Ending of engine/cpu/kernels.py */
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

/* How many columns of the output a panel gives. */
INLINE int64_t panel_columns(const struct product *product) {
    return product->ending == TO_GATED ? HALF_PANEL : PANEL;
}

INLINE int64_t num_panels(const struct product *product) {
    return (product->out_size + panel_columns(product) - 1) / panel_columns(product);
}

INLINE const uint16_t *panel_at(const struct product *product, int64_t panel) {
    return product->weight + panel * PANEL * product->in_size;
}

/* A bit for each of the `left` first lanes. */
INLINE __mmask16 first_lanes(int64_t left) { return left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0; }

INLINE void store_half(uint16_t *to, __m512 values, int64_t left) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(values);
    if (left >= HALF_PANEL)
        _mm256_storeu_si256((__m256i *)to, rounded);
    else
        _mm256_mask_storeu_epi16(to, first_lanes(left), rounded);
}

/* The sums of an input row by all rows of a panel, made the results of `row`. `ending` is the product's own, given as
   a constant: the choice is made once for many rows. */
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

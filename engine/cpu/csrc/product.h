/* The product of input rows with a packed bfloat16 matrix: its arguments, and how sums become results.

   A weight [out, in] is packed in panels of PANEL rows (the last padded with zeros), pairs of `in` side by side:

       [ceil(out / PANEL), in / 2, PANEL, 2]

   A gated weight combines the gate and up matrices, [size, in] each. A panel holds 16 rows of gate and the same 16 rows
   of up (both padded with zeros). An input row's sums by one panel then suffice for 16 results of SwiGLU:

       [ceil(size / 16), in / 2, 16 of gate + 16 of up, 2]

   Sums are float, and are rounded once, after the bias and the activation. */
#ifndef TANDEM_PRODUCT_H
#define TANDEM_PRODUCT_H

#include "silu.h"

#define PANEL 32
#define HALF_PANEL 16 /* one vector of sums */

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

/* Prefetches the first line of each row's results: a store waits for its line, and the inputs of many rows evict the
   results from L2. */
INLINE void fetch_results(const struct product *product, int64_t row, int64_t panel, const int rows) {
    const int64_t element = product->ending == TO_FLOAT ? 4 : 2, row_bytes = product->out_size * element;
    const char *to = (const char *)product->out + row * row_bytes + panel * panel_columns(product) * element;
    for (int r = 0; r < rows; r++) __builtin_prefetch(to + r * row_bytes, 1, 2);
}

/* Loads and stores of the first `left` elements of a vector; all of them if there are more, none if `left` is below 1. */
#if WIDE_VECTORS
INLINE __mmask16 first_lanes(int64_t left) { return left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0; }

INLINE vfloat load_some(const float *from, int64_t left) { return _mm512_maskz_loadu_ps(first_lanes(left), from); }

INLINE void store_some(float *to, vfloat values, int64_t left) { _mm512_mask_storeu_ps(to, first_lanes(left), values); }

INLINE void store_some_rounded(uint16_t *to, vfloat values, int64_t left) {
    const __m256i rounded = round_vector(values);
    if (left >= LANES)
        _mm256_storeu_si256((__m256i *)to, rounded);
    else
        _mm256_mask_storeu_epi16(to, first_lanes(left), rounded);
}
#else
INLINE int64_t some(int64_t left) { return left >= LANES ? LANES : left > 0 ? left : 0; }

INLINE vfloat load_some(const float *from, int64_t left) {
    vfloat loaded = {0};
    memcpy(&loaded, from, 4 * some(left));
    return loaded;
}

INLINE void store_some(float *to, vfloat values, int64_t left) { memcpy(to, &values, 4 * some(left)); }

INLINE void store_some_rounded(uint16_t *to, vfloat values, int64_t left) {
    uint16_t rounded[LANES];
    store_row(rounded, 0, 1, values);
    memcpy(to, rounded, 2 * some(left));
}
#endif

/* Stores the results of input row `row` by a panel from its sums. `ending` equals product->ending but is a constant:
   the caller branches once for many rows. */
INLINE void finish_row(const struct product *product, int64_t row, int64_t panel, vfloat first, vfloat second,
                       const enum ending ending) {
    const int64_t column = panel * (ending == TO_GATED ? HALF_PANEL : PANEL), left = product->out_size - column;
    const int64_t at = row * product->out_size + column;
    if (ending == TO_GATED) {
        store_some_rounded((uint16_t *)product->out + at, bf16_silu(first) * second, left);
        return;
    }
    if (product->bias) {
        first += load_some(product->bias + column, left);
        second += load_some(product->bias + column + HALF_PANEL, left - HALF_PANEL);
    }
    if (ending == TO_FLOAT) {
        float *to = (float *)product->out + at;
        store_some(to, first, left);
        store_some(to + HALF_PANEL, second, left - HALF_PANEL);
    } else {
        uint16_t *to = (uint16_t *)product->out + at;
        store_some_rounded(to, first, left);
        store_some_rounded(to + HALF_PANEL, second, left - HALF_PANEL);
    }
}

/* Runs `statement`, a use of finish_row, with `e` as the product's ending. */
#define FOR_ENDING(ending_, ...) \
    switch (ending_) { \
    case TO_BF16: { enum { e = TO_BF16 }; __VA_ARGS__ } break; \
    case TO_FLOAT: { enum { e = TO_FLOAT }; __VA_ARGS__ } break; \
    case TO_GATED: { enum { e = TO_GATED }; __VA_ARGS__ } break; \
    }

#endif

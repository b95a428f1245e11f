/* A bfloat16 matrix as the kernels multiply by it, and what becomes of the sums: what products in vectors and in tiles
   have in common.

   A weight [out, in] lies in panels of PANEL of its rows (the last padded with zeros), pairs of `in` side by side:

       [ceil(out / PANEL), in / 2, PANEL, 2]

   A gated one, of gate and up matrices [size, in] each, has 16 rows of the gate and the same 16 of up in a panel (both
   padded with zeros), so that who has a row's sums of a panel has all that 16 results of SwiGLU need:

       [ceil(size / 16), in / 2, 16 of gate + 16 of up, 2]

   Sums are float, and are rounded once: after the bias, after the activation. */
#ifndef TANDEM_BF16_PANELS_H
#define TANDEM_BF16_PANELS_H

#include "bf16_products.h"

#define PANEL 32
#define HALF_PANEL 16

enum ending { /* what a product's results are: as engine/native_kernels.py numbers them */
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

#endif

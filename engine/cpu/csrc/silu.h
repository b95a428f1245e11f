/* SwiGLU's activation: x / (1 + e^-x). */
#ifndef TANDEM_SILU_H
#define TANDEM_SILU_H

#include "bf16_products.h"

INLINE vfloat silu(vfloat gate) {
    /* Clamped, because `exponential` is valid up to 88; the result of so low a gate is practically zero. */
    const vfloat negated = -gate, limit = splat(88.0f);
    const vint over = negated > limit;
    return gate / (1.0f + exponential((vfloat)(((vint)limit & over) | ((vint)negated & ~over))));
}

/* silu for results that are rounded to bfloat16: on AVX-512 by a reciprocal within 2^-14. */
INLINE vfloat bf16_silu(vfloat gate) {
#if WIDE_VECTORS
    const __m512 power = power_of_two(gate * -LOG2_E);
    return _mm512_mul_ps(gate, _mm512_rcp14_ps(_mm512_add_ps(power, _mm512_set1_ps(1.0f))));
#else
    return silu(gate);
#endif
}

#endif

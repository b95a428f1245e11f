/* A matrix of 8-bit or 4-bit codes, laid out so that one vector holds the same columns of neighbouring rows.

   A row's columns are cut into groups of 32, each with a scale and, for 4 bits, a minimum, both half precision:

       8 bits   weight = (code - 128) * scale              4 bits   weight = code * scale + minimum

   Rows are cut into tiles of 48, which is what a kernel multiplies by at a time: so it reads memory in order. Their
   words lie side by side. A word holds 4 columns of 8 bits, or 8 columns of 4 bits: columns 0 to 3 in the low halves
   of its bytes, 4 to 7 in the high ones.

       codes    [tiles][groups][8 or 4 words][48 rows]     scales, minimums    [tiles][groups][48 rows]

   Rows and columns that only fill up a tile or a group are zero or meet zeros. engine/quantization.py writes this. */
#ifndef TANDEM_QUANTIZED_H
#define TANDEM_QUANTIZED_H

#include "vectors.h"

#define GROUP 32
#define TILE_ROWS 48

struct quantized_matrix {
    const int32_t *codes;
    const uint16_t *scales, *minimums; /* minimums: NULL for 8 bits */
    const float *bias;                 /* [num_rows], or NULL */
    int64_t num_rows, num_columns, num_groups;
};

INLINE int words_per_group(int bits) { return GROUP * bits / 32; }

/* LANES half-precision numbers: their exponent moved into a float's, which 2^112 then corrects. No infinities here. */
INLINE vfloat load_halves(const uint16_t *from) {
    vshort raw;
    memcpy(&raw, from, sizeof raw);
    const vint bits = __builtin_convertvector(raw, vint);
    const vfloat magnitude = (vfloat)((bits & 0x7fff) << 13) * 0x1p112f;
    return (vfloat)((vint)magnitude | (bits & 0x8000) << 16);
}

INLINE float load_half(uint16_t raw) {
    const uint32_t magnitude = (uint32_t)(raw & 0x7fff) << 13, sign = (uint32_t)(raw & 0x8000) << 16;
    float value;
    memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
    return sign ? -value : value;
}

#endif

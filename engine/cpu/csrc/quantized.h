/* A matrix of 8-bit or 4-bit codes. One vector holds the same columns of neighbouring rows.

   A row is divided into groups of 32 columns. Each group has a scale and, for 4 bits, a minimum, in half precision:

       8 bits   weight = (code - 128) * scale              4 bits   weight = code * scale + minimum

   The matrix is divided into tiles of 48 rows. A kernel multiplies by one tile at a time and reads memory in order: the
   words of a tile's rows are side by side. A word holds 4 columns of 8 bits, or 8 columns of 4 bits: columns 0 to 3 in
   the low halves of its bytes, columns 4 to 7 in the high halves.

       codes    [tiles][groups][8 or 4 words][48 rows]     scales, minimums    [tiles][groups][48 rows]

   Padding of a tile or a group is zero or is multiplied by zeros. engine/quantization.py writes this layout. */
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

/* LANES half-precision numbers as floats: shifts the exponent into a float's place, then corrects the bias by 2^112.
   The numbers must be finite. */
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

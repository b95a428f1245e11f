/* Dequantizes GGUF's simplest blocks of 32 weights into the model's dtype in one pass; engine/gguf_groups.py describes
   the layouts. A scale has 11 bits and a code at most 8, so their product is exact. The sum with the minimum is rounded
   once, fused or not: every compiler and instruction set gives the same bits. */
#include "vectors.h"

#define BLOCK 32

enum kind { Q8_0, Q4_0, Q4_1 }; /* numbered as in engine/cpu/dequantize.py */

static const int block_bytes[] = {[Q8_0] = 34, [Q4_0] = 18, [Q4_1] = 20};

INLINE float half_at(const uint8_t *from) {
    const uint32_t half = from[0] | (uint32_t)from[1] << 8, sign = (half & 0x8000) << 16;
    const uint32_t exponent = half >> 10 & 31, fraction = half & 0x3ff;
    const float tiny = (float)fraction * 0x1p-24f; /* subnormal */
    uint32_t bits = sign | (exponent == 31 ? 0xff : exponent + 112) << 23 | fraction << 13;
    float value;
    if (exponent == 0) return sign ? -tiny : tiny;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint16_t as_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)(bits >> 16 | 64); /* rounding could turn NaN into infinity */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Writes the BLOCK weights of one block to `values`. */
INLINE void unpack(const uint8_t *block, const enum kind kind, float *values) {
    const float scale = half_at(block), minimum = kind == Q4_1 ? half_at(block + 2) : 0.0f;
    const uint8_t *codes = block + (kind == Q4_1 ? 4 : 2);
    if (kind == Q8_0) {
        for (int i = 0; i < BLOCK; i++) values[i] = scale * (float)(int8_t)codes[i];
        return;
    }
    const int middle = kind == Q4_0 ? 8 : 0;
    for (int i = 0; i < BLOCK / 2; i++) {
        values[i] = scale * (float)((codes[i] & 15) - middle);
        values[i + BLOCK / 2] = scale * (float)((codes[i] >> 4) - middle);
    }
    if (kind == Q4_1)
        for (int i = 0; i < BLOCK; i++) values[i] += minimum;
}

INLINE void unpack_all(const uint8_t *blocks, int64_t num_blocks, const enum kind kind, void *out, int is_bf16) {
    for (int64_t b = 0; b < num_blocks; b++) {
        float values[BLOCK];
        unpack(blocks + b * block_bytes[kind], kind, values);
        if (is_bf16) {
            uint16_t *to = (uint16_t *)out + b * BLOCK;
            for (int i = 0; i < BLOCK; i++) to[i] = as_bf16(values[i]);
        } else {
            memcpy((float *)out + b * BLOCK, values, sizeof values);
        }
    }
}

/* blocks [num_blocks] of `kind` -> out [num_blocks * 32], bfloat16 or float. */
EXPORT void tandem_dequantize(const uint8_t *blocks, int64_t num_blocks, int kind, void *out, int is_bf16) {
    if (kind == Q8_0) unpack_all(blocks, num_blocks, Q8_0, out, is_bf16);
    if (kind == Q4_0) unpack_all(blocks, num_blocks, Q4_0, out, is_bf16);
    if (kind == Q4_1) unpack_all(blocks, num_blocks, Q4_1, out, is_bf16);
}

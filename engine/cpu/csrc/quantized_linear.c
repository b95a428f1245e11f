/* Products with a quantized matrix, in integers: out = inputs * matrix^T + bias.

   The inputs are first rounded to 8 bits, by groups of 32 like the weights; a group's largest element sets its scale.
   The 32 products of a group are then summed in 32 bits without rounding. The groups' sums are floats, added in order.
   An output therefore depends on its own row of inputs alone, not on the batch, the threads or the instruction set
   (except for the last bit of a sum on CPUs without fused multiply-add).

   A block is a few rows of inputs by a few vectors of a tile, with its integer sums in registers. A block has several
   vectors because broadcasting four inputs to all lanes costs as much as multiplying by them. Computing the blocks of
   one tile prefetches the next tile. */
#include "quantized.h"
#include "threads.h"

#if defined(__AVX512BW__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define BLOCK_VECTORS 3
#if LANES == 16 && defined(__AVX512BW__)
#define BLOCK_ROWS 6 /* 18 of 32 registers hold integer sums; the rest hold weights, scales and float sums */
#else
#define BLOCK_ROWS 2
#endif
#define PASS_ROWS 256          /* input rows per pass over the matrix: so many stay in L2 */
#define PARALLEL_GROUPS 256    /* of a tile: one thread finishes fewer before another wakes up */
#define LINE 64 /* bytes of a cache line */
#define VANISHING 1e-30f /* a group counts as zero if its largest input is smaller */

/* One group of one row of inputs. */
struct group_input {
    float scale;
    union {
        int32_t start;     /* 8 bits: initial value of the sum, -128 * sum of inputs, because codes are unsigned */
        float scaled_sum;  /* 4 bits: factor of the minimum */
    };
};

struct inputs {
    int8_t *codes;              /* [rows][num_groups * GROUP] */
    struct group_input *groups; /* [rows][num_groups] */
};

/* sum + the products of each word's four unsigned bytes and the four signed bytes of `inputs`. */
INLINE vint dot4(vint sum, vint weights, int32_t inputs) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (vint)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(inputs));
#elif LANES == 16 && defined(__AVX512BW__)
    const __m512i all = _mm512_set1_epi32(inputs), even = _mm512_set1_epi32(0x00ff00ff), words = (__m512i)weights;
    const __m512i even_inputs = _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8), odd_inputs = _mm512_srai_epi16(all, 8);
    const __m512i even_sums = _mm512_madd_epi16(_mm512_and_si512(words, even), even_inputs);
    return sum + (vint)even_sums + (vint)_mm512_madd_epi16(_mm512_srli_epi16(words, 8), odd_inputs);
#elif LANES == 8 && defined(__AVX2__)
    const __m256i all = _mm256_set1_epi32(inputs), even = _mm256_set1_epi32(0x00ff00ff), words = (__m256i)weights;
    const __m256i even_inputs = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), odd_inputs = _mm256_srai_epi16(all, 8);
    const __m256i even_sums = _mm256_madd_epi16(_mm256_and_si256(words, even), even_inputs);
    return sum + (vint)even_sums + (vint)_mm256_madd_epi16(_mm256_srli_epi16(words, 8), odd_inputs);
#else
    for (int byte = 0; byte < 4; byte++)
        sum += (weights >> (8 * byte) & 0xff) * (int32_t)(int8_t)(inputs >> (8 * byte));
    return sum;
#endif
}

INLINE vfloat absolute(vfloat values) { return (vfloat)((vint)values & 0x7fffffff); }

typedef int32_t vint4 __attribute__((vector_size(16)));

INLINE vfloat4 larger4(vfloat4 a, vfloat4 b) {
    const vint4 take = a > b;
    return (vfloat4)(((vint4)a & take) | ((vint4)b & ~take));
}

INLINE float largest_of(vfloat values) {
    vfloat4 quarters[LANES / 4];
    memcpy(quarters, &values, sizeof values);
    vfloat4 largest = quarters[0];
    for (int quarter = 1; quarter < LANES / 4; quarter++) largest = larger4(largest, quarters[quarter]);
    const float a = largest[0] > largest[1] ? largest[0] : largest[1];
    const float b = largest[2] > largest[3] ? largest[2] : largest[3];
    return a > b ? a : b;
}

typedef int8_t vchar __attribute__((vector_size(LANES)));

/* Rounds 32 floats to 8 bits: nearest, ties to even. If one is infinite or NaN, the scale is NaN, and so are all sums. */
INLINE void quantize_group(const vfloat *values, int8_t *codes, struct group_input *group, int has_minimums) {
    vfloat magnitude = absolute(values[0]);
    for (int part = 1; part < GROUP / LANES; part++) magnitude = larger(magnitude, absolute(values[part]));
    const float largest = largest_of(magnitude);
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    const float factor = largest < VANISHING ? 0.0f : 127.0f / largest;
    vfloat sums = {0};
    for (int part = 0; part < GROUP / LANES; part++) {
        const vfloat shifted = values[part] * factor + shift;
        const vchar narrow = __builtin_convertvector((vint)shifted - (vint)splat(shift), vchar);
        memcpy(codes + part * LANES, &narrow, sizeof narrow);
        sums += shifted - shift;
    }
    const float sum = sum_lanes(sums); /* of integers: exact; NaN if one of the floats is infinite or NaN */
    const int is_finite = sum == sum;
    group->scale = !is_finite ? sum : largest < VANISHING ? 0.0f : largest / 127.0f;
    if (has_minimums)
        group->scaled_sum = group->scale * sum;
    else
        group->start = is_finite ? -128 * (int32_t)sum : 0;
}

INLINE void quantize_row(const void *row, int is_bf16, const struct quantized_matrix *matrix, int8_t *codes,
                         struct group_input *groups) {
    for (int64_t group = 0; group < matrix->num_groups; group++) {
        const int64_t first = group * GROUP, present = matrix->num_columns - first;
        vfloat values[GROUP / LANES];
        if (present >= GROUP) {
            for (int part = 0; part < GROUP / LANES; part++)
                values[part] = load_row(row, first + part * LANES, is_bf16);
        } else {
            float padded[GROUP] = {0};
            for (int64_t i = 0; i < present; i++) padded[i] = load_one(row, first + i, is_bf16);
            memcpy(values, padded, sizeof padded);
        }
        quantize_group(values, codes + first, groups + group, matrix->minimums != NULL);
    }
}

INLINE vint load_words(const int32_t *from) {
    vint words;
    memcpy(&words, from, sizeof words);
    return words;
}

/* The part of the next tile that a block prefetches: `lines` cache lines for each group. */
struct ahead {
    const char *from;
    int64_t lines;
};

/* out[row * BLOCK_VECTORS + v] = row `row` of the inputs by vector v of the tile, counted from the tile's row `lane`.
   rows and bits are constants at every call. */
INLINE void multiply(const struct quantized_matrix *matrix, int64_t tile, int lane, const int8_t *codes,
                     const struct group_input *inputs, struct ahead ahead, int rows, int bits, vfloat *out) {
    const int64_t num_groups = matrix->num_groups, row_bytes = num_groups * GROUP;
    const int group_words = words_per_group(bits) * TILE_ROWS;
    const int32_t *words = matrix->codes + tile * num_groups * group_words + lane;
    const int64_t first_scale = tile * num_groups * TILE_ROWS + lane;
    vfloat sums[BLOCK_ROWS * BLOCK_VECTORS];
    for (int i = 0; i < rows * BLOCK_VECTORS; i++) sums[i] = splat(0.0f);
    for (int64_t group = 0; group < num_groups; group++) {
        for (int64_t line = 0; line < ahead.lines; line++) __builtin_prefetch(ahead.from + line * LINE, 0, 2);
        ahead.from += ahead.lines * LINE;
        vint products[BLOCK_ROWS * BLOCK_VECTORS];
        for (int row = 0; row < rows; row++) {
            const vint start = bits == 8 ? inputs[row * num_groups].start - (vint){0} : (vint){0};
            for (int v = 0; v < BLOCK_VECTORS; v++) products[row * BLOCK_VECTORS + v] = start;
        }
#pragma GCC unroll 8
        for (int four = 0; four < GROUP / 4; four++) { /* four columns; with 4 bits, two fours share a word */
            vint weights[BLOCK_VECTORS];
            for (int v = 0; v < BLOCK_VECTORS; v++) {
                weights[v] = load_words(words + four * bits / 8 * TILE_ROWS + v * LANES);
                if (bits == 4) weights[v] = weights[v] >> (four % 2 * 4) & 0x0f0f0f0f;
            }
            for (int row = 0; row < rows; row++) {
                int32_t these;
                memcpy(&these, codes + row * row_bytes + 4 * four, sizeof these);
                for (int i = row * BLOCK_VECTORS, v = 0; v < BLOCK_VECTORS; i++, v++)
                    products[i] = dot4(products[i], weights[v], these);
            }
        }
        vfloat scales[BLOCK_VECTORS], minimums[BLOCK_VECTORS];
        for (int v = 0; v < BLOCK_VECTORS; v++) {
            const int64_t place = first_scale + group * TILE_ROWS + v * LANES;
            scales[v] = load_halves(matrix->scales + place);
            if (bits == 4) minimums[v] = load_halves(matrix->minimums + place);
        }
        for (int row = 0; row < rows; row++) {
            const vfloat scale = splat(inputs[row * num_groups].scale);
            const vfloat scaled_sum = bits == 4 ? splat(inputs[row * num_groups].scaled_sum) : scale;
            for (int i = row * BLOCK_VECTORS, v = 0; v < BLOCK_VECTORS; i++, v++) {
                sums[i] += __builtin_convertvector(products[i], vfloat) * scales[v] * scale;
                if (bits == 4) sums[i] += minimums[v] * scaled_sum;
            }
        }
        words += group_words;
        codes += GROUP;
        inputs++;
    }
    for (int i = 0; i < rows * BLOCK_VECTORS; i++) out[i] = sums[i];
}

/* One compiled copy of `multiply` for each block size. */
#define MULTIPLY(rows, bits) \
    static __attribute__((noinline)) void multiply_##rows##_##bits( \
        const struct quantized_matrix *matrix, int64_t tile, int lane, const int8_t *codes, \
        const struct group_input *inputs, struct ahead ahead, vfloat *out) { \
        multiply(matrix, tile, lane, codes, inputs, ahead, rows, bits, out); \
    }
#define MULTIPLY_BOTH(rows) MULTIPLY(rows, 8) MULTIPLY(rows, 4)
MULTIPLY_BOTH(1)
MULTIPLY_BOTH(2)
#if BLOCK_ROWS == 6
MULTIPLY_BOTH(3)
MULTIPLY_BOTH(4)
MULTIPLY_BOTH(5)
MULTIPLY_BOTH(6)
#endif

/* [rows - 1][is_4_bit] */
static void (*const MULTIPLY_BLOCK[][2])(const struct quantized_matrix *, int64_t, int, const int8_t *,
                                         const struct group_input *, struct ahead, vfloat *) = {
    {multiply_1_8, multiply_1_4}, {multiply_2_8, multiply_2_4},
#if BLOCK_ROWS == 6
    {multiply_3_8, multiply_3_4}, {multiply_4_8, multiply_4_4}, {multiply_5_8, multiply_5_4},
    {multiply_6_8, multiply_6_4},
#endif
};

/* Stores one input row's sums by up to LANES rows of the matrix from `first` on. */
INLINE void store_sums(const struct quantized_matrix *matrix, int64_t first, vfloat sums, void *row, int is_bf16) {
    const int64_t present = matrix->num_rows - first;
    if (present >= LANES) {
        if (matrix->bias) sums += load_floats(matrix->bias + first);
        store_row(row, first, is_bf16, sums);
        return;
    }
    for (int64_t lane = 0; lane < present; lane++)
        store_one(row, first + lane, is_bf16, sums[lane] + (matrix->bias ? matrix->bias[first + lane] : 0.0f));
}

/* Multiplies rows [first_row, end_row) of the inputs by one tile, in blocks of nearly equal size. */
static void multiply_rows(const struct quantized_matrix *matrix, int64_t tile, const struct inputs *inputs,
                          int64_t first_row, int64_t end_row, void *outputs, int is_bf16) {
    const int64_t num_groups = matrix->num_groups, num_blocks = (end_row - first_row + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int is_4_bit = matrix->minimums != NULL;
    const int64_t tile_bytes = num_groups * words_per_group(is_4_bit ? 4 : 8) * TILE_ROWS * sizeof(int32_t);
    const int64_t lines = (tile_bytes + LINE * num_groups * num_blocks - 1) / (LINE * num_groups * num_blocks);
    const char *const next = (const char *)matrix->codes + (tile + 1) * tile_bytes, *const end = next + tile_bytes;
    struct ahead ahead = {next, lines};
    for (int64_t row = first_row, left = num_blocks, rows; left > 0; row += rows, left--) {
        rows = (end_row - row + left - 1) / left;
        const int8_t *codes = inputs->codes + row * num_groups * GROUP;
        const struct group_input *groups = inputs->groups + row * num_groups;
        for (int lane = 0; lane < TILE_ROWS; lane += BLOCK_VECTORS * LANES) {
            vfloat sums[BLOCK_ROWS * BLOCK_VECTORS];
            MULTIPLY_BLOCK[rows - 1][is_4_bit](matrix, tile, lane, codes, groups, ahead, sums);
            ahead.from += ahead.lines * num_groups * LINE;
            if (ahead.from >= end) ahead.lines = 0;
            for (int i = 0; i < rows * BLOCK_VECTORS; i++) {
                const size_t place = (size_t)(row + i / BLOCK_VECTORS) * matrix->num_rows * element_bytes(is_bf16);
                const int64_t first = tile * TILE_ROWS + lane + i % BLOCK_VECTORS * LANES;
                store_sums(matrix, first, sums[i], (char *)outputs + place, is_bf16);
            }
        }
    }
}

/* inputs: [num_rows, matrix->num_columns], outputs: [num_rows, matrix->num_rows], both contiguous.
   scratch: num_rows * matrix->num_groups * 40 bytes, aligned to 8. */
EXPORT void tandem_quantized_linear(const struct quantized_matrix *matrix, const void *inputs, void *outputs,
                                    int64_t num_rows, void *scratch, int is_bf16, int num_threads) {
    const int64_t num_groups = matrix->num_groups, num_tiles = (matrix->num_rows + TILE_ROWS - 1) / TILE_ROWS;
    const struct inputs rounded = {
        (int8_t *)scratch, (struct group_input *)((char *)scratch + num_rows * num_groups * GROUP)};
    const int threads = num_rows * num_tiles * num_groups >= PARALLEL_GROUPS ? num_threads : 1;
    FOR_EACH(row, num_rows, num_rows > threads ? threads : 1, {
        quantize_row(element(inputs, row * matrix->num_columns, is_bf16), is_bf16, matrix,
                     rounded.codes + row * num_groups * GROUP, rounded.groups + row * num_groups);
    });
    for (int64_t from = 0; from < num_rows; from += PASS_ROWS) {
        const int64_t until = num_rows - from < PASS_ROWS ? num_rows : from + PASS_ROWS;
        FOR_EACH(tile, num_tiles, threads,
                 multiply_rows(matrix, tile, &rounded, from, until, outputs, is_bf16););
    }
}

INLINE float weight_at(const struct quantized_matrix *matrix, int64_t row, int64_t column) {
    const int64_t group = row / TILE_ROWS * matrix->num_groups + column / GROUP, lane = row % TILE_ROWS;
    const int four = column % GROUP / 4, byte = column % 4;
    const float scale = load_half(matrix->scales[group * TILE_ROWS + lane]);
    if (!matrix->minimums) {
        const int32_t word = matrix->codes[(group * words_per_group(8) + four) * TILE_ROWS + lane];
        return (float)((word >> 8 * byte & 0xff) - 128) * scale;
    }
    const int32_t word = matrix->codes[(group * words_per_group(4) + four / 2) * TILE_ROWS + lane];
    const float minimum = load_half(matrix->minimums[group * TILE_ROWS + lane]);
    return (float)(word >> (8 * byte + four % 2 * 4) & 0xf) * scale + minimum;
}

/* outputs: [num_ids, matrix->num_columns]; row i = row ids[i] of the matrix. Returns 0, or 1 if an id is not a row. */
EXPORT int tandem_quantized_rows(const struct quantized_matrix *matrix, const int64_t *ids, int64_t num_ids,
                                 void *outputs, int is_bf16) {
    for (int64_t i = 0; i < num_ids; i++) {
        if (ids[i] < 0 || ids[i] >= matrix->num_rows) return 1;
        for (int64_t column = 0; column < matrix->num_columns; column++)
            store_one(outputs, i * matrix->num_columns + column, is_bf16, weight_at(matrix, ids[i], column));
    }
    return 0;
}

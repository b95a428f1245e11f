/* The operations of AMX's tiles, as instructions or in plain C.

   A CPU has eight tile registers of up to 16 rows of 64 bytes. `shape_tiles` gives the registers their shapes:

       0 1    sums of the upper input rows, float       4    upper input rows, bfloat16
       2 3    sums of the lower input rows              5    lower input rows
                                                        6 7  weights, 16 rows of pairs: [inputs / 2, 16, 2]

       MULTIPLY_TILES(c, a, b)    c[m][n] += the sum over k of a[m][2k] * b[k][n][0] + a[m][2k + 1] * b[k][n][1]

   Numbers of tiles are literals, strides are bytes. A row of sums depends on its own inputs alone. -DPORTABLE_TILES
   chooses plain C, so that a CPU without AMX runs the algorithms of the kernels too. */
#ifndef TANDEM_TILES_H
#define TANDEM_TILES_H

#include "vectors.h"

#if defined(__AMX_BF16__) || defined(PORTABLE_TILES)
#define TILES 1
#else
#define TILES 0
#endif

#if TILES
#if LANES != 16
#error "a tile's row is one vector of 16 floats"
#endif

#define TILE_ROWS 16
#define TILE_BYTES 64  /* of a row */
#define TILE_INPUTS 32 /* bfloat16 elements of a row */

/* The configuration in the CPU's format. */
struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
};

INLINE struct tile_shapes shapes_of(int upper, int lower) {
    struct tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = TILE_BYTES;
        shapes.num_rows[tile] = tile >= 6 ? TILE_ROWS : tile == 2 || tile == 3 || tile == 5 ? lower : upper;
    }
    return shapes;
}

#ifndef PORTABLE_TILES
#include <immintrin.h>

/* gcc does not know that tile instructions read memory: stores to it must not move behind them, or vanish. */
#define FINISH_STORES(to) __asm__ volatile("" ::"r"(to) : "memory")

#define LOAD_TILE(tile, from, stride) \
    do { \
        FINISH_STORES(from); \
        _tile_loadd(tile, from, stride); \
    } while (0)
#define ZERO_TILE(tile) _tile_zero(tile)
#define MULTIPLY_TILES(sums, inputs, weights) _tile_dpbf16ps(sums, inputs, weights)
#define STORE_TILE(tile, to, stride) _tile_stored(tile, to, stride)

/* Begins a thread's use of tiles. Both numbers of rows are 1 to 16. */
INLINE void shape_tiles(int upper, int lower) {
    const struct tile_shapes shapes = shapes_of(upper, lower);
    FINISH_STORES(&shapes);
    _tile_loadconfig(&shapes);
}

/* Ends it. Until then every context switch saves 8 KB. */
INLINE void release_tiles(void) { _tile_release(); }

#else /* the same operations in plain C */

struct tile_register {
    int num_rows, row_bytes;
    uint8_t rows[TILE_ROWS][TILE_BYTES];
};

static _Thread_local struct tile_register tile_registers[8];

#define LOAD_TILE(tile, from, stride) load_tile(&tile_registers[tile], from, stride)
#define ZERO_TILE(tile) memset(tile_registers[tile].rows, 0, sizeof tile_registers[tile].rows)
#define STORE_TILE(tile, to, stride) store_tile(&tile_registers[tile], to, stride)
#define MULTIPLY_TILES(sums, inputs, weights) \
    multiply_tiles(&tile_registers[sums], &tile_registers[inputs], &tile_registers[weights])

INLINE void load_tile(struct tile_register *tile, const void *from, size_t stride) {
    if (tile->num_rows == 0) __builtin_trap(); /* not shaped: the CPU raises an exception */
    memset(tile->rows, 0, sizeof tile->rows);
    for (int row = 0; row < tile->num_rows; row++)
        memcpy(tile->rows[row], (const char *)from + row * stride, tile->row_bytes);
}

INLINE void store_tile(const struct tile_register *tile, void *to, size_t stride) {
    if (tile->num_rows == 0) __builtin_trap();
    for (int row = 0; row < tile->num_rows; row++)
        memcpy((char *)to + row * stride, tile->rows[row], tile->row_bytes);
}

/* Like the CPU, sums the first and the second elements of the pairs apart. */
static void multiply_tiles(struct tile_register *sums, const struct tile_register *inputs,
                           const struct tile_register *weights) {
    if (sums->num_rows != inputs->num_rows || sums->row_bytes != weights->row_bytes ||
        inputs->row_bytes != 4 * weights->num_rows || sums->num_rows == 0)
        __builtin_trap(); /* shapes that do not fit: the CPU raises an exception */
    for (int m = 0; m < sums->num_rows; m++) {
        vfloat first = {0}, second = {0};
        for (int k = 0; k < weights->num_rows; k++) {
            uint32_t pair;
            vfloat weight_first, weight_second;
            memcpy(&pair, inputs->rows[m] + 4 * k, sizeof pair);
            load_pair(weights->rows[k], 0, 1, &weight_first, &weight_second);
            first += (vfloat)((vint){0} + (int32_t)(pair << 16)) * weight_first;
            second += (vfloat)((vint){0} + (int32_t)(pair & 0xffff0000)) * weight_second;
        }
        float *row = (float *)sums->rows[m];
        store_floats(row, load_floats(row) + (first + second));
    }
}

INLINE void shape_tiles(int upper, int lower) {
    const struct tile_shapes shapes = shapes_of(upper, lower);
    for (int tile = 0; tile < 8; tile++)
        tile_registers[tile] = (struct tile_register){shapes.num_rows[tile], shapes.row_bytes[tile], {{0}}};
}

INLINE void release_tiles(void) { memset(tile_registers, 0, sizeof tile_registers); }

#endif
#endif
#endif

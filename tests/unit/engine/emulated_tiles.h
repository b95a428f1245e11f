/* The tile instructions that bf16_tiles.c uses, in C, as Intel describes them: what the CPU would refuse ends the
   process, and a tile reads and writes just its bytes, so that a sanitizer sees them. A thread has tiles of its own. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct emulated_tile {
    int num_rows, row_bytes;
    unsigned char rows[16][64];
};

static _Thread_local struct emulated_tile emulated_tiles[8];
static _Thread_local int emulated_shaped;
static int64_t emulated_products; /* of all threads */

static void emulated_require(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "the CPU would refuse: %s\n", what);
    abort();
}

static struct emulated_tile *emulated_tile(int number) {
    emulated_require(emulated_shaped, "tiles without a shape");
    emulated_require(emulated_tiles[number].num_rows > 0, "a tile without rows");
    return &emulated_tiles[number];
}

static void emulated_loadconfig(const void *config) {
    const unsigned char *bytes = config; /* 0: palette, 1: start row, 16..: bytes of a row, 48..: rows */
    emulated_require(bytes[0] == 1 && bytes[1] == 0, "a palette that is not 1");
    for (int other = 2; other < 64; other++) {
        const int unused = other < 16 || (other >= 32 && other < 48) || other >= 56;
        emulated_require(!unused || bytes[other] == 0, "a reserved byte that is not 0");
    }
    memset(emulated_tiles, 0, sizeof emulated_tiles);
    for (int number = 0; number < 8; number++) {
        struct emulated_tile *tile = &emulated_tiles[number];
        tile->row_bytes = bytes[16 + 2 * number] | bytes[17 + 2 * number] << 8;
        tile->num_rows = bytes[48 + number];
        emulated_require(tile->row_bytes <= 64 && tile->num_rows <= 16, "a tile too large");
        emulated_require((tile->row_bytes == 0) == (tile->num_rows == 0), "a tile of rows or columns alone");
    }
    emulated_shaped = 1;
}

static void emulated_release(void) {
    memset(emulated_tiles, 0, sizeof emulated_tiles);
    emulated_shaped = 0;
}

static void emulated_zero(int number) { memset(emulated_tile(number)->rows, 0, sizeof emulated_tiles[0].rows); }

static void emulated_loadd(int number, const void *from, int64_t stride) {
    struct emulated_tile *tile = emulated_tile(number);
    for (int row = 0; row < tile->num_rows; row++)
        memcpy(tile->rows[row], (const char *)from + row * stride, (size_t)tile->row_bytes);
}

static void emulated_stored(int number, void *to, int64_t stride) {
    const struct emulated_tile *tile = emulated_tile(number);
    for (int row = 0; row < tile->num_rows; row++)
        memcpy((char *)to + row * stride, tile->rows[row], (size_t)tile->row_bytes);
}

static float emulated_flushed(float value) { return fpclassify(value) == FP_SUBNORMAL ? 0.0f : value; }

static float emulated_bf16(const unsigned char *from) {
    const uint32_t bits = (uint32_t)from[0] << 16 | (uint32_t)from[1] << 24;
    float value;
    memcpy(&value, &bits, sizeof value);
    return emulated_flushed(value);
}

/* sums += inputs . pairs: first elements of pairs and second ones are summed apart, then together, then to the sum. */
static void emulated_dpbf16ps(int sums_number, int inputs_number, int pairs_number) {
    struct emulated_tile *sums = emulated_tile(sums_number);
    const struct emulated_tile *inputs = emulated_tile(inputs_number), *pairs = emulated_tile(pairs_number);
    emulated_require(sums->num_rows == inputs->num_rows && sums->row_bytes == pairs->row_bytes &&
                         inputs->row_bytes == 4 * pairs->num_rows,
                     "tiles that do not fit each other");
    __atomic_add_fetch(&emulated_products, 1, __ATOMIC_RELAXED);
    for (int row = 0; row < sums->num_rows; row++) {
        for (int column = 0; column < sums->row_bytes / 4; column++) {
            float parts[2] = {0.0f, 0.0f}, sum;
            for (int pair = 0; pair < pairs->num_rows; pair++)
                for (int half = 0; half < 2; half++)
                    parts[half] = emulated_flushed(fmaf(emulated_bf16(&inputs->rows[row][4 * pair + 2 * half]),
                                                        emulated_bf16(&pairs->rows[pair][4 * column + 2 * half]),
                                                        parts[half]));
            memcpy(&sum, &sums->rows[row][4 * column], sizeof sum);
            sum = emulated_flushed(emulated_flushed(sum) + emulated_flushed(parts[0] + parts[1]));
            memcpy(&sums->rows[row][4 * column], &sum, sizeof sum);
        }
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps

/* How many products of tiles there were. */
EXPORT int64_t tandem_emulated_products(void) { return __atomic_load_n(&emulated_products, __ATOMIC_RELAXED); }

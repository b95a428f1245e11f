/* The product of bf16_linear.c for many rows, by the CPU's tiles (AMX).

   A tile is up to 16 rows of 64 bytes: of sums, of 32 neighbours of as many input rows, or of 16 pairs of half a panel,
   for the panels lie just as the instruction wants its second factor. Two tiles of input rows by a panel take all eight:

                                     WEIGHTS_0     WEIGHTS_1      16 pairs of 16 rows of the weight each
       INPUTS_0   16 rows x 32       SUMS_00       SUMS_01
       INPUTS_1   16 rows x 32       SUMS_10       SUMS_11

   What a row gets depends on that row alone, as there, but is not what it gets there: an instruction sums the first
   elements of 16 pairs and their second ones apart, without denormals, then adds both to the sum. So a row that is
   computed among few (by vectors) and among many (by tiles) may differ by a rounding of the sum; who needs equal tokens
   however rows are batched uses float32. Run under an emulator of Sapphire Rapids, never on such a CPU, never timed. */
#include "bf16_panels.h"

#if defined(__AMX_BF16__) || defined(TILE_INTRINSICS)
#ifdef TILE_INTRINSICS
#include TILE_INTRINSICS /* the tests' own, in C */
#endif

#define FEW_ROWS 8     /* up to so many, vectors keep pace with memory, and fetch it better. A guess, not measured */
#define TILE_ROWS 16   /* at most */
#define DEPTH 32       /* elements of `in` that one instruction takes: `in` is a multiple */
#define BLOCK_ROWS 480 /* of inputs that pass by a panel before the next is taken: they stay in the second cache */
#define STRIDE (PANEL * 4) /* bytes from pair to pair of a panel, and from row to row of sums */

/* Numbers, for they become part of the instruction. */
#define SUMS_00 0
#define SUMS_01 1
#define SUMS_10 2
#define SUMS_11 3
#define INPUTS_0 4
#define INPUTS_1 5
#define WEIGHTS_0 6
#define WEIGHTS_1 7

struct tile_shapes { /* as the instruction reads it */
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
};

/* For this thread: tiles of `num_rows` input rows. */
static void shape_tiles(int num_rows) {
    struct tile_shapes shapes = {.palette = 1};
    for (int tile = SUMS_00; tile <= WEIGHTS_1; tile++) {
        shapes.row_bytes[tile] = 64;
        shapes.num_rows[tile] = tile < WEIGHTS_0 ? num_rows : 16;
    }
    __asm__ volatile("" : : "r"(&shapes) : "memory"); /* gcc believes that the intrinsic reads 8 bytes */
    _tile_loadconfig(&shapes);
}

struct rows { /* of the inputs: a tile's own */
    int64_t from, until;
};

/* The sums of one or two (a constant) tiles of input rows by a panel, to `sums`; `num_ahead` cache lines from `ahead`
   on are fetched at each step. */
INLINE void sum_tiles(const struct product *product, const struct rows *rows, const int num_tiles, int64_t panel,
                      const char *ahead, int64_t num_ahead, float *sums) {
    const int64_t input_stride = product->in_size * 2;
    const uint16_t *weights = panel_at(product, panel);
    const uint16_t *inputs_0 = product->inputs + rows[0].from * product->in_size;
    const uint16_t *inputs_1 = product->inputs + rows[num_tiles - 1].from * product->in_size;
    _tile_zero(SUMS_00);
    _tile_zero(SUMS_01);
    if (num_tiles == 2) _tile_zero(SUMS_10);
    if (num_tiles == 2) _tile_zero(SUMS_11);
    for (int64_t from = 0; from < product->in_size; from += DEPTH, weights += DEPTH * PANEL) {
        for (int64_t line = 0; line < num_ahead; line++, ahead += LINE_BYTES) _mm_prefetch(ahead, _MM_HINT_T1);
        _tile_loadd(WEIGHTS_0, weights, STRIDE);
        _tile_loadd(WEIGHTS_1, weights + PANEL, STRIDE);
        _tile_loadd(INPUTS_0, inputs_0 + from, input_stride);
        _tile_dpbf16ps(SUMS_00, INPUTS_0, WEIGHTS_0);
        _tile_dpbf16ps(SUMS_01, INPUTS_0, WEIGHTS_1);
        if (num_tiles == 2) {
            _tile_loadd(INPUTS_1, inputs_1 + from, input_stride);
            _tile_dpbf16ps(SUMS_10, INPUTS_1, WEIGHTS_0);
            _tile_dpbf16ps(SUMS_11, INPUTS_1, WEIGHTS_1);
        }
    }
    _tile_stored(SUMS_00, sums, STRIDE);
    _tile_stored(SUMS_01, sums + HALF_PANEL, STRIDE);
    if (num_tiles == 2) {
        _tile_stored(SUMS_10, sums + TILE_ROWS * PANEL, STRIDE);
        _tile_stored(SUMS_11, sums + TILE_ROWS * PANEL + HALF_PANEL, STRIDE);
    }
}

static void finish_rows(const struct product *product, const struct rows *rows, int64_t panel, const float *sums) {
    for (int64_t row = rows->from; row < rows->until; row++, sums += PANEL) {
        const __m512 first = _mm512_loadu_ps(sums), second = _mm512_loadu_ps(sums + HALF_PANEL);
        switch (product->ending) {
#define ENDING(e) \
    case e: finish_row(product, row, panel, first, second, e); break;
            ENDING(TO_BF16) ENDING(TO_FLOAT) ENDING(TO_GATED)
#undef ENDING
        }
    }
}

/* A panel by input rows [from, until), in pairs of tiles of nearly the same height. The higher ones are the last, so
   that what the others read beyond their own rows is there. Meanwhile the next panel is fetched. */
static void multiply_panel(const struct product *product, int64_t from, int64_t until, int64_t panel, int num_tiles) {
    const int64_t num_steps = product->in_size / DEPTH, num_pairs = (num_tiles + 1) / 2;
    const int64_t num_ahead = (DEPTH * PANEL * 2 / LINE_BYTES + num_pairs - 1) / num_pairs;
    const char *ahead = (const char *)panel_at(product, panel + 1);
    for (int64_t tile = 0; tile < num_tiles; tile += 2, ahead += num_steps * num_ahead * LINE_BYTES) {
        struct rows rows[2];
        float sums[2 * TILE_ROWS * PANEL];
        const int together = tile + 1 < num_tiles ? 2 : 1;
        for (int t = 0; t < together; t++) {
            rows[t].from = from + (until - from) * (tile + t) / num_tiles;
            rows[t].until = from + (until - from) * (tile + t + 1) / num_tiles;
        }
        if (together == 2)
            sum_tiles(product, rows, 2, panel, ahead, num_ahead, sums);
        else
            sum_tiles(product, rows, 1, panel, ahead, num_ahead, sums);
        for (int t = 0; t < together; t++) finish_rows(product, &rows[t], panel, sums + t * TILE_ROWS * PANEL);
    }
}

void tandem_bf16_linear(const uint16_t *inputs, const uint16_t *weight, const float *bias, void *out, int64_t num_rows,
                        int64_t out_size, int64_t in_size, int ending, int num_threads);

/* As tandem_bf16_linear, which it leaves few rows to, and rows that are no whole number of steps. The process has asked
   the kernel for the tiles before. */
EXPORT void tandem_bf16_tiles(const uint16_t *inputs, const uint16_t *weight, const float *bias, void *out,
                              int64_t num_rows, int64_t out_size, int64_t in_size, int ending, int num_threads) {
    if (num_rows <= FEW_ROWS || in_size % DEPTH != 0) {
        tandem_bf16_linear(inputs, weight, bias, out, num_rows, out_size, in_size, ending, num_threads);
        return;
    }
    const struct product product = {inputs, weight, bias, out, num_rows, out_size, in_size, (enum ending)ending};
    for (int64_t from = 0; from < num_rows; from += BLOCK_ROWS) {
        const int64_t until = from + BLOCK_ROWS < num_rows ? from + BLOCK_ROWS : num_rows, height = until - from;
        const int num_tiles = height <= TILE_ROWS ? 1 : 2 * (int)((height + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS));
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        {
            shape_tiles((int)((height + num_tiles - 1) / num_tiles));
#pragma omp for schedule(static)
            for (int64_t panel = 0; panel < num_panels(&product); panel++)
                multiply_panel(&product, from, until, panel, num_tiles);
            _tile_release();
        }
    }
}
#endif

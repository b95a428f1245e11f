/* AMX's bfloat16 tiles on a CPU without them. Such a CPU raises SIGILL for each tile instruction. The handler computes
   what Intel's manual (SDM, volume 2) says of the instruction, and continues behind it. An instruction that a CPU with
   AMX refuses ends the process: its tile is not configured, its shapes do not fit, or the process has not asked Linux
   for tiles.

   Preloaded by `python -m tools.amx`. TILES_LOG: a file to which each process appends how many it has run. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define PER_THREAD static _Thread_local __attribute__((tls_model("initial-exec")))
enum { MAX_ROWS = 16, MAX_BYTES = 64, NUM_TILES = 8, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };

struct tile {
    int num_rows, row_bytes; /* 0: not configured */
    uint8_t rows[MAX_ROWS][MAX_BYTES];
};

PER_THREAD struct tile tiles[NUM_TILES];
static atomic_int permitted;
static atomic_long num_multiplied;
static struct sigaction others; /* what the rest of the process wants to do about SIGILL */
static int (*real_sigaction)(int, const struct sigaction *, struct sigaction *);

/* Tries the instruction again with the action of the others. */
static void refuse(const char *why) {
    (void)!write(STDERR_FILENO, why, strlen(why));
    real_sigaction(SIGILL, &others, NULL);
}

static int configure(const uint8_t *from) {
    memset(tiles, 0, sizeof tiles);
    if (from[0] != 1 || from[1] != 0) return 0; /* palette, and the row at which an interrupted load goes on */
    for (int tile = 0; tile < NUM_TILES; tile++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, from + 16 + 2 * tile, sizeof row_bytes);
        const int num_rows = from[48 + tile];
        if (num_rows > MAX_ROWS || row_bytes > MAX_BYTES || !num_rows != !row_bytes) return 0;
        tiles[tile].num_rows = num_rows;
        tiles[tile].row_bytes = row_bytes;
    }
    return 1;
}

static void load(struct tile *tile, const char *from, int64_t stride) {
    memset(tile->rows, 0, sizeof tile->rows);
    for (int row = 0; row < tile->num_rows; row++) memcpy(tile->rows[row], from + row * stride, tile->row_bytes);
}

static void store(const struct tile *tile, char *to, int64_t stride) {
    for (int row = 0; row < tile->num_rows; row++) memcpy(to + row * stride, tile->rows[row], tile->row_bytes);
}

/* Like the CPU, takes denormal numbers for zeros. */
static float flushed(float value) { return fabsf(value) < 0x1p-126f ? copysignf(0.0f, value) : value; }

static float element(const uint8_t *row, int index) {
    uint16_t half;
    memcpy(&half, row + 2 * index, sizeof half);
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return flushed(value);
}

/* TDPBF16PS: sums the first and the second elements of the pairs apart. */
static int multiply(struct tile *sums, const struct tile *inputs, const struct tile *weights) {
    if (sums == inputs || sums == weights || inputs == weights || !sums->num_rows || sums->row_bytes % 4 ||
        sums->num_rows != inputs->num_rows || sums->row_bytes != weights->row_bytes ||
        inputs->row_bytes != 4 * weights->num_rows)
        return 0;
    float factors[MAX_ROWS][2][MAX_ROWS]; /* [pair of inputs][first or second][column] */
    const int num_columns = sums->row_bytes / 4, num_pairs = weights->num_rows;
    for (int k = 0; k < num_pairs; k++)
        for (int n = 0; n < num_columns; n++)
            for (int half = 0; half < 2; half++) factors[k][half][n] = element(weights->rows[k], 2 * n + half);
    for (int m = 0; m < sums->num_rows; m++) {
        float halves[2][MAX_ROWS] = {{0}}, *row = (float *)sums->rows[m];
        for (int k = 0; k < num_pairs; k++)
            for (int half = 0; half < 2; half++) {
                const float input = element(inputs->rows[m], 2 * k + half);
                for (int n = 0; n < num_columns; n++)
                    halves[half][n] = flushed(fmaf(input, factors[k][half][n], halves[half][n]));
            }
        for (int n = 0; n < num_columns; n++) row[n] = flushed(flushed(row[n]) + flushed(halves[0][n] + halves[1][n]));
    }
    return 1;
}

static const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

/* An operand in memory, [base + displacement + index * scale]. A load of a tile takes the index for its stride. */
struct operand {
    char *base;
    int64_t index;
    int num_bytes; /* of the encoding; 0: none that is known here, such as one relative to the instruction */
};

static struct operand operand_at(const uint8_t *code, const greg_t *values, int base_high, int index_high) {
    const int mode = code[0] >> 6, has_index = (code[0] & 7) == 4;
    const int base = (has_index ? code[1] : code[0]) & 7, index = (code[1] >> 3 & 7) | index_high;
    const int num_bytes = 1 + has_index, displacement_bytes = mode == 1 ? 1 : mode == 2 ? 4 : 0;
    if (mode == 3 || (mode == 0 && base == 5)) return (struct operand){0};
    int32_t displacement = (int8_t)code[num_bytes];
    if (displacement_bytes == 4) memcpy(&displacement, code + num_bytes, sizeof displacement);
    return (struct operand){
        .base = (char *)values[REGISTERS[base | base_high]] + (displacement_bytes ? displacement : 0),
        .index = has_index && index != 4 ? values[REGISTERS[index]] << (code[1] >> 6) : 0,
        .num_bytes = num_bytes + displacement_bytes,
    };
}

/* Runs the instruction. Returns its length, or 0 if a CPU with AMX would refuse it or it is none of AMX. */
static int run(const uint8_t *code, const greg_t *values) {
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84)) return 0; /* VEX, 0F 38, W0, 128 bits */
    const int prefix = code[2] & 3, operation = code[3], is_register = code[4] >> 6 == 3, first = code[4] >> 3 & 7;
    struct tile *tile = &tiles[first], *source = &tiles[code[4] & 7], *second = &tiles[~(code[2] >> 3) & 7];
    const struct operand memory = operand_at(code + 4, values, code[1] & 0x20 ? 0 : 8, code[1] & 0x40 ? 0 : 8);
    const int length = 4 + memory.num_bytes;
    enum { NONE, P66, F3, F2 };
    switch (operation << 8 | prefix << 4 | is_register) {
        case 0x4900 | NONE << 4: /* LDTILECFG */
            return memory.num_bytes && configure((uint8_t *)memory.base + memory.index) ? length : 0;
        case 0x4900 | NONE << 4 | 1: /* TILERELEASE */
            memset(tiles, 0, sizeof tiles);
            return 5;
        case 0x4900 | F2 << 4 | 1: /* TILEZERO */
            memset(tile->rows, 0, sizeof tile->rows);
            return tile->num_rows ? 5 : 0;
        case 0x4b00 | F2 << 4: /* TILELOADD */
        case 0x4b00 | F3 << 4: /* TILESTORED */
            if (!tile->num_rows || memory.num_bytes < 2) return 0;
            if (prefix == F2)
                load(tile, memory.base, memory.index);
            else
                store(tile, memory.base, memory.index);
            return length;
        case 0x5c00 | F3 << 4 | 1: /* TDPBF16PS */
            num_multiplied++;
            return multiply(tile, source, second) ? 5 : 0;
        default:
            return 0;
    }
}

static void on_sigill(int number, siginfo_t *info, void *context) {
    greg_t *values = ((ucontext_t *)context)->uc_mcontext.gregs;
    const int length = run((const uint8_t *)values[REG_RIP], values);
    if (!length)
        refuse("tile_traps: a CPU with AMX refuses this instruction\n");
    else if (!permitted)
        refuse("tile_traps: a tile instruction before arch_prctl\n");
    else
        values[REG_RIP] += length;
    (void)number, (void)info;
}

static void report(void) {
    const char *path = getenv("TILES_LOG");
    FILE *file = path && num_multiplied ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "process %d: %ld products of tiles\n", getpid(), (long)num_multiplied);
    fclose(file);
}

__attribute__((constructor)) static void begin(void) {
    const struct sigaction action = {.sa_sigaction = on_sigill, .sa_flags = SA_SIGINFO | SA_NODEFER};
    real_sigaction = dlsym(RTLD_NEXT, "sigaction");
    real_sigaction(SIGILL, &action, &others);
    atexit(report);
}

/* Keeps the handler from being replaced, as Python's faulthandler would. */
int sigaction(int number, const struct sigaction *action, struct sigaction *old) {
    if (!real_sigaction) real_sigaction = dlsym(RTLD_NEXT, "sigaction");
    if (number != SIGILL) return real_sigaction(number, action, old);
    if (old) *old = others;
    if (action) others = *action;
    return 0;
}

/* Grants the tile registers in the place of Linux. */
long syscall(long number, ...) {
    static long (*next)(long, ...);
    long given[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) given[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && given[0] == REQUEST_PERMISSION && given[1] == TILE_DATA) {
        permitted = 1;
        return 0;
    }
    if (!next) next = dlsym(RTLD_NEXT, "syscall");
    return next(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

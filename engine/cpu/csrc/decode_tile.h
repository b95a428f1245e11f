/* One tile of one KV head: scores, softmax with a running maximum, weighted sum of values. This form uses the
   compiler's vector types and runs on every target; decode_tile_bf16.h has the form for bfloat16 products. */
#ifndef TANDEM_DECODE_TILE_H
#define TANDEM_DECODE_TILE_H

#include "kv_cache.h"

#define MAX_TILE_HEADS 4

#ifndef FETCH_LOCALITY /* of __builtin_prefetch: 2 loads into L2, 0 bypasses L2; the build chooses for the CPU */
#define FETCH_LOCALITY 2
#endif

/* Up to TILE positions. A shorter tile repeats its last row up to TILE. */
struct tile {
    const char *rows[TILE];
    int count;
};

/* The keys and values of one KV head in a tile: row p of the keys is at rows[p] + keys. */
struct place {
    const char *const *rows;
    size_t keys, values;
};

/* The place being computed and the two places after it. */
struct course {
    struct place here, next, later;
};

/* Computing a row prefetches later rows, so memory stays evenly busy. With full miss queues, the CPU drops prefetches.
   Each row is therefore prefetched several times: two places, one place and half a place before its use.

   FETCH_LOCALITY 2 prefetches into L2, which has more miss buffers than L1: this doubles the speed of a CPU with few
   L1 miss buffers. On other CPUs 0 is better: the rows, which are read once, then evict nothing from L2 that the next
   layer needs. With 0, rows two places ahead are not prefetched, because they do not fit in L1. */
INLINE void fetch_row(const char *row, size_t num_bytes) {
    for (size_t byte = 0; byte < num_bytes; byte += LINE_BYTES) __builtin_prefetch(row + byte, 0, FETCH_LOCALITY);
}

INLINE void fetch_while_scoring(const struct course *course, int p, size_t num_bytes) {
    if (FETCH_LOCALITY) fetch_row(course->later.rows[p] + course->later.keys, num_bytes);
    fetch_row(course->next.rows[p] + course->next.keys, num_bytes);
    fetch_row(course->here.rows[p] + course->here.values, num_bytes);
}

INLINE void fetch_while_adding(const struct course *course, int p, size_t at, size_t num_bytes) {
    if (FETCH_LOCALITY) fetch_row(course->later.rows[p] + course->later.values + at, num_bytes);
    fetch_row(course->next.rows[p] + course->next.values + at, num_bytes);
    fetch_row(course->next.rows[p] + course->next.keys + at, num_bytes);
}

/* scores[h][p] = query[h] . key row p, for `heads` query heads and `count` rows. heads and count are constants. */
INLINE void score_rows(const float *query, int head_dim, const char *const *rows, size_t offset, int is_bf16,
                       const int heads, const int count, float *scores) {
    vfloat sums[MAX_TILE_HEADS][4] = {{{0}}};
    for (int d = 0; d < head_dim; d += PAIR) {
        for (int p = 0; p < count; p++) {
            vfloat first, second;
            load_pair(rows[p] + offset, d, is_bf16, &first, &second);
            for (int h = 0; h < heads; h++) {
                sums[h][p] += first * load_floats(query + h * head_dim + d);
                sums[h][p] += second * load_floats(query + h * head_dim + d + LANES);
            }
        }
    }
    for (int h = 0; h < heads; h++) {
        vfloat4 totals = sum_four(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
        for (int p = 0; p < count; p++) scores[h * TILE + p] = totals[p];
    }
}

/* Turns scores into weights relative to the running maximum; returns the factor for earlier sums. total: [LANES]; the
   caller sums the lanes at the end. */
INLINE float weigh_scores(float *scores, int count, float *maximum, float *total) {
    for (int p = count; p % LANES; p++) scores[p] = -INFINITY;
    vfloat tops = load_floats(scores);
    for (int p = LANES; p < count; p += LANES) tops = larger(tops, load_floats(scores + p));
    float top = largest_lane(tops), rescale = 1.0f;
    if (top > *maximum) {
        rescale = exponential(splat(*maximum - top))[0];
        *maximum = top;
    }
    vfloat sums = load_floats(total) * rescale;
    for (int p = 0; p < count; p += LANES) {
        vfloat weights = exponential(load_floats(scores + p) - *maximum);
        store_floats(scores + p, weights);
        sums += weights;
    }
    store_floats(total, sums);
    return rescale;
}

INLINE void add_row(const char *row, int d, const float *weights, int is_bf16, const int heads,
                    vfloat sums[MAX_TILE_HEADS][2]) {
    vfloat first, second;
    load_pair(row, d, is_bf16, &first, &second);
    for (int h = 0; h < heads; h++) {
        sums[h][0] += first * weights[h * TILE];
        sums[h][1] += second * weights[h * TILE];
    }
}

/* sums[h] = sums[h] * rescale[h] + weights[h] . value rows. Even and odd rows have separate sums: this shortens the
   dependency chains. */
INLINE void add_values(const struct course *course, int count, const float *weights, const float *rescale,
                       int head_dim, int is_bf16, const int heads, float *sums) {
    const struct place *here = &course->here;
    const size_t pair_bytes = PAIR * element_bytes(is_bf16);
    for (int d = 0; d < head_dim; d += PAIR) {
        vfloat even[MAX_TILE_HEADS][2], odd[MAX_TILE_HEADS][2];
        for (int h = 0; h < heads; h++) {
            even[h][0] = load_floats(sums + h * head_dim + d) * rescale[h];
            even[h][1] = load_floats(sums + h * head_dim + d + LANES) * rescale[h];
            odd[h][0] = odd[h][1] = (vfloat){0};
        }
        int p = 0;
        for (; p + 2 <= count; p += 2) {
            for (int i = p; i < p + 2; i++) fetch_while_adding(course, i, d * element_bytes(is_bf16), pair_bytes);
            add_row(here->rows[p] + here->values, d, weights + p, is_bf16, heads, even);
            add_row(here->rows[p + 1] + here->values, d, weights + p + 1, is_bf16, heads, odd);
        }
        if (p < count) add_row(here->rows[p] + here->values, d, weights + p, is_bf16, heads, even);
        for (int h = 0; h < heads; h++) {
            store_floats(sums + h * head_dim + d, even[h][0] + odd[h][0]);
            store_floats(sums + h * head_dim + d + LANES, even[h][1] + odd[h][1]);
        }
    }
}

/* One tile of one KV head for `heads` (a constant) of its query heads. */
INLINE void attend_tile(const struct kv_cache *cache, const struct course *course, int count, int is_bf16,
                        const int heads, const float *query, float *sums, float *maxima, float *totals) {
    const struct place *here = &course->here;
    float scores[MAX_TILE_HEADS * TILE], rescale[MAX_TILE_HEADS];
    const int step = heads == 4 ? 2 : 4, head_dim = cache->head_dim;
    const size_t row_bytes = head_dim * element_bytes(is_bf16);
    int p = 0;
    for (; p + step <= count; p += step) {
        for (int i = p; i < p + step; i++) fetch_while_scoring(course, i, row_bytes);
        score_rows(query, head_dim, here->rows + p, here->keys, is_bf16, heads, step, scores + p);
    }
    for (; p < count; p++)
        score_rows(query, head_dim, here->rows + p, here->keys, is_bf16, heads, 1, scores + p);
    for (int h = 0; h < heads; h++)
        rescale[h] = weigh_scores(scores + h * TILE, count, maxima + h, totals + h * LANES);
    add_values(course, count, scores, rescale, head_dim, is_bf16, heads, sums);
}

#endif

/* One tile of a decode's attention in plain floats, and the fetching of the next tile while this one is computed. */
#ifndef TANDEM_DECODE_TILE_H
#define TANDEM_DECODE_TILE_H

#include "kv_cache.h"

#define MAX_TILE_HEADS 4
#define LINE_BYTES 64 /* of a cache line */
#define FETCH_BYTES 256

struct tile {
    const char *rows[TILE];
    int count;
};

/* What the next tile will read: runs of memory, and how far they have been asked for. Long runs in order are what the
   CPU's own prefetching goes along with. */
struct fetch {
    const char *runs[2 * TILE];
    size_t run_bytes, at;
    int run, num_runs;
};

/* Asks for the next lines of the fetch: as much as was just used, so that memory is neither idle nor flooded. */
INLINE void fetch_ahead(struct fetch *fetch, size_t num_bytes) {
    for (size_t byte = 0; byte < num_bytes && fetch->run < fetch->num_runs; byte += FETCH_BYTES) {
        const char *from = fetch->runs[fetch->run] + fetch->at;
        for (int line = 0; line < FETCH_BYTES; line += LINE_BYTES) __builtin_prefetch(from + line, 0, 3);
        fetch->at += FETCH_BYTES;
        if (fetch->at >= fetch->run_bytes) fetch->at = 0, fetch->run++;
    }
}

/* One head's keys, then its values, of the blocks that begin at positions [from, until). */
INLINE void plan_fetch(const struct kv_cache *cache, const int32_t *table, int64_t from, int64_t until,
                       size_t key_offset, struct fetch *fetch) {
    fetch->run = fetch->num_runs = 0;
    fetch->at = 0;
    fetch->run_bytes = cache->head_stride;
    const int64_t size = cache->block_size, first = (from + size - 1) / size;
    for (int value = 0; value < 2; value++, key_offset += cache->value_stride)
        for (int64_t block = first; block * size < until; block++)
            fetch->runs[fetch->num_runs++] = cache->base + table[block] * cache->block_stride + key_offset;
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

/* Turns scores into weights relative to the running maximum; returns what earlier sums must be multiplied by. */
INLINE float weigh_scores(float *scores, int count, float *maximum, float *total) {
    for (int p = count; p % LANES; p++) scores[p] = -INFINITY;
    vfloat tops = load_floats(scores);
    for (int p = LANES; p < count; p += LANES) tops = larger(tops, load_floats(scores + p));
    float top = largest_lane(tops), rescale = 1.0f;
    if (top > *maximum) {
        rescale = exponential(splat(*maximum - top))[0];
        *maximum = top;
    }
    vfloat sums = {0};
    for (int p = 0; p < count; p += LANES) {
        vfloat weights = exponential(load_floats(scores + p) - *maximum);
        store_floats(scores + p, weights);
        sums += weights;
    }
    *total = *total * rescale + sum_lanes(sums);
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

/* sums[h] = sums[h] * rescale[h] + weights[h] . value rows. Even and odd rows are summed apart: shorter chains. */
INLINE void add_values(const struct tile *tile, struct fetch *fetch, size_t offset, const float *weights,
                       const float *rescale, int head_dim, int is_bf16, const int heads, float *sums) {
    const size_t pair_bytes = PAIR * element_bytes(is_bf16);
    for (int d = 0; d < head_dim; d += PAIR) {
        vfloat even[MAX_TILE_HEADS][2], odd[MAX_TILE_HEADS][2];
        for (int h = 0; h < heads; h++) {
            even[h][0] = load_floats(sums + h * head_dim + d) * rescale[h];
            even[h][1] = load_floats(sums + h * head_dim + d + LANES) * rescale[h];
            odd[h][0] = odd[h][1] = (vfloat){0};
        }
        int p = 0;
        for (; p + 2 <= tile->count; p += 2) {
            fetch_ahead(fetch, 2 * pair_bytes);
            add_row(tile->rows[p] + offset, d, weights + p, is_bf16, heads, even);
            add_row(tile->rows[p + 1] + offset, d, weights + p + 1, is_bf16, heads, odd);
        }
        if (p < tile->count) add_row(tile->rows[p] + offset, d, weights + p, is_bf16, heads, even);
        for (int h = 0; h < heads; h++) {
            store_floats(sums + h * head_dim + d, even[h][0] + odd[h][0]);
            store_floats(sums + h * head_dim + d + LANES, even[h][1] + odd[h][1]);
        }
    }
}

/* One tile of one KV head for `heads` (a constant) of its query heads. */
INLINE void attend_tile(const struct kv_cache *cache, const struct tile *tile, struct fetch *fetch, size_t key_offset,
                        int is_bf16, const int heads, const float *query, float *sums, float *maxima, float *totals) {
    float scores[MAX_TILE_HEADS * TILE], rescale[MAX_TILE_HEADS];
    const int step = heads == 4 ? 2 : 4, head_dim = cache->head_dim;
    const size_t value_offset = key_offset + cache->value_stride;
    int p = 0;
    for (; p + step <= tile->count; p += step) {
        score_rows(query, head_dim, tile->rows + p, key_offset, is_bf16, heads, step, scores + p);
        fetch_ahead(fetch, step * head_dim * element_bytes(is_bf16));
    }
    for (; p < tile->count; p++)
        score_rows(query, head_dim, tile->rows + p, key_offset, is_bf16, heads, 1, scores + p);
    for (int h = 0; h < heads; h++)
        rescale[h] = weigh_scores(scores + h * TILE, tile->count, maxima + h, totals + h);
    add_values(tile, fetch, value_offset, scores, rescale, head_dim, is_bf16, heads, sums);
}

#endif

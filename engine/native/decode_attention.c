/* Attention of one new token per sequence over its paged KV, read in place and once.

   A task is one sequence and a run of its KV heads. Positions pass in tiles: scores of all query heads of a KV head,
   softmax with a running maximum (online, in float), weighted sum of values; meanwhile the next tile is fetched.
   What a head gets depends on its own sequence alone, in one order, whatever else is in the batch. */
#include <stdlib.h>

#include "kv_cache.h"

#define MAX_TILE_HEADS 4
#define LINE_BYTES 64 /* of a cache line */

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

/* Asks for the next lines of the fetch: as much as was just used, so that memory is neither idle nor flooded. */
INLINE void fetch_ahead(struct fetch *fetch, size_t num_bytes) {
    for (size_t byte = 0; byte < num_bytes && fetch->run < fetch->num_runs; byte += LINE_BYTES) {
        __builtin_prefetch(fetch->runs[fetch->run] + fetch->at, 0, 2);
        fetch->at += LINE_BYTES;
        if (fetch->at >= fetch->run_bytes) fetch->at = 0, fetch->run++;
    }
}

/* The blocks that begin at positions [from, until): keys, then values, of heads that lie in one run. */
INLINE void plan_fetch(const struct kv_cache *cache, const int32_t *table, int64_t from, int64_t until,
                       size_t key_offset, int num_heads, struct fetch *fetch) {
    fetch->run = fetch->num_runs = 0;
    fetch->at = 0;
    fetch->run_bytes = num_heads * cache->head_stride;
    const int64_t size = cache->block_size;
    for (int64_t block = (from + size - 1) / size; block * size < until; block++) {
        const char *keys = cache->base + table[block] * cache->block_stride + key_offset;
        fetch->runs[fetch->num_runs++] = keys;
        fetch->runs[fetch->num_runs++] = keys + cache->value_stride;
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

INLINE void attend_sequence(const struct kv_cache *cache, const struct paged_batch *batch, int64_t index,
                            const void *queries, int64_t query_stride, void *out, size_t layer_offset, int first_head,
                            int num_heads, int is_bf16, float *scratch) {
    const int head_dim = cache->head_dim, group = cache->num_heads / cache->num_kv_heads;
    const int num_queries = num_heads * group;
    const int64_t length = batch->start[index] + 1, row = batch->first_row[index];
    const int32_t *table = batch->tables + batch->first_block[index];
    float *query = scratch, *sums = query + num_queries * head_dim, *maxima = sums + num_queries * head_dim;
    float *totals = maxima + num_queries;
    for (int d = 0; d < num_queries * head_dim; d += PAIR) {
        vfloat first, second;
        load_pair(queries, row * query_stride + first_head * group * head_dim + d, is_bf16, &first, &second);
        store_floats(query + d, first * cache->scale);
        store_floats(query + d + LANES, second * cache->scale);
    }
    memset(sums, 0, sizeof(float) * num_queries * head_dim);
    for (int h = 0; h < num_queries; h++) maxima[h] = -INFINITY, totals[h] = 0.0f;

    struct tile tile;
    struct fetch fetch;
    for (int64_t from = 0; from < length; from += TILE) {
        const int64_t until = from + TILE < length ? from + TILE : length;
        const int64_t next_until = until + TILE < length ? until + TILE : length;
        tile.count = (int)(until - from);
        locate_rows(cache, table, from, until, tile.rows);
        plan_fetch(cache, table, until, next_until, layer_offset + first_head * cache->head_stride, num_heads, &fetch);
        for (int head = 0; head < num_heads; head++) {
            const size_t key_offset = layer_offset + (first_head + head) * cache->head_stride;
            for (int h = head * group, left = group; left > 0;) {
                float *q = query + h * head_dim, *s = sums + h * head_dim;
                const int heads = left < MAX_TILE_HEADS ? left : MAX_TILE_HEADS;
                switch (heads) {
                case 1: attend_tile(cache, &tile, &fetch, key_offset, is_bf16, 1, q, s, maxima + h, totals + h); break;
                case 2: attend_tile(cache, &tile, &fetch, key_offset, is_bf16, 2, q, s, maxima + h, totals + h); break;
                case 3: attend_tile(cache, &tile, &fetch, key_offset, is_bf16, 3, q, s, maxima + h, totals + h); break;
                default: attend_tile(cache, &tile, &fetch, key_offset, is_bf16, 4, q, s, maxima + h, totals + h);
                }
                h += heads, left -= heads;
            }
        }
    }
    for (int h = 0; h < num_queries; h++) {
        const float inverse = 1.0f / totals[h];
        const size_t to = ((size_t)row * cache->num_heads + first_head * group + h) * head_dim;
        for (int d = 0; d < head_dim; d += PAIR)
            store_pair(out, to + d, is_bf16, load_floats(sums + h * head_dim + d) * inverse,
                       load_floats(sums + h * head_dim + d + LANES) * inverse);
    }
}

/* Returns 0, or 1 where there is no memory for scratch. query_stride is in elements; out: [rows, heads, head_dim]. */
EXPORT int tandem_decode_attention(const struct kv_cache *cache, const struct paged_batch *batch, const void *queries,
                                   int64_t query_stride, void *out, int64_t layer) {
    /* Whole sequences where there are enough of them to go round, else runs of KV heads. */
    int64_t splits = (cache->num_threads + batch->num_sequences - 1) / batch->num_sequences;
    if (splits > cache->num_kv_heads) splits = cache->num_kv_heads;
    const int heads_per_task = (int)((cache->num_kv_heads + splits - 1) / splits);
    splits = (cache->num_kv_heads + heads_per_task - 1) / heads_per_task;
    const int64_t num_tasks = batch->num_sequences * splits;
    const size_t scratch_floats = (size_t)cache->num_heads * (2 * cache->head_dim + 2);
    int failed = 0;
#pragma omp parallel num_threads(cache->num_threads) if (num_tasks > 1 && cache->num_threads > 1) reduction(| : failed)
    {
        float *scratch = malloc(scratch_floats * sizeof(float));
        failed |= scratch == NULL;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < num_tasks; task++) {
            if (scratch == NULL) continue;
            const int first_head = (int)(task % splits) * heads_per_task;
            const int left = cache->num_kv_heads - first_head;
            const int heads = left < heads_per_task ? left : heads_per_task;
            const size_t offset = layer * cache->layer_stride;
            if (cache->is_bf16)
                attend_sequence(cache, batch, task / splits, queries, query_stride, out, offset, first_head, heads, 1,
                                scratch);
            else
                attend_sequence(cache, batch, task / splits, queries, query_stride, out, offset, first_head, heads, 0,
                                scratch);
        }
        free(scratch);
    }
    return failed;
}

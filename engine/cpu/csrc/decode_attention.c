/* Attention of one new token per sequence over its paged KV, which is read in place and once.

   A task is one sequence and a run of its KV heads. Each tile of positions takes three steps: scores of all query
   heads of a KV head, softmax with a running maximum (online, in float), and the weighted sum of values. Meanwhile the
   next tile is prefetched. A head's result depends on its own sequence alone: the order of summing does not depend on
   the rest of the batch. */
#include <stdlib.h>

#include "decode_tile.h"
#include "step_attention.h"
#if BF16_PRODUCTS
#include "decode_tile_bf16.h"
#else
#define attend_tile_bf16(...) ((void)0)
#define double_pairs(...) ((void)0)
#define store_interleaved(...) ((void)0)
#endif

/* Attends with `heads` (a constant) query heads from `h` on; query and sums hold all heads contiguously. */
INLINE void attend_heads(const struct kv_cache *cache, const struct course *course, int count, int is_bf16,
                         const int heads, int h, float *query, float *sums, float *maxima, float *totals) {
    const int at = h * cache->head_dim;
    if (BF16_PRODUCTS && is_bf16)
        attend_tile_bf16(cache, course, count, heads, (uint16_t *)(query + at), sums + at, maxima + h,
                         totals + h * LANES);
    else
        attend_tile(cache, course, count, is_bf16, heads, query + at, sums + at, maxima + h, totals + h * LANES);
}

INLINE void load_queries(const struct kv_cache *cache, const void *queries, size_t index, int num_elements,
                         int is_bf16, float *query) {
    if (BF16_PRODUCTS && is_bf16) {
        double_pairs(element(queries, index, 1), num_elements, (uint16_t *)query);
        return;
    }
    for (int d = 0; d < num_elements; d += PAIR) {
        vfloat first, second;
        load_pair(queries, index + d, is_bf16, &first, &second);
        store_floats(query + d, first * cache->scale);
        store_floats(query + d + LANES, second * cache->scale);
    }
}

INLINE void store_head(const float *sums, const float *total, int head_dim, void *out, size_t index, int is_bf16) {
    const float inverse = 1.0f / sum_lanes(load_floats(total));
    for (int d = 0; d < head_dim; d += PAIR) {
        const vfloat first = load_floats(sums + d) * inverse, second = load_floats(sums + d + LANES) * inverse;
        if (BF16_PRODUCTS && is_bf16)
            store_interleaved((uint16_t *)out + index + d, first, second);
        else
            store_pair(out, index + d, is_bf16, first, second);
    }
}

/* The rows of a whole tile, one of each block in turn. A block's part of a layer is a contiguous run of a few KB. The
   hardware prefetcher starts sooner on several interleaved runs than on one run after another. */
INLINE void locate_whole_tile(const struct kv_cache *cache, const int32_t *table, const char **rows) {
    const int num_blocks = TILE / cache->block_size;
    for (int block = 0; block < num_blocks; block++) {
        const char *row = cache->base + table[block] * cache->block_stride;
        for (int i = block; i < TILE; i += num_blocks, row += cache->row_stride) rows[i] = row;
    }
}

/* The tile of sequence `index` that begins at position `from`. Past the sequence's end: the next sequence's first tile.
   Past the last sequence: that sequence's last tile again, which is already in the cache. */
INLINE void locate_tile(const struct kv_cache *cache, const struct paged_batch *batch, int64_t index, int64_t from,
                        struct tile *tile) {
    if (from > batch->start[index]) {
        const int is_last = index + 1 == batch->num_sequences;
        from = is_last ? batch->start[index] / TILE * TILE : 0;
        index += !is_last;
    }
    const int64_t length = batch->start[index] + 1;
    const int32_t *table = batch->tables + batch->first_block[index];
    tile->count = (int)(from + TILE < length ? TILE : length - from);
    if (tile->count == TILE && TILE % cache->block_size == 0) {
        locate_whole_tile(cache, table + from / cache->block_size, tile->rows);
        return;
    }
    locate_rows(cache, table, from, from + tile->count, tile->rows);
    for (int p = tile->count; p < TILE; p++) tile->rows[p] = tile->rows[tile->count - 1];
}

#define TILES 3 /* the current tile and the tiles of the two places after it */

/* The place of KV head `head`. Numbers from num_heads on mean heads of the following tiles. */
INLINE struct place place_of(const struct kv_cache *cache, const struct tile *tiles, int turn, size_t first_key,
                             int head, int num_heads) {
    const size_t keys = first_key + head % num_heads * cache->head_stride;
    return (struct place){tiles[(turn + head / num_heads) % TILES].rows, keys, keys + cache->value_stride};
}

INLINE void attend_sequence(const struct kv_cache *cache, const struct paged_batch *batch, int64_t index,
                            const void *queries, int64_t query_stride, void *out, size_t layer_offset, int first_head,
                            int num_heads, int is_bf16, float *scratch) {
    const int head_dim = cache->head_dim, group = cache->num_heads / cache->num_kv_heads;
    const int num_queries = num_heads * group;
    const int64_t length = batch->start[index] + 1, row = batch->first_row[index];
    const size_t first_key = layer_offset + first_head * cache->head_stride;
    float *query = scratch, *sums = query + num_queries * head_dim, *totals = sums + num_queries * head_dim;
    float *maxima = totals + num_queries * LANES;
    struct tile tiles[TILES];
    for (int turn = 0; turn + 1 < TILES; turn++) locate_tile(cache, batch, index, turn * TILE, tiles + turn);
    load_queries(cache, queries, row * query_stride + first_head * group * head_dim, num_queries * head_dim, is_bf16,
                 query);
    memset(sums, 0, sizeof(float) * num_queries * (head_dim + LANES));
    for (int h = 0; h < num_queries; h++) maxima[h] = -INFINITY;

    int turn = 0;
    for (int64_t from = 0; from < length; from += TILE, turn = (turn + 1) % TILES) {
        locate_tile(cache, batch, index, from + (TILES - 1) * TILE, tiles + (turn + TILES - 1) % TILES);
        for (int head = 0; head < num_heads; head++) {
            const struct course course = {
                place_of(cache, tiles, turn, first_key, head, num_heads),
                place_of(cache, tiles, turn, first_key, head + 1, num_heads),
                place_of(cache, tiles, turn, first_key, head + 2, num_heads),
            };
            for (int h = head * group, left = group; left > 0;) {
                const int heads = left < MAX_TILE_HEADS ? left : MAX_TILE_HEADS;
                switch (heads) {
#define HEADS(n) \
    attend_heads(cache, &course, tiles[turn].count, is_bf16, n, h, query, sums, maxima, totals); \
    break;
                case 1: HEADS(1)
                case 2: HEADS(2)
                case 3: HEADS(3)
                default: HEADS(4)
#undef HEADS
                }
                h += heads, left -= heads;
            }
        }
    }
    for (int h = 0; h < num_queries; h++)
        store_head(sums + h * head_dim, totals + h * LANES, head_dim, out,
                   ((size_t)row * cache->num_heads + first_head * group + h) * head_dim, is_bf16);
}

/* Prefetches the first tile of the first sequence. */
void tandem_fetch_first_tile(const struct kv_cache *cache, const struct paged_batch *batch, int64_t layer) {
    struct tile tile;
    locate_tile(cache, batch, 0, 0, &tile);
    const size_t keys = layer * cache->layer_stride, row_bytes = cache->head_dim * element_bytes(cache->is_bf16);
    for (int p = 0; p < tile.count; p++) {
        fetch_row(tile.rows[p] + keys + cache->value_stride, row_bytes);
        fetch_row(tile.rows[p] + keys, row_bytes);
    }
}

/* One layer of a batch. A task is a run of KV heads of one sequence. */
struct decode {
    const struct kv_cache *cache;
    const struct paged_batch *batch;
    const void *queries;
    int64_t query_stride;
    void *out;
    size_t layer_offset;
    int64_t splits; /* tasks per sequence */
    int heads_per_task;
};

INLINE void attend_task(const struct decode *decode, int64_t task, int is_bf16, float *scratch) {
    const int first_head = (int)(task % decode->splits) * decode->heads_per_task;
    const int left = decode->cache->num_kv_heads - first_head;
    attend_sequence(decode->cache, decode->batch, task / decode->splits, decode->queries, decode->query_stride,
                    decode->out, decode->layer_offset, first_head,
                    left < decode->heads_per_task ? left : decode->heads_per_task, is_bf16, scratch);
}

/* Runs this thread's share of the tasks; outside a parallel region, all of them. Returns 1 if memory runs out. */
static int attend_tasks(const struct decode *decode) {
    const struct kv_cache *cache = decode->cache;
    const size_t scratch_floats = (size_t)cache->num_heads * (2 * cache->head_dim + LANES + 1);
    const int64_t num_tasks = decode->batch->num_sequences * decode->splits;
    float *scratch = aligned_alloc(64, (scratch_floats * sizeof(float) + 63) / 64 * 64);
    const int failed = scratch == NULL;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < num_tasks; task++) {
        if (failed) continue;
        if (cache->is_bf16)
            attend_task(decode, task, 1, scratch);
        else
            attend_task(decode, task, 0, scratch);
    }
    free(scratch);
    return failed;
}

int tandem_decode_attention(const struct kv_cache *cache, const struct paged_batch *batch, const void *queries,
                            int64_t query_stride, void *out, int64_t layer) {
    /* A task is a whole sequence if there are enough sequences for all threads, else a run of KV heads. */
    int64_t splits = (cache->num_threads + batch->num_sequences - 1) / batch->num_sequences;
    if (splits > cache->num_kv_heads) splits = cache->num_kv_heads;
    const int heads_per_task = (int)((cache->num_kv_heads + splits - 1) / splits);
    splits = (cache->num_kv_heads + heads_per_task - 1) / heads_per_task;
    const struct decode decode = {
        cache, batch, queries, query_stride, out, layer * cache->layer_stride, splits, heads_per_task,
    };
    if (cache->num_threads == 1 || batch->num_sequences * splits == 1) return attend_tasks(&decode);
    int failed = 0;
#pragma omp parallel num_threads(cache->num_threads) reduction(| : failed)
    failed |= attend_tasks(&decode);
    return failed;
}

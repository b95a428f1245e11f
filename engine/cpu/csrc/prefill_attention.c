/* Causal attention of a chunk of tokens over its sequence's paged KV: the cached prefix and the chunk itself.

   A task is one KV head and a span of the chunk's tokens with all query heads that share the KV head. The task's rows
   are ordered (token, query head), so later rows attend to more positions. For each tile of positions:

       keys, transposed once   [head_dim, TILE]
       for each ROWS rows:     scores [ROWS, TILE] -> causal mask -> online softmax -> sums += weights . values

   Every row of the task uses the transposed tile; values are read in place. Products are blocked in registers: ROWS
   rows by a pair of vectors. */
#include <stdlib.h>

#include "prefill_span.h"
#include "step_attention.h"

INLINE void transpose_keys(const char *const *rows, size_t offset, int count, int head_dim, int is_bf16, float *keys) {
    for (int p = 0; p < count; p++) {
        for (int d = 0; d < head_dim; d += PAIR) {
            float pair[PAIR];
            vfloat first, second;
            load_pair(rows[p] + offset, d, is_bf16, &first, &second);
            store_floats(pair, first);
            store_floats(pair + LANES, second);
            for (int i = 0; i < PAIR; i++) keys[(d + i) * TILE + p] = pair[i];
        }
    }
    for (int d = 0; d < head_dim; d++)
        for (int p = count; p < TILE; p++) keys[d * TILE + p] = 0.0f;
}

/* scores[r][p] = query row r . key p */
INLINE void score_tile(const float *query, const float *keys, int head_dim, int count, float *scores) {
    for (int p = 0; p < count; p += PAIR) {
        vfloat sums[ROWS][2] = {{{0}}};
        for (int d = 0; d < head_dim; d++) {
            const vfloat first = load_floats(keys + d * TILE + p), second = load_floats(keys + d * TILE + p + LANES);
            for (int r = 0; r < ROWS; r++) {
                sums[r][0] += first * query[r * head_dim + d];
                sums[r][1] += second * query[r * head_dim + d];
            }
        }
        for (int r = 0; r < ROWS; r++) {
            store_floats(scores + r * TILE + p, sums[r][0]);
            store_floats(scores + r * TILE + p + LANES, sums[r][1]);
        }
    }
}

/* Weights of the first `seen` of TILE scores, 0 for the rest; returns the factor for earlier sums. */
INLINE float weigh_row(float *scores, int seen, int count, float *maximum, float *total) {
    if (seen <= 0) {
        memset(scores, 0, sizeof(float) * TILE);
        return 1.0f;
    }
    for (int p = seen; p < TILE; p++) scores[p] = -INFINITY;
    vfloat tops = load_floats(scores);
    for (int p = LANES; p < count; p += LANES) tops = larger(tops, load_floats(scores + p));
    const float top = largest_lane(tops);
    float rescale = 1.0f;
    if (top > *maximum) {
        rescale = exponential(splat(*maximum - top))[0];
        *maximum = top;
    }
    vfloat sums = {0};
    for (int p = 0; p < count; p += LANES) {
        const vfloat weights = exponential(load_floats(scores + p) - *maximum);
        store_floats(scores + p, weights);
        sums += weights;
    }
    *total = *total * rescale + sum_lanes(sums);
    return rescale;
}

INLINE void add_values(const char *const *rows, size_t offset, int count, const float *weights, const float *rescale,
                       int head_dim, int is_bf16, float *sums) {
    for (int d = 0; d < head_dim; d += PAIR) {
        vfloat added[ROWS][2];
        for (int r = 0; r < ROWS; r++) {
            added[r][0] = load_floats(sums + r * head_dim + d) * rescale[r];
            added[r][1] = load_floats(sums + r * head_dim + d + LANES) * rescale[r];
        }
        for (int p = 0; p < count; p++) {
            vfloat first, second;
            load_pair(rows[p] + offset, d, is_bf16, &first, &second);
            for (int r = 0; r < ROWS; r++) {
                added[r][0] += first * weights[r * TILE + p];
                added[r][1] += second * weights[r * TILE + p];
            }
        }
        for (int r = 0; r < ROWS; r++) {
            store_floats(sums + r * head_dim + d, added[r][0]);
            store_floats(sums + r * head_dim + d + LANES, added[r][1]);
        }
    }
}

INLINE void attend_tile(const struct span *span, int64_t from, int count, size_t key_offset, int is_bf16) {
    const struct kv_cache *cache = span->cache;
    const int head_dim = cache->head_dim;
    const char *rows[TILE];
    float scores[ROWS * TILE], rescale[ROWS];
    locate_rows(cache, span->table, from, from + count, rows);
    transpose_keys(rows, key_offset, count, head_dim, is_bf16, span->keys);
    for (int row = 0; row < span->num_rows; row += ROWS) {
        const int64_t last_seen = position_of(span, row + ROWS - 1);
        if (last_seen < from) continue;
        const int used = last_seen - from + 1 < count ? (int)(last_seen - from + 1) : count;
        score_tile(span->query + row * head_dim, span->keys, head_dim, used, scores);
        for (int r = 0; r < ROWS; r++) {
            const int64_t visible = position_of(span, row + r) - from + 1;
            const int seen = visible < used ? (int)visible : used;
            rescale[r] = weigh_row(scores + r * TILE, seen, used, span->maxima + row + r, span->totals + row + r);
        }
        add_values(rows, key_offset + cache->value_stride, used, scores, rescale, head_dim, is_bf16,
                   span->sums + row * head_dim);
    }
}

INLINE void attend_span(struct span *span, const char *queries, int64_t query_stride, char *out, int kv_head,
                        int64_t layer, int is_bf16) {
    const struct kv_cache *cache = span->cache;
    const int head_dim = cache->head_dim, group = span->group, used_rows = span->num_tokens * group;
    for (int row = 0; row < span->num_rows; row++) {
        const int real = row < used_rows ? row : used_rows - 1;
        const size_t index =
            (span->first_row + real / group) * query_stride + (size_t)(kv_head * group + real % group) * head_dim;
        for (int d = 0; d < head_dim; d += PAIR) { /* in the order of pairs, like the keys */
            vfloat first, second;
            load_pair(queries, index + d, is_bf16, &first, &second);
            store_floats(span->query + row * head_dim + d, first * cache->scale);
            store_floats(span->query + row * head_dim + d + LANES, second * cache->scale);
        }
        span->maxima[row] = -INFINITY, span->totals[row] = 0.0f;
    }
    memset(span->sums, 0, sizeof(float) * span->num_rows * head_dim);
    const int64_t length = span->first_position + span->num_tokens;
    const size_t key_offset = layer * cache->layer_stride + kv_head * cache->head_stride;
    for (int64_t from = 0; from < length; from += TILE)
        attend_tile(span, from, (int)(length - from < TILE ? length - from : TILE), key_offset, is_bf16);
    for (int row = 0; row < used_rows; row++) {
        const float inverse = 1.0f / span->totals[row];
        const size_t index =
            ((span->first_row + row / group) * cache->num_heads + kv_head * group + row % group) * head_dim;
        for (int d = 0; d < head_dim; d += PAIR)
            store_pair(out, index + d, is_bf16, load_floats(span->sums + row * head_dim + d) * inverse,
                       load_floats(span->sums + row * head_dim + d + LANES) * inverse);
    }
}

/* Returns the sequence of task number `task`, and makes *task the number within that sequence. */
INLINE int64_t sequence_of(const struct paged_batch *batch, int span_tokens, int num_kv_heads, int64_t *task) {
    int64_t sequence = 0;
    for (;; sequence++) {
        const int64_t tasks = (batch->num_tokens[sequence] + span_tokens - 1) / span_tokens * num_kv_heads;
        if (*task < tasks) return sequence;
        *task -= tasks;
    }
}

int tandem_prefill_attention(const struct kv_cache *cache, const struct paged_batch *batch, const void *queries,
                             int64_t query_stride, void *out, int64_t layer) {
    const int group = cache->num_heads / cache->num_kv_heads, head_dim = cache->head_dim;
    const int span_tokens = group < SPAN_ROWS ? SPAN_ROWS / group : 1;
    const int packed = PACKED_PRODUCTS && cache->is_bf16, together = packed ? BF16_ROWS : ROWS;
    const int max_rows = (span_tokens * group + together - 1) / together * together;
    const size_t key_floats = (size_t)head_dim * (packed ? WIDE_TILE : TILE);
    const size_t scratch_bytes = (max_rows * (2 * (size_t)head_dim + 2) + key_floats) * sizeof(float);
    int64_t num_tasks = 0;
    for (int64_t i = 0; i < batch->num_sequences; i++)
        num_tasks += (batch->num_tokens[i] + span_tokens - 1) / span_tokens * cache->num_kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(cache->num_threads) if (num_tasks > 1 && cache->num_threads > 1) reduction(| : failed)
    {
        float *scratch = aligned_alloc(LINE_BYTES, (scratch_bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES);
        failed |= scratch == NULL;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < num_tasks; task++) {
            if (scratch == NULL) continue;
            int64_t within = task;
            const int64_t i = sequence_of(batch, span_tokens, cache->num_kv_heads, &within);
            const int first = (int)(within / cache->num_kv_heads) * span_tokens, left = batch->num_tokens[i] - first;
            struct span span = {
                .cache = cache,
                .table = batch->tables + batch->first_block[i],
                .first_position = batch->start[i] + first,
                .first_row = batch->first_row[i] + first,
                .num_tokens = left < span_tokens ? left : span_tokens,
                .group = group,
            };
            span.num_rows = (span.num_tokens * group + together - 1) / together * together;
            span.query = scratch;
            span.sums = span.query + (size_t)max_rows * head_dim;
            span.keys = span.sums + (size_t)max_rows * head_dim;
            span.maxima = span.keys + key_floats;
            span.totals = span.maxima + max_rows;
            const int kv_head = (int)(within % cache->num_kv_heads);
            if (PACKED_PRODUCTS && packed)
                tandem_attend_span_bf16(&span, queries, query_stride, out, kv_head, layer);
            else if (cache->is_bf16)
                attend_span(&span, queries, query_stride, out, kv_head, layer, 1);
            else
                attend_span(&span, queries, query_stride, out, kv_head, layer, 0);
        }
        free(scratch);
    }
    return failed;
}

/* A prefill's span by products of packed bfloat16. The steps are those of prefill_attention.c, but keys and values are
   packed once for all rows of the span. Packing puts pairs along the summed dimension side by side.

       keys    [WIDE_TILE / TILE][head_dim / 2, TILE, 2]    scores [BF16_ROWS, TILE] = queries . keys
       values  [WIDE_TILE / 2, head_dim, 2]                 sums [BF16_ROWS, head_dim] += weights . values, in the order
                                                            of interleaved rows

   Scores, maxima, totals and sums are float; weights are rounded to bfloat16 before the multiplication. A row's maximum
   and total need reductions across lanes, so they are computed once per WIDE_TILE positions. A row sums its positions
   in the same order, by the same groups, whatever the chunk: positions that it does not see have the weight 0.
   Products are computed by tiles (prefill_tiles.h) or by vdpbf16ps (prefill_dpbf16.h). */
#include "prefill_span.h"

#if PACKED_PRODUCTS
#include "bf16_products.h"

/* For functions that must keep their sums in registers: inlined next to each other, they spill. */
#define APART static __attribute__((noinline))
#define LINE_ALIGNED __attribute__((aligned(LINE_BYTES)))

#if TILES
#include "prefill_tiles.h"
#else
#include "prefill_dpbf16.h"
#endif

/* Transposes 16 pairs of each of 16 rows: output vector i is pair i of all rows. */
#if WIDE_VECTORS
INLINE void transpose_pairs(const char *const *rows, size_t offset, uint16_t *to, size_t to_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + offset);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* afterwards 128-bit lane k of a[i + j] is column 4 * k + j of rows i .. i + 3 */
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        const __m512i even_low = _mm512_shuffle_i32x4(a[j], a[j + 4], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(a[j], a[j + 4], 0xdd);
        const __m512i even_high = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0x88);
        const __m512i odd_high = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0xdd);
        _mm512_storeu_si512(to + j * to_stride, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
        _mm512_storeu_si512(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
        _mm512_storeu_si512(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
        _mm512_storeu_si512(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
    }
}
#else
INLINE void transpose_pairs(const char *const *rows, size_t offset, uint16_t *to, size_t to_stride) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) memcpy(to + j * to_stride + 2 * i, rows[i] + offset + 4 * j, 4);
}
#endif

/* Packs `count` positions, at most WIDE_TILE. Keys fill tiles of TILE; scores of the last tile's padding are masked.
   Values fill groups of SUMMED_TOGETHER positions; the padding's weight is 0. */
APART void pack_positions(const char *const *rows, size_t key_offset, size_t value_offset, int count, int head_dim,
                          uint16_t *keys, uint16_t *values) {
    for (int first = 0; first < count; first += TILE, keys += head_dim * TILE)
        for (int p = 0; p < TILE; p += 16)
            for (int d = 0; d < head_dim; d += WIDE)
                transpose_pairs(rows + first + p, key_offset + 2 * d, keys + d * TILE + 2 * p, 2 * TILE);
    const int padded = (count + SUMMED_TOGETHER - 1) / SUMMED_TOGETHER * SUMMED_TOGETHER;
    for (int p = 0; p < padded; p += 2, values += 2 * head_dim)
        for (int d = 0; d < head_dim; d += WIDE)
            interleave_rows(rows[p] + value_offset + 2 * d, rows[p + 1] + value_offset + 2 * d, values + 2 * d);
}

/* A vector of a row's scores from index `from` on; scores at index `seen` and up become -infinity. */
INLINE vfloat seen_scores(const float *scores, int from, int seen) {
    const int left = seen - from;
    if (left >= LANES) return load_floats(scores + from);
#if WIDE_VECTORS
    const __mmask16 mask = left > 0 ? (1u << left) - 1 : 0;
    return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), mask, scores + from);
#else
    vfloat masked = splat(-INFINITY);
    memcpy(&masked, scores + from, left > 0 ? 4 * left : 0);
    return masked;
#endif
}

/* Stores the weights of two vectors of scores, relative to the shift; adds them to the sums. */
INLINE void weigh_two(vfloat low, vfloat high, vfloat factor, vfloat shift, uint16_t *weights, vfloat sums[2]) {
    low = power_of_two(low * factor - shift), high = power_of_two(high * factor - shift);
    store_rounded(weights, low, high);
    sums[0] += low, sums[1] += high;
}

/* Weights of the first `seen` scores of a row, 0 for the rest up to `used`. Scores are not scaled yet: exponent =
   scale * log2(e). Returns the factor for earlier sums: exactly 1 for a row that sees no position, because which rows
   are computed together, and so meet such positions, depends on the chunk. */
INLINE float weigh_row(const float *scores, int seen, int used, float exponent, float *maximum, float *total,
                       uint16_t *weights) {
    if (seen <= 0) {
        memset(weights, 0, sizeof *weights * ((used + WIDE - 1) / WIDE * WIDE));
        return 1.0f;
    }
    vfloat tops = splat(-INFINITY), more_tops = tops, sums[2] = {{0}, {0}};
    int from = 0;
    for (; from + WIDE <= seen; from += WIDE) {
        tops = larger(tops, load_floats(scores + from));
        more_tops = larger(more_tops, load_floats(scores + from + LANES));
    }
    for (; from < seen; from += LANES) tops = larger(tops, seen_scores(scores, from, seen));
    const float before = *maximum, top = largest_lane(larger(tops, more_tops));
    const float after = before > top ? before : top;
    const vfloat factor = splat(exponent), shift = splat(after * exponent);
    const float rescale = power_of_two(splat(before) * factor - shift)[0];
    for (from = 0; from + WIDE <= seen; from += WIDE)
        weigh_two(load_floats(scores + from), load_floats(scores + from + LANES), factor, shift, weights + from, sums);
    for (; from < used; from += WIDE)
        weigh_two(seen_scores(scores, from, seen), seen_scores(scores, from + LANES, seen), factor, shift,
                  weights + from, sums);
    *maximum = after;
    *total = *total * rescale + sum_vector(sums[0] + sums[1]);
    return rescale;
}

APART void weigh_rows(const float *scores, const int *seen, int used, float exponent, float *maxima, float *totals,
                      uint16_t *weights, float *rescale) {
    for (int r = 0; r < BF16_ROWS; r++)
        rescale[r] = weigh_row(scores + r * WIDE_TILE, seen[r], used, exponent, maxima + r, totals + r,
                               weights + r * WIDE_TILE);
}

static void attend_tile(const struct span *span, int64_t from, int count, size_t key_offset) {
    const struct kv_cache *cache = span->cache;
    const int head_dim = cache->head_dim;
    uint16_t *keys = (uint16_t *)span->keys, *values = keys + head_dim * WIDE_TILE;
    uint16_t weights[BF16_ROWS * WIDE_TILE] LINE_ALIGNED;
    const char *rows[WIDE_TILE];
    float scores[BF16_ROWS * WIDE_TILE] LINE_ALIGNED, rescale[BF16_ROWS];
    locate_rows(cache, span->table, from, from + count, rows);
    for (int p = count; p % TILE != 0; p++) rows[p] = rows[count - 1]; /* finite padding; its weight is 0 */
    pack_positions(rows, key_offset, key_offset + cache->value_stride, count, head_dim, keys, values);
    for (int row = 0; row < span->num_rows; row += BF16_ROWS) {
        const int used = smaller(position_of(span, row + BF16_ROWS - 1) - from + 1, count);
        if (used <= 0) continue;
        score_positions((uint16_t *)span->query + row * head_dim, keys, head_dim, used, scores);
        int seen[BF16_ROWS];
        for (int r = 0; r < BF16_ROWS; r++) seen[r] = smaller(position_of(span, row + r) - from + 1, used);
        weigh_rows(scores, seen, used, cache->scale * LOG2_E, span->maxima + row, span->totals + row, weights, rescale);
        add_values(weights, values, used, rescale, head_dim, span->sums + row * head_dim);
    }
}

/* The address of a row's result: [head_dim] of a token's query head. */
INLINE uint16_t *result_of(const struct span *span, uint16_t *out, int kv_head, int row) {
    const int64_t token = span->first_row + row / span->group;
    const int64_t head = token * span->cache->num_heads + kv_head * span->group + row % span->group;
    return out + head * span->cache->head_dim;
}

void tandem_attend_span_bf16(struct span *span, const uint16_t *queries, int64_t query_stride, uint16_t *out,
                             int kv_head, int64_t layer) {
    const struct kv_cache *cache = span->cache;
    const int head_dim = cache->head_dim, group = span->group, used_rows = span->num_tokens * group;
    for (int row = 0; row < span->num_rows; row++) {
        const int real = row < used_rows ? row : used_rows - 1;
        memcpy((uint16_t *)span->query + row * head_dim,
               queries + (span->first_row + real / group) * query_stride + (kv_head * group + real % group) * head_dim,
               2 * head_dim);
        span->maxima[row] = -INFINITY, span->totals[row] = 0.0f;
        const char *result = (const char *)result_of(span, out, kv_head, real); /* a store waits for its line */
        for (int byte = 0; byte < 2 * head_dim; byte += LINE_BYTES) __builtin_prefetch(result + byte, 1, 2);
    }
    memset(span->sums, 0, sizeof(float) * span->num_rows * head_dim);
    const int64_t length = span->first_position + span->num_tokens;
    const size_t key_offset = layer * cache->layer_stride + kv_head * cache->head_stride;
#if TILES
    shape_tiles(TILE_ROWS, TILE_ROWS);
#endif
    for (int64_t from = 0; from < length; from += WIDE_TILE)
        attend_tile(span, from, smaller(length - from, WIDE_TILE), key_offset);
#if TILES
    release_tiles();
#endif
    for (int row = 0; row < used_rows; row++) {
        const float inverse = 1.0f / span->totals[row];
        const float *sums = span->sums + row * head_dim;
        uint16_t *to = result_of(span, out, kv_head, row);
        for (int d = 0; d < head_dim; d += WIDE)
            store_interleaved(to + d, load_floats(sums + d) * inverse, load_floats(sums + d + LANES) * inverse);
    }
}
#endif

/* A prefill's span by bfloat16 products. The steps are those of prefill_attention.c, but keys and values are packed
   once for all rows of the span. Packing puts pairs along the summed dimension side by side; each lane belongs to
   another element of the result.

       keys    [WIDE_TILE / TILE][head_dim / 2, TILE, 2]    scores [ROWS, TILE] = queries . keys, with a pair of the
                                                            query broadcast to all lanes
       values  [WIDE_TILE / 2, head_dim, 2]                 sums [ROWS, head_dim] += weights . values, in the order of
                                                            interleaved rows

   Scores, maxima, totals and sums are float; weights are rounded to bfloat16 before the multiplication. A row's maximum
   and total need reductions across lanes, so they are computed once per WIDE_TILE positions. */
#include "prefill_span.h"

#ifdef __AVX512BF16__
#include "bf16_products.h"

#define SCORE_VECTORS (TILE / LANES)
/* For functions that must keep their sums in registers: inlined next to each other, they spill. */
#define APART static __attribute__((noinline))

/* Transposes 16 pairs of each of 16 rows: output vector i is pair i of all rows. */
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

/* Packs `count` positions, at most WIDE_TILE. Keys fill tiles of TILE; scores of the last tile's padding are masked. */
APART void pack_positions(const char *const *rows, size_t key_offset, size_t value_offset, int count, int head_dim,
                          uint16_t *keys, uint16_t *values) {
    for (int first = 0; first < count; first += TILE, keys += head_dim * TILE)
        for (int p = 0; p < TILE; p += 16)
            for (int d = 0; d < head_dim; d += WIDE)
                transpose_pairs(rows + first + p, key_offset + 2 * d, keys + d * TILE + 2 * p, 2 * TILE);
    for (int p = 0; p < count; p += 2, values += 2 * head_dim) {
        for (int d = 0; d < head_dim; d += WIDE) {
            const __m512bh a = load_wide(rows[p] + value_offset + 2 * d);
            const __m512bh b = load_wide(rows[p + 1] + value_offset + 2 * d);
            _mm512_storeu_si512(values + 2 * d, (__m512i)interleave_low(a, b));
            _mm512_storeu_si512(values + 2 * d + WIDE, (__m512i)interleave_high(a, b));
        }
    }
}

/* sums[r] += rows[r] . packed, for ROWS rows of at least one pair and `vectors` (a constant) vectors of results. */
INLINE void multiply_rows(const uint16_t *rows, int row_stride, int num_pairs, const uint16_t *packed,
                          int packed_stride, const int vectors, __m512 sums[ROWS][SCORE_VECTORS]) {
    int pair = 0;
    do { /* with a loop that may run zero times, the compiler keeps a copy of the sums in memory */
        __m512bh parts[SCORE_VECTORS];
        for (int v = 0; v < vectors; v++) parts[v] = load_wide(packed + pair * packed_stride + v * WIDE);
        for (int r = 0; r < ROWS; r++) {
            const __m512bh both = splat_pair(rows + r * row_stride + 2 * pair);
            for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], parts[v], both);
        }
    } while (++pair < num_pairs);
}

/* Computes scores of `vectors` (a constant) vectors of positions. */
INLINE void score_part(const uint16_t *query, const uint16_t *keys, int head_dim, const int vectors, float *scores) {
    __m512 sums[ROWS][SCORE_VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_setzero_ps();
    multiply_rows(query, head_dim, head_dim / 2, keys, 2 * TILE, vectors, sums);
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) _mm512_storeu_ps(scores + r * WIDE_TILE + v * LANES, sums[r][v]);
}

/* Scores the first `used` positions of WIDE_TILE, rounded up to a multiple of 32. */
APART void score_positions(const uint16_t *query, const uint16_t *keys, int head_dim, int used, float *scores) {
    for (; used > TILE / 2; used -= TILE, keys += head_dim * TILE, scores += TILE)
        score_part(query, keys, head_dim, SCORE_VECTORS, scores);
    if (used > 0) score_part(query, keys, head_dim, SCORE_VECTORS / 2, scores);
}

/* A vector of a row's scores from index `from` on; scores at index `seen` and up become -infinity. */
INLINE __m512 seen_scores(const float *scores, int from, int seen) {
    const int left = seen - from;
    if (left >= LANES) return _mm512_loadu_ps(scores + from);
    const __mmask16 mask = left > 0 ? (1u << left) - 1 : 0;
    return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), mask, scores + from);
}

/* Weights of the first `seen` scores of a row, 0 for the rest up to `used`. Scores are not scaled yet: exponent =
   scale * log2(e). Returns the factor for earlier sums. */
INLINE float weigh_row(const float *scores, int seen, int used, float exponent, float *maximum, float *total,
                       uint16_t *weights) {
    __m512 tops = _mm512_set1_ps(-INFINITY), more_tops = tops;
    int from = 0;
    for (; from + WIDE <= seen; from += WIDE) {
        tops = _mm512_max_ps(tops, _mm512_loadu_ps(scores + from));
        more_tops = _mm512_max_ps(more_tops, _mm512_loadu_ps(scores + from + LANES));
    }
    for (; from < seen; from += LANES) tops = _mm512_max_ps(tops, seen_scores(scores, from, seen));
    const float before = *maximum, top = _mm512_reduce_max_ps(_mm512_max_ps(tops, more_tops));
    const float after = before > top ? before : top;
    const __m512 factor = _mm512_set1_ps(exponent), shift = _mm512_set1_ps(after * exponent);
    const __m512 scale = power_of_two(_mm512_fmsub_ps(_mm512_set1_ps(before), factor, shift));
    __m512 sums = _mm512_setzero_ps(), more = sums;
    for (from = 0; from + WIDE <= seen; from += WIDE) {
        const __m512 low = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores + from), factor, shift));
        const __m512 high = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores + from + LANES), factor, shift));
        _mm512_storeu_si512(weights + from, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        sums = _mm512_add_ps(sums, low), more = _mm512_add_ps(more, high);
    }
    for (; from < used; from += WIDE) {
        const __m512 low = power_of_two(_mm512_fmsub_ps(seen_scores(scores, from, seen), factor, shift));
        const __m512 high = power_of_two(_mm512_fmsub_ps(seen_scores(scores, from + LANES, seen), factor, shift));
        _mm512_storeu_si512(weights + from, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        sums = _mm512_add_ps(sums, low), more = _mm512_add_ps(more, high);
    }
    const float rescale = _mm512_cvtss_f32(scale);
    *maximum = after;
    *total = *total * rescale + _mm512_reduce_add_ps(_mm512_add_ps(sums, more));
    return rescale;
}

APART void weigh_rows(const float *scores, const int *seen, int used, float exponent, float *maxima, float *totals,
                      uint16_t *weights, float *rescale) {
    for (int r = 0; r < ROWS; r++)
        rescale[r] = weigh_row(scores + r * WIDE_TILE, seen[r], used, exponent, maxima + r, totals + r,
                               weights + r * WIDE_TILE);
}

/* Updates `vectors` (a constant) vectors of each row's sums. */
INLINE void add_part(const uint16_t *weights, const uint16_t *values, int count, const float *rescale, int head_dim,
                     const int vectors, float *sums) {
    __m512 added[ROWS][SCORE_VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++)
            added[r][v] = _mm512_mul_ps(_mm512_loadu_ps(sums + r * head_dim + v * LANES), _mm512_set1_ps(rescale[r]));
    multiply_rows(weights, WIDE_TILE, (count + 1) / 2, values, 2 * head_dim, vectors, added);
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) _mm512_storeu_ps(sums + r * head_dim + v * LANES, added[r][v]);
}

APART void add_values(const uint16_t *weights, const uint16_t *values, int count, const float *rescale, int head_dim,
                       float *sums) {
    int d = 0;
    for (; d + 2 * WIDE <= head_dim; d += 2 * WIDE)
        add_part(weights, values + 2 * d, count, rescale, head_dim, 4, sums + d);
    if (d < head_dim) add_part(weights, values + 2 * d, count, rescale, head_dim, 2, sums + d);
}

static void attend_tile(const struct span *span, int64_t from, int count, size_t key_offset) {
    const struct kv_cache *cache = span->cache;
    const int head_dim = cache->head_dim;
    uint16_t *keys = (uint16_t *)span->keys, *values = keys + head_dim * WIDE_TILE, weights[ROWS * WIDE_TILE];
    const char *rows[WIDE_TILE];
    float scores[ROWS * WIDE_TILE], rescale[ROWS];
    locate_rows(cache, span->table, from, from + count, rows);
    for (int p = count; p % TILE != 0; p++) rows[p] = rows[count - 1]; /* finite padding; its weight is 0 */
    pack_positions(rows, key_offset, key_offset + cache->value_stride, count, head_dim, keys, values);
    for (int row = 0; row < span->num_rows; row += ROWS) {
        const int used = smaller(position_of(span, row + ROWS - 1) - from + 1, count);
        if (used <= 0) continue;
        score_positions((uint16_t *)span->query + row * head_dim, keys, head_dim, used, scores);
        int seen[ROWS];
        for (int r = 0; r < ROWS; r++) seen[r] = smaller(position_of(span, row + r) - from + 1, used);
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
    for (int64_t from = 0; from < length; from += WIDE_TILE)
        attend_tile(span, from, smaller(length - from, WIDE_TILE), key_offset);
    for (int row = 0; row < used_rows; row++) {
        const __m512 inverse = _mm512_set1_ps(1.0f / span->totals[row]);
        const float *sums = span->sums + row * head_dim;
        uint16_t *to = result_of(span, out, kv_head, row);
        for (int d = 0; d < head_dim; d += WIDE)
            store_interleaved(to + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), inverse),
                              _mm512_mul_ps(_mm512_loadu_ps(sums + d + LANES), inverse));
    }
}
#endif

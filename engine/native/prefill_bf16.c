/* A prefill's span by bfloat16 products. As in prefill_attention.c, but a tile of keys and values is packed once for
   all rows of the span: pairs of what is summed over lie side by side, in every lane another place of the result.

       keys    [head_dim / 2, TILE, 2]    scores [ROWS, TILE] = queries . keys, a pair of the query in every lane
       values  [TILE / 2, head_dim, 2]    sums [ROWS, head_dim] += weights . values, in the order of interleaved rows

   Scores, maxima, totals and sums are float; weights are rounded to bfloat16 before they multiply. */
#include "prefill_span.h"

#ifdef __AVX512BF16__
#include "bf16_products.h"

#define SCORE_VECTORS (TILE / LANES)
/* What must keep its sums in registers is a function of its own: inlined side by side, they do not. */
#define APART static __attribute__((noinline))

/* 16 pairs of each of 16 rows, turned: vector i is pair i of all rows. */
INLINE void transpose_pairs(const char *const *rows, size_t offset, uint16_t *to, size_t to_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + offset);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* now each 128 bits of a[i + j] hold column 4 * lane + j of rows i .. i + 3 */
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

APART void pack_tile(const char *const *rows, size_t key_offset, size_t value_offset, int count, int head_dim,
                     uint16_t *keys, uint16_t *values) {
    for (int p = 0; p < TILE; p += 16)
        for (int d = 0; d < head_dim; d += WIDE)
            transpose_pairs(rows + p, key_offset + 2 * d, keys + d * TILE + 2 * p, 2 * TILE);
    for (int p = 0; p < count; p += 2, values += 2 * head_dim) {
        for (int d = 0; d < head_dim; d += WIDE) {
            const __m512bh a = load_wide(rows[p] + value_offset + 2 * d);
            const __m512bh b = load_wide(rows[p + 1] + value_offset + 2 * d);
            _mm512_storeu_si512(values + 2 * d, (__m512i)interleave_low(a, b));
            _mm512_storeu_si512(values + 2 * d + WIDE, (__m512i)interleave_high(a, b));
        }
    }
}

/* sums[r] += rows[r] . packed, for ROWS rows of pairs and `vectors` (a constant) vectors of results. */
INLINE void multiply_rows(const uint16_t *rows, int row_stride, int num_pairs, const uint16_t *packed,
                          int packed_stride, const int vectors, __m512 sums[ROWS][SCORE_VECTORS]) {
    for (int pair = 0; pair < num_pairs; pair++) {
        __m512bh parts[SCORE_VECTORS];
        for (int v = 0; v < vectors; v++) parts[v] = load_wide(packed + pair * packed_stride + v * WIDE);
        for (int r = 0; r < ROWS; r++) {
            const __m512bh both = splat_pair(rows + r * row_stride + 2 * pair);
            for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], parts[v], both);
        }
    }
}

APART void score_tile(const uint16_t *query, const uint16_t *keys, int head_dim, float *scores) {
    __m512 sums[ROWS][SCORE_VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < SCORE_VECTORS; v++) sums[r][v] = _mm512_setzero_ps();
    multiply_rows(query, head_dim, head_dim / 2, keys, 2 * TILE, SCORE_VECTORS, sums);
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < SCORE_VECTORS; v++) _mm512_storeu_ps(scores + r * TILE + v * LANES, sums[r][v]);
}

/* The first `seen` of a row's scores; the rest counts for nothing. Unmasked where all are seen: that is most rows. */
INLINE __m512 seen_scores(const float *scores, int vector, int seen) {
    const int left = seen - vector * LANES;
    if (left >= LANES) return _mm512_loadu_ps(scores + vector * LANES);
    const __mmask16 mask = left > 0 ? (1u << left) - 1 : 0;
    return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), mask, scores + vector * LANES);
}

/* Weights of the first seen[r] of TILE scores of row r, 0 for the rest; earlier sums are multiplied by rescale[r].
   Scores are not scaled yet: exponent = scale * log2(e). */
APART void weigh_rows(const float *scores, const int *seen, float exponent, float *maxima, float *totals,
                      uint16_t *weights, float *rescale) {
    const __mmask16 rows = (1u << ROWS) - 1;
    float tops[LANES] = {0}, added[LANES] = {0};
    for (int r = 0; r < ROWS; r++) {
        __m512 top = seen_scores(scores + r * TILE, 0, seen[r]);
        for (int v = 1; v < SCORE_VECTORS; v++) top = _mm512_max_ps(top, seen_scores(scores + r * TILE, v, seen[r]));
        tops[r] = _mm512_reduce_max_ps(top);
    }
    const __m512 before = _mm512_maskz_loadu_ps(rows, maxima), factor = _mm512_set1_ps(exponent);
    const __m512 after = _mm512_max_ps(before, _mm512_loadu_ps(tops));
    const __m512 scale = power_of_two(_mm512_mul_ps(factor, _mm512_sub_ps(before, after)));
    _mm512_storeu_ps(tops, _mm512_mul_ps(after, factor));
    for (int r = 0; r < ROWS; r++) {
        const __m512 shift = _mm512_set1_ps(tops[r]);
        __m512 sums = _mm512_setzero_ps();
        for (int v = 0; v < SCORE_VECTORS; v += 2) {
            const __m512 a = seen_scores(scores + r * TILE, v, seen[r]);
            const __m512 b = seen_scores(scores + r * TILE, v + 1, seen[r]);
            const __m512 low = power_of_two(_mm512_fmsub_ps(a, factor, shift));
            const __m512 high = power_of_two(_mm512_fmsub_ps(b, factor, shift));
            _mm512_storeu_si512(weights + r * TILE + v * LANES, (__m512i)_mm512_cvtne2ps_pbh(high, low));
            sums = _mm512_add_ps(sums, _mm512_add_ps(low, high));
        }
        added[r] = _mm512_reduce_add_ps(sums);
    }
    _mm512_mask_storeu_ps(maxima, rows, after);
    _mm512_mask_storeu_ps(rescale, rows, scale);
    const __m512 total = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(rows, totals), scale, _mm512_loadu_ps(added));
    _mm512_mask_storeu_ps(totals, rows, total);
}

/* `vectors` (a constant) vectors of each row's sums. */
INLINE void add_part(const uint16_t *weights, const uint16_t *values, int count, const float *rescale, int head_dim,
                     const int vectors, float *sums) {
    __m512 added[ROWS][SCORE_VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++)
            added[r][v] = _mm512_mul_ps(_mm512_loadu_ps(sums + r * head_dim + v * LANES), _mm512_set1_ps(rescale[r]));
    multiply_rows(weights, TILE, (count + 1) / 2, values, 2 * head_dim, vectors, added);
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
    uint16_t *keys = (uint16_t *)span->keys, *values = keys + head_dim * TILE, weights[ROWS * TILE];
    const char *rows[TILE];
    float scores[ROWS * TILE], rescale[ROWS];
    locate_rows(cache, span->table, from, from + count, rows);
    for (int p = count; p < TILE; p++) rows[p] = rows[count - 1]; /* numbers, at least; their weight is 0 */
    pack_tile(rows, key_offset, key_offset + cache->value_stride, count, head_dim, keys, values);
    for (int row = 0; row < span->num_rows; row += ROWS) {
        const int used = smaller(position_of(span, row + ROWS - 1) - from + 1, count);
        if (used <= 0) continue;
        score_tile((uint16_t *)span->query + row * head_dim, keys, head_dim, scores);
        int seen[ROWS];
        const int all_seen = position_of(span, row) - from + 1 >= used;
        for (int r = 0; r < ROWS; r++)
            seen[r] = all_seen ? used : smaller(position_of(span, row + r) - from + 1, used);
        weigh_rows(scores, seen, cache->scale * LOG2_E, span->maxima + row, span->totals + row, weights, rescale);
        add_values(weights, values, used, rescale, head_dim, span->sums + row * head_dim);
    }
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
    }
    memset(span->sums, 0, sizeof(float) * span->num_rows * head_dim);
    const int64_t length = span->first_position + span->num_tokens;
    const size_t key_offset = layer * cache->layer_stride + kv_head * cache->head_stride;
    for (int64_t from = 0; from < length; from += TILE)
        attend_tile(span, from, smaller(length - from, TILE), key_offset);
    for (int row = 0; row < used_rows; row++) {
        const __m512 inverse = _mm512_set1_ps(1.0f / span->totals[row]);
        const float *sums = span->sums + row * head_dim;
        const int64_t head = (span->first_row + row / group) * cache->num_heads + kv_head * group + row % group;
        uint16_t *to = out + head * head_dim;
        for (int d = 0; d < head_dim; d += WIDE)
            store_interleaved(to + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), inverse),
                              _mm512_mul_ps(_mm512_loadu_ps(sums + d + LANES), inverse));
    }
}
#endif

/* One task of prefill attention: a span of tokens with the query heads that share one KV head. */
#ifndef TANDEM_PREFILL_SPAN_H
#define TANDEM_PREFILL_SPAN_H

#include "kv_cache.h"
#include "tiles.h"

#define PACKED_PRODUCTS (BF16_PRODUCTS || TILES) /* whether prefill_bf16.c computes spans of bfloat16 */
#define ROWS 6                                   /* rows computed together */
#define BF16_ROWS (TILES ? 16 : ROWS)            /* the same for bfloat16: a tile has 16 rows */
#define WIDE_TILE (TILES ? 4 * TILE : 8 * TILE)  /* positions packed together; by tiles, all their scores stay in L1 */
#define SPAN_ROWS 384 /* rows of a task: enough to make the transposing cheap, few enough to stay in L2 */

struct span {
    const struct kv_cache *cache;
    const int32_t *table;
    int64_t first_position;            /* of the span's first token */
    int64_t first_row;                 /* of the step's queries */
    int num_tokens, group, num_rows;   /* num_rows: tokens * group, rounded up to ROWS or BF16_ROWS */
    float *query, *sums;               /* [num_rows, head_dim] */
    float *keys;                       /* [head_dim, TILE]; for packed products, WIDE_TILE packed keys, then values */
    float *maxima, *totals;            /* [num_rows] */
};

INLINE int64_t position_of(const struct span *span, int row) {
    const int token = row / span->group;
    return span->first_position + (token < span->num_tokens ? token : span->num_tokens - 1);
}

INLINE int smaller(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

/* Computes the span by products of packed bfloat16. Defined only if PACKED_PRODUCTS. */
void tandem_attend_span_bf16(struct span *span, const uint16_t *queries, int64_t query_stride, uint16_t *out,
                             int kv_head, int64_t layer);

#endif

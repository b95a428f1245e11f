/* The layout of the paged KV pool. Kernels read rows of head_dim elements at computed addresses, without a gather.

       [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]

   Strides are in bytes. The key row of a position in layer 0, head 0 is at
   base + table[position / block_size] * block_stride + position % block_size * row_stride. */
#ifndef TANDEM_KV_CACHE_H
#define TANDEM_KV_CACHE_H

#include "vectors.h"

struct kv_cache {
    char *base;
    int64_t block_stride, layer_stride, value_stride, head_stride, row_stride;
    int32_t block_size, head_dim, num_heads, num_kv_heads;
    int32_t is_bf16, num_threads;
    float scale;
};

/* Sequences of a step. Rows [first_row[i], first_row[i] + num_tokens[i]) of the step's queries belong to sequence i, at
   positions from start[i] on. The block table of sequence i begins at tables[first_block[i]]. */
struct paged_batch {
    int64_t num_sequences;
    const int32_t *tables;
    const int64_t *first_block;
    const int32_t *first_row, *num_tokens, *start;
};

#define TILE 64 /* positions per pass of scores, softmax and weighted sum */

/* Writes the addresses of the rows of positions [from, until) to `rows`. */
INLINE void locate_rows(const struct kv_cache *cache, const int32_t *table, int64_t from, int64_t until,
                        const char **rows) {
    int64_t block = from / cache->block_size, place = from % cache->block_size;
    for (int64_t position = from; position < until; place = 0, block++) {
        const char *row = cache->base + table[block] * cache->block_stride + place * cache->row_stride;
        for (; place < cache->block_size && position < until; place++, position++, row += cache->row_stride)
            *rows++ = row;
    }
}

#endif

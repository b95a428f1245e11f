/* The parts of one layer's attention, and the inputs that all layers of a step share. */
#ifndef TANDEM_STEP_ATTENTION_H
#define TANDEM_STEP_ATTENTION_H

#include "kv_cache.h"

struct step_attention {
    const struct kv_cache *cache;
    const float *cosine, *sine; /* [num_rows, head_dim / 2] */
    const int64_t *slots;       /* for each row, the bytes from the pool's base to layer 0, head 0's key of its slot */
    int64_t num_rows;
    struct paged_batch decodes, prefills; /* sequences with one row and with several rows; either may be empty */
};

/* Rotates queries and keys in place and writes keys and values into their slots.
   heads: [num_rows, num_heads + 2 * num_kv_heads, head_dim], contiguous. */
void tandem_rope_and_write(const struct kv_cache *cache, void *heads, const float *cosine, const float *sine,
                           const int64_t *slots, int64_t num_rows, int64_t layer);

/* Prefetches the first tile that decode attention reads. The batch is not empty. */
void tandem_fetch_first_tile(const struct kv_cache *cache, const struct paged_batch *batch, int64_t layer);

/* Both return 0, or 1 if there is no memory for scratch. query_stride is in elements; out: [rows, heads, head_dim]. */
int tandem_decode_attention(const struct kv_cache *cache, const struct paged_batch *batch, const void *queries,
                            int64_t query_stride, void *out, int64_t layer);
int tandem_prefill_attention(const struct kv_cache *cache, const struct paged_batch *batch, const void *queries,
                             int64_t query_stride, void *out, int64_t layer);

#endif

/* Rotary embedding and the cache write in one pass over a step's projected rows.

   A row holds query heads, key heads and value heads. Queries and keys are rotated in place (half-split: element d
   pairs with d + head_dim / 2); rotated keys and the values are also written into the row's slot of the pool. */
#include "step_attention.h"
#include "threads.h"

INLINE void rotate(const void *from, void *to, const float *cosine, const float *sine, int half, int is_bf16) {
    for (int d = 0; d < half; d += LANES) {
        const vfloat low = load_row(from, d, is_bf16), high = load_row(from, d + half, is_bf16);
        const vfloat cos = load_floats(cosine + d), sin = load_floats(sine + d);
        store_row(to, d, is_bf16, low * cos - high * sin);
        store_row(to, d + half, is_bf16, high * cos + low * sin);
    }
}

INLINE void write_row(const struct kv_cache *cache, char *heads, const float *cosine, const float *sine, char *slot,
                      int is_bf16) {
    const int num_heads = cache->num_heads, num_kv_heads = cache->num_kv_heads, half = cache->head_dim / 2;
    const size_t head_bytes = cache->head_dim * element_bytes(is_bf16);
    for (int head = 0; head < num_heads + num_kv_heads; head++)
        rotate(heads + head * head_bytes, heads + head * head_bytes, cosine, sine, half, is_bf16);
    const char *keys = heads + num_heads * head_bytes, *values = keys + num_kv_heads * head_bytes;
    for (int head = 0; head < num_kv_heads; head++) {
        memcpy(slot + head * cache->head_stride, keys + head * head_bytes, head_bytes);
        memcpy(slot + cache->value_stride + head * cache->head_stride, values + head * head_bytes, head_bytes);
    }
}

void tandem_rope_and_write(const struct kv_cache *cache, void *heads, const float *cosine, const float *sine,
                           const int64_t *slots, int64_t num_rows, int64_t layer) {
    const int half = cache->head_dim / 2;
    const size_t row_bytes =
        (size_t)(cache->num_heads + 2 * cache->num_kv_heads) * cache->head_dim * element_bytes(cache->is_bf16);
    FOR_EACH(row, num_rows, num_rows >= 64 ? cache->num_threads : 1, {
        char *slot = cache->base + slots[row] + layer * cache->layer_stride;
        char *from = (char *)heads + row * row_bytes;
        if (cache->is_bf16)
            write_row(cache, from, cosine + row * half, sine + row * half, slot, 1);
        else
            write_row(cache, from, cosine + row * half, sine + row * half, slot, 0);
    });
}

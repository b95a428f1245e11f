/* One layer's attention in one call: the call from Python costs as much time as a short sequence's kernels. */
#include "step_attention.h"

/* heads: [num_rows, num_heads + 2 * num_kv_heads, head_dim], rotated in place. out: [num_rows, num_heads, head_dim].
   Returns 0, or 1 if there is no memory for scratch. */
EXPORT int tandem_attend(const struct step_attention *step, void *heads, void *out, int64_t layer) {
    const struct kv_cache *cache = step->cache;
    const struct paged_batch *decodes = &step->decodes, *prefills = &step->prefills;
    const int64_t stride = (int64_t)(cache->num_heads + 2 * cache->num_kv_heads) * cache->head_dim;
    if (decodes->num_sequences > 0) tandem_fetch_first_tile(cache, decodes, layer); /* arrives during rotation */
    tandem_rope_and_write(cache, heads, step->cosine, step->sine, step->slots, step->num_rows, layer);
    int failed = 0;
    if (decodes->num_sequences > 0) failed |= tandem_decode_attention(cache, decodes, heads, stride, out, layer);
    if (prefills->num_sequences > 0) failed |= tandem_prefill_attention(cache, prefills, heads, stride, out, layer);
    return failed;
}

/* The elementwise operations between matrix products: the residual sum with RMS norm, and SwiGLU's activation.

   All sums are float for every dtype of the rows. Rows are contiguous. */
#include "silu.h"
#include "threads.h"

#define PARALLEL_ELEMENTS 32768 /* one thread finishes fewer before another wakes up */

/* normed = x / sqrt(mean(x^2) + epsilon) * weight. x is the row, to which `update`, if given, is added first. */
INLINE void norm_row(void *row, const void *update, const void *weight, void *normed, int64_t size, float epsilon,
                     int is_bf16) {
    vfloat squares = {0};
    float tail = 0.0f;
    int64_t i = 0;
    for (; i + PAIR <= size; i += PAIR) {
        vfloat first, second;
        load_pair(row, i, is_bf16, &first, &second);
        if (update) {
            vfloat more_first, more_second;
            load_pair(update, i, is_bf16, &more_first, &more_second);
            store_pair(row, i, is_bf16, first + more_first, second + more_second);
            load_pair(row, i, is_bf16, &first, &second); /* rounded, as the next layer reads the row */
        }
        squares += first * first;
        squares += second * second;
    }
    for (; i < size; i++) {
        if (update) store_one(row, i, is_bf16, load_one(row, i, is_bf16) + load_one(update, i, is_bf16));
        const float value = load_one(row, i, is_bf16);
        tail += value * value;
    }
    const float factor = 1.0f / sqrtf((sum_lanes(squares) + tail) / (float)size + epsilon);
    for (i = 0; i + PAIR <= size; i += PAIR) {
        vfloat first, second, weight_first, weight_second;
        load_pair(row, i, is_bf16, &first, &second);
        load_pair(weight, i, is_bf16, &weight_first, &weight_second);
        store_pair(normed, i, is_bf16, first * factor * weight_first, second * factor * weight_second);
    }
    for (; i < size; i++)
        store_one(normed, i, is_bf16, load_one(row, i, is_bf16) * factor * load_one(weight, i, is_bf16));
}

/* rows, update and normed: [num_rows, size]; weight: [size]. If update is not NULL, rows += update, and normed may use
   the memory of update. */
EXPORT void tandem_add_rms_norm(void *rows, const void *update, const void *weight, void *normed, int64_t num_rows,
                                int64_t size, float epsilon, int is_bf16, int num_threads) {
    const size_t row_bytes = size * element_bytes(is_bf16);
    FOR_EACH(row, num_rows, num_rows * size >= PARALLEL_ELEMENTS ? num_threads : 1, {
        char *values = (char *)rows + row * row_bytes, *to = (char *)normed + row * row_bytes;
        const char *more = update ? (const char *)update + row * row_bytes : NULL;
        if (is_bf16)
            norm_row(values, more, weight, to, size, epsilon, 1);
        else
            norm_row(values, more, weight, to, size, epsilon, 0);
    });
}

INLINE void silu_row(const void *row, void *to, int64_t size, int is_bf16) {
    const void *up = element(row, size, is_bf16);
    int64_t i = 0;
    for (; i + PAIR <= size; i += PAIR) {
        vfloat gate_first, gate_second, up_first, up_second;
        load_pair(row, i, is_bf16, &gate_first, &gate_second);
        load_pair(up, i, is_bf16, &up_first, &up_second);
        if (is_bf16)
            store_pair(to, i, 1, bf16_silu(gate_first) * up_first, bf16_silu(gate_second) * up_second);
        else
            store_pair(to, i, 0, silu(gate_first) * up_first, silu(gate_second) * up_second);
    }
    for (; i < size; i++)
        store_one(to, i, is_bf16, silu(splat(load_one(row, i, is_bf16)))[0] * load_one(up, i, is_bf16));
}

/* rows: [num_rows, 2 * size], gate then up; out: [num_rows, size] = silu(gate) * up. */
EXPORT void tandem_silu_and_multiply(const void *rows, void *out, int64_t num_rows, int64_t size, int is_bf16,
                                     int num_threads) {
    const size_t row_bytes = size * element_bytes(is_bf16);
    FOR_EACH(row, num_rows, num_rows * size >= PARALLEL_ELEMENTS ? num_threads : 1, {
        if (is_bf16)
            silu_row((const char *)rows + 2 * row * row_bytes, (char *)out + row * row_bytes, size, 1);
        else
            silu_row((const char *)rows + 2 * row * row_bytes, (char *)out + row * row_bytes, size, 0);
    });
}

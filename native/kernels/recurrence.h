/* The memory of a recurrent layer's head, and causal convolutions. Columns of a memory are independent, and so are
 * channels; each has its own sums, in the order of the rows. Plain operations in a fixed order: all instruction sets give
 * the same bits. */
#ifndef NP_KERNELS_RECURRENCE_H
#define NP_KERNELS_RECURRENCE_H
#include "kernels/exponential.h"
#include "neuronpipe.h"

#include <string.h>

typedef float np_sixteen __attribute__((vector_size(64), aligned(4)));
enum { NP_COLUMNS = 16 }; /* of np_sixteen */

/* The change of a memory's columns by one token, for `groups` (a constant) groups of sixteen columns. `from` and `to` are
 * the first row's columns; they may be the same. Two sums for even and odd rows shorten the chain of additions. Where each
 * row keeps a share of its own (by_row, a constant), what the memory knows of the key is known of that share. */
NP_INLINE void np_remember_columns(const np_memory_job *job, size_t t, const float *from, float *to, size_t column, int groups, int by_row) {
    const float *key = job->keys + t * job->keys_stride, *query = job->queries + t * job->keys_stride;
    float *value = job->values + t * job->values_stride + column;
    const size_t rows = job->key_width, stride = job->value_width;
    const float *of_rows = job->kept + t * (by_row ? rows : 1), kept = of_rows[0], share = job->shares[t];
    np_sixteen change[8], even[8] = {{0}}, odd[8] = {{0}};
    for (size_t row = 0; job->is_delta && row < rows; row += 2)
        for (int g = 0; g < groups; g++) {
            even[g] += *(const np_sixteen *)(from + row * stride + g * NP_COLUMNS) * (by_row ? key[row] * of_rows[row] : key[row]);
            if (row + 1 < rows)
                odd[g] += *(const np_sixteen *)(from + (row + 1) * stride + g * NP_COLUMNS) * (by_row ? key[row + 1] * of_rows[row + 1] : key[row + 1]);
        }
    for (int g = 0; g < groups; g++) {
        const np_sixteen known = even[g] + odd[g];
        change[g] = (*(const np_sixteen *)(value + g * NP_COLUMNS) - (by_row ? known : known * kept)) * share;
        even[g] = odd[g] = (np_sixteen){0};
    }
    for (size_t row = 0; row < rows; row += 2)
        for (int g = 0; g < groups; g++) {
            const size_t at = row * stride + (size_t)g * NP_COLUMNS;
            const np_sixteen first = *(const np_sixteen *)(from + at) * (by_row ? of_rows[row] : kept) + change[g] * key[row];
            *(np_sixteen *)(to + at) = first;
            even[g] += first * query[row];
            if (row + 1 == rows) continue;
            const np_sixteen second = *(const np_sixteen *)(from + at + stride) * (by_row ? of_rows[row + 1] : kept) + change[g] * key[row + 1];
            *(np_sixteen *)(to + at + stride) = second;
            odd[g] += second * query[row + 1];
        }
    for (int g = 0; g < groups; g++)
        *(np_sixteen *)(value + g * NP_COLUMNS) = even[g] + odd[g];
}

/* The same for a single column. */
NP_INLINE void np_remember_column(const np_memory_job *job, size_t t, const float *from, float *to, size_t column, int by_row) {
    const float *key = job->keys + t * job->keys_stride, *query = job->queries + t * job->keys_stride;
    float *value = job->values + t * job->values_stride + column, sums[2] = {0};
    const size_t rows = job->key_width, stride = job->value_width;
    const float *of_rows = job->kept + t * (by_row ? rows : 1), kept = of_rows[0];
    for (size_t row = 0; job->is_delta && row < rows; row++)
        sums[row % 2] += from[row * stride] * (by_row ? key[row] * of_rows[row] : key[row]);
    const float known = sums[0] + sums[1], change = (*value - (by_row ? known : known * kept)) * job->shares[t];
    sums[0] = sums[1] = 0.0f;
    for (size_t row = 0; row < rows; row++) {
        to[row * stride] = from[row * stride] * (by_row ? of_rows[row] : kept) + change * key[row];
        sums[row % 2] += to[row * stride] * query[row];
    }
    *value = sums[0] + sums[1];
}

/* With one token whole rows are read and written, in the order of the memory; with many, columns that fit the first-level
 * cache. */
NP_INLINE void np_remember_tokens(const np_memory_job *job, int by_row) {
    const size_t width = job->value_width;
    size_t column = 0;
    if (!job->from) memset(job->to, 0, job->key_width * width * sizeof *job->to);
    for (size_t t = 0; job->tokens == 1 && t < 1; t++)
        for (; column + 8 * NP_COLUMNS <= width; column += 8 * NP_COLUMNS)
            np_remember_columns(job, t, (job->from ? job->from : job->to) + column, job->to + column, column, 8, by_row);
    for (; column + 4 * NP_COLUMNS <= width; column += 4 * NP_COLUMNS)
        for (size_t t = 0; t < job->tokens; t++)
            np_remember_columns(job, t, (t == 0 && job->from ? job->from : job->to) + column, job->to + column, column, 4, by_row);
    for (; column + NP_COLUMNS <= width; column += NP_COLUMNS)
        for (size_t t = 0; t < job->tokens; t++)
            np_remember_columns(job, t, (t == 0 && job->from ? job->from : job->to) + column, job->to + column, column, 1, by_row);
    for (; column < width; column++)
        for (size_t t = 0; t < job->tokens; t++)
            np_remember_column(job, t, (t == 0 && job->from ? job->from : job->to) + column, job->to + column, column, by_row);
}

/* The body of np_isa.remember. */
NP_INLINE void np_remember_body(const np_memory_job *job) {
    if (job->is_by_row) np_remember_tokens(job, 1);
    else np_remember_tokens(job, 0);
}

/* The body of np_isa.keep. */
NP_INLINE void np_keep_body(const float *rates, const float *biases, float decay, size_t n, float *kept) {
    for (size_t i = 0; i < n; i++) kept[i] = np_exponential(np_softplus(rates[i] + biases[i]) * decay);
}

/* The body of np_isa.convolve. */
NP_INLINE void np_convolve_body(const np_convolution_job *job) {
    for (size_t t = 0; t < job->tokens; t++) {
        float *out = job->out + t * job->out_stride;
        for (size_t c = 0; c < job->channels; c++) out[c] = 0.0f;
        for (size_t tap = 0; tap < job->taps; tap++) {
            const float *weights = job->weights + tap * job->weights_stride, *x = job->inputs[t + tap];
            for (size_t c = 0; c < job->channels; c++) out[c] += weights[c] * x[c];
        }
        for (size_t c = 0; job->bias && c < job->channels; c++) out[c] += job->bias[c];
        for (size_t c = 0; job->is_activated && c < job->channels; c++) out[c] = np_silu(out[c]);
    }
}
#endif

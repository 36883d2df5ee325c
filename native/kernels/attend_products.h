/* Attention's two products, of queries with keys and of weights with values, for an instruction set that defines before
 * it includes this file:
 *
 *   TARGET, PREFIX       the attribute of functions; PREFIX(name) is the name of an exported one
 *   vector, LANES, SUMS  floats; how many of them; how many sums are kept in registers, a multiple of QUERIES
 *   QUERIES              queries for which values are mixed at once, 4 or 8
 *   zero, load, store, broadcast, add_product(a, b, sum)
 *   elements(type, row, j, scales)   LANES elements of a row of the KV cache from column j on
 *   add_lanes(sums, out)             out[i] = the sum of the lanes of sums[i], all in the same order
 *
 * A row is converted once for all queries of a block. Every result goes through the same operations in every block, so
 * its bits do not depend on the other rows and queries. */
#include "kernels/isa.h"
#include "kernels/half.h"

#include <string.h>

/* The scales of rows, as floats: those of f16 are not read. */
typedef float row_scales[NP_ATTEND_CHUNK][NP_MAX_COLUMNS / NP_GROUP];

NP_INLINE TARGET void read_scales(const int type, const np_kv_rows *rows, row_scales scales) {
    for (size_t r = 0; type == NP_Q8 && r < rows->count; r++) {
        const uint16_t *stored = (const uint16_t *)(const void *)(rows->rows + r * rows->row_bytes + rows->n);
        for (size_t g = 0; g < rows->n / NP_GROUP; g++) scales[r][g] = half_of(stored[g]);
    }
}

/* What is this far ahead is prefetched: the hardware's own prefetching reads 10 GB/s with eight queries, this 15 (Zen 5). */
enum { AHEAD_BYTES = 8192 };

NP_INLINE void prefetch_ahead(const np_kv_rows *rows, size_t first, size_t count) {
    const uintptr_t end = (uintptr_t)rows->rows + (rows->count + rows->following) * rows->row_bytes;
    uintptr_t at = (uintptr_t)rows->rows + first * rows->row_bytes + AHEAD_BYTES;
    const uintptr_t last = at + count * rows->row_bytes;
    for (; at < last && at < end; at += 64) __builtin_prefetch((const void *)at, 0, 2);
}

/* The last columns of queries if a row is no whole number of vectors (has_last, a constant so that sums stay in registers
 * without it): zeros stand for those of other vectors. Rows of q8 are whole. */
typedef float last_columns[QUERIES][LANES];

NP_INLINE TARGET void read_last(size_t n, const float *queries, size_t stride, size_t count, last_columns last) {
    for (size_t q = 0; q < count; q++)
        for (size_t lane = 0; lane < LANES; lane++) last[q][lane] = lane < LANES - n % LANES ? 0.0f : queries[q * stride + n - LANES + lane];
}

/* Add the products of LANES columns of R rows, from column j on, with Q queries. */
NP_INLINE TARGET void multiply_columns(const int type, const size_t R, const size_t Q, const np_kv_rows *rows, const row_scales scales, size_t first,
                                       size_t j, const float *queries, size_t stride, vector *sums) {
    const uint8_t *row = rows->rows + first * rows->row_bytes;
    vector query[QUERIES];
    for (size_t q = 0; q < Q; q++) query[q] = load(queries + q * stride);
    for (size_t r = 0; r < R; r++, row += rows->row_bytes) {
        const vector key = elements(type, row, j, scales[first + r]);
        for (size_t q = 0; q < Q; q++) sums[q * R + r] = add_product(key, query[q], sums[q * R + r]);
    }
}

/* The products of R rows with Q queries. */
NP_INLINE TARGET void multiply(const int type, const int has_last, const size_t R, const size_t Q, const np_kv_rows *rows, const row_scales scales, size_t first,
                               const float *queries, size_t stride, const last_columns last, float *out, size_t out_stride) {
    vector sums[SUMS];
    float added[SUMS];
    size_t j = 0;
    for (size_t i = 0; i < SUMS; i++) sums[i] = zero();
    for (; j + LANES <= rows->n; j += LANES) multiply_columns(type, R, Q, rows, scales, first, j, queries + j, stride, sums);
    if (has_last) multiply_columns(type, R, Q, rows, scales, first, rows->n - LANES, last[0], LANES, sums);
    add_lanes(sums, added);
    for (size_t q = 0; q < Q; q++)
        for (size_t r = 0; r < R; r++) out[q * out_stride + first + r] = added[q * R + r];
}

NP_INLINE TARGET void multiply_all(const int type, const int has_last, const size_t Q, const np_kv_rows *rows, const row_scales scales, int prefetches,
                                   const float *queries, size_t stride, float *out, size_t out_stride) {
    last_columns last;
    size_t r = 0;
    if (has_last) read_last(rows->n, queries, stride, Q, last);
    for (; r + SUMS / Q <= rows->count; r += SUMS / Q) {
        if (prefetches) prefetch_ahead(rows, r, SUMS / Q);
        multiply(type, has_last, SUMS / Q, Q, rows, scales, r, queries, stride, last, out, out_stride);
    }
    for (; r < rows->count; r++) multiply(type, has_last, 1, Q, rows, scales, r, queries, stride, last, out, out_stride);
}

NP_INLINE TARGET void scores_of(const int type, const int has_last, const np_kv_rows *rows, const float *queries, size_t stride, size_t count, float *out,
                                size_t out_stride) {
    row_scales scales;
    read_scales(type, rows, scales);
    for (size_t q = 0, done; q < count; q += done) {
        const float *some = queries + q * stride;
        float *to = out + q * out_stride;
        done = count - q >= 4 ? 4 : count - q >= 2 ? 2 : 1;
        if (done == 4) multiply_all(type, has_last, 4, rows, scales, q == 0, some, stride, to, out_stride);
        else if (done == 2) multiply_all(type, has_last, 2, rows, scales, q == 0, some, stride, to, out_stride);
        else multiply_all(type, has_last, 1, rows, scales, q == 0, some, stride, to, out_stride);
    }
}

TARGET void PREFIX(scores)(const np_kv_rows *rows, const float *queries, size_t stride, size_t count, float *out, size_t out_stride) {
    if (rows->type == NP_Q8) scores_of(NP_Q8, 0, rows, queries, stride, count, out, out_stride);
    else if (rows->n % LANES) scores_of(NP_F16, 1, rows, queries, stride, count, out, out_stride);
    else scores_of(NP_F16, 0, rows, queries, stride, count, out, out_stride);
}

/* Add columns from j on to C vectors of the outputs of Q queries. */
NP_INLINE TARGET void add(const int type, const size_t C, const size_t Q, const np_kv_rows *rows, const row_scales scales, size_t j,
                          int prefetches, const float *weights, size_t stride, float *out, size_t out_stride) {
    vector sums[SUMS];
    for (size_t q = 0; q < Q; q++)
        for (size_t c = 0; c < C; c++) sums[q * C + c] = load(out + q * out_stride + c * LANES);
    for (size_t r = 0; r < rows->count; r++) {
        vector weight[QUERIES];
        if (prefetches) prefetch_ahead(rows, r, 1);
        for (size_t q = 0; q < Q; q++) weight[q] = broadcast(weights + q * stride + r);
        for (size_t c = 0; c < C; c++) {
            const vector value = elements(type, rows->rows + r * rows->row_bytes, j + c * LANES, scales[r]);
            for (size_t q = 0; q < Q; q++) sums[q * C + c] = add_product(value, weight[q], sums[q * C + c]);
        }
    }
    for (size_t q = 0; q < Q; q++)
        for (size_t c = 0; c < C; c++) store(out + q * out_stride + c * LANES, sums[q * C + c]);
}

NP_INLINE TARGET void add_all(const int type, const int has_last, const size_t Q, const np_kv_rows *rows, const row_scales scales, int prefetches,
                              const float *weights, size_t stride, float *out, size_t out_stride) {
    enum { MOST_VECTORS = 8 };
    const size_t C = SUMS / Q < MOST_VECTORS ? SUMS / Q : MOST_VECTORS;
    last_columns last;
    size_t j = 0;
    /* Some of these columns are those of another vector, too: both begin with the same outputs, and find the same. */
    for (size_t q = 0; has_last && q < Q; q++) store(last[q], load(out + q * out_stride + rows->n - LANES));
    for (; j + C * LANES <= rows->n; j += C * LANES) add(type, C, Q, rows, scales, j, prefetches && j == 0, weights, stride, out + j, out_stride);
    for (; j + LANES <= rows->n; j += LANES) add(type, 1, Q, rows, scales, j, prefetches && j == 0, weights, stride, out + j, out_stride);
    if (has_last) add(type, 1, Q, rows, scales, rows->n - LANES, 0, weights, stride, last[0], LANES);
    for (size_t q = 0; has_last && q < Q; q++) store(out + q * out_stride + rows->n - LANES, load(last[q]));
}

NP_INLINE TARGET void mix_of(const int type, const int has_last, const np_kv_rows *rows, const float *weights, size_t stride, size_t count, float *out,
                             size_t out_stride) {
    row_scales scales;
    read_scales(type, rows, scales);
    for (size_t q = 0, done; q < count; q += done) {
        const float *some = weights + q * stride;
        float *to = out + q * out_stride;
        done = count - q >= QUERIES ? QUERIES : count - q >= 4 ? 4 : count - q >= 2 ? 2 : 1;
        if (done == QUERIES) add_all(type, has_last, QUERIES, rows, scales, q == 0, some, stride, to, out_stride);
        else if (done == 4) add_all(type, has_last, 4, rows, scales, q == 0, some, stride, to, out_stride);
        else if (done == 2) add_all(type, has_last, 2, rows, scales, q == 0, some, stride, to, out_stride);
        else add_all(type, has_last, 1, rows, scales, q == 0, some, stride, to, out_stride);
    }
}

TARGET void PREFIX(mix)(const np_kv_rows *rows, const float *weights, size_t stride, size_t count, float *out, size_t out_stride) {
    if (rows->type == NP_Q8) mix_of(NP_Q8, 0, rows, weights, stride, count, out, out_stride);
    else if (rows->n % LANES) mix_of(NP_F16, 1, rows, weights, stride, count, out, out_stride);
    else mix_of(NP_F16, 0, rows, weights, stride, count, out, out_stride);
}

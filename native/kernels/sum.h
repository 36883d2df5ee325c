/* Sums of vectors in the fixed order of a tree: neighbours are paired, level by level. */
#ifndef NP_KERNELS_SUM_H
#define NP_KERNELS_SUM_H
#include "kernels/isa.h"

#include <string.h>

/* Columns per pass: enough for hardware prefetch of rows, while the partial sums stay in the first-level cache. */
enum { NP_SUM_COLUMNS = 512, NP_SUM_LEVELS = 32 };

NP_INLINE void np_add_left(const float *left, size_t n, float *sum) {
    for (size_t j = 0; j < n; j++) sum[j] = left[j] + sum[j];
}

/* A binary counter of partial sums: after row i, level l holds a sum of 2^l rows when bit l of i+1 is set. Adding a row
 * carries like incrementing the counter, and the remaining levels are combined from the right at the end. Rows come in
 * pairs, so level 0 is never stored. Sums of rows that were summed before lie in the places of their first rows; that
 * of level 0 is a row itself. */
NP_INLINE void np_sum_columns(const float *rows, size_t summed, size_t count, size_t stride, size_t n, float *out) {
    float partial[NP_SUM_LEVELS][NP_SUM_COLUMNS];
    const size_t even = summed & ~(size_t)1;
    for (size_t first = 0; first < even;) {
        const int level = 63 - __builtin_clzll((uint64_t)(even - first));
        memcpy(partial[level], rows + first * stride, n * sizeof *out);
        first += (size_t)1 << level;
    }
    for (size_t i = even; i + 1 < count; i += 2) {
        const float *first = rows + i * stride, *second = first + stride;
        const int level = 1 + __builtin_ctzll(~(uint64_t)(i / 2)); /* where the carry ends */
        float *sum = partial[level];
        for (size_t j = 0; j < n; j++) sum[j] = first[j] + second[j];
        for (int l = 1; l < level; l++) np_add_left(partial[l], n, sum);
    }
    int level = __builtin_ctzll((uint64_t)count);
    memcpy(out, level ? partial[level] : rows + (count - 1) * stride, n * sizeof *out);
    for (level++; count >> level; level++)
        if (count >> level & 1) np_add_left(partial[level], n, out);
}

/* The body of np_isa.sum_tree, for count > 0 and summed <= count. */
NP_INLINE void np_sum_tree_body(const float *rows, size_t summed, size_t count, size_t stride, size_t n, float *out) {
    for (size_t j = 0; j < n; j += NP_SUM_COLUMNS)
        np_sum_columns(rows + j, summed, count, stride, n - j < NP_SUM_COLUMNS ? n - j : NP_SUM_COLUMNS, out + j);
}
#endif

/* Sums of vectors in a fixed order. */
#include "neuronpipe.h"

#include <string.h>

void np_add(const float *x, size_t n, float *y) {
    for (size_t j = 0; j < n; j++) y[j] += x[j];
}

enum { COLUMNS = 64, LEVELS = 64 };

/* A binary counter of partial sums: after row i, level l holds a sum of 2^l rows when bit l of i+1 is set. Adding a row carries
 * like adding one, and what is left at the end combines from the right: the tree that pairing neighbours, level by level, gives. */
static void sum_columns(const float *rows, size_t count, size_t stride, size_t n, float *out) {
    float partial[LEVELS][COLUMNS], carry[COLUMNS];
    for (size_t i = 0; i < count; i++) {
        memcpy(carry, rows + i * stride, n * sizeof *carry);
        int level = 0;
        for (; i >> level & 1; level++)
            for (size_t j = 0; j < n; j++) carry[j] = partial[level][j] + carry[j];
        memcpy(partial[level], carry, n * sizeof *carry);
    }
    int level = 0;
    while (!(count >> level & 1)) level++;
    memcpy(carry, partial[level], n * sizeof *carry);
    for (level++; count >> level; level++)
        if (count >> level & 1)
            for (size_t j = 0; j < n; j++) carry[j] = partial[level][j] + carry[j];
    memcpy(out, carry, n * sizeof *carry);
}

void np_sum_tree(const float *rows, size_t count, size_t stride, size_t n, float *out) {
    if (!count) memset(out, 0, n * sizeof *out);
    for (size_t j = 0; count && j < n; j += COLUMNS)
        sum_columns(rows + j, count, stride, n - j < COLUMNS ? n - j : COLUMNS, out + j);
}

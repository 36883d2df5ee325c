/* Sums and rotations of vectors, with the same bits on every instruction set. */
#include "kernels/exponential.h"
#include "kernels/isa.h"

#include <string.h>

void np_add(const float *x, size_t n, float *y) {
    for (size_t j = 0; j < n; j++) y[j] += x[j];
}

void np_soft_cap(float *x, size_t n, float cap) {
    for (size_t j = 0; j < n; j++) x[j] = cap * np_hyperbolic_tangent(x[j] / cap);
}

void np_sum_tree(const float *rows, size_t count, size_t stride, size_t n, float *out) {
    np_sum_tree_on(rows, 0, count, stride, n, out);
}

void np_sum_tree_on(const float *rows, size_t summed, size_t count, size_t stride, size_t n, float *out) {
    if (count)
        np_isa_current()->sum_tree(rows, summed < count ? summed : count, count, stride, n, out);
    else
        memset(out, 0, n * sizeof *out);
}

uint32_t np_tree_nodes(uint32_t rows) {
    return (uint32_t)__builtin_popcount(rows);
}

uint32_t np_tree_node_first(uint32_t rows, uint32_t node) {
    uint32_t first = 0;
    for (; node && rows; node--) {
        const uint32_t highest = UINT32_C(1) << (31 - __builtin_clz(rows));
        first += highest;
        rows -= highest;
    }
    return first;
}

void np_rope(float *head, size_t width, const float *inverse_frequency, int32_t position) {
    np_isa_current()->rope(head, width, inverse_frequency, position);
}

/* What sums and turns vectors, with the same bits on every instruction set. */
#include "kernels/isa.h"

#include <string.h>

void np_add(const float *x, size_t n, float *y) {
    for (size_t j = 0; j < n; j++) y[j] += x[j];
}

void np_sum_tree(const float *rows, size_t count, size_t stride, size_t n, float *out) {
    if (count)
        np_isa_current()->sum_tree(rows, count, stride, n, out);
    else
        memset(out, 0, n * sizeof *out);
}

void np_rope(float *head, size_t width, const float *inverse_frequency, int32_t position) {
    np_isa_current()->rope(head, width, inverse_frequency, position);
}

/* Products of float32 rows with a vector, of a router for example. A product is sixteen running sums, added pairwise:
 * plain operations in a fixed order, so that all instruction sets give the same bits. Rows are computed together
 * because a single row waits for its own additions. */
#ifndef NP_KERNELS_FLOAT_ROWS_H
#define NP_KERNELS_FLOAT_ROWS_H
#include "kernels/isa.h"

enum { NP_FLOAT_LANES = 16 };

/* The product of a row from its running sums of the first i elements. */
NP_INLINE float np_float_product(float lanes[NP_FLOAT_LANES], const float *row, const float *x, size_t i, size_t n) {
    for (size_t lane = 0; i + lane < n; lane++) lanes[lane] += row[i + lane] * x[i + lane];
    for (size_t half = NP_FLOAT_LANES / 2; half; half /= 2)
        for (size_t lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* Define np_isa.dot_floats as NAME, with registers of so many bytes, and so many rows together as leave registers for
 * all running sums. */
#define NP_DEFINE_DOT_FLOATS(TARGET, NAME, REGISTER_BYTES, TOGETHER)                                                                    \
    typedef float NAME##_lanes __attribute__((vector_size(REGISTER_BYTES), aligned(4)));                                                \
    NP_INLINE TARGET void NAME##_some(const float *rows, const size_t count, size_t n, const float *x, float *out) {                    \
        enum { REGISTERS = 64 / REGISTER_BYTES, LANES = REGISTER_BYTES / 4 };                                                           \
        NAME##_lanes sums[TOGETHER][REGISTERS] = {{{0}}};                                                                               \
        size_t i = 0;                                                                                                                   \
        for (; i + NP_FLOAT_LANES <= n; i += NP_FLOAT_LANES)                                                                            \
            for (size_t j = 0; j < REGISTERS; j++) {                                                                                    \
                const NAME##_lanes some = *(const NAME##_lanes *)(x + i + j * LANES);                                                   \
                for (size_t r = 0; r < count; r++) sums[r][j] += *(const NAME##_lanes *)(rows + r * n + i + j * LANES) * some;          \
            }                                                                                                                           \
        for (size_t r = 0; r < count; r++) {                                                                                            \
            float lanes[NP_FLOAT_LANES];                                                                                                \
            memcpy(lanes, sums[r], sizeof lanes);                                                                                       \
            out[r] = np_float_product(lanes, rows + r * n, x, i, n);                                                                    \
        }                                                                                                                               \
    }                                                                                                                                   \
    static TARGET void NAME(const float *rows, size_t count, size_t n, const float *x, float *out) {                                    \
        size_t row = 0;                                                                                                                 \
        for (; row + TOGETHER <= count; row += TOGETHER) NAME##_some(rows + row * n, TOGETHER, n, x, out + row);                        \
        for (; row < count; row++) NAME##_some(rows + row * n, 1, n, x, out + row);                                                     \
    }
#endif

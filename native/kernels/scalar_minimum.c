/* The reference kernels for rows with a minimum in plain C; minimum.h describes the rows. */
#include "kernels/minimum.h"

NP_INLINE void minimum_row(const int type, const uint8_t *quants, const uint8_t *scales, size_t n, const uint8_t *activation,
                           size_t stride, const int tokens, float *sums) {
    const size_t groups = n / NP_GROUP;
    for (int t = 0; t < tokens; t++) sums[t] = 0.0f;
    for (size_t first = 0; first < groups; first += NP_MINIMUM_GROUPS) {
        const np_minimum_block b = np_minimum_block_of(type, scales + np_minimum_bytes(type) * first);
        for (size_t g = first; g < groups && g < first + NP_MINIMUM_GROUPS; g++) {
            uint8_t codes[NP_GROUP];
            np_minimum_group(type, quants, n, g, codes);
            for (int t = 0; t < tokens; t++) {
                const np_activation x = np_activation_at(activation + t * stride, n);
                const int8_t *low = x.quants + np_q4_place(g), *high = low + 64;
                int32_t dot = 0;
                for (int j = 0; j < 16; j++) dot += codes[j] * low[j] + codes[j + 16] * high[j];
                sums[t] += (float)dot * (b.scales[g - first] * x.scales[g]);
                sums[t] -= b.minimums[g - first] * ((float)x.sums[g] * x.scales[g]);
            }
        }
    }
}

NP_INLINE void add_minimum_row(const int type, const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {
    for (size_t g = 0; g < n / NP_GROUP; g++, y += NP_GROUP) {
        const np_minimum_block b = np_minimum_block_of(type, scales + g / NP_MINIMUM_GROUPS * NP_MINIMUM_GROUPS * np_minimum_bytes(type));
        const float scale = a * b.scales[g % NP_MINIMUM_GROUPS], minimum = a * b.minimums[g % NP_MINIMUM_GROUPS];
        uint8_t codes[NP_GROUP];
        np_minimum_group(type, quants, n, g, codes);
        for (int j = 0; j < NP_GROUP; j++) y[j] = (y[j] + scale * (float)codes[j]) - minimum;
    }
}

#define DEFINE_ROWS(NAME, TYPE)                                                                                                  \
    NP_INLINE void dot_row_##NAME(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead, const uint8_t *activation, \
                                  size_t stride, const int tokens, float *sums) {                                                \
        minimum_row(TYPE, quants, scales, n, activation, stride, tokens, sums);                                                  \
    }                                                                                                                            \
    NP_INLINE void add_row_##NAME(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {                   \
        add_minimum_row(TYPE, quants, scales, n, a, y);                                                                          \
    }                                                                                                                            \
    NP_DEFINE_DOT_ROWS(, np_scalar_dot_##NAME, dot_row_##NAME)                                                                   \
    NP_DEFINE_ADD_ROWS(, np_scalar_add_##NAME, add_row_##NAME)

DEFINE_ROWS(q4k, NP_Q4K)
DEFINE_ROWS(q5k, NP_Q5K)
DEFINE_ROWS(q6k, NP_Q6K)
DEFINE_ROWS(q4h, NP_Q4H)
DEFINE_ROWS(q5h, NP_Q5H)

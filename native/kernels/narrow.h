/* Conversion of a row of groups of 32 to signed bytes with a single scale, for neural processors. Products of a scale
 * and a quant are exact and rounding to nearest is unambiguous, so all instruction sets give the same bits. Rows with
 * minimums are decoded first. */
#ifndef NP_KERNELS_NARROW_H
#define NP_KERNELS_NARROW_H
#include "kernels/codebook.h"
#include "kernels/half.h"
#include "kernels/isa.h"
#include "kernels/minimum.h"
#include "kernels/three_bits.h"

NP_INLINE size_t np_group_bytes(int type) { return type == NP_Q8 ? NP_GROUP : type == NP_Q3 ? NP_Q3_GROUP_BYTES : NP_GROUP / 2; }

/* 0, or NaN if a scale is not finite. */
NP_INLINE float np_strangeness(const uint16_t *scales, size_t groups) {
    uint32_t strange = 0;
    for (size_t g = 0; g < groups; g++) strange |= (scales[g] & 0x7c00) == 0x7c00;
    return strange ? np_float_of(0x7fc00000) : 0.0f;
}

/* Define the np_narrow_function NAME from LARGEST(type, quants, scales, groups), the largest magnitude of a row, and
 * ROUND(type, quants, factor, out), the integers nearest to a group's quants times a factor. The type is a constant in
 * each of their copies. */
#define NP_NARROW_ROW(TYPE, LARGEST, ROUND)                                                                              \
    do {                                                                                                                 \
        const size_t groups = n / NP_GROUP;                                                                              \
        const float scale = (LARGEST(TYPE, quants, scales, groups) + np_strangeness(scales, groups)) / 127.0f;           \
        *row_scale = scale;                                                                                              \
        for (size_t g = 0; g < groups; g++)                                                                              \
            ROUND(TYPE, quants + g * np_group_bytes(TYPE), scale > 0.0f ? np_half_to_float(scales[g]) / scale : 0.0f,    \
                  out + g * NP_GROUP);                                                                                   \
    } while (0)
#define NP_DEFINE_NARROW(TARGET, NAME, LARGEST, ROUND)                                                                   \
    TARGET void NAME(int type, const uint8_t *quants, const uint16_t *scales, size_t n, int8_t *out, float *row_scale) { \
        if (type == NP_Q8)                                                                                               \
            NP_NARROW_ROW(NP_Q8, LARGEST, ROUND);                                                                        \
        else if (type == NP_Q4)                                                                                          \
            NP_NARROW_ROW(NP_Q4, LARGEST, ROUND);                                                                        \
        else if (type == NP_IQ4)                                                                                         \
            NP_NARROW_ROW(NP_IQ4, LARGEST, ROUND);                                                                       \
        else if (type == NP_MXFP4)                                                                                       \
            NP_NARROW_ROW(NP_MXFP4, LARGEST, ROUND);                                                                     \
        else if (np_has_minimum(type))                                                                                   \
            np_minimum_narrow(type, quants, (const uint8_t *)scales, n, out, row_scale);                                 \
        else                                                                                                             \
            NP_NARROW_ROW(NP_Q3, LARGEST, ROUND);                                                                        \
    }

#if defined(__x86_64__)
#include <immintrin.h>

/* Half of a group's quants as bytes. */
NP_INLINE __attribute__((target("ssse3"))) __m128i np_half_group(int type, const uint8_t *quants, int half) {
    if (type == NP_Q8) return _mm_loadu_si128((const __m128i *)(const void *)(quants + half * 16));
    __m128i both;
    if (type == NP_Q3) {
        const np_q4_group group = np_q4_of_q3(quants);
        both = _mm_set_epi64x((int64_t)group.words[1], (int64_t)group.words[0]);
    } else {
        both = _mm_loadu_si128((const __m128i *)(const void *)quants);
    }
    return np_nibble_values(type, _mm_and_si128(half ? _mm_srli_epi16(both, 4) : both, _mm_set1_epi8(15)));
}
#endif
#endif

/* Scales for tests, and the definition of a quantized weight in double precision, bit by bit. */
#ifndef NP_TESTS_WEIGHTS_H
#define NP_TESTS_WEIGHTS_H
#include "check.h"
#include "kernels/half.h"
#include "neuronpipe.h"

static const char *const type_names[] = {"f16", "q8", "q4", "q3", "q4k", "q5k", "q6k", "iq4", "mxfp4", "q4h", "q5h"};
enum { TYPES = sizeof type_names / sizeof type_names[0] };

static inline int has_minimum(int type) { return (type >= NP_Q4K && type <= NP_Q6K) || type >= NP_Q4H; }

static inline int bits_of(int type) { return (int[]){16, 8, 4, 3, 4, 5, 6, 4, 4, 4, 5}[type]; }

/* The largest magnitude of a quant or code. */
static inline int largest_code(int type) { return (int[]){0, 128, 8, 4, 15, 31, 63, 127, 12, 15, 31}[type]; }

/* The next of a row's fp16 numbers behind `at`: every scale, or with minimums d and dmin of every block. */
static inline size_t next_half(int type, size_t at) { return at + (!has_minimum(type) || type >= NP_Q4H ? 2 : at % 16 == 0 ? 2 : 14); }

/* Where the first group's minimum or its unit is, in halves. */
static inline size_t minimum_place(int type) { return type >= NP_Q4H ? 8 : 1; }

/* Random scales of about this magnitude. With minimums, those of groups that a short block lacks are random as well:
 * kernels must not depend on them. */
static inline void fill_scales(int type, void *scales, size_t bytes, float magnitude) {
    uint8_t *to = scales;
    for (size_t i = 0; i < bytes; i++) to[i] = (uint8_t)random_bits();
    for (size_t at = 0; at < bytes; at = next_half(type, at)) {
        const uint16_t half = np_float_to_half(magnitude * (has_minimum(type) && type < NP_Q4H ? 1 / 32.0f : 1.0f) * random_float());
        memcpy(to + at, &half, 2);
    }
}

/* w = product - minimum, both exact; rounded once to float when the product is, and once more at the end. */
typedef struct {
    double product, minimum;
} weight_parts;

static inline double half_at(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, 2);
    return np_half_to_float(half);
}

/* Bit j of a plane of uint16 words, one a group, for code j of group g. */
static inline int plane_bit(const uint8_t *plane, size_t g, size_t j) { return plane[2 * g + j / 8] >> j % 8 & 1; }

static inline weight_parts parts_with_minimum(int type, const uint8_t *quants, const uint8_t *scales, size_t n, size_t j) {
    const size_t g = j / 32, i = g % 8, plane_bytes = n / 32 * 2;
    const uint8_t *block = scales + g / 8 * 16, byte = quants[g * 16 + j % 16], upper = block[12 + i % 4];
    int code = j % 32 < 16 ? byte & 15 : byte >> 4;
    for (int bit = 4; bit < bits_of(type); bit++)
        code += plane_bit(quants + n / 2 + (size_t)(2 * (bit - 4) + (j % 32 >= 16)) * plane_bytes, g, j % 16) << bit;
    if (type >= NP_Q4H) return (weight_parts){half_at(scales + g / 8 * 32 + 2 * i) * code, half_at(scales + g / 8 * 32 + 16 + 2 * i)};
    const int scale = (block[4 + i] & 15) + ((upper >> (i < 4 ? 0 : 4) & 3) << 4);
    const int minimum = (block[4 + i] >> 4) + ((upper >> (i < 4 ? 2 : 6) & 3) << 4);
    return (weight_parts){half_at(block) * scale * code, half_at(block + 2) * minimum};
}

/* iq4: as llama.cpp lists them for IQ4_NL. mxfp4: twice a float with a sign, two bits of exponent and one of fraction. */
static inline int nibble_value(int type, int nibble) {
    static const int iq4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    if (type == NP_IQ4) return iq4[nibble];
    if (type != NP_MXFP4) return nibble - 8;
    const int exponent = nibble >> 1 & 3, fraction = nibble & 1, value = exponent ? (2 + fraction) << (exponent - 1) : fraction;
    return nibble & 8 ? -value : value;
}

static inline weight_parts weight_parts_at(int type, const uint8_t *quants, const uint8_t *scales, size_t n, size_t j) {
    if (type == NP_F16) return (weight_parts){half_at(quants + 2 * j), 0};
    if (has_minimum(type)) return parts_with_minimum(type, quants, scales, n, j);
    const double scale = half_at(scales + j / 32 * 2);
    if (type == NP_Q8) return (weight_parts){scale * (int8_t)quants[j], 0};
    if (type == NP_Q3) {
        const uint8_t *group = quants + j / 32 * 12, low = group[j % 8] >> j % 32 / 8 * 2 & 3, third = group[8 + j % 4] >> j % 32 / 4 & 1;
        return (weight_parts){scale * (low + 4 * third - 4), 0};
    }
    const uint8_t byte = quants[j / 32 * 16 + j % 16];
    return (weight_parts){scale * nibble_value(type, j % 32 < 16 ? byte & 15 : byte >> 4), 0};
}

/* A row's first `part` columns as a row of their own. */
static inline void copy_columns(int type, const uint8_t *quants, size_t n, size_t part, uint8_t *to) {
    if (!has_minimum(type)) {
        memcpy(to, quants, np_quant_bytes(type, part));
        return;
    }
    memcpy(to, quants, part / 2);
    for (int plane = 0; plane < 2 * (bits_of(type) - 4); plane++)
        memcpy(to + part / 2 + (size_t)plane * (part / 16), quants + n / 2 + (size_t)plane * (n / 16), part / 16);
}

/* As np_decode_row defines it. */
static inline float weight_of(weight_parts parts) { return (float)((double)(float)parts.product - parts.minimum); }
#endif

/* q4k, q5k, q6k, q4h and q5h: groups of 32 weights with a scale and a minimum, in blocks of eight groups; a row's last
 * block may have fewer.
 *
 *   w = s * code - z, with s = d * scale and z = dmin * minimum of the group (both exact in float32)
 *
 *   scales of q4k, q5k, q6k     content, 16 bytes a block
 *   bytes 0..1, 2..3            d and dmin, fp16
 *   bytes 4..11                 byte i: low four bits of scale i (low nibble) and of minimum i (high nibble)
 *   bytes 12..15                byte j, from its lowest bits on: upper two bits of scale j, minimum j, scale j + 4,
 *                               minimum j + 4
 *
 *   scales of q4h, q5h          content, 32 bytes a block
 *   bytes 0..15, 16..31         s of the eight groups, then z, fp16
 *
 *   quants of a row             content
 *   n/2 bytes                   low four bits of codes, as q4's nibbles
 *   n/32 uint16                 q5k, q6k, q5h: fifth bits of each group's first 16 codes, bit j of code j
 *   n/32 uint16                 fifth bits of the last 16 codes
 *   n/32 uint16, n/32 uint16    q6k: sixth bits, in the same way
 *
 * Prepared activations are q4's. A group's product is s * xs * dot(codes, quants) - z * (xs * sum of quants). */
#ifndef NP_KERNELS_MINIMUM_H
#define NP_KERNELS_MINIMUM_H
#include "kernels/activation.h"

enum { NP_MINIMUM_GROUPS = 8 }; /* of a block */

NP_INLINE int np_has_half_scales(int type) { return type == NP_Q4H || type == NP_Q5H; }

NP_INLINE int np_has_minimum(int type) { return type == NP_Q4K || type == NP_Q5K || type == NP_Q6K || np_has_half_scales(type); }

/* Bytes of a group's scale and minimum: an eighth of a block's. */
NP_INLINE size_t np_minimum_bytes(int type) { return np_has_half_scales(type) ? 4 : 2; }

/* Bits of a code beyond the nibble. */
NP_INLINE size_t np_high_bits(int type) { return type == NP_Q6K ? 2 : type == NP_Q5K || type == NP_Q5H ? 1 : 0; }

/* Byte i: the scale or the minimum of a block's group i, 0 to 63. */
typedef struct {
    uint64_t scales, minimums;
} np_minimum_codes;

NP_INLINE np_minimum_codes np_minimum_codes_of(const uint8_t *block) {
    const uint64_t nibble = 0x0f0f0f0f0f0f0f0fu, upper = 0x3030303030303030u;
    uint64_t low;
    uint32_t high;
    memcpy(&low, block + 4, 8);
    memcpy(&high, block + 12, 4);
    const uint64_t both = high | (uint64_t)(high >> 4) << 32; /* byte i: upper bits of scale i, then of minimum i */
    return (np_minimum_codes){(low & nibble) | (both << 4 & upper), (low >> 4 & nibble) | (both << 2 & upper)};
}

/* s and z of a block's groups. */
typedef struct {
    float scales[NP_MINIMUM_GROUPS], minimums[NP_MINIMUM_GROUPS];
} np_minimum_block;

NP_INLINE np_minimum_block np_minimum_block_of(int type, const uint8_t *block) {
    if (np_has_half_scales(type)) {
        uint16_t all[2 * NP_MINIMUM_GROUPS];
        np_minimum_block halves_of_block;
        memcpy(all, block, sizeof all);
        for (int i = 0; i < NP_MINIMUM_GROUPS; i++) {
            halves_of_block.scales[i] = np_half_to_float(all[i]);
            halves_of_block.minimums[i] = np_half_to_float(all[NP_MINIMUM_GROUPS + i]);
        }
        return halves_of_block;
    }
    const np_minimum_codes codes = np_minimum_codes_of(block);
    uint16_t halves[2];
    memcpy(halves, block, 4);
    const float d = np_half_to_float(halves[0]), dmin = np_half_to_float(halves[1]);
    np_minimum_block b;
    for (int i = 0; i < NP_MINIMUM_GROUPS; i++) {
        b.scales[i] = d * (float)(codes.scales >> 8 * i & 63);
        b.minimums[i] = dmin * (float)(codes.minimums >> 8 * i & 63);
    }
    return b;
}

/* The 32 codes of group g of a row of n. */
NP_INLINE void np_minimum_group(int type, const uint8_t *quants, size_t n, size_t g, uint8_t codes[NP_GROUP]) {
    const uint8_t *nibbles = quants + g * 16, *bits = quants + n / 2 + 2 * g;
    for (int j = 0; j < 16; j++) codes[j] = nibbles[j] & 15, codes[j + 16] = nibbles[j] >> 4;
    for (size_t bit = 0; bit < np_high_bits(type); bit++)
        for (int half = 0; half < 2; half++, bits += n / 16) {
            uint16_t word;
            memcpy(&word, bits, 2);
            for (int j = 0; j < 16; j++) codes[16 * half + j] |= (uint8_t)((word >> j & 1) << (4 + bit));
        }
}

/* Decode `count` groups of a block, from group `first` on. */
NP_INLINE void np_minimum_decode(int type, const uint8_t *quants, const uint8_t *scales, size_t n, size_t first, size_t count, float *w) {
    const np_minimum_block b = np_minimum_block_of(type, scales + np_minimum_bytes(type) * first);
    for (size_t g = 0; g < count; g++, w += NP_GROUP) {
        uint8_t codes[NP_GROUP];
        np_minimum_group(type, quants, n, first + g, codes);
        for (int j = 0; j < NP_GROUP; j++) w[j] = b.scales[g] * (float)codes[j] - b.minimums[g];
    }
}

NP_INLINE size_t np_minimum_count(size_t groups, size_t first) {
    return groups - first < NP_MINIMUM_GROUPS ? groups - first : NP_MINIMUM_GROUPS;
}

/* The body of np_isa.narrow for these types, compiled once per instruction set, with the same bits for all. */
NP_INLINE void np_minimum_narrow(int type, const uint8_t *quants, const uint8_t *scales, size_t n, int8_t *out, float *row_scale) {
    const size_t groups = n / NP_GROUP;
    float w[NP_MINIMUM_GROUPS * NP_GROUP];
    int32_t largest = 0; /* as bits, which order like the magnitudes, with NaN above all */
    for (size_t first = 0; first < groups; first += NP_MINIMUM_GROUPS) {
        const size_t count = np_minimum_count(groups, first);
        np_minimum_decode(type, quants, scales, n, first, count, w);
        for (size_t j = 0; j < count * NP_GROUP; j++) {
            const int32_t magnitude = (int32_t)(np_bits_of(w[j]) & 0x7fffffff);
            largest = magnitude > largest ? magnitude : largest;
        }
    }
    const int is_finite = largest < 0x7f800000;
    *row_scale = is_finite ? np_float_of((uint32_t)largest) / 127.0f : np_float_of(0x7fc00000);
    if (largest == 0 || !is_finite) {
        memset(out, 0, n);
        return;
    }
    const float factor = 1.0f / *row_scale;
    for (size_t first = 0; first < groups; first += NP_MINIMUM_GROUPS, out += NP_MINIMUM_GROUPS * NP_GROUP) {
        const size_t count = np_minimum_count(groups, first);
        np_minimum_decode(type, quants, scales, n, first, count, w);
        /* Adding 1.5 * 2^23 rounds to an integer, nearest even, and leaves it in the low bits. */
        for (size_t j = 0; j < count * NP_GROUP; j++) out[j] = (int8_t)(np_bits_of(w[j] * factor + 12582912.0f) & 0xff);
    }
}
#endif

/* Rows as GGUF stores them, decoded a block at a time and encoded again as q8 or q6k. gguf_rows.c describes the blocks.
 *
 * Compiled once for each instruction set, with the same bits for all, and vectorized by the compiler. GCC unrolls loops
 * of up to 16 turns before it vectorizes, and then fails to. So the loops that matter have 32 turns. */
#ifndef NP_KERNELS_GGUF_ROWS_H
#define NP_KERNELS_GGUF_ROWS_H
#include "kernels/codebook.h"
#include "kernels/half.h"
#include "kernels/minimum.h"

enum { NP_GGUF_WIDE = 256, NP_MAX_FIELD = 63 }; /* weights of a K-quant's block; the largest six-bit number */

#define NP_EACH_BYTE(byte) (0x0101010101010101u * (uint64_t)(byte))

NP_INLINE uint16_t np_half_at(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return half;
}

NP_INLINE uint32_t np_word32_at(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

NP_INLINE uint64_t np_word_at(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

NP_INLINE void np_put_word(void *at, uint64_t word) { memcpy(at, &word, sizeof word); }

NP_INLINE unsigned np_is_strange(uint16_t half) { return (half & 0x7c00) == 0x7c00; } /* infinite or NaN */

/* The 16 bytes of scales and minimums from those of Q4_K or Q5_K. There, words a and b have six bits of four scales and
 * four minimums, and above these the upper two bits of the other four, whose low bits lie as ours do. */
NP_INLINE unsigned np_move_fields(const uint8_t *block, uint8_t *fields) {
    const uint32_t a = np_word32_at(block + 4), b = np_word32_at(block + 8);
    const uint32_t lows = (a & 0x0f0f0f0fu) | (b & 0x0f0f0f0fu) << 4;
    const uint32_t uppers_of_a = (a >> 4 & 0x03030303u) | (a >> 2 & 0x30303030u);
    const uint32_t uppers = uppers_of_a | (b >> 2 & 0x0c0c0c0cu) | (b & 0xc0c0c0c0u);
    memcpy(fields, block, 4);
    memcpy(fields + 4, &lows, 4);
    memcpy(fields + 8, block + 12, 4);
    memcpy(fields + 12, &uppers, 4);
    return np_is_strange(np_half_at(block)) | np_is_strange(np_half_at(block + 2));
}

/* Scale g of IQ4_XS, not yet multiplied by d. */
NP_INLINE float np_iq4_xs_field(const uint8_t *block, int g) {
    const int low = block[4 + g / 2] >> g % 2 * 4 & 15, high = np_half_at(block + 2) >> 2 * g & 3;
    return (float)((low | high << 4) - 32);
}

/* ---- decoding: weights of one block, 0; or 1 if a number is not finite ---- */

NP_INLINE void np_scaled(const int8_t *codes, float scale, float minimum, float *restrict w) {
    for (int j = 0; j < NP_GROUP; j++) w[j] = scale * (float)codes[j] - minimum;
}

/* fifths: the bytes of fifth bits, 32 for Q5_K. */
NP_INLINE unsigned np_decode_with_minimums(const uint8_t *block, const size_t fifths, float *w) {
    const uint8_t *nibbles = block + 16 + fifths, *bits = block + 16;
    uint8_t fields[16];
    int8_t codes[NP_GGUF_WIDE];
    const unsigned strange = np_move_fields(block, fields);
    const np_minimum_block scales = np_minimum_block_of(NP_Q4K, fields);
    for (int i = 0; i < NP_GGUF_WIDE; i += 2 * NP_GROUP, nibbles += NP_GROUP)
        for (int j = 0; j < NP_GROUP; j++) codes[i + j] = nibbles[j] & 15, codes[i + NP_GROUP + j] = nibbles[j] >> 4;
    if (fifths)
        for (int g = 0; g < NP_MINIMUM_GROUPS; g++)
            for (int j = 0; j < NP_GROUP; j++) codes[NP_GROUP * g + j] |= bits[j] & 1 << g ? 16 : 0;
    for (int g = 0; g < NP_MINIMUM_GROUPS; g++)
        np_scaled(codes + NP_GROUP * g, scales.scales[g], scales.minimums[g], w + NP_GROUP * g);
    return strange;
}

NP_INLINE unsigned np_decode_q6_k(const uint8_t *block, float *w) {
    const float d = np_half_to_float(np_half_at(block + 208));
    uint8_t codes[NP_GGUF_WIDE], *to = codes;
    for (const uint8_t *lows = block, *uppers = block + 128; lows < block + 128; lows += 64, uppers += 32, to += 128)
        for (int j = 0; j < NP_GROUP; j++) {
            to[j] = (uint8_t)((lows[j] & 15) | (uppers[j] & 3) << 4);
            to[j + 32] = (uint8_t)((lows[j + 32] & 15) | (uppers[j] >> 2 & 3) << 4);
            to[j + 64] = (uint8_t)(lows[j] >> 4 | (uppers[j] >> 4 & 3) << 4);
            to[j + 96] = (uint8_t)(lows[j + 32] >> 4 | uppers[j] >> 6 << 4);
        }
    for (int k = 0; k < NP_GGUF_WIDE / 16; k++)
        for (int j = 0; j < 16; j++) w[16 * k + j] = d * (float)(int8_t)block[192 + k];
    for (int j = 0; j < NP_GGUF_WIDE; j++) w[j] *= (float)(codes[j] - 32);
    return np_is_strange(np_half_at(block + 208));
}

/* The nibbles and scales of up to eight groups of IQ4_NL, IQ4_XS or MXFP4. A scale of MXFP4 is 2^(exponent - 128); the
 * smallest two are below float's normal numbers. */
NP_INLINE unsigned np_gather_groups(int encoding, const uint8_t *stored, size_t groups, uint8_t *nibbles,
                                    float *scales) {
    unsigned strange = 0;
    if (encoding == NP_GGUF_IQ4_XS) {
        const float d = np_half_to_float(np_half_at(stored));
        for (int g = 0; g < NP_MINIMUM_GROUPS; g++) scales[g] = d * np_iq4_xs_field(stored, g);
        memcpy(nibbles, stored + 8, NP_GGUF_WIDE / 2);
        return np_is_strange(np_half_at(stored));
    }
    for (size_t g = 0; g < groups; g++)
        if (encoding == NP_GGUF_MXFP4) {
            const uint32_t exponent = stored[17 * g];
            scales[g] = np_float_of(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
            memcpy(nibbles + 16 * g, stored + 17 * g + 1, 16);
        } else {
            scales[g] = np_half_to_float(np_half_at(stored + 18 * g));
            strange |= np_is_strange(np_half_at(stored + 18 * g));
            memcpy(nibbles + 16 * g, stored + 18 * g + 2, 16);
        }
    return strange;
}

/* ---- encoding: 0; or 1 if a number does not fit fp16 ---- */

/* The nearest integer, even if two are, within the limits. Adding 1.5 * 2^23 leaves it in the low byte of the bits, and
 * bits order like the numbers, or are negative if the sum is. Comparisons of integers vectorize, those of floats do
 * not. */
NP_INLINE uint8_t np_rounded(float x, int least, int most) {
    const int32_t zero = 0x4b400000, bits = (int32_t)np_bits_of(x + 12582912.0f);
    const int32_t above = bits > zero + least ? bits : zero + least;
    return (uint8_t)((above < zero + most ? above : zero + most) & 0xff);
}

typedef struct {
    uint16_t half;
    float number; /* the same */
} np_stored_half;

/* The nearest fp16 number, as np_float_to_half, or the next one upwards, for x >= 0. Has no jumps that depend on data,
 * which would often be mispredicted: scales lie around fp16's smallest normal number. */
NP_INLINE np_stored_half np_half_of(float x, const int upwards) {
    const uint32_t bits = np_bits_of(x), is_small = bits < 0x38800000;
    const uint32_t normal = (bits + (upwards ? 0x1fff : 0xfff + (bits >> 13 & 1))) & ~0x1fffu;
    uint32_t small = np_bits_of(x + 0.5f); /* the last bit is 2^-24 */
    if (upwards) small += np_float_of(small) - 0.5f < x;
    const uint32_t half = is_small ? small - 0x3f000000 : (normal - 0x38000000) >> 13;
    const uint32_t number = is_small ? np_bits_of(np_float_of(small) - 0.5f) : normal;
    return (np_stored_half){(uint16_t)(half < 0x7c00 ? half : 0x7c00), np_float_of(number)};
}

/* As quantize.py does it: the inverse of the rounded scale is the factor. */
NP_INLINE unsigned np_encode_q8(const float *w, const size_t groups, uint8_t *restrict quants,
                                uint8_t *restrict scales) {
    float peaks[NP_MINIMUM_GROUPS], factors[NP_MINIMUM_GROUPS];
    unsigned strange = 0;
    for (size_t g = 0; g < groups; g++) {
        int32_t largest = 0; /* as bits, which order like the magnitudes */
        for (int j = 0; j < NP_GROUP; j++) {
            const int32_t magnitude = (int32_t)(np_bits_of(w[NP_GROUP * g + j]) & 0x7fffffff);
            largest = magnitude > largest ? magnitude : largest;
        }
        peaks[g] = np_float_of((uint32_t)largest);
    }
    for (size_t g = 0; g < groups; g++) {
        const np_stored_half scale = np_half_of(peaks[g] / 127.0f, 0);
        const float inverse = 1.0f / scale.number;
        factors[g] = scale.half ? inverse : 0.0f;
        strange |= np_is_strange(scale.half);
        memcpy(scales + 2 * g, &scale.half, 2);
    }
    for (size_t g = 0; g < groups; g++)
        for (size_t j = NP_GROUP * g; j < NP_GROUP * (g + 1); j++) quants[j] = np_rounded(w[j] * factors[g], -127, 127);
    return strange;
}

/* Write the 16 bytes of a block's scales, as minimum.h describes them, and change scales and minimums to what is
 * stored: scales are rounded up, so that the codes cover the range, and minimums to the nearest. */
NP_INLINE unsigned np_store_fields(float *scales, float *minimums, uint8_t *fields) {
    float most_scale = 0.0f, most_minimum = 0.0f;
    for (int g = 0; g < NP_MINIMUM_GROUPS; g++) {
        most_scale = scales[g] > most_scale ? scales[g] : most_scale;
        most_minimum = minimums[g] > most_minimum ? minimums[g] : most_minimum;
    }
    const np_stored_half unit = np_half_of(most_scale / NP_MAX_FIELD, 1);
    const np_stored_half minimum_unit = np_half_of(most_minimum / NP_MAX_FIELD, 1);
    const float inverse = unit.half ? 1.0f / unit.number : 0.0f;
    const float minimum_inverse = minimum_unit.half ? 1.0f / minimum_unit.number : 0.0f;
    uint8_t codes[2][NP_MINIMUM_GROUPS];
    for (int g = 0; g < NP_MINIMUM_GROUPS; g++) {
        const float ratio = scales[g] * inverse, nearest = (ratio + 12582912.0f) - 12582912.0f;
        codes[0][g] = np_rounded(nearest + (float)(nearest < ratio), 0, NP_MAX_FIELD);
        codes[1][g] = np_rounded(minimums[g] * minimum_inverse, 0, NP_MAX_FIELD);
        scales[g] = unit.number * (float)codes[0][g];
        minimums[g] = minimum_unit.number * (float)codes[1][g];
    }
    const uint64_t a = np_word_at(codes[0]), b = np_word_at(codes[1]);
    const uint64_t uppers = (a >> 4 & NP_EACH_BYTE(3)) | (b >> 4 & NP_EACH_BYTE(3)) << 2;
    const uint32_t last = (uint32_t)(uppers | uppers >> 28);
    memcpy(fields, &unit.half, 2);
    memcpy(fields + 2, &minimum_unit.half, 2);
    np_put_word(fields + 4, (a & NP_EACH_BYTE(15)) | (b & NP_EACH_BYTE(15)) << 4);
    memcpy(fields + 12, &last, 4);
    return np_is_strange(unit.half) | np_is_strange(minimum_unit.half);
}

/* The bits of a float as an integer that orders like it, and the reverse. */
NP_INLINE int32_t np_in_order(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

/* Bit j is a bit of code j of 16. */
NP_INLINE uint16_t np_bits_of_16(const uint8_t *codes, int bit) {
#if defined(__x86_64__)
    return (uint16_t)_mm_movemask_epi8(_mm_slli_epi16(_mm_loadu_si128((const void *)codes), 7 - bit));
#else
    const uint64_t gather = 0x0102040810204080u; /* moves bit 0 of byte j to bit 56 + j */
    const uint64_t low = (np_word_at(codes) >> bit & NP_EACH_BYTE(1)) * gather;
    const uint64_t high = (np_word_at(codes + 8) >> bit & NP_EACH_BYTE(1)) * gather;
    return (uint16_t)(low >> 56 | high >> 56 << 8);
#endif
}

/* A group's nibbles, and two uint16 of fifth and two of sixth bits in planes `plane_bytes` apart. */
NP_INLINE void np_put_six_bits(const uint8_t *codes, uint8_t *nibbles, uint8_t *planes, size_t plane_bytes) {
    for (int j = 0; j < 16; j += 8) {
        const uint64_t first = np_word_at(codes + j), second = np_word_at(codes + 16 + j);
        np_put_word(nibbles + j, (first & NP_EACH_BYTE(15)) | (second & NP_EACH_BYTE(15)) << 4);
    }
    for (int i = 0; i < 4; i++, planes += plane_bytes) {
        const uint16_t bits = np_bits_of_16(codes + i % 2 * 16, 4 + i / 2);
        memcpy(planes, &bits, sizeof bits);
    }
}

/* quants, planes: where the block's begin. */
NP_INLINE unsigned np_encode_q6k(const float *w, uint8_t *quants, uint8_t *planes, size_t plane_bytes,
                                 uint8_t *fields) {
    float scales[NP_MINIMUM_GROUPS], minimums[NP_MINIMUM_GROUPS];
    for (int g = 0; g < NP_MINIMUM_GROUPS; g++) {
        int32_t lowest = 0, highest = INT32_MIN;
        for (int j = 0; j < NP_GROUP; j++) {
            const int32_t place = np_in_order((int32_t)np_bits_of(w[NP_GROUP * g + j]));
            lowest = place < lowest ? place : lowest;
            highest = place > highest ? place : highest;
        }
        minimums[g] = -np_float_of((uint32_t)np_in_order(lowest));
        scales[g] = (np_float_of((uint32_t)np_in_order(highest)) + minimums[g]) * (1.0f / NP_MAX_FIELD);
    }
    const unsigned strange = np_store_fields(scales, minimums, fields);
    uint8_t codes[NP_GGUF_WIDE];
    for (int g = 0; g < NP_MINIMUM_GROUPS; g++) {
        const float inverse = scales[g] > 0.0f ? 1.0f / scales[g] : 0.0f, minimum = minimums[g];
        for (int j = NP_GROUP * g; j < NP_GROUP * (g + 1); j++)
            codes[j] = np_rounded((w[j] + minimum) * inverse, 0, NP_MAX_FIELD);
    }
    for (int g = 0; g < NP_MINIMUM_GROUPS; g++)
        np_put_six_bits(codes + NP_GROUP * g, quants + 16 * g, planes + 2 * g, plane_bytes);
    return strange;
}

/* ---- rows ---- */

/* Bytes of a block of 32 or of 256 weights. */
NP_INLINE size_t np_gguf_block_bytes(int encoding) {
    switch (encoding) {
    case NP_GGUF_Q4_0:
    case NP_GGUF_IQ4_NL: return 18;
    case NP_GGUF_Q5_0: return 22;
    case NP_GGUF_Q8_0: return 34;
    case NP_GGUF_MXFP4: return 17;
    case NP_GGUF_Q4_K: return 144;
    case NP_GGUF_Q5_K: return 176;
    case NP_GGUF_Q6_K: return 210;
    case NP_GGUF_IQ4_XS: return 136;
    default: return 0;
    }
}

NP_INLINE int np_gguf_is_wide(int encoding) { return np_gguf_block_bytes(encoding) > 34; }

/* Q4_K, Q5_K or Q6_K as q8 or q6k. `encoding` and `type` are constants in each copy. */
NP_INLINE unsigned np_recode_wide(const int encoding, const int type, const uint8_t *stored, size_t n, uint8_t *quants,
                                  uint8_t *scales) {
    const size_t fifths = encoding == NP_GGUF_Q5_K ? 32 : 0;
    float w[NP_GGUF_WIDE];
    unsigned strange = 0;
    for (size_t j = 0; j < n; j += NP_GGUF_WIDE, stored += np_gguf_block_bytes(encoding)) {
        strange |= encoding == NP_GGUF_Q6_K ? np_decode_q6_k(stored, w) : np_decode_with_minimums(stored, fifths, w);
        if (type == NP_Q8)
            strange |= np_encode_q8(w, NP_MINIMUM_GROUPS, quants + j, scales + j / 16);
        else
            strange |= np_encode_q6k(w, quants + j / 2, quants + n / 2 + j / 16, n / 16, scales + j / 16);
    }
    return strange;
}

/* Define the np_recode_function NAME from LOOK_UP(type, nibbles, codes), the values of a group's nibbles in a
 * codebook. */
#define NP_DEFINE_RECODE(TARGET, NAME, LOOK_UP)                                                                       \
    TARGET unsigned NAME(int encoding, const uint8_t *stored, size_t n, int type, uint8_t *quants, uint8_t *scales) { \
        if (encoding == NP_GGUF_Q4_K) return np_recode_wide(NP_GGUF_Q4_K, NP_Q8, stored, n, quants, scales);          \
        if (encoding == NP_GGUF_Q5_K) return np_recode_wide(NP_GGUF_Q5_K, NP_Q8, stored, n, quants, scales);          \
        if (encoding == NP_GGUF_Q6_K && type == NP_Q8)                                                                \
            return np_recode_wide(NP_GGUF_Q6_K, NP_Q8, stored, n, quants, scales);                                    \
        if (encoding == NP_GGUF_Q6_K) return np_recode_wide(NP_GGUF_Q6_K, NP_Q6K, stored, n, quants, scales);         \
        const size_t bytes = np_gguf_block_bytes(encoding) * (encoding == NP_GGUF_IQ4_XS ? 1 : NP_MINIMUM_GROUPS);    \
        const int codebook = encoding == NP_GGUF_MXFP4 ? NP_MXFP4 : NP_IQ4;                                           \
        uint8_t nibbles[NP_GGUF_WIDE / 2];                                                                            \
        int8_t codes[NP_GGUF_WIDE];                                                                                   \
        float factors[NP_MINIMUM_GROUPS], w[NP_GGUF_WIDE];                                                            \
        unsigned strange = 0;                                                                                         \
        for (size_t j = 0; j < n; j += NP_GGUF_WIDE, stored += bytes) {                                               \
            const size_t groups = np_minimum_count(n / NP_GROUP, j / NP_GROUP);                                       \
            strange |= np_gather_groups(encoding, stored, groups, nibbles, factors);                                  \
            for (size_t g = 0; g < groups; g++) LOOK_UP(codebook, nibbles + 16 * g, codes + NP_GROUP * g);            \
            for (size_t g = 0; g < groups; g++)                                                                       \
                np_scaled(codes + NP_GROUP * g, factors[g], 0.0f, w + NP_GROUP * g);                                  \
            strange |= np_encode_q8(w, groups, quants + j, scales + j / 16);                                          \
        }                                                                                                             \
        return strange;                                                                                               \
    }

NP_INLINE void np_look_up(int type, const uint8_t *nibbles, int8_t *codes) {
    const int8_t *values = np_codebook(type);
    for (int j = 0; j < 16; j++) codes[j] = values[nibbles[j] & 15], codes[j + 16] = values[nibbles[j] >> 4];
}

#if defined(__x86_64__)
NP_INLINE __attribute__((target("ssse3"))) void np_look_up_ssse3(int type, const uint8_t *nibbles, int8_t *codes) {
    const __m128i both = _mm_loadu_si128((const void *)nibbles), low = _mm_set1_epi8(15);
    _mm_storeu_si128((void *)codes, np_nibble_values(type, _mm_and_si128(both, low)));
    _mm_storeu_si128((void *)(codes + 16), np_nibble_values(type, _mm_and_si128(_mm_srli_epi16(both, 4), low)));
}
#elif defined(__aarch64__)
NP_INLINE void np_look_up_neon(int type, const uint8_t *nibbles, int8_t *codes) {
    const uint8x16_t both = vld1q_u8(nibbles);
    vst1q_s8(codes, np_neon_values(type, vandq_u8(both, vdupq_n_u8(15))));
    vst1q_s8(codes + 16, np_neon_values(type, vshrq_n_u8(both, 4)));
}
#endif
#endif

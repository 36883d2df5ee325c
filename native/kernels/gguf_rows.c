/* Rows as GGUF stores them, converted to the library's types. Runs once for each matrix that is read from flash.
 *
 * GGUF's blocks have the numbers of a few groups and their codes side by side. Here a row's quants are contiguous, and
 * its scales lie elsewhere. Where the type can express the values of the encoding, only bits are moved, by code that is
 * as fast with the instructions of every processor. Otherwise blocks are decoded and encoded again (gguf_rows.h).
 *
 * Blocks, all numbers little-endian; "nibbles as in q4" are 16 bytes a group, codes j and j + 16 in byte j:
 *
 *   Q4_0, IQ4_NL    fp16 scale; nibbles as in q4
 *   Q5_0            fp16 scale; uint32 of fifth bits, bit j of code j; nibbles as in q4
 *   Q8_0            fp16 scale; 32 signed bytes
 *   MXFP4           exponent of the scale, 127 for 1; nibbles as in q4
 *   Q4_K, Q5_K      fp16 d and dmin; 12 bytes of six-bit scales and minimums; Q5_K: 32 bytes, bit g of byte j is the
 *                   fifth bit of code j of group g; 128 bytes, byte 32 i + j has code j of groups 2 i and 2 i + 1
 *   Q6_K            two halves of 64 bytes of nibbles; two halves of 32 bytes of upper bits; 16 signed bytes, each the
 *                   scale of 16 weights; fp16 d. In half h of four groups, byte 32 i + j of its nibbles has code j of
 *                   groups i and i + 2, and bits 2 g and 2 g + 1 of byte j belong to code j of group g. Codes are 32
 *                   too large.
 *   IQ4_XS          fp16 d; uint16 with the upper two bits of eight scales; four bytes of their low nibbles; nibbles as
 *                   in q4. A scale is d * (its six bits - 32). */
#include "kernels/gguf_rows.h"

/* Groups with an fp16 scale whose quants are ours. */
NP_INLINE unsigned move_groups(const uint8_t *stored, size_t groups, const size_t bytes, uint8_t *quants,
                               uint8_t *scales) {
    unsigned strange = 0;
    for (size_t g = 0; g < groups; g++, stored += 2 + bytes) {
        strange |= np_is_strange(np_half_at(stored));
        memcpy(scales + 2 * g, stored, 2);
        memcpy(quants + bytes * g, stored + 2, bytes);
    }
    return strange;
}

/* Bit j of a byte becomes byte j: 0xf0 if it is clear, 0 if it is set. */
NP_INLINE uint64_t minus_16_unless(unsigned bits) {
    const uint64_t apart = NP_EACH_BYTE(bits) & 0x8040201008040201u;
    const uint64_t is_set = (apart + NP_EACH_BYTE(0x7f)) >> 7 & NP_EACH_BYTE(1);
    return (is_set ^ NP_EACH_BYTE(1)) * 0xf0;
}

/* Eight bytes of nibbles minus 8. That moves the highest bit of a nibble to the four above. */
NP_INLINE uint64_t minus_8(uint64_t nibbles) {
    const uint64_t changed = nibbles ^ NP_EACH_BYTE(8);
    return changed | (changed >> 3 & NP_EACH_BYTE(1)) * 0xf0;
}

/* Codes as signed bytes; of Q5_0 with 4 bytes of fifth bits. 16 is subtracted from a code with a fifth bit by clearing
 * it, and from one without by setting the upper four bits. */
NP_INLINE unsigned widen_groups(const uint8_t *stored, size_t groups, const size_t fifths, uint8_t *quants,
                                uint8_t *scales) {
    unsigned strange = 0;
    for (size_t g = 0; g < groups; g++, stored += 18 + fifths, quants += NP_GROUP) {
        const uint64_t nibbles[2] = {np_word_at(stored + 2 + fifths), np_word_at(stored + 10 + fifths)};
        strange |= np_is_strange(np_half_at(stored));
        memcpy(scales + 2 * g, stored, 2);
        for (int k = 0; k < 4; k++) {
            const uint64_t codes = nibbles[k % 2] >> k / 2 * 4 & NP_EACH_BYTE(15);
            np_put_word(quants + 8 * k, fifths ? codes | minus_16_unless(stored[2 + k]) : minus_8(codes));
        }
    }
    return strange;
}

/* mxfp4's values are twice those of MXFP4, so exponents count from 128. fp16 has powers of two from -24 to 15; smaller
 * ones, as of blocks of zeros, are rounded to 0. */
NP_INLINE unsigned move_mxfp4(const uint8_t *stored, size_t groups, uint8_t *quants, uint8_t *scales) {
    unsigned strange = 0;
    for (size_t g = 0; g < groups; g++, stored += 17) {
        const int exponent = stored[0] - 128;
        const uint16_t half = (uint16_t)(exponent >= -14 ? (exponent + 15) << 10 : exponent >= -24 ? 1 << ((exponent + 24) & 15) : 0);
        strange |= exponent > 15;
        memcpy(scales + 2 * g, &half, 2);
        memcpy(quants + 16 * g, stored + 1, 16);
    }
    return strange;
}

/* A scale just above 65504 would be rounded down to it, and is refused. */
NP_INLINE unsigned move_iq4_xs(const uint8_t *stored, size_t n, uint8_t *quants, uint8_t *scales) {
    unsigned strange = 0;
    for (size_t b = 0; b < n / NP_GGUF_WIDE; b++, stored += 136) {
        const float d = np_half_to_float(np_half_at(stored));
        for (int g = 0; g < NP_MINIMUM_GROUPS; g++) {
            const float scale = d * np_iq4_xs_field(stored, g);
            const uint16_t half = np_float_to_half(scale);
            strange |= !(scale <= 65504.0f && scale >= -65504.0f);
            memcpy(scales + 16 * b + 2 * g, &half, 2);
        }
        memcpy(quants + 128 * b, stored + 8, 128);
    }
    return strange;
}

NP_INLINE void move_nibbles(const uint8_t *restrict from, uint8_t *restrict to) {
    for (int i = 0; i < 4; i++, from += 32, to += 32)
        for (int j = 0; j < 16; j++) {
            to[j] = (uint8_t)((from[j] & 15) | from[j + 16] << 4);
            to[j + 16] = (uint8_t)(from[j] >> 4 | (from[j + 16] & 0xf0));
        }
}

/* Bit i of byte j becomes bit j of byte i. */
NP_INLINE uint64_t transposed(uint64_t x) {
    uint64_t changes = (x ^ x >> 7) & 0x00aa00aa00aa00aau;
    x ^= changes ^ changes << 7;
    changes = (x ^ x >> 14) & 0x0000cccc0000ccccu;
    x ^= changes ^ changes << 14;
    changes = (x ^ x >> 28) & 0x00000000f0f0f0f0u;
    return x ^ changes ^ changes << 28;
}

/* A block's two pieces of planes, from the fifth bits of Q5_K. */
NP_INLINE void move_fifths(const uint8_t *from, uint8_t *planes, size_t plane_bytes) {
    for (int half = 0; half < 2; half++) {
        uint8_t eight[2][8], both[16];
        for (int i = 0; i < 2; i++) np_put_word(eight[i], transposed(np_word_at(from + 16 * half + 8 * i)));
        for (int g = 0; g < 8; g++) both[2 * g] = eight[0][g], both[2 * g + 1] = eight[1][g];
        memcpy(planes + (size_t)half * plane_bytes, both, sizeof both);
    }
}

/* Rows of Q4_K, or of Q5_K with 32 bytes of fifth bits, to a type with `high_bits` beyond the nibble. */
NP_INLINE unsigned move_with_minimums(const uint8_t *stored, size_t n, const size_t fifths, size_t high_bits,
                                      uint8_t *quants, uint8_t *scales) {
    unsigned strange = 0;
    for (size_t b = 0; b < n / NP_GGUF_WIDE; b++, stored += 144 + fifths) {
        strange |= np_move_fields(stored, scales + 16 * b);
        move_nibbles(stored + 16 + fifths, quants + 128 * b);
        if (fifths) move_fifths(stored + 16, quants + n / 2 + 16 * b, n / 16);
    }
    const size_t moved = n / 2 + fifths * (n / NP_GGUF_WIDE);
    memset(quants + moved, 0, n / 2 + high_bits * (n / 8) - moved);
    return strange;
}

/* Returns 0, or 1 if a value does not fit. */
static unsigned unpack_row(int encoding, const uint8_t *stored, size_t n, int type, uint8_t *quants, uint8_t *scales) {
    const size_t groups = n / NP_GROUP;
    switch (encoding) {
    case NP_GGUF_Q4_0:
        if (type == NP_Q8) return widen_groups(stored, groups, 0, quants, scales);
        return move_groups(stored, groups, 16, quants, scales);
    case NP_GGUF_Q5_0: return widen_groups(stored, groups, 4, quants, scales);
    case NP_GGUF_Q8_0: return move_groups(stored, groups, 32, quants, scales);
    default: break;
    }
    if (type == NP_Q8 || encoding == NP_GGUF_Q6_K)
        return np_isa_current()->recode(encoding, stored, n, type, quants, scales);
    switch (encoding) {
    case NP_GGUF_Q4_K: return move_with_minimums(stored, n, 0, np_high_bits(type), quants, scales);
    case NP_GGUF_Q5_K: return move_with_minimums(stored, n, 32, np_high_bits(type), quants, scales);
    case NP_GGUF_IQ4_NL: return move_groups(stored, groups, 16, quants, scales);
    case NP_GGUF_IQ4_XS: return move_iq4_xs(stored, n, quants, scales);
    default: return move_mxfp4(stored, groups, quants, scales);
    }
}

size_t np_gguf_row_bytes(int encoding, size_t n) {
    const size_t weights = np_gguf_is_wide(encoding) ? NP_GGUF_WIDE : NP_GROUP;
    return n % weights ? 0 : n / weights * np_gguf_block_bytes(encoding);
}

int np_gguf_fits(int encoding, int type) {
    switch (encoding) {
    case NP_GGUF_Q4_0: return type == NP_Q4 || type == NP_Q8;
    case NP_GGUF_Q5_0:
    case NP_GGUF_Q8_0: return type == NP_Q8;
    case NP_GGUF_Q4_K: return type == NP_Q4K || type == NP_Q5K || type == NP_Q6K || type == NP_Q8;
    case NP_GGUF_Q5_K: return type == NP_Q5K || type == NP_Q6K || type == NP_Q8;
    case NP_GGUF_Q6_K: return type == NP_Q6K || type == NP_Q8;
    case NP_GGUF_IQ4_NL:
    case NP_GGUF_IQ4_XS: return type == NP_IQ4 || type == NP_Q8;
    case NP_GGUF_MXFP4: return type == NP_MXFP4 || type == NP_Q8;
    default: return 0;
    }
}

int np_unpack_gguf_rows(int encoding, const void *stored, size_t rows, size_t n, int type, void *quants, void *scales) {
    const size_t bytes = np_gguf_row_bytes(encoding, n);
    const size_t quant_bytes = np_quant_bytes(type, n), scale_bytes = np_scale_bytes(type, n);
    unsigned strange = 0;
    if (!bytes || !np_gguf_fits(encoding, type)) return NP_E_ARGUMENT;
    const uint8_t *from = stored;
    uint8_t *to = quants, *scales_to = scales;
    for (size_t r = 0; r < rows && !strange; r++, from += bytes, to += quant_bytes, scales_to += scale_bytes)
        strange = unpack_row(encoding, from, n, type, to, scales_to);
    return strange ? NP_E_ARGUMENT : NP_OK;
}

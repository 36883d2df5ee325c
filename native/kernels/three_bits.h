/* q3: groups of 32 weights of -4 to 3 in 12 bytes, as codes of three bits: weight + 4. They are unpacked to the order
 * of q4, so that results of a q3 row have the bits of a q4 row with the same weights and scales.
 *
 *   bytes 0..7     low two bits of codes: byte i has those of i, i + 8, i + 16, i + 24, from its lowest bits on
 *   bytes 8..11    third bits: byte 8 + i has those of i, i + 4, i + 8, ..., i + 28, from its lowest bit on
 *
 * Unpacked to q4's 16 bytes: the first eight bytes, then the same shifted right by two bits, have the low two bits
 * where q4 has them. The last four bytes, four times, shifted left by two and by one, not at all, and right by one,
 * have the third bits above those. */
#ifndef NP_KERNELS_THREE_BITS_H
#define NP_KERNELS_THREE_BITS_H
#include "kernels/isa.h"

#include <string.h>

enum { NP_Q3_GROUP_BYTES = 12 };

/* A group's 16 bytes in q4's format, the lower byte of a word first. */
typedef struct {
    uint64_t words[2];
} np_q4_group;

NP_INLINE np_q4_group np_q4_of_q3(const uint8_t *group) {
    const uint64_t low = 0x3333333333333333u, third = 0x44444444u, four = 0x4444444444444444u; /* code + 4 is q4's nibble */
    uint64_t lows;
    uint32_t thirds;
    memcpy(&lows, group, 8);
    memcpy(&thirds, group + 8, 4);
    const uint64_t first = (thirds << 2 & third) | (uint64_t)(thirds << 1 & third) << 32;
    const uint64_t second = (thirds & third) | (uint64_t)(thirds >> 1 & third) << 32;
    return (np_q4_group){{((lows & low) | first) + four, ((lows >> 2 & low) | second) + four}};
}
#endif

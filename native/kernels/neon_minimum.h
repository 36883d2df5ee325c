/* Scales, minimums and codes of rows with a minimum with NEON; minimum.h describes the rows. */
#ifndef NP_KERNELS_NEON_MINIMUM_H
#define NP_KERNELS_NEON_MINIMUM_H
#include "kernels/minimum.h"

#include <arm_neon.h>

enum { NP_FOUR = 4 }; /* groups, half a block: what is unpacked at a time */

/* s and z of four groups. */
typedef struct {
    float32x4_t scales, minimums;
} np_neon_scales;

/* Of the four groups from `first` on; anything for those that the row does not have. */
NP_INLINE np_neon_scales np_neon_scales_of(const int type, const uint8_t *scales, size_t first) {
    const uint8_t *block = scales + first / NP_MINIMUM_GROUPS * NP_MINIMUM_GROUPS * np_minimum_bytes(type);
    if (np_has_half_scales(type)) {
        const uint8_t *four_of_scales = block + 2 * (first % NP_MINIMUM_GROUPS);
        return (np_neon_scales){vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(four_of_scales))),
                                vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(four_of_scales + 16)))};
    }
    const np_minimum_codes codes = np_minimum_codes_of(block);
    const unsigned half = 8 * (first % NP_MINIMUM_GROUPS);
    const uint64_t four = (codes.scales >> half & 0xffffffff) | codes.minimums >> half << 32;
    const uint16x8_t both = vmovl_u8(vcreate_u8(four));
    uint32_t factors;
    memcpy(&factors, block, 4);
    const float32x4_t d = vcvt_f32_f16(vreinterpret_f16_u32(vdup_n_u32(factors))); /* d, dmin, d, dmin */
    return (np_neon_scales){vmulq_laneq_f32(vcvtq_f32_u32(vmovl_u16(vget_low_u16(both))), d, 0),
                            vmulq_laneq_f32(vcvtq_f32_u32(vmovl_high_u16(both)), d, 1)};
}

/* Bits beyond the nibbles of four groups: of each plane eight bytes of their first 16 codes, eight of their last. */
typedef struct {
    uint8x16_t planes[2];
} np_neon_bits;

/* Of `count` groups from `first` on, at most four. */
NP_INLINE np_neon_bits np_neon_bits_of(const int type, const uint8_t *quants, size_t n, size_t first, size_t count) {
    np_neon_bits bits = {{vdupq_n_u8(0), vdupq_n_u8(0)}};
    const uint8_t *plane = quants + n / 2 + 2 * first;
    for (size_t bit = 0; bit < np_high_bits(type); bit++, plane += n / 8) {
        uint8_t rest[16] = {0};
        if (count < NP_FOUR) memcpy(rest, plane, 2 * count), memcpy(rest + 8, plane + n / 16, 2 * count);
        bits.planes[bit] = count < NP_FOUR ? vld1q_u8(rest) : vcombine_u8(vld1_u8(plane), vld1_u8(plane + n / 16));
    }
    return bits;
}

/* The codes of a group's first or last 16 weights. group: its number in `bits`. */
NP_INLINE int8x16_t np_neon_codes(const int type, const uint8_t *nibbles, const np_neon_bits *bits, size_t group, const int half) {
    static const uint8_t bytes[16] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    static const uint8_t powers[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t packed = vld1q_u8(nibbles);
    const uint8x16_t which = vaddq_u8(vld1q_u8(bytes), vdupq_n_u8((uint8_t)(2 * group + 8 * (size_t)half)));
    uint8x16_t codes = half ? vshrq_n_u8(packed, 4) : vandq_u8(packed, vdupq_n_u8(15));
    for (size_t bit = 0; bit < np_high_bits(type); bit++) {
        const uint8x16_t is_set = vtstq_u8(vqtbl1q_u8(bits->planes[bit], which), vld1q_u8(powers));
        codes = vbslq_u8(vdupq_n_u8((uint8_t)(16 << bit)), is_set, codes);
    }
    return vreinterpretq_s8_u8(codes);
}
#endif

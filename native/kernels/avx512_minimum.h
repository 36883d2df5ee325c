/* Shared by the AVX-512 kernels: scales, minimums and high bits of rows with a minimum, as minimum.h describes them. */
#ifndef NP_KERNELS_AVX512_MINIMUM_H
#define NP_KERNELS_AVX512_MINIMUM_H
#include "kernels/minimum.h"

#include <immintrin.h>

/* s and z of 16 groups, lane i of group i; z only of rows with minimums. */
typedef struct {
    __m512 scales, minimums;
} np_lane_scales;

/* Two blocks of q4h or q5h; of the second zeros if it is NULL. */
NP_INLINE NP_AVX512 np_lane_scales np_half_lanes(const void *first, const void *second) {
    const __m256i upper = second ? _mm256_loadu_si256(second) : _mm256_setzero_si256();
    const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(first)), upper, 1);
    const __m512i sorted = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 4, 5, 2, 3, 6, 7), all);
    return (np_lane_scales){_mm512_cvtph_ps(_mm512_castsi512_si256(sorted)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(sorted, 1))};
}

/* Two blocks; of the second zeros if it is NULL. */
NP_INLINE NP_AVX512 np_lane_scales np_minimum_lanes(const int type, const void *first_block, const void *second_block) {
    if (np_has_half_scales(type)) return np_half_lanes(first_block, second_block);
    const __m128i upper = second_block ? _mm_loadu_si128(second_block) : _mm_setzero_si128();
    const __m256i both = _mm256_set_m128i(upper, _mm_loadu_si128(first_block));
    /* In every lane a group's bytes: low bits of scale and minimum, and the byte with its upper bits, which lie four bits
     * further up for the last four groups of a block. */
    const __m512i halves = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), _mm512_castsi256_si512(both));
    const __m128i first = _mm_setr_epi32(0x80800c04, 0x80800d05, 0x80800e06, 0x80800f07);
    const __m512i firsts = _mm512_broadcast_i32x4(first), four = _mm512_setr_epi64(0, 0, 0x400000004, 0x400000004, 0, 0, 0x400000004, 0x400000004);
    const __m512i fields = _mm512_shuffle_epi8(halves, _mm512_add_epi32(firsts, four));
    const __m512i nibble = _mm512_set1_epi32(15), six_bits = _mm512_set1_epi32(63);
    const __m512i shift = _mm512_add_epi32(four, _mm512_set1_epi32(4)), minimum_shift = _mm512_add_epi32(shift, _mm512_set1_epi32(2));
    /* 0xca: where the nibble's mask has a bit, that of the second argument */
    const __m512i scale = _mm512_ternarylogic_epi32(nibble, fields, _mm512_srlv_epi32(fields, shift), 0xca);
    const __m512i minimum = _mm512_ternarylogic_epi32(nibble, _mm512_srli_epi32(fields, 4), _mm512_srlv_epi32(fields, minimum_shift), 0xca);
    const __m512 d = _mm512_cvtph_ps(_mm256_shuffle_epi8(both, _mm256_set1_epi16(0x0100)));
    const __m512 dmin = _mm512_cvtph_ps(_mm256_shuffle_epi8(both, _mm256_set1_epi16(0x0302)));
    return (np_lane_scales){_mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_and_si512(scale, six_bits))),
                            _mm512_mul_ps(dmin, _mm512_cvtepi32_ps(_mm512_and_si512(minimum, six_bits)))};
}

/* Those of a row's next 16 groups, `block` being their first block; of `groups` if so few are left. */
NP_INLINE NP_AVX512 np_lane_scales np_row_minimums(const int type, const uint8_t *block, size_t groups) {
    return np_minimum_lanes(type, block, groups > NP_MINIMUM_GROUPS ? block + np_minimum_bytes(type) * NP_MINIMUM_GROUPS : NULL);
}

/* xs * the groups' sums of quants: what a group's minimum is multiplied by. */
NP_INLINE NP_AVX512 __m512 np_scaled_sums(const np_activation *x, size_t group) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(x->sums + group)), _mm512_loadu_ps(x->scales + group));
}

/* Bits of a plane for four groups. lacking: by how many bytes a row's last groups fall short of eight. As many bytes
 * before the groups are read instead, where a row has at least 16 bytes of nibbles. */
NP_INLINE __mmask64 np_plane_bits(const uint8_t *plane, size_t lacking) {
    uint64_t bits;
    memcpy(&bits, plane - lacking, 8);
    return bits >> 8 * lacking;
}

/* Add the bits above the nibble to codes of four groups: the first 16 of each, or with the next plane the last 16. */
NP_INLINE NP_AVX512 __m512i np_add_high_bits(const int type, __m512i codes, const uint8_t *planes, size_t plane_bytes, size_t lacking) {
    for (size_t bit = 0; bit < np_high_bits(type); bit++)
        codes = _mm512_mask_add_epi8(codes, np_plane_bits(planes + 2 * bit * plane_bytes, lacking), codes, _mm512_set1_epi8((char)(16 << bit)));
    return codes;
}

/* The same for the 32 codes of one group. */
NP_INLINE NP_AVX512 __m256i np_add_group_bits(const int type, __m256i codes, const uint8_t *planes, size_t plane_bytes) {
    for (size_t bit = 0; bit < np_high_bits(type); bit++, planes += 2 * plane_bytes) {
        uint16_t first, last;
        memcpy(&first, planes, 2);
        memcpy(&last, planes + plane_bytes, 2);
        codes = _mm256_mask_add_epi8(codes, first | (__mmask32)last << 16, codes, _mm256_set1_epi8((char)(16 << bit)));
    }
    return codes;
}

/* The same for transposed codes: register j has those from 4j on of 16 groups, a group in a lane. */
NP_INLINE NP_AVX512 void np_add_turned_bits(const int type, __m512i codes[4], const uint8_t *planes, size_t plane_bytes, __mmask16 groups) {
    /* Lane i: four bytes of 16 or 0, for the bits of i. */
    const __m512i spread = _mm512_setr_epi32(0, 0x10, 0x1000, 0x1010, 0x100000, 0x100010, 0x101000, 0x101010, 0x10000000, 0x10000010,
                                             0x10001000, 0x10001010, 0x10100000, 0x10100010, 0x10101000, 0x10101010);
    for (size_t bit = 0; bit < np_high_bits(type); bit++) {
        const __m512i table = _mm512_slli_epi32(spread, (unsigned)bit);
        const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(groups, planes + 2 * bit * plane_bytes));
        for (unsigned j = 0; j < 4; j++) {
            const __m512i bytes = _mm512_permutexvar_epi32(_mm512_srli_epi32(words, 4 * j), table); /* by the lowest four bits */
            codes[j] = _mm512_or_si512(codes[j], bytes);
        }
    }
}
#endif

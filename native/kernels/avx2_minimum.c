/* AVX2 with FMA and F16C: dot products and sums of rows with a minimum; minimum.h describes the rows. */
#include "kernels/minimum.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* s and z of a block, lane i of group i. */
typedef struct {
    __m256 scales, minimums;
} block_scales;

NP_INLINE NP_AVX2 __m256 times_codes(__m128 half, uint64_t codes) {
    return _mm256_mul_ps(_mm256_broadcastss_ps(half), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)codes))));
}

NP_INLINE NP_AVX2 block_scales scales_of(const int type, const uint8_t *block) {
    if (np_has_half_scales(type))
        return (block_scales){_mm256_cvtph_ps(_mm_loadu_si128((const void *)block)), _mm256_cvtph_ps(_mm_loadu_si128((const void *)(block + 16)))};
    const np_minimum_codes codes = np_minimum_codes_of(block);
    int32_t halves;
    memcpy(&halves, block, 4);
    const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(halves));
    return (block_scales){times_codes(both, codes.scales), times_codes(_mm_movehdup_ps(both), codes.minimums)};
}

/* `value` in the bytes whose bit is set. */
NP_INLINE NP_AVX2 __m256i where(uint32_t bits, char value) {
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i which = _mm256_set1_epi64x((int64_t)0x8040201008040201u);
    const __m256i chosen = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)bits), spread), which);
    return _mm256_and_si256(_mm256_cmpeq_epi8(chosen, which), _mm256_set1_epi8(value));
}

/* The bits of two groups, or of one. */
NP_INLINE uint32_t bits_at(const uint8_t *plane, int both) {
    uint32_t bits = 0;
    if (both) memcpy(&bits, plane, 4);
    else memcpy(&bits, plane, 2);
    return bits;
}

/* The codes of two groups, `planes` at their bits: the first 16 of both, and the last 16. `both`: 0 if the second one
 * is not there. */
NP_INLINE NP_AVX2 void pair_codes(const int type, const uint8_t *nibbles, const uint8_t *planes, size_t plane_bytes, int both,
                                  __m256i codes[2]) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m128i first = _mm_loadu_si128((const void *)nibbles);
    const __m256i w = _mm256_set_m128i(both ? _mm_loadu_si128((const void *)(nibbles + 16)) : _mm_setzero_si128(), first);
    codes[0] = _mm256_and_si256(w, nibble);
    codes[1] = _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble);
    for (size_t bit = 0; bit < np_high_bits(type); bit++)
        for (int half = 0; half < 2; half++, planes += plane_bytes)
            codes[half] = _mm256_or_si256(codes[half], where(bits_at(planes, both), (char)(16 << bit)));
}

/* The lanes of two groups of a block: g in the lower half, g + 1 in the upper. */
NP_INLINE NP_AVX2 __m256 pair_of(__m256 block, size_t g) {
    const __m256i which = _mm256_add_epi32(_mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), _mm256_set1_epi32((int)g));
    return _mm256_permutevar8x32_ps(block, which);
}

/* Add the eight lanes in a fixed order. */
NP_INLINE NP_AVX2 float add_lanes(__m256 sum) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

/* A block's products: of a pair of groups in lanes 0-3 and 4-7, then the minimums, lane i of group i. Two products are at
 * most 2 * 63 * 127, and two such sums fit int16. */
NP_INLINE NP_AVX2 void dot_block(const int type, const uint8_t *quants, const uint8_t *scales, size_t n, size_t first, const size_t count,
                                 size_t ahead, const np_activation *x, const int tokens, __m256 *sum) {
    const __m256i ones = _mm256_set1_epi16(1);
    const size_t plane_bytes = n / 16;
    const uint8_t *planes = quants + n / 2 + 2 * first;
    const block_scales block = scales_of(type, scales + np_minimum_bytes(type) * first);
    __m256 scale[NP_TOKEN_BLOCK];
    for (int t = 0; t < tokens; t++) {
        const __m256 x_scales = _mm256_loadu_ps(x[t].scales + first);
        const __m256 x_sums = _mm256_cvtepi32_ps(_mm256_loadu_si256((const void *)(x[t].sums + first)));
        scale[t] = _mm256_mul_ps(block.scales, x_scales);
        sum[t] = _mm256_fnmadd_ps(block.minimums, _mm256_mul_ps(x_sums, x_scales), sum[t]);
    }
    for (size_t plane = 0; first % 32 == 0 && plane < 2 * np_high_bits(type); plane++) np_prefetch(planes + plane * plane_bytes, ahead);
    for (size_t g = 0; g < count; g += 2) {
        const uint8_t *nibbles = quants + (first + g) * 16;
        __m256i codes[2];
        np_prefetch(nibbles, ahead);
        pair_codes(type, nibbles, planes + 2 * g, plane_bytes, g + 1 < count, codes);
        for (int t = 0; t < tokens; t++) {
            const int8_t *q = x[t].quants + np_q4_place(first + g);
            const __m256i v0 = _mm256_loadu_si256((const void *)q), v1 = _mm256_loadu_si256((const void *)(q + 64));
            const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(codes[0], v0), _mm256_maddubs_epi16(codes[1], v1));
            sum[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones)), pair_of(scale[t], g), sum[t]);
        }
    }
}

NP_INLINE NP_AVX2 void dot_row(const int type, const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead,
                               const uint8_t *activation, size_t stride, const int tokens, float *sums) {
    const size_t groups = n / NP_GROUP;
    np_activation x[NP_TOKEN_BLOCK];
    __m256 sum[NP_TOKEN_BLOCK];
    for (int t = 0; t < tokens; t++) {
        x[t] = np_activation_at(activation + t * stride, n);
        sum[t] = _mm256_setzero_ps();
    }
    size_t first = 0;
    for (; first + NP_MINIMUM_GROUPS <= groups; first += NP_MINIMUM_GROUPS)
        dot_block(type, quants, scales, n, first, NP_MINIMUM_GROUPS, ahead, x, tokens, sum);
    if (first < groups) dot_block(type, quants, scales, n, first, groups - first, ahead, x, tokens, sum);
    for (int t = 0; t < tokens; t++) sums[t] = add_lanes(sum[t]);
}

enum { TOGETHER = 4 }; /* rows that are added with one load and store of y */

/* Prefetch what the next rows have where these have a block. */
NP_INLINE void prefetch_block(const int type, const np_rows *rows, size_t r, size_t first, size_t count) {
    for (; count > 0 && r < rows->rows; r++, count--) {
        const np_row row = np_row_at(rows, r);
        __builtin_prefetch(row.quants + first * 16, 0, 2);
        __builtin_prefetch(row.quants + first * 16 + 64, 0, 2);
        for (size_t plane = 0; first % 32 == 0 && plane < 2 * np_high_bits(type); plane++)
            __builtin_prefetch(row.quants + rows->n / 2 + plane * (rows->n / 16) + 2 * first, 0, 2);
        if (first % 32 == 0) __builtin_prefetch(row.scales + np_minimum_bytes(type) * first, 0, 2);
    }
}

/* y += factor * codes of two groups. Register k of y has columns 4k to 4k + 3 of both, a group in each half. */
NP_INLINE NP_AVX2 void add_pair(const int type, const uint8_t *nibbles, const uint8_t *planes, size_t plane_bytes, int both, __m256 factor,
                                __m256 y[8]) {
    const __m256i spread = _mm256_setr_epi64x((int64_t)0x8080800180808000u, (int64_t)0x8080800380808002u, (int64_t)0x8080800180808000u,
                                              (int64_t)0x8080800380808002u);
    __m256i codes[2];
    pair_codes(type, nibbles, planes, plane_bytes, both, codes);
    for (int k = 0; k < 8; k++) {
        const __m256i columns = _mm256_shuffle_epi8(codes[k / 4], _mm256_add_epi32(spread, _mm256_set1_epi32(k % 4 * 4)));
        y[k] = _mm256_fmadd_ps(factor, _mm256_cvtepi32_ps(columns), y[k]);
    }
}

/* Rows that are added together, and the current block's factors of them. */
typedef struct {
    np_row row[TOGETHER];
    __m256 factors[TOGETHER], minimum; /* a * s; the sum of a * z */
} added_rows;

/* Add up groups g and, if there are both, g + 1 of `count` rows. */
NP_INLINE NP_AVX2 void add_columns(const int type, const added_rows *rows, const size_t count, size_t n, size_t g, const int both, float *y) {
    const size_t in_block = g % NP_MINIMUM_GROUPS;
    const __m256 minimum = pair_of(rows->minimum, in_block);
    __m256 columns[8];
    for (int k = 0; k < 8; k++) {
        const __m128 low = _mm_loadu_ps(y + 4 * k), high = both ? _mm_loadu_ps(y + NP_GROUP + 4 * k) : _mm_setzero_ps();
        columns[k] = _mm256_sub_ps(_mm256_set_m128(high, low), minimum);
    }
    for (size_t i = 0; i < count; i++) {
        const uint8_t *quants = rows->row[i].quants;
        add_pair(type, quants + g * 16, quants + n / 2 + 2 * g, n / 16, both, pair_of(rows->factors[i], in_block), columns);
    }
    for (int k = 0; k < 8; k++) {
        _mm_storeu_ps(y + 4 * k, _mm256_castps256_ps128(columns[k]));
        if (both) _mm_storeu_ps(y + NP_GROUP + 4 * k, _mm256_extractf128_ps(columns[k], 1));
    }
}

/* Add `count` rows from r on. Their minimums are added up before they are subtracted. */
NP_INLINE NP_AVX2 void add_together(const int type, const np_rows *rows, size_t r, const size_t count, const float *a, float *y) {
    const size_t groups = rows->n / NP_GROUP;
    added_rows added;
    for (size_t i = 0; i < count; i++) added.row[i] = np_row_at(rows, r + i);
    for (size_t first = 0; first < groups; first += NP_MINIMUM_GROUPS) {
        prefetch_block(type, rows, r + count, first, count);
        added.minimum = _mm256_setzero_ps();
        for (size_t i = 0; i < count; i++) {
            const block_scales block = scales_of(type, added.row[i].scales + np_minimum_bytes(type) * first);
            const __m256 factor = _mm256_set1_ps(a[r + i]);
            added.factors[i] = _mm256_mul_ps(factor, block.scales);
            added.minimum = _mm256_fmadd_ps(factor, block.minimums, added.minimum);
        }
        const size_t end = first + np_minimum_count(groups, first);
        size_t g = first;
        for (; g + 2 <= end; g += 2) add_columns(type, &added, count, rows->n, g, 1, y + g * NP_GROUP);
        if (g < end) add_columns(type, &added, count, rows->n, g, 0, y + g * NP_GROUP);
    }
}

NP_INLINE NP_AVX2 void add_rows(const int type, const np_rows *rows, const float *a, float *y) {
    size_t r = 0;
    for (; r + TOGETHER <= rows->rows; r += TOGETHER) add_together(type, rows, r, TOGETHER, a, y);
    for (; r < rows->rows; r++) add_together(type, rows, r, 1, a, y);
}

#define DEFINE_ROWS(NAME, TYPE, AHEAD)                                                                                        \
    NP_INLINE NP_AVX2 void dot_row_##NAME(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead,               \
                                          const uint8_t *activation, size_t stride, const int tokens, float *sums) {          \
        dot_row(TYPE, quants, scales, n, ahead, activation, stride, tokens, sums);                                            \
    }                                                                                                                         \
    NP_DEFINE_DOT_ROWS_AHEAD(NP_AVX2, np_avx2_dot_##NAME, dot_row_##NAME, AHEAD)                                              \
    NP_AVX2 void np_avx2_add_##NAME(const np_rows *rows, const float *a, float *y) { add_rows(TYPE, rows, a, y); }

DEFINE_ROWS(q4k, NP_Q4K, np_ahead_bytes)
DEFINE_ROWS(q5k, NP_Q5K, np_ahead_whole_rows)
DEFINE_ROWS(q6k, NP_Q6K, np_ahead_whole_rows)
DEFINE_ROWS(q4h, NP_Q4H, np_ahead_bytes)
DEFINE_ROWS(q5h, NP_Q5H, np_ahead_whole_rows)
#endif

/* AVX2 with FMA and F16C: dot products of rows. */
#include "kernels/activation.h"
#include "kernels/codebook.h"
#include "kernels/three_bits.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* Add the eight lanes in a fixed order. */
NP_INLINE NP_AVX2 float add_lanes(__m256 sum) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

NP_INLINE NP_AVX2 void f16_row(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead,
                               const uint8_t *activation, size_t stride, const int tokens, float *sums) {
    const uint16_t *w = (const uint16_t *)(const void *)quants;
    __m256 even[NP_TOKEN_BLOCK], odd[NP_TOKEN_BLOCK];
    for (int t = 0; t < tokens; t++) even[t] = odd[t] = _mm256_setzero_ps();
    size_t j = 0;
    for (; j + 16 <= n; j += 16) {
        const __m256 first = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(w + j)));
        const __m256 second = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(w + j + 8)));
        for (int t = 0; t < tokens; t++) {
            const float *x = (const float *)(const void *)(activation + t * stride);
            even[t] = _mm256_fmadd_ps(first, _mm256_loadu_ps(x + j), even[t]);
            odd[t] = _mm256_fmadd_ps(second, _mm256_loadu_ps(x + j + 8), odd[t]);
        }
    }
    for (int t = 0; t < tokens; t++) {
        const float *x = (const float *)(const void *)(activation + t * stride);
        float sum = add_lanes(_mm256_add_ps(even[t], odd[t]));
        for (size_t k = j; k < n; k++) sum += np_half_to_float(w[k]) * x[k];
        sums[t] = sum;
    }
}

/* Scales of eight groups, fewer at a row's end. */
NP_INLINE NP_AVX2 __m256 group_scales(const uint16_t *scales, size_t count) {
    uint16_t rest[8] = {0};
    if (count < 8) scales = memcpy(rest, scales, 2 * count);
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)scales));
}

/* One group of 32. maddubs needs one unsigned side: the weights' magnitudes, with their signs moved to the activation.
 * Two products are at most 2 * 128 * 127, which fits int16. */
NP_INLINE NP_AVX2 void q8_row(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead,
                              const uint8_t *activation, size_t stride, const int tokens, float *sums) {
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    const __m256i ones = _mm256_set1_epi16(1);
    const size_t groups = n / NP_GROUP;
    np_activation x[NP_TOKEN_BLOCK];
    __m256 sum[NP_TOKEN_BLOCK], scale[NP_TOKEN_BLOCK];
    for (int t = 0; t < tokens; t++) {
        x[t] = np_activation_at(activation + t * stride, n);
        sum[t] = _mm256_setzero_ps();
    }
    for (size_t first = 0; first < groups; first += 8) {
        const size_t count = groups - first < 8 ? groups - first : 8;
        const __m256 weight_scale = group_scales(s + first, count);
        for (int t = 0; t < tokens; t++) scale[t] = _mm256_mul_ps(weight_scale, _mm256_loadu_ps(x[t].scales + first));
        for (size_t g = 0; g < count; g++) {
            const __m256i w = _mm256_loadu_si256((const void *)(quants + (first + g) * NP_GROUP));
            np_prefetch(quants + (first + g) * NP_GROUP, ahead);
            const __m256i magnitude = _mm256_abs_epi8(w), which = _mm256_set1_epi32((int)g);
            for (int t = 0; t < tokens; t++) {
                const __m256i v = _mm256_loadu_si256((const void *)(x[t].quants + (first + g) * NP_GROUP));
                const __m256i dot = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(v, w)), ones);
                sum[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_permutevar8x32_ps(scale[t], which), sum[t]);
            }
        }
    }
    for (int t = 0; t < tokens; t++) sums[t] = add_lanes(sum[t]);
}

/* Convert two groups of q3 to those of q4. */
NP_INLINE NP_AVX2 __m256i q3_pair(const uint8_t *first, const uint8_t *second) {
    int64_t lows[2];
    int32_t thirds[2];
    memcpy(lows, first, 8);
    memcpy(lows + 1, second, 8);
    memcpy(thirds, first + 8, 4);
    memcpy(thirds + 1, second + 8, 4);
    const __m256i low = _mm256_srlv_epi64(_mm256_setr_epi64x(lows[0], lows[0], lows[1], lows[1]), _mm256_setr_epi64x(0, 2, 0, 2));
    const __m256i third = _mm256_set_m128i(_mm_set1_epi32(thirds[1]), _mm_set1_epi32(thirds[0]));
    const __m256i left = _mm256_sllv_epi32(third, _mm256_setr_epi32(2, 1, 0, 32, 2, 1, 0, 32)); /* shifts by 32 leave zero */
    const __m256i right = _mm256_srlv_epi32(third, _mm256_setr_epi32(32, 32, 32, 1, 32, 32, 32, 1));
    const __m256i three = _mm256_set1_epi8(0x33), four = _mm256_set1_epi8(0x44); /* code + 4 is the nibble */
    const __m256i codes = _mm256_or_si256(_mm256_and_si256(low, three), _mm256_and_si256(_mm256_or_si256(left, right), four));
    return _mm256_add_epi8(codes, four);
}

/* Two groups: lanes 0-3 belong to the first. Nibbles are used as 0..15, and 8 times the group's sum of activations is
 * subtracted in the group's first lane. */
NP_INLINE NP_AVX2 void q4_pair(__m256i w, size_t pair, __m256 *scale, __m256i *offset, const np_activation *x, size_t group,
                               const int tokens, __m256 *sum) {
    const __m256i ones = _mm256_set1_epi16(1), nibble = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    const __m256i which = _mm256_add_epi32(_mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), _mm256_set1_epi32(2 * (int)pair));
    const __m256i low = _mm256_and_si256(w, nibble), high = _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble);
    for (int t = 0; t < tokens; t++) {
        const int8_t *quants = x[t].quants + np_q4_place(group);
        const __m256i v0 = _mm256_loadu_si256((const void *)quants), v1 = _mm256_loadu_si256((const void *)(quants + 64));
        const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, v0), _mm256_maddubs_epi16(high, v1));
        const __m256i taken = _mm256_blend_epi32(zero, _mm256_permutevar8x32_epi32(offset[t], which), 0x11);
        const __m256i dot = _mm256_sub_epi32(_mm256_madd_epi16(pairs, ones), taken);
        sum[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_permutevar8x32_ps(scale[t], which), sum[t]);
    }
}

/* Two groups whose nibbles stand for values up to 127: as in q8_row, the values' signs are moved to the activation. */
NP_INLINE NP_AVX2 void codebook_pair(const int type, __m256i w, size_t pair, __m256 *scale, const np_activation *x, size_t group,
                                     const int tokens, __m256 *sum) {
    const __m256i values = _mm256_broadcastsi128_si256(_mm_load_si128((const void *)np_codebook(type)));
    const __m256i ones = _mm256_set1_epi16(1), nibble = _mm256_set1_epi8(15);
    const __m256i which = _mm256_add_epi32(_mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), _mm256_set1_epi32(2 * (int)pair));
    const __m256i low = _mm256_shuffle_epi8(values, _mm256_and_si256(w, nibble));
    const __m256i high = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble));
    const __m256i low_magnitude = _mm256_abs_epi8(low), high_magnitude = _mm256_abs_epi8(high);
    for (int t = 0; t < tokens; t++) {
        const int8_t *quants = x[t].quants + np_q4_place(group);
        const __m256i v0 = _mm256_loadu_si256((const void *)quants), v1 = _mm256_loadu_si256((const void *)(quants + 64));
        const __m256i first = _mm256_maddubs_epi16(low_magnitude, _mm256_sign_epi8(v0, low));
        const __m256i last = _mm256_maddubs_epi16(high_magnitude, _mm256_sign_epi8(v1, high));
        const __m256i dot = _mm256_add_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(last, ones));
        sum[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_permutevar8x32_ps(scale[t], which), sum[t]);
    }
}

NP_INLINE NP_AVX2 void nibble_row(const int type, const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead,
                                  const uint8_t *activation, size_t stride, const int tokens, float *sums) {
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    const size_t groups = n / NP_GROUP, group_bytes = type == NP_Q3 ? NP_Q3_GROUP_BYTES : 16;
    np_activation x[NP_TOKEN_BLOCK];
    __m256 sum[NP_TOKEN_BLOCK], scale[NP_TOKEN_BLOCK];
    __m256i offset[NP_TOKEN_BLOCK];
    for (int t = 0; t < tokens; t++) {
        x[t] = np_activation_at(activation + t * stride, n);
        sum[t] = _mm256_setzero_ps();
    }
    for (size_t first = 0; first < groups; first += 8) {
        const size_t count = groups - first < 8 ? groups - first : 8;
        const __m256 weight_scale = group_scales(s + first, count);
        for (int t = 0; t < tokens; t++) {
            scale[t] = _mm256_mul_ps(weight_scale, _mm256_loadu_ps(x[t].scales + first));
            offset[t] = _mm256_slli_epi32(_mm256_loadu_si256((const void *)(x[t].sums + first)), 3);
        }
        for (size_t g = 0; g < count; g += 2) {
            const uint8_t *w = quants + (first + g) * group_bytes;
            __m256i both;
            np_prefetch(w, ahead);
            if (type == NP_Q3) {
                both = q3_pair(w, g + 1 < count ? w + group_bytes : w); /* without a second group its activations are zeros */
            } else {
                const __m128i a = _mm_loadu_si128((const void *)w);
                const __m128i b = g + 1 < count ? _mm_loadu_si128((const void *)(w + 16)) : _mm_setzero_si128();
                both = _mm256_set_m128i(b, a);
            }
            if (np_has_codebook(type)) codebook_pair(type, both, g / 2, scale, x, first + g, tokens, sum);
            else q4_pair(both, g / 2, scale, offset, x, first + g, tokens, sum);
        }
    }
    for (int t = 0; t < tokens; t++) sums[t] = add_lanes(sum[t]);
}

#define DEFINE_NIBBLE_ROWS(NAME, TYPE)                                                                                                \
    NP_INLINE NP_AVX2 void NAME##_row(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead, const uint8_t *activation, \
                                      size_t stride, const int tokens, float *sums) {                                                 \
        nibble_row(TYPE, quants, scales, n, ahead, activation, stride, tokens, sums);                                                 \
    }                                                                                                                                 \
    NP_DEFINE_DOT_ROWS(NP_AVX2, np_avx2_dot_##NAME, NAME##_row)

NP_DEFINE_DOT_ROWS(NP_AVX2, np_avx2_dot_f16, f16_row)
NP_DEFINE_DOT_ROWS(NP_AVX2, np_avx2_dot_q8, q8_row)
DEFINE_NIBBLE_ROWS(q4, NP_Q4)
DEFINE_NIBBLE_ROWS(q3, NP_Q3)
DEFINE_NIBBLE_ROWS(iq4, NP_IQ4)
DEFINE_NIBBLE_ROWS(mxfp4, NP_MXFP4)
#endif

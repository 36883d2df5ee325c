/* AVX-512 with VNNI: dot products of rows. */
#include "kernels/activation.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* One step: 16 weights with 16 floats of each token, into accumulator `lane` of four, so that four sums are under way. */
NP_INLINE NP_AVX512 void f16_step(__m512 w, __mmask16 mask, size_t j, int lane, const uint8_t *activation, size_t stride,
                                  const int tokens, __m512 sum[NP_TOKEN_BLOCK][4]) {
    for (int t = 0; t < tokens; t++) {
        const float *x = (const float *)(const void *)(activation + t * stride);
        sum[t][lane] = _mm512_fmadd_ps(w, _mm512_maskz_loadu_ps(mask, x + j), sum[t][lane]);
    }
}

NP_INLINE NP_AVX512 void f16_row(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead,
                                 const uint8_t *activation, size_t stride, const int tokens, float *sums) {
    const uint16_t *w = (const uint16_t *)(const void *)quants;
    __m512 sum[NP_TOKEN_BLOCK][4];
    for (int t = 0; t < tokens; t++)
        for (int lane = 0; lane < 4; lane++) sum[t][lane] = _mm512_setzero_ps();
    size_t j = 0;
    for (; j + 64 <= n; j += 64)
        for (int lane = 0; lane < 4; lane++) {
            if (lane % 2 == 0) _mm_prefetch((const void *)(quants + 2 * j + 32 * lane + ahead), _MM_HINT_T0);
            const __m512 weights = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(w + j + 16 * lane)));
            f16_step(weights, 0xffff, j + 16 * lane, lane, activation, stride, tokens, sum);
        }
    for (; j < n; j += 16) {
        const __mmask16 mask = n - j < 16 ? (__mmask16)((1u << (n - j)) - 1) : 0xffff;
        f16_step(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, w + j)), mask, j, 0, activation, stride, tokens, sum);
    }
    for (int t = 0; t < tokens; t++)
        sums[t] = _mm512_reduce_add_ps(
            _mm512_add_ps(_mm512_add_ps(sum[t][0], sum[t][1]), _mm512_add_ps(sum[t][2], sum[t][3])));
}

/* Scales of 16 groups, fewer at a row's end: weights' fp16 times activation's float32. */
NP_INLINE NP_AVX512 __m512 group_scales(const uint16_t *scales, size_t count) {
    const __mmask16 mask = count < 16 ? (__mmask16)((1u << count) - 1) : 0xffff;
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scales));
}

/* 64 weights of two groups: lanes 0-7 belong to the first. dpbusd wants one side unsigned: the weights' magnitudes, their signs
 * given to the activation (which has no -128 that could not be negated). Integers are exact here; only the scaled sums round. */
NP_INLINE NP_AVX512 void q8_pair(__m512i w, size_t pair, __m512 *scale, const np_activation *x, size_t group,
                                 const int tokens, __m512 *sum) {
    const __m512i zero = _mm512_setzero_si512();
    const __m512i which =
        _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), _mm512_set1_epi32(2 * (int)pair));
    const __m512i magnitude = _mm512_abs_epi8(w);
    const __mmask64 negative = _mm512_movepi8_mask(w);
    for (int t = 0; t < tokens; t++) {
        const __m512i quants = _mm512_loadu_si512(x[t].quants + group * NP_GROUP);
        const __m512i dot = _mm512_dpbusd_epi32(zero, magnitude, _mm512_mask_sub_epi8(quants, negative, zero, quants));
        sum[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(which, scale[t]), sum[t]);
    }
}

NP_INLINE NP_AVX512 void q8_row(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead,
                                const uint8_t *activation, size_t stride, const int tokens, float *sums) {
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    const size_t groups = n / NP_GROUP;
    np_activation x[NP_TOKEN_BLOCK];
    __m512 sum[NP_TOKEN_BLOCK], scale[NP_TOKEN_BLOCK];
    for (int t = 0; t < tokens; t++) {
        x[t] = np_activation_at(activation + t * stride, n);
        sum[t] = _mm512_setzero_ps();
    }
    for (size_t g = 0; g < groups; g += 16) {
        const size_t count = groups - g < 16 ? groups - g : 16;
        const __m512 weight_scale = group_scales(s + g, count);
        for (int t = 0; t < tokens; t++) scale[t] = _mm512_mul_ps(weight_scale, _mm512_loadu_ps(x[t].scales + g));
        const uint8_t *w = quants + g * NP_GROUP;
        for (size_t pair = 0; pair < count / 2; pair++) {
            _mm_prefetch((const void *)(w + 64 * pair + ahead), _MM_HINT_T0);
            q8_pair(_mm512_loadu_si512(w + 64 * pair), pair, scale, x, g + 2 * pair, tokens, sum);
        }
        if (count % 2) {
            const __m512i half = _mm512_maskz_loadu_epi8(0xffffffff, w + 32 * (count - 1));
            q8_pair(half, count / 2, scale, x, g + count - 1, tokens, sum);
        }
    }
    for (int t = 0; t < tokens; t++) sums[t] = _mm512_reduce_add_ps(sum[t]);
}

/* 128 weights of four groups: lanes 0-3 belong to the first. Nibbles are taken as 0..15; the 8 to subtract from each is 8 times
 * the group's sum of activations, put into the group's first lane before the products. */
NP_INLINE NP_AVX512 void q4_four(__m512i w, size_t four, __m512 *scale, __m512i *offset, const np_activation *x, size_t group,
                                 const int tokens, __m512 *sum) {
    const __m512i which =
        _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_set1_epi32(4 * (int)four));
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i low = _mm512_and_si512(w, nibble), high = _mm512_and_si512(_mm512_srli_epi16(w, 4), nibble);
    for (int t = 0; t < tokens; t++) {
        const int8_t *quants = x[t].quants + group * NP_GROUP;
        __m512i dot = _mm512_maskz_permutexvar_epi32(0x1111, which, offset[t]);
        dot = _mm512_dpbusd_epi32(dot, low, _mm512_loadu_si512(quants));
        dot = _mm512_dpbusd_epi32(dot, high, _mm512_loadu_si512(quants + 64));
        sum[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(which, scale[t]), sum[t]);
    }
}

NP_INLINE NP_AVX512 void q4_row(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead,
                                const uint8_t *activation, size_t stride, const int tokens, float *sums) {
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    const size_t groups = n / NP_GROUP;
    np_activation x[NP_TOKEN_BLOCK];
    __m512 sum[NP_TOKEN_BLOCK], scale[NP_TOKEN_BLOCK];
    __m512i offset[NP_TOKEN_BLOCK];
    for (int t = 0; t < tokens; t++) {
        x[t] = np_activation_at(activation + t * stride, n);
        sum[t] = _mm512_setzero_ps();
    }
    for (size_t g = 0; g < groups; g += 16) {
        const size_t count = groups - g < 16 ? groups - g : 16;
        const __m512 weight_scale = group_scales(s + g, count);
        for (int t = 0; t < tokens; t++) {
            scale[t] = _mm512_mul_ps(weight_scale, _mm512_loadu_ps(x[t].scales + g));
            offset[t] = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(x[t].sums + g)), 3);
        }
        const uint8_t *w = quants + g * 16;
        for (size_t four = 0; four < count / 4; four++) {
            _mm_prefetch((const void *)(w + 64 * four + ahead), _MM_HINT_T0);
            q4_four(_mm512_loadu_si512(w + 64 * four), four, scale, offset, x, g + 4 * four, tokens, sum);
        }
        if (count % 4) {
            const size_t done = count / 4 * 4;
            const __m512i rest = _mm512_maskz_loadu_epi8(((__mmask64)1 << 16 * (count - done)) - 1, w + 16 * done);
            q4_four(rest, count / 4, scale, offset, x, g + done, tokens, sum);
        }
    }
    for (int t = 0; t < tokens; t++) sums[t] = _mm512_reduce_add_ps(sum[t]);
}

NP_DEFINE_DOT_ROWS(NP_AVX512, np_avx512_dot_f16, f16_row)
NP_DEFINE_DOT_ROWS(NP_AVX512, np_avx512_dot_q8, q8_row)
NP_DEFINE_DOT_ROWS(NP_AVX512, np_avx512_dot_q4, q4_row)
#endif

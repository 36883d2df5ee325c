/* AVX-512 with VNNI: everything but the dot products, and the table. */
#include "kernels/activation.h"
#include "kernels/exponential.h"

#if defined(__x86_64__)
#include <immintrin.h>

NP_INLINE NP_AVX512 __mmask16 first_lanes(size_t count) { return count < 16 ? (__mmask16)((1u << count) - 1) : 0xffff; }

NP_INLINE NP_AVX512 void add_row_f16(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {
    const uint16_t *w = (const uint16_t *)(const void *)quants;
    const __m512 factor = _mm512_set1_ps(a);
    size_t j = 0;
    for (; j + 16 <= n; j += 16) {
        const __m512 weights = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(w + j)));
        _mm512_storeu_ps(y + j, _mm512_fmadd_ps(factor, weights, _mm512_loadu_ps(y + j)));
    }
    if (j < n) {
        const __mmask16 mask = first_lanes(n - j);
        const __m512 weights = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, w + j));
        _mm512_mask_storeu_ps(y + j, mask, _mm512_fmadd_ps(factor, weights, _mm512_maskz_loadu_ps(mask, y + j)));
    }
}

/* a * scale of 16 groups, fewer at a row's end. Through memory, because a broadcast from memory costs no arithmetic port. */
NP_INLINE NP_AVX512 void factors(const uint8_t *scales, size_t group, size_t groups, float a, float out[16]) {
    const uint16_t *s = (const uint16_t *)(const void *)scales + group;
    const __m512 all = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(groups - group), s));
    _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_set1_ps(a), all));
}

NP_INLINE NP_AVX512 void add_row_q8(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {
    const size_t groups = n / NP_GROUP;
    float factor[16];
    for (size_t g = 0; g < groups; g++, y += NP_GROUP, quants += NP_GROUP) {
        if (g % 16 == 0) factors(scales, g, groups, a, factor);
        const __m512 f = _mm512_set1_ps(factor[g % 16]);
        const __m512i w0 = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)quants));
        const __m512i w1 = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(quants + 16)));
        _mm512_storeu_ps(y, _mm512_fmadd_ps(f, _mm512_cvtepi32_ps(w0), _mm512_loadu_ps(y)));
        _mm512_storeu_ps(y + 16, _mm512_fmadd_ps(f, _mm512_cvtepi32_ps(w1), _mm512_loadu_ps(y + 16)));
    }
}

/* So few bytes hold so much work that the processor alone does not run far enough ahead in memory. Never past the row: the next
 * one may be a neuron that does not fire. */
enum { AHEAD_BYTES = 512 };

NP_INLINE NP_AVX512 void add_row_q4(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {
    /* A permute looks the nibble's value up in a register and reads the index's low four bits only: no masking. */
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const size_t groups = n / NP_GROUP;
    float factor[16];
    for (size_t g = 0; g < groups; g++, y += NP_GROUP, quants += 16) {
        if (g % 16 == 0) factors(scales, g, groups, a, factor);
        if (g % 4 == 0 && (groups - g) * 16 > AHEAD_BYTES) np_prefetch(quants, AHEAD_BYTES);
        const __m512 f = _mm512_set1_ps(factor[g % 16]);
        const __m512i pair = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)quants));
        const __m512 low = _mm512_permutexvar_ps(pair, values);
        const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(pair, 4), values);
        _mm512_storeu_ps(y, _mm512_fmadd_ps(f, low, _mm512_loadu_ps(y)));
        _mm512_storeu_ps(y + 16, _mm512_fmadd_ps(f, high, _mm512_loadu_ps(y + 16)));
    }
}

static NP_DEFINE_ADD_ROWS(NP_AVX512, add_f16, add_row_f16)
static NP_DEFINE_ADD_ROWS(NP_AVX512, add_q8, add_row_q8)
static NP_DEFINE_ADD_ROWS(NP_AVX512, add_q4, add_row_q4)

static NP_AVX512 void prepare(int type, const float *x, size_t n, uint8_t *activation) {
    np_prepare_body(type, x, n, activation);
}

static NP_AVX512 float softmax_weights(float *scores, size_t count) { return np_softmax_body(scores, count); }

static NP_AVX512 void f32_to_f16(const float *x, size_t n, uint16_t *out) {
    for (size_t j = 0; j < n; j += 16) {
        const __mmask16 mask = first_lanes(n - j);
        const __m256i half = _mm512_cvtps_ph(_mm512_maskz_loadu_ps(mask, x + j), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_mask_storeu_epi16(out + j, mask, half);
    }
}

static NP_AVX512 void f16_to_f32(const uint16_t *x, size_t n, float *out) {
    for (size_t j = 0; j < n; j += 16) {
        const __mmask16 mask = first_lanes(n - j);
        _mm512_mask_storeu_ps(out + j, mask, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, x + j)));
    }
}

static int runs_here(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && np_isa_avx2.runs_here();
}

const np_isa np_isa_avx512 = {
    "avx512",
    runs_here,
    {np_avx512_dot_f16, np_avx512_dot_q8, np_avx512_dot_q4},
    {add_f16, add_q8, add_q4},
    prepare,
    softmax_weights,
    f32_to_f16,
    f16_to_f32,
};
#endif

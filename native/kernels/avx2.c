/* AVX2 with FMA and F16C: all kernels but the dot products, and the table. */
#include "kernels/activate.h"
#include "kernels/activation.h"
#include "kernels/exponential.h"
#include "kernels/float_rows.h"
#include "kernels/gguf_rows.h"
#include "kernels/narrow.h"
#include "kernels/recurrence.h"
#include "kernels/rope.h"
#include "kernels/sum.h"

#if defined(__x86_64__)
#include <immintrin.h>

NP_INLINE NP_AVX2 void add_row_f16(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {
    const uint16_t *w = (const uint16_t *)(const void *)quants;
    const __m256 factor = _mm256_set1_ps(a);
    size_t j = 0;
    for (; j + 8 <= n; j += 8) {
        const __m256 weights = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(w + j)));
        _mm256_storeu_ps(y + j, _mm256_fmadd_ps(factor, weights, _mm256_loadu_ps(y + j)));
    }
    for (; j < n; j++) y[j] = __builtin_fmaf(a, np_half_to_float(w[j]), y[j]); /* rounds once, like the body */
}

/* Software prefetch: with so much work per byte the hardware prefetcher does not run far enough ahead. */
enum { AHEAD_BYTES = 512 };

NP_INLINE NP_AVX2 void add_row_q8(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    for (size_t g = 0; g < n / NP_GROUP; g++) {
        if (n - g * NP_GROUP > AHEAD_BYTES) np_prefetch(quants + g * NP_GROUP, AHEAD_BYTES);
        const __m256 factor = _mm256_set1_ps(a * _cvtsh_ss(s[g]));
        for (size_t j = g * NP_GROUP; j < (g + 1) * NP_GROUP; j += 8) {
            const __m256 w = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(quants + j))));
            _mm256_storeu_ps(y + j, _mm256_fmadd_ps(factor, w, _mm256_loadu_ps(y + j)));
        }
    }
}

NP_INLINE NP_AVX2 void add_nibble_row(const int type, const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    const __m128i nibble = _mm_set1_epi8(15);
    for (size_t g = 0; g < n / NP_GROUP; g++, y += NP_GROUP) {
        if (n / 2 - g * 16 > AHEAD_BYTES) np_prefetch(quants + g * 16, AHEAD_BYTES);
        const __m256 factor = _mm256_set1_ps(a * _cvtsh_ss(s[g]));
        const __m128i packed = _mm_loadu_si128((const void *)(quants + g * 16));
        const __m128i low = np_nibble_values(type, _mm_and_si128(packed, nibble));
        const __m128i high = np_nibble_values(type, _mm_and_si128(_mm_srli_epi16(packed, 4), nibble));
        const __m128i eights[4] = {low, _mm_unpackhi_epi64(low, low), high, _mm_unpackhi_epi64(high, high)};
        for (int k = 0; k < 4; k++) {
            const __m256 w = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eights[k]));
            _mm256_storeu_ps(y + 8 * k, _mm256_fmadd_ps(factor, w, _mm256_loadu_ps(y + 8 * k)));
        }
    }
}

static NP_DEFINE_ADD_ROWS(NP_AVX2, add_f16, add_row_f16)

/* Rows added to eight times `vectors` columns of four tokens, which stay in registers: a row is converted once. */
NP_INLINE NP_AVX2 void add_f16_to_four(const np_rows *rows, const float *a, size_t a_stride, size_t j, const int vectors, float *y, size_t y_stride) {
    __m256 sum[4][2];
    for (int t = 0; t < 4; t++)
        for (int k = 0; k < vectors; k++) sum[t][k] = _mm256_loadu_ps(y + (size_t)t * y_stride + j + 8 * k);
    for (size_t r = 0; r < rows->rows; r++) {
        const uint8_t *w = np_row_at(rows, r).quants + 2 * j;
        __m256 row[2];
        for (int k = 0; k < vectors; k++) row[k] = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(w + 16 * k)));
        for (int t = 0; t < 4; t++) {
            const __m256 factor = _mm256_set1_ps(a[(size_t)t * a_stride + r]);
            for (int k = 0; k < vectors; k++) sum[t][k] = _mm256_fmadd_ps(factor, row[k], sum[t][k]);
        }
    }
    for (int t = 0; t < 4; t++)
        for (int k = 0; k < vectors; k++) _mm256_storeu_ps(y + (size_t)t * y_stride + j + 8 * k, sum[t][k]);
}

static NP_DEFINE_ADD_F16_FOR_TOKENS(NP_AVX2, add_for_tokens, add_f16_to_four, add_f16)
static NP_DEFINE_ADD_ROWS(NP_AVX2, add_q8, add_row_q8)

#define DEFINE_ADD_NIBBLES(NAME, TYPE)                                                                                        \
    NP_INLINE NP_AVX2 void NAME##_row(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {            \
        add_nibble_row(TYPE, quants, scales, n, a, y);                                                                        \
    }                                                                                                                         \
    static NP_DEFINE_ADD_ROWS(NP_AVX2, NAME, NAME##_row)

DEFINE_ADD_NIBBLES(add_q4, NP_Q4)
DEFINE_ADD_NIBBLES(add_iq4, NP_IQ4)
DEFINE_ADD_NIBBLES(add_mxfp4, NP_MXFP4)

static NP_AVX2 void prepare(int type, const float *x, size_t n, uint8_t *activation) {
    np_prepare_body(type, x, n, activation);
}

static NP_AVX2 float softmax_weights(float *scores, size_t count) { return np_softmax_body(scores, count); }

static NP_AVX2 void sum_tree(const float *rows, size_t summed, size_t count, size_t stride, size_t n, float *out) {
    np_sum_tree_body(rows, summed, count, stride, n, out);
}

static NP_AVX2 void rope(float *head, size_t width, const float *inverse_frequency, int32_t position) {
    np_rope_body(head, width, inverse_frequency, position);
}

static NP_AVX2 void remember(const np_memory_job *job) {
    np_remember_body(job);
}

NP_DEFINE_DOT_FLOATS(NP_AVX2, dot_floats, 32, 4)

static NP_AVX2 void convolve(const np_convolution_job *job) {
    np_convolve_body(job);
}

static NP_AVX2 void keep(const float *rates, const float *biases, float decay, size_t n, float *kept) {
    np_keep_body(rates, biases, decay, n, kept);
}

static NP_AVX2 void activate(int activation, float limit, const float *gates, const float *ups, size_t n, float *values) {
    np_activate_body(activation, limit, gates, ups, n, values);
}

static NP_AVX2 void f32_to_f16(const float *x, size_t n, uint16_t *out) {
    size_t j = 0;
    for (; j + 8 <= n; j += 8) {
        const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(x + j), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((void *)(out + j), half);
    }
    for (; j < n; j++) out[j] = np_float_to_half(x[j]);
}

static NP_AVX2 void f16_to_f32(const uint16_t *x, size_t n, float *out) {
    size_t j = 0;
    for (; j + 8 <= n; j += 8) _mm256_storeu_ps(out + j, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(x + j))));
    for (; j < n; j++) out[j] = np_half_to_float(x[j]);
}

/* A quarter of a group: the lower or the upper eight bytes of a half. */
NP_INLINE NP_AVX2 __m256 quants_of(int type, const uint8_t *quants, int quarter) {
    const __m128i half = np_half_group(type, quants, quarter / 2);
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(quarter % 2 ? _mm_srli_si128(half, 8) : half));
}

NP_INLINE NP_AVX2 float largest_of_row(int type, const uint8_t *quants, const uint16_t *scales, size_t groups) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 most = _mm256_setzero_ps();
    for (size_t g = 0; g < groups; g++, quants += np_group_bytes(type)) {
        const __m256 scale = _mm256_set1_ps(_cvtsh_ss(scales[g]));
        for (int quarter = 0; quarter < 4; quarter++)
            most = _mm256_max_ps(most, _mm256_andnot_ps(sign, _mm256_mul_ps(quants_of(type, quants, quarter), scale)));
    }
    float lanes[8], largest = 0.0f;
    _mm256_storeu_ps(lanes, most);
    for (int lane = 0; lane < 8; lane++) largest = lanes[lane] > largest ? lanes[lane] : largest;
    return largest;
}

NP_INLINE NP_AVX2 __m256i rounded(int type, const uint8_t *quants, int quarter, __m256 factor) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(quants_of(type, quants, quarter), factor));
}

NP_INLINE NP_AVX2 void round_group(int type, const uint8_t *quants, float factor, int8_t *out) {
    const __m256 factors = _mm256_set1_ps(factor);
    const __m256i first = _mm256_packs_epi32(rounded(type, quants, 0, factors), rounded(type, quants, 1, factors));
    const __m256i second = _mm256_packs_epi32(rounded(type, quants, 2, factors), rounded(type, quants, 3, factors));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing goes by halves of the register */
    _mm256_storeu_si256((__m256i *)(void *)out, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order));
}

static NP_DEFINE_NARROW(NP_AVX2, narrow, largest_of_row, round_group)
static NP_DEFINE_RECODE(NP_AVX2, recode, np_look_up_ssse3)

static int runs_here(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

const np_isa np_isa_avx2 = {
    "avx2",
    runs_here,
    {np_avx2_dot_f16, np_avx2_dot_q8, np_avx2_dot_q4, np_avx2_dot_q3, np_avx2_dot_q4k, np_avx2_dot_q5k, np_avx2_dot_q6k, np_avx2_dot_iq4,
     np_avx2_dot_mxfp4, np_avx2_dot_q4h, np_avx2_dot_q5h},
    {add_f16, add_q8, add_q4, NULL, np_avx2_add_q4k, np_avx2_add_q5k, np_avx2_add_q6k, add_iq4, add_mxfp4,
     np_avx2_add_q4h, np_avx2_add_q5h},
    prepare,
    softmax_weights,
    f32_to_f16,
    f16_to_f32,
    sum_tree,
    rope,
    remember,
    convolve,
    dot_floats,
    keep,
    activate,
    narrow,
    recode,
    NULL,
    add_for_tokens,
    np_avx2_scores,
    np_avx2_mix,
};
#endif

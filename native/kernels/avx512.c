/* AVX-512 with VNNI: the table, and all kernels but dot products and added rows. AMX differs only in the panel. */
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

NP_INLINE NP_AVX512 __mmask16 first_lanes(size_t count) { return count < 16 ? (__mmask16)((1u << count) - 1) : 0xffff; }

static NP_AVX512 void prepare(int type, const float *x, size_t n, uint8_t *activation) {
    np_prepare_body(type, x, n, activation);
}

static NP_AVX512 float softmax_weights(float *scores, size_t count) { return np_softmax_body(scores, count); }

static NP_AVX512 void sum_tree(const float *rows, size_t summed, size_t count, size_t stride, size_t n, float *out) {
    np_sum_tree_body(rows, summed, count, stride, n, out);
}

static NP_AVX512 void rope(float *head, size_t width, const float *inverse_frequency, int32_t position) {
    np_rope_body(head, width, inverse_frequency, position);
}

static NP_AVX512 void remember(const np_memory_job *job) {
    np_remember_body(job);
}

NP_DEFINE_DOT_FLOATS(NP_AVX512, dot_floats, 64, 4)

static NP_AVX512 void convolve(const np_convolution_job *job) {
    np_convolve_body(job);
}

static NP_AVX512 void keep(const float *rates, const float *biases, float decay, size_t n, float *kept) {
    np_keep_body(rates, biases, decay, n, kept);
}

static NP_AVX512 void activate(int activation, float limit, const float *gates, const float *ups, size_t n, float *values) {
    np_activate_body(activation, limit, gates, ups, n, values);
}

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

NP_INLINE NP_AVX512 __m512 quants_of(int type, const uint8_t *quants, int half) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(np_half_group(type, quants, half)));
}

NP_INLINE NP_AVX512 float largest_of_row(int type, const uint8_t *quants, const uint16_t *scales, size_t groups) {
    __m512 most = _mm512_setzero_ps();
    for (size_t g = 0; g < groups; g++, quants += np_group_bytes(type)) {
        const __m512 scale = _mm512_set1_ps(_cvtsh_ss(scales[g]));
        for (int half = 0; half < 2; half++)
            most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_mul_ps(quants_of(type, quants, half), scale)));
    }
    return _mm512_reduce_max_ps(most);
}

NP_INLINE NP_AVX512 void round_group(int type, const uint8_t *quants, float factor, int8_t *out) {
    for (int half = 0; half < 2; half++) {
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(quants_of(type, quants, half), _mm512_set1_ps(factor)));
        _mm_storeu_si128((__m128i *)(void *)(out + half * 16), _mm512_cvtepi32_epi8(rounded));
    }
}

static NP_DEFINE_NARROW(NP_AVX512, narrow, largest_of_row, round_group)
static NP_DEFINE_RECODE(NP_AVX512, recode, np_look_up_ssse3)

static int runs_here(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && np_isa_avx2.runs_here();
}

static int runs_with_amx(void) { return !np_isa_amx_lacks(); }

#define TABLE(NAME, RUNS_HERE, PANEL)                             \
    {NAME,                                                        \
     RUNS_HERE,                                                   \
     {np_avx512_dot_f16, np_avx512_dot_q8, np_avx512_dot_q4, np_avx512_dot_q3, \
      np_avx512_dot_q4k, np_avx512_dot_q5k, np_avx512_dot_q6k, np_avx512_dot_iq4, np_avx512_dot_mxfp4, \
      np_avx512_dot_q4h, np_avx512_dot_q5h}, \
     {np_avx512_add_f16, np_avx512_add_q8, np_avx512_add_q4, NULL, np_avx512_add_q4k, np_avx512_add_q5k, np_avx512_add_q6k, \
      np_avx512_add_iq4, np_avx512_add_mxfp4, np_avx512_add_q4h, np_avx512_add_q5h}, \
     prepare,                                                     \
     softmax_weights,                                             \
     f32_to_f16,                                                  \
     f16_to_f32,                                                  \
     sum_tree,                                                    \
     rope,                                                        \
     remember,                                                    \
     convolve,                                                    \
     dot_floats,                                                  \
     keep,                                                        \
     activate,                                                    \
     narrow,                                                      \
     recode,                                                      \
     PANEL,                                                       \
     np_avx512_add_for_tokens,                                    \
     np_avx512_scores,                                            \
     np_avx512_mix}

const np_isa np_isa_avx512 = TABLE("avx512", runs_here, &np_avx512_panel);
const np_isa np_isa_amx = TABLE("amx", runs_with_amx, &np_amx_panel); /* if amx.c allows it */
#endif

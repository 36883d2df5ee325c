/* NEON: all kernels but the dot products, and the tables of both NEON instruction sets. */
#include "kernels/activate.h"
#include "kernels/activation.h"
#include "kernels/exponential.h"
#include "kernels/float_rows.h"
#include "kernels/gguf_rows.h"
#include "kernels/narrow.h"
#include "kernels/recurrence.h"
#include "kernels/rope.h"
#include "kernels/sum.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>

NP_INLINE void add_row_f16(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {
    const uint16_t *w = (const uint16_t *)(const void *)quants;
    size_t j = 0;
    for (; j + 8 <= n; j += 8) {
        const float16x8_t packed = vreinterpretq_f16_u16(vld1q_u16(w + j));
        vst1q_f32(y + j, vfmaq_n_f32(vld1q_f32(y + j), vcvt_f32_f16(vget_low_f16(packed)), a));
        vst1q_f32(y + j + 4, vfmaq_n_f32(vld1q_f32(y + j + 4), vcvt_high_f32_f16(packed), a));
    }
    for (; j < n; j++) y[j] = __builtin_fmaf(a, np_half_to_float(w[j]), y[j]); /* rounds once, like the body */
}

/* y[0..15] += factor * w. */
NP_INLINE void add_16(int8x16_t w, float factor, float *y) {
    const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(w)), vmovl_high_s8(w)};
    for (int k = 0; k < 2; k++, y += 8) {
        const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves[k])));
        const float32x4_t high = vcvtq_f32_s32(vmovl_high_s16(halves[k]));
        vst1q_f32(y, vfmaq_n_f32(vld1q_f32(y), low, factor));
        vst1q_f32(y + 4, vfmaq_n_f32(vld1q_f32(y + 4), high, factor));
    }
}

NP_INLINE void add_row_q8(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    for (size_t g = 0; g < n / NP_GROUP; g++, quants += NP_GROUP, y += NP_GROUP) {
        const float factor = a * np_half_to_float(s[g]);
        add_16(vld1q_s8((const int8_t *)quants), factor, y);
        add_16(vld1q_s8((const int8_t *)quants + 16), factor, y + 16);
    }
}

NP_INLINE void add_nibble_row(const int type, const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    for (size_t g = 0; g < n / NP_GROUP; g++, quants += 16, y += NP_GROUP) {
        const float factor = a * np_half_to_float(s[g]);
        const uint8x16_t packed = vld1q_u8(quants);
        add_16(np_neon_values(type, vandq_u8(packed, vdupq_n_u8(15))), factor, y);
        add_16(np_neon_values(type, vshrq_n_u8(packed, 4)), factor, y + 16);
    }
}

static NP_DEFINE_ADD_ROWS(, add_f16, add_row_f16)

/* Rows added to eight times `pairs` columns of four tokens, which stay in registers: a row is converted once. */
NP_INLINE void add_f16_to_four(const np_rows *rows, const float *a, size_t a_stride, size_t j, const int pairs, float *y, size_t y_stride) {
    float32x4_t sum[4][4];
    for (int t = 0; t < 4; t++)
        for (int k = 0; k < 2 * pairs; k++) sum[t][k] = vld1q_f32(y + (size_t)t * y_stride + j + 4 * k);
    for (size_t r = 0; r < rows->rows; r++) {
        const uint16_t *w = (const uint16_t *)(const void *)np_row_at(rows, r).quants + j;
        float32x4_t row[4];
        for (int k = 0; k < pairs; k++) {
            const float16x8_t packed = vreinterpretq_f16_u16(vld1q_u16(w + 8 * k));
            row[2 * k] = vcvt_f32_f16(vget_low_f16(packed));
            row[2 * k + 1] = vcvt_high_f32_f16(packed);
        }
        for (int t = 0; t < 4; t++)
            for (int k = 0; k < 2 * pairs; k++) sum[t][k] = vfmaq_n_f32(sum[t][k], row[k], a[(size_t)t * a_stride + r]);
    }
    for (int t = 0; t < 4; t++)
        for (int k = 0; k < 2 * pairs; k++) vst1q_f32(y + (size_t)t * y_stride + j + 4 * k, sum[t][k]);
}

static NP_DEFINE_ADD_F16_FOR_TOKENS(, add_for_tokens, add_f16_to_four, add_f16)
static NP_DEFINE_ADD_ROWS(, add_q8, add_row_q8)

#define DEFINE_ADD_NIBBLES(NAME, TYPE)                                                                           \
    NP_INLINE void NAME##_row(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {       \
        add_nibble_row(TYPE, quants, scales, n, a, y);                                                           \
    }                                                                                                            \
    static NP_DEFINE_ADD_ROWS(, NAME, NAME##_row)

DEFINE_ADD_NIBBLES(add_q4, NP_Q4)
DEFINE_ADD_NIBBLES(add_iq4, NP_IQ4)
DEFINE_ADD_NIBBLES(add_mxfp4, NP_MXFP4)

static void prepare(int type, const float *x, size_t n, uint8_t *activation) { np_prepare_body(type, x, n, activation); }

static float softmax_weights(float *scores, size_t count) { return np_softmax_body(scores, count); }

static void sum_tree(const float *rows, size_t summed, size_t count, size_t stride, size_t n, float *out) {
    np_sum_tree_body(rows, summed, count, stride, n, out);
}

static void rope(float *head, size_t width, const float *inverse_frequency, int32_t position) {
    np_rope_body(head, width, inverse_frequency, position);
}

static void remember(const np_memory_job *job) {
    np_remember_body(job);
}

NP_DEFINE_DOT_FLOATS(, dot_floats, 16, 4)

static void convolve(const np_convolution_job *job) {
    np_convolve_body(job);
}

static void keep(const float *rates, const float *biases, float decay, size_t n, float *kept) {
    np_keep_body(rates, biases, decay, n, kept);
}

static void activate(int activation, float limit, const float *gates, const float *ups, size_t n, float *values) {
    np_activate_body(activation, limit, gates, ups, n, values);
}

static void f32_to_f16(const float *x, size_t n, uint16_t *out) {
    size_t j = 0;
    for (; j + 4 <= n; j += 4) vst1_u16(out + j, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x + j))));
    for (; j < n; j++) out[j] = np_float_to_half(x[j]);
}

static void f16_to_f32(const uint16_t *x, size_t n, float *out) {
    size_t j = 0;
    for (; j + 4 <= n; j += 4) vst1q_f32(out + j, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + j))));
    for (; j < n; j++) out[j] = np_half_to_float(x[j]);
}

NP_INLINE int8x16_t half_group(int type, const uint8_t *quants, int half) {
    if (type == NP_Q8) return vld1q_s8((const int8_t *)quants + half * 16);
    uint8x16_t both;
    if (type == NP_Q3) {
        const np_q4_group group = np_q4_of_q3(quants);
        both = vreinterpretq_u8_u64(vld1q_u64(group.words));
    } else {
        both = vld1q_u8(quants);
    }
    return np_neon_values(type, half ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15)));
}

/* Convert sixteen bytes to floats and multiply them by a factor. */
NP_INLINE float32x4x4_t times(int8x16_t bytes, float factor) {
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return (float32x4x4_t){{vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), factor),
                            vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))), factor),
                            vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), factor),
                            vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))), factor)}};
}

NP_INLINE float largest_of_row(int type, const uint8_t *quants, const uint16_t *scales, size_t groups) {
    float32x4_t most = vdupq_n_f32(0.0f);
    for (size_t g = 0; g < groups; g++, quants += np_group_bytes(type))
        for (int half = 0; half < 2; half++) {
            const float32x4x4_t values = times(half_group(type, quants, half), np_half_to_float(scales[g]));
            for (int i = 0; i < 4; i++) most = vmaxq_f32(most, vabsq_f32(values.val[i]));
        }
    return vmaxvq_f32(most);
}

NP_INLINE int16x8_t rounded(float32x4_t low, float32x4_t high) {
    return vcombine_s16(vmovn_s32(vcvtnq_s32_f32(low)), vmovn_s32(vcvtnq_s32_f32(high)));
}

NP_INLINE void round_group(int type, const uint8_t *quants, float factor, int8_t *out) {
    for (int half = 0; half < 2; half++) {
        const float32x4x4_t x = times(half_group(type, quants, half), factor);
        vst1q_s8(out + half * 16, vcombine_s8(vmovn_s16(rounded(x.val[0], x.val[1])), vmovn_s16(rounded(x.val[2], x.val[3]))));
    }
}

static NP_DEFINE_NARROW(, narrow, largest_of_row, round_group)
static NP_DEFINE_RECODE(, recode, np_look_up_neon)

static int neon_runs_here(void) { return 1; } /* part of every 64-bit Arm processor */

#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
static int dotprod_runs_here(void) { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

const np_isa np_isa_neon = {
    "neon",
    neon_runs_here,
    {np_neon_dot_f16, np_neon_dot_q8, np_neon_dot_q4, np_neon_dot_q3, np_neon_dot_q4k, np_neon_dot_q5k, np_neon_dot_q6k, np_neon_dot_iq4,
     np_neon_dot_mxfp4, np_neon_dot_q4h, np_neon_dot_q5h},
    {add_f16, add_q8, add_q4, NULL, np_neon_add_q4k, np_neon_add_q5k, np_neon_add_q6k, add_iq4, add_mxfp4,
     np_neon_add_q4h, np_neon_add_q5h},
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
    np_neon_scores,
    np_neon_mix,
};

const np_isa np_isa_dotprod = {
    "dotprod",
    dotprod_runs_here,
    {np_neon_dot_f16, np_dotprod_dot_q8, np_dotprod_dot_q4, np_dotprod_dot_q3, np_dotprod_dot_q4k, np_dotprod_dot_q5k, np_dotprod_dot_q6k,
     np_dotprod_dot_iq4, np_dotprod_dot_mxfp4, np_dotprod_dot_q4h, np_dotprod_dot_q5h},
    {add_f16, add_q8, add_q4, NULL, np_neon_add_q4k, np_neon_add_q5k, np_neon_add_q6k, add_iq4, add_mxfp4,
     np_neon_add_q4h, np_neon_add_q5h},
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
    np_neon_scores,
    np_neon_mix,
};
#endif

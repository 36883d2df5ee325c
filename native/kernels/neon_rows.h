/* Dot products of quantized rows with NEON, for the two ways of multiplying bytes. The including file defines
 *   TARGET                        a function attribute, may be empty
 *   multiply_add(sum, w, x)       sum + products of 16 signed bytes, in some fixed way over four int32 lanes
 *   DOT_Q8, DOT_Q4, ... (one for each type but f16)          the names of the np_dot_functions */
#include "kernels/activation.h"
#include "kernels/codebook.h"
#include "kernels/neon_minimum.h"
#include "kernels/three_bits.h"

#include <arm_neon.h>

/* The scales of four groups, fewer at a row's end. */
NP_INLINE TARGET float32x4_t group_scales(const uint16_t *scales, size_t count) {
    uint16_t rest[4] = {0};
    if (count < 4) scales = memcpy(rest, scales, 2 * count);
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(scales)));
}

/* Finds each token's activations and zeroes its sums. */
NP_INLINE TARGET void begin_sums(const uint8_t *activation, size_t stride, size_t n, const int tokens, np_activation *x,
                                 float32x4_t *sum) {
    for (int t = 0; t < tokens; t++) {
        x[t] = np_activation_at(activation + t * stride, n);
        sum[t] = vdupq_n_f32(0);
    }
}

NP_INLINE TARGET void q8_row(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead, const uint8_t *activation,
                             size_t stride, const int tokens, float *sums) {
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    const size_t groups = n / NP_GROUP;
    np_activation x[NP_TOKEN_BLOCK];
    float32x4_t sum[NP_TOKEN_BLOCK], scale[NP_TOKEN_BLOCK];
    begin_sums(activation, stride, n, tokens, x, sum);
    for (size_t first = 0; first < groups; first += 4) {
        const size_t count = groups - first < 4 ? groups - first : 4;
        const float32x4_t weight_scale = group_scales(s + first, count);
        for (int t = 0; t < tokens; t++) scale[t] = vmulq_f32(weight_scale, vld1q_f32(x[t].scales + first));
        for (size_t g = 0; g < count; g++) {
            const size_t at = (first + g) * NP_GROUP;
            const int8x16_t w0 = vld1q_s8((const int8_t *)quants + at), w1 = vld1q_s8((const int8_t *)quants + at + 16);
            np_prefetch(quants + at, ahead);
            for (int t = 0; t < tokens; t++) {
                int32x4_t dot = multiply_add(vdupq_n_s32(0), w0, vld1q_s8(x[t].quants + at));
                dot = multiply_add(dot, w1, vld1q_s8(x[t].quants + at + 16));
                sum[t] = vfmaq_n_f32(sum[t], vcvtq_f32_s32(dot), scale[t][g]);
            }
        }
    }
    for (int t = 0; t < tokens; t++) sums[t] = vaddvq_f32(sum[t]);
}

/* A group of q3 as one of q4, with codes in the nibbles' lower three bits and anything in the fourth. */
NP_INLINE TARGET uint8x16_t q3_group(const uint8_t *group) {
    static const int8_t turns[16] = {2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0, -1, -1, -1, -1};
    uint32_t thirds;
    memcpy(&thirds, group + 8, 4);
    const uint8x8_t lows = vld1_u8(group);
    const uint8x16_t low = vcombine_u8(lows, vshr_n_u8(lows, 2));
    const uint8x16_t third = vshlq_u8(vreinterpretq_u8_u32(vdupq_n_u32(thirds)), vld1q_s8(turns));
    return vbslq_u8(vdupq_n_u8(0x33), low, third);
}

/* The weights of nibbles; of q3 of its codes. */
NP_INLINE TARGET int8x16_t weights_of(const int type, uint8x16_t codes) {
    return type == NP_Q3 ? vsubq_s8(vreinterpretq_s8_u8(codes), vdupq_n_s8(4)) : np_neon_values(type, codes);
}

NP_INLINE TARGET void nibble_row(const int type, const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead,
                                 const uint8_t *activation, size_t stride, const int tokens, float *sums) {
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    const uint8x16_t nibble = vdupq_n_u8(type == NP_Q3 ? 7 : 15);
    const size_t groups = n / NP_GROUP, group_bytes = type == NP_Q3 ? NP_Q3_GROUP_BYTES : 16;
    np_activation x[NP_TOKEN_BLOCK];
    float32x4_t sum[NP_TOKEN_BLOCK], scale[NP_TOKEN_BLOCK];
    begin_sums(activation, stride, n, tokens, x, sum);
    for (size_t first = 0; first < groups; first += 4) {
        const size_t count = groups - first < 4 ? groups - first : 4;
        const float32x4_t weight_scale = group_scales(s + first, count);
        for (int t = 0; t < tokens; t++) scale[t] = vmulq_f32(weight_scale, vld1q_f32(x[t].scales + first));
        for (size_t g = 0; g < count; g++) {
            const uint8_t *w = quants + (first + g) * group_bytes;
            const uint8x16_t packed = type == NP_Q3 ? q3_group(w) : vld1q_u8(w);
            np_prefetch(w, ahead);
            const uint8x16_t upper = vshrq_n_u8(packed, 4);
            const int8x16_t low = weights_of(type, vandq_u8(packed, nibble));
            const int8x16_t high = weights_of(type, type == NP_Q3 ? vandq_u8(upper, nibble) : upper);
            const size_t at = np_q4_place(first + g);
            for (int t = 0; t < tokens; t++) {
                int32x4_t dot = multiply_add(vdupq_n_s32(0), low, vld1q_s8(x[t].quants + at));
                dot = multiply_add(dot, high, vld1q_s8(x[t].quants + at + 64));
                sum[t] = vfmaq_n_f32(sum[t], vcvtq_f32_s32(dot), scale[t][g]);
            }
        }
    }
    for (int t = 0; t < tokens; t++) sums[t] = vaddvq_f32(sum[t]);
}

/* Of four groups the minimums are subtracted first, lane i that of group i; then products are added. */
NP_INLINE TARGET void minimum_row(const int type, const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead,
                                  const uint8_t *activation, size_t stride, const int tokens, float *sums) {
    const size_t groups = n / NP_GROUP;
    np_activation x[NP_TOKEN_BLOCK];
    float32x4_t sum[NP_TOKEN_BLOCK], scale[NP_TOKEN_BLOCK];
    begin_sums(activation, stride, n, tokens, x, sum);
    for (size_t first = 0; first < groups; first += NP_FOUR) {
        const size_t count = groups - first < NP_FOUR ? groups - first : NP_FOUR;
        const np_neon_scales weight_scales = np_neon_scales_of(type, scales, first);
        const np_neon_bits bits = np_neon_bits_of(type, quants, n, first, count);
        for (size_t plane = 0; first % 32 == 0 && plane < 2 * np_high_bits(type); plane++)
            np_prefetch(quants + n / 2 + plane * (n / 16) + 2 * first, ahead);
        for (int t = 0; t < tokens; t++) {
            const float32x4_t x_scales = vld1q_f32(x[t].scales + first), x_sums = vcvtq_f32_s32(vld1q_s32(x[t].sums + first));
            scale[t] = vmulq_f32(weight_scales.scales, x_scales);
            sum[t] = vfmsq_f32(sum[t], weight_scales.minimums, vmulq_f32(x_sums, x_scales));
        }
        for (size_t g = 0; g < count; g++) {
            const uint8_t *w = quants + (first + g) * 16;
            const size_t at = np_q4_place(first + g);
            np_prefetch(w, ahead);
            const int8x16_t low = np_neon_codes(type, w, &bits, g, 0), high = np_neon_codes(type, w, &bits, g, 1);
            for (int t = 0; t < tokens; t++) {
                int32x4_t dot = multiply_add(vdupq_n_s32(0), low, vld1q_s8(x[t].quants + at));
                dot = multiply_add(dot, high, vld1q_s8(x[t].quants + at + 64));
                sum[t] = vfmaq_n_f32(sum[t], vcvtq_f32_s32(dot), scale[t][g]);
            }
        }
    }
    for (int t = 0; t < tokens; t++) sums[t] = vaddvq_f32(sum[t]);
}

#define DEFINE_ROW(NAME, ROW, TYPE)                                                                                                    \
    NP_INLINE TARGET void NAME(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead, const uint8_t *activation,        \
                               size_t stride, const int tokens, float *sums) {                                                         \
        ROW(TYPE, quants, scales, n, ahead, activation, stride, tokens, sums);                                                         \
    }
DEFINE_ROW(q4_row, nibble_row, NP_Q4)
DEFINE_ROW(q3_row, nibble_row, NP_Q3)
DEFINE_ROW(iq4_row, nibble_row, NP_IQ4)
DEFINE_ROW(mxfp4_row, nibble_row, NP_MXFP4)
DEFINE_ROW(q4k_row, minimum_row, NP_Q4K)
DEFINE_ROW(q5k_row, minimum_row, NP_Q5K)
DEFINE_ROW(q6k_row, minimum_row, NP_Q6K)
DEFINE_ROW(q4h_row, minimum_row, NP_Q4H)
DEFINE_ROW(q5h_row, minimum_row, NP_Q5H)

NP_DEFINE_DOT_ROWS(TARGET, DOT_Q8, q8_row)
NP_DEFINE_DOT_ROWS(TARGET, DOT_Q4, q4_row)
NP_DEFINE_DOT_ROWS(TARGET, DOT_Q3, q3_row)
NP_DEFINE_DOT_ROWS(TARGET, DOT_IQ4, iq4_row)
NP_DEFINE_DOT_ROWS(TARGET, DOT_MXFP4, mxfp4_row)
NP_DEFINE_DOT_ROWS(TARGET, DOT_Q4K, q4k_row)
NP_DEFINE_DOT_ROWS(TARGET, DOT_Q4H, q4h_row)
NP_DEFINE_DOT_ROWS_AHEAD(TARGET, DOT_Q5H, q5h_row, np_ahead_whole_rows)
NP_DEFINE_DOT_ROWS_AHEAD(TARGET, DOT_Q5K, q5k_row, np_ahead_whole_rows)
NP_DEFINE_DOT_ROWS_AHEAD(TARGET, DOT_Q6K, q6k_row, np_ahead_whole_rows)

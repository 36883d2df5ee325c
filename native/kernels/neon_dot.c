/* NEON: dot products of rows on any 64-bit Arm processor. */
#if defined(__aarch64__)
#define TARGET
#define DOT_Q8 np_neon_dot_q8
#define DOT_Q4 np_neon_dot_q4
#define DOT_Q3 np_neon_dot_q3
#define DOT_IQ4 np_neon_dot_iq4
#define DOT_MXFP4 np_neon_dot_mxfp4
#define DOT_Q4H np_neon_dot_q4h
#define DOT_Q5H np_neon_dot_q5h
#define DOT_Q4K np_neon_dot_q4k
#define DOT_Q5K np_neon_dot_q5k
#define DOT_Q6K np_neon_dot_q6k
#include "kernels/isa.h"

#include <arm_neon.h>

/* Two products are at most 2 * 128 * 127, which fits int16. */
NP_INLINE int32x4_t multiply_add(int32x4_t sum, int8x16_t w, int8x16_t x) {
    const int16x8_t products = vmull_s8(vget_low_s8(w), vget_low_s8(x));
    return vpadalq_s16(sum, vmlal_high_s8(products, w, x));
}

#include "kernels/neon_rows.h"

NP_INLINE void f16_row(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead, const uint8_t *activation,
                       size_t stride, const int tokens, float *sums) {
    const uint16_t *w = (const uint16_t *)(const void *)quants;
    float32x4_t even[NP_TOKEN_BLOCK], odd[NP_TOKEN_BLOCK];
    for (int t = 0; t < tokens; t++) even[t] = odd[t] = vdupq_n_f32(0);
    size_t j = 0;
    for (; j + 8 <= n; j += 8) {
        const float16x8_t packed = vreinterpretq_f16_u16(vld1q_u16(w + j));
        const float32x4_t first = vcvt_f32_f16(vget_low_f16(packed)), second = vcvt_high_f32_f16(packed);
        for (int t = 0; t < tokens; t++) {
            const float *x = (const float *)(const void *)(activation + t * stride);
            even[t] = vfmaq_f32(even[t], first, vld1q_f32(x + j));
            odd[t] = vfmaq_f32(odd[t], second, vld1q_f32(x + j + 4));
        }
    }
    for (int t = 0; t < tokens; t++) {
        const float *x = (const float *)(const void *)(activation + t * stride);
        float sum = vaddvq_f32(vaddq_f32(even[t], odd[t]));
        for (size_t k = j; k < n; k++) sum += np_half_to_float(w[k]) * x[k];
        sums[t] = sum;
    }
}

NP_DEFINE_DOT_ROWS(TARGET, np_neon_dot_f16, f16_row)
#endif

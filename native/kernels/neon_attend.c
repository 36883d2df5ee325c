/* Attention's products with NEON. */
#if defined(__aarch64__)
#include "kernels/isa.h"
#include "kernels/half.h"

#include <arm_neon.h>

#define TARGET
#define PREFIX(name) np_neon_##name
enum { LANES = 4, SUMS = 16, QUERIES = 8 };
typedef float32x4_t vector;

NP_INLINE vector zero(void) { return vdupq_n_f32(0.0f); }
NP_INLINE vector load(const float *x) { return vld1q_f32(x); }
NP_INLINE void store(float *x, vector v) { vst1q_f32(x, v); }
NP_INLINE vector broadcast(const float *x) { return vld1q_dup_f32(x); }
NP_INLINE vector add_product(vector a, vector b, vector sum) { return vfmaq_f32(sum, a, b); }
NP_INLINE float half_of(uint16_t half) { return np_half_to_float(half); }

NP_INLINE vector elements(const int type, const uint8_t *row, size_t j, const float *scales) {
    if (type == NP_F16) return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(const void *)row + j)));
    uint32_t packed;
    memcpy(&packed, row + j, sizeof packed);
    const int16x4_t quants = vget_low_s16(vmovl_s8(vcreate_s8(packed)));
    return vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(quants)), scales[j / NP_GROUP]);
}

NP_INLINE void add_lanes(const vector *sums, float *out) {
    for (int i = 0; i < SUMS; i += 4)
        vst1q_f32(out + i, vpaddq_f32(vpaddq_f32(sums[i], sums[i + 1]), vpaddq_f32(sums[i + 2], sums[i + 3])));
}

#include "kernels/attend_products.h"
#endif

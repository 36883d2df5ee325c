/* fp16 <-> fp32 in integer arithmetic, with the bits that F16C and NEON give: nearest even, denormals kept, NaN made
 * quiet. */
#ifndef NP_KERNELS_HALF_H
#define NP_KERNELS_HALF_H
#include <stdint.h>
#include <string.h>

static inline uint32_t np_bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float np_float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float np_half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    if (exponent == 31) return np_float_of(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
    if (exponent) return np_float_of(sign | (exponent + 112) << 23 | fraction << 13);
    float magnitude = (float)fraction * 0x1p-24f; /* exact */
    return np_float_of(sign | np_bits_of(magnitude));
}

static inline uint16_t np_float_to_half(float x) {
    uint32_t bits = np_bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* from 65520 on: rounds to infinity */
    if (magnitude < 0x38800000) {
        /* Below 2^-14: adding 0.5 leaves the units of 2^-24 in the last bits, rounded to nearest even by the
         * addition. */
        return (uint16_t)(sign | (np_bits_of(np_float_of(magnitude) + 0.5f) - 0x3f000000));
    }
    uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (rounded - 0x38000000) >> 13);
}
#endif

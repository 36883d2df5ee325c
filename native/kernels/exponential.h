/* exp for softmax and sampling: arguments <= 0, relative error below 1.2e-7, 0 below -87. Plain operations in a fixed
 * order, so that all instruction sets and C libraries give the same bits, and the compiler can vectorize loops of
 * it. */
#ifndef NP_KERNELS_EXPONENTIAL_H
#define NP_KERNELS_EXPONENTIAL_H
#include "kernels/half.h"
#include "kernels/isa.h"

NP_INLINE float np_exponential(float x) {
    /* x = k ln 2 + r with |r| <= ln 2 / 2; k by adding 1.5 * 2^23, which rounds and leaves k in the low bits. ln 2 in
     * two parts, the first short enough for an exact product. */
    const float shifted = x * 1.44269504f + 12582912.0f;
    const float k = shifted - 12582912.0f;
    const float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f; /* (exp(r) - 1 - r) / r^2, minimax on that interval */
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const float value = (p * r * r + r) + 1.0f;
    const float power = np_float_of((np_bits_of(shifted) << 23) + 0x3f800000u); /* 2^k */
    return x < -87.0f ? 0.0f : value * power;
}

/* tanh, absolute error below 2e-7. */
NP_INLINE float np_hyperbolic_tangent(float x) {
    const float e = np_exponential(x < 0.0f ? 2.0f * x : -2.0f * x);
    const float magnitude = (1.0f - e) / (1.0f + e);
    return x < 0.0f ? -magnitude : magnitude;
}

/* 1 / (1 + exp(-x)). NaN stays NaN. */
NP_INLINE float np_sigmoid(float x) {
    const float e = np_exponential(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

NP_INLINE float np_silu(float x) {
    return x * np_sigmoid(x);
}

/* log(1 + exp(x)), relative error below 3e-7: log(1 + e) = 2 artanh(e / (2 + e)), whose argument is at most 1/3. */
NP_INLINE float np_softplus(float x) {
    const float e = np_exponential(x < 0.0f ? x : -x), s = e / (2.0f + e), s2 = s * s;
    const float series = 1.0f + s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7 + s2 * (1.0f / 9 + s2 * (1.0f / 11 + s2 / 13)))));
    return (x < 0.0f ? 0.0f : x) + 2.0f * s * series;
}

/* x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x^3), as x / (1 + exp(-2u)). */
NP_INLINE float np_gelu(float x) {
    const float twice = 1.595769122f * (x + 0.044715f * x * x * x);
    const float e = np_exponential(twice < 0.0f ? twice : -twice);
    return (twice < 0.0f ? x * e : x) / (1.0f + e);
}

/* x times the normal distribution up to x, absolute error below 2e-7 |x|. The distribution up to -|x| is exp(-x^2 / 2) t P(t)
 * with t = 1 / (1 + 0.3 |x|) and a minimax polynomial P for |x| < 13.3, beyond which the exponential is 0. */
NP_INLINE float np_gelu_erf(float x) {
    const float magnitude = x < 0.0f ? -x : x;
    const float t = 1.0f / (1.0f + 0.3f * magnitude);
    float p = 3.603633182e-2f;
    p = p * t - 1.587137251e-1f;
    p = p * t + 2.089647689e-1f;
    p = p * t - 5.609602626e-2f;
    p = p * t + 1.298434828e-1f;
    p = p * t + 9.952304706e-2f;
    p = p * t + 1.208168943e-1f;
    p = p * t + 1.196251654e-1f;
    const float tail = np_exponential(-0.5f * x * x) * t * p;
    return x < 0.0f ? x * tail : x * (1.0f - tail);
}

/* The body of np_isa.softmax_weights. Sixteen partial sums, combined in a fixed order. */
NP_INLINE float np_softmax_body(float *scores, size_t count) {
    float max[16], sum[16];
    for (int j = 0; j < 16; j++) max[j] = -__builtin_inff(), sum[j] = 0.0f;
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int j = 0; j < 16; j++) max[j] = scores[i + j] > max[j] ? scores[i + j] : max[j];
    for (size_t j = 0; i + j < count; j++) max[j] = scores[i + j] > max[j] ? scores[i + j] : max[j];
    float greatest = max[0];
    for (int j = 1; j < 16; j++) greatest = max[j] > greatest ? max[j] : greatest;
    for (i = 0; i + 16 <= count; i += 16)
        for (int j = 0; j < 16; j++) sum[j] += scores[i + j] = np_exponential(scores[i + j] - greatest);
    for (size_t j = 0; i + j < count; j++) sum[j] += scores[i + j] = np_exponential(scores[i + j] - greatest);
    for (int width = 8; width; width /= 2)
        for (int j = 0; j < width; j++) sum[j] += sum[j + width];
    return sum[0];
}
#endif

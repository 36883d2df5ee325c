/* The layout of prepared activations for quantized rows. Rows of all types but q8 read those of q4. For f16 rows an
 * activation is n float32.
 *
 *   bytes                            content
 *   padded(n, 128)                   int8 quants, zeros after n
 *   4 * padded(n/32, 16)             float32 scale of each group of 32, zeros after the last
 *   4 * padded(n/32, 16)             int32 sum of each group's quants, zeros after the last
 *
 * The padding lets vector code read whole registers. The quants of a q8 activation are in order. Those of a q4
 * activation are in the order in which packed nibbles are unpacked, in blocks of four groups A B C D:
 *
 *   A[0..15] B[0..15] C[0..15] D[0..15] A[16..31] B[16..31] C[16..31] D[16..31] */
#ifndef NP_KERNELS_ACTIVATION_H
#define NP_KERNELS_ACTIVATION_H
#include "kernels/half.h"
#include "kernels/isa.h"

typedef struct {
    const int8_t *quants;
    const float *scales;
    const int32_t *sums;
} np_activation;

NP_INLINE size_t np_padded(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

NP_INLINE np_activation np_activation_at(const uint8_t *bytes, size_t n) {
    const uint8_t *scales = bytes + np_padded(n, 128);
    const uint8_t *sums = scales + 4 * np_padded(n / NP_GROUP, 16);
    return (np_activation){(const int8_t *)bytes, (const float *)(const void *)scales, (const int32_t *)(const void *)sums};
}

/* The offset of the first 16 quants of a group in a q4 activation; the other 16 follow 64 bytes later. */
NP_INLINE size_t np_q4_place(size_t group) { return group / 4 * 128 + group % 4 * 16; }

/* The body of np_isa.prepare, compiled once per instruction set, with the same bits for all. A group with a non-finite
 * value gets a non-finite scale, so that all results show it. */
NP_INLINE void np_prepare_body(int type, const float *x, size_t n, uint8_t *activation) {
    const size_t groups = n / NP_GROUP;
    np_activation to = np_activation_at(activation, n);
    int8_t *quants = (int8_t *)activation;
    float *scales = (float *)to.scales;
    int32_t *sums = (int32_t *)to.sums;
    memset(quants + n / 128 * 128, 0, np_padded(n, 128) - n / 128 * 128);
    memset(scales + groups, 0, 4 * (np_padded(groups, 16) - groups));
    memset(sums + groups, 0, 4 * (np_padded(groups, 16) - groups));
    for (size_t g = 0; g < groups; g++, x += NP_GROUP) {
        int32_t largest = 0; /* as bits, which order like the magnitudes, with NaN above all */
        for (int j = 0; j < NP_GROUP; j++) {
            int32_t magnitude = (int32_t)(np_bits_of(x[j]) & 0x7fffffff);
            largest = magnitude > largest ? magnitude : largest;
        }
        const float max_magnitude = np_float_of((uint32_t)largest);
        const float inverse = max_magnitude > 1e-30f ? 127.0f / max_magnitude : 0.0f; /* smaller values are treated as zero: 127/max would overflow */
        int8_t group[NP_GROUP];
        int32_t sum = 0;
        for (int j = 0; j < NP_GROUP; j++) {
            /* Adding 1.5 * 2^23 rounds to an integer, nearest even, and leaves it in the low bits. */
            int32_t q = (int8_t)(np_bits_of(x[j] * inverse + 12582912.0f) & 0xff);
            group[j] = (int8_t)q;
            sum += q;
        }
        scales[g] = max_magnitude <= 1e-30f ? 0.0f : max_magnitude / 127.0f;
        sums[g] = sum;
        int8_t *low = quants + (type == NP_Q8 ? g * NP_GROUP : np_q4_place(g));
        memcpy(low, group, 16);
        memcpy(low + (type == NP_Q8 ? 16 : 64), group + 16, 16);
    }
}
#endif

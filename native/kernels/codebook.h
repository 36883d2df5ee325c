/* iq4, mxfp4: rows of q4's form whose codes stand for the values of a table, w = s * value[code].
 *
 *   iq4      the values of llama.cpp's IQ4_NL and IQ4_XS
 *   mxfp4    the values of OCP's E2M1 floats (MXFP4), twice as large, so that they are integers */
#ifndef NP_KERNELS_CODEBOOK_H
#define NP_KERNELS_CODEBOOK_H
#include "kernels/isa.h"

enum { NP_CODES = 16 };

NP_INLINE int np_has_codebook(int type) { return type == NP_IQ4 || type == NP_MXFP4; }

NP_INLINE const int8_t *np_codebook(int type) {
    static const _Alignas(16) int8_t iq4[NP_CODES] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static const _Alignas(16) int8_t mxfp4[NP_CODES] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return type == NP_IQ4 ? iq4 : mxfp4;
}

/* The value of a nibble of a q4, iq4 or mxfp4 row. */
NP_INLINE int np_nibble_value(int type, unsigned nibble) { return np_has_codebook(type) ? np_codebook(type)[nibble] : (int)nibble - 8; }

#if defined(__x86_64__)
#include <immintrin.h>

/* The values of 16 nibbles in bytes' lower halves; the upper halves are 0. */
NP_INLINE __attribute__((target("ssse3"))) __m128i np_nibble_values(int type, __m128i nibbles) {
    if (!np_has_codebook(type)) return _mm_sub_epi8(nibbles, _mm_set1_epi8(8));
    return _mm_shuffle_epi8(_mm_load_si128((const __m128i *)(const void *)np_codebook(type)), nibbles);
}
#elif defined(__aarch64__)
#include <arm_neon.h>

NP_INLINE int8x16_t np_neon_values(int type, uint8x16_t nibbles) {
    if (!np_has_codebook(type)) return vsubq_s8(vreinterpretq_s8_u8(nibbles), vdupq_n_s8(8));
    return vqtbl1q_s8(vld1q_s8(np_codebook(type)), nibbles);
}
#endif
#endif

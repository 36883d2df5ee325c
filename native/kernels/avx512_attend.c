/* Attention's products with AVX-512. */
#if defined(__x86_64__)
#include "kernels/isa.h"

#include <immintrin.h>

#define TARGET NP_AVX512
#define PREFIX(name) np_avx512_##name
enum { LANES = 16, SUMS = 16, QUERIES = 8 };
typedef __m512 vector;

NP_INLINE NP_AVX512 vector zero(void) { return _mm512_setzero_ps(); }
NP_INLINE NP_AVX512 vector load(const float *x) { return _mm512_loadu_ps(x); }
NP_INLINE NP_AVX512 void store(float *x, vector v) { _mm512_storeu_ps(x, v); }
NP_INLINE NP_AVX512 vector broadcast(const float *x) { return _mm512_set1_ps(*x); }
NP_INLINE NP_AVX512 vector add_product(vector a, vector b, vector sum) { return _mm512_fmadd_ps(a, b, sum); }
NP_INLINE NP_AVX512 float half_of(uint16_t half) { return _cvtsh_ss(half); }

NP_INLINE NP_AVX512 vector elements(const int type, const uint8_t *row, size_t j, const float *scales) {
    if (type == NP_F16) return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(row + 2 * j)));
    const __m512i quants = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(row + j)));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(quants), _mm512_set1_ps(scales[j / NP_GROUP]));
}

/* The sums of pairs of lanes of a in the lower half of each quarter, of b in the upper half. */
NP_INLINE NP_AVX512 __m512 fold(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }
NP_INLINE NP_AVX512 __m512 fold_quarters(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

NP_INLINE NP_AVX512 void add_lanes(const vector *sums, float *out) {
    vector quarters[4];
    for (int i = 0; i < 4; i++) {
        const vector a = fold(sums[4 * i], sums[4 * i + 1]), b = fold(sums[4 * i + 2], sums[4 * i + 3]);
        quarters[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    _mm512_storeu_ps(out, fold_quarters(fold_quarters(quarters[0], quarters[1]), fold_quarters(quarters[2], quarters[3])));
}

#include "kernels/attend_products.h"
#endif

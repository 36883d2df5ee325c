/* Attention's products with AVX2, FMA and F16C. */
#if defined(__x86_64__)
#include "kernels/isa.h"

#include <immintrin.h>

#define TARGET NP_AVX2
#define PREFIX(name) np_avx2_##name
enum { LANES = 8, SUMS = 8, QUERIES = 4 };
typedef __m256 vector;

NP_INLINE NP_AVX2 vector zero(void) { return _mm256_setzero_ps(); }
NP_INLINE NP_AVX2 vector load(const float *x) { return _mm256_loadu_ps(x); }
NP_INLINE NP_AVX2 void store(float *x, vector v) { _mm256_storeu_ps(x, v); }
NP_INLINE NP_AVX2 vector broadcast(const float *x) { return _mm256_broadcast_ss(x); }
NP_INLINE NP_AVX2 vector add_product(vector a, vector b, vector sum) { return _mm256_fmadd_ps(a, b, sum); }
NP_INLINE NP_AVX2 float half_of(uint16_t half) { return _cvtsh_ss(half); }

NP_INLINE NP_AVX2 vector elements(const int type, const uint8_t *row, size_t j, const float *scales) {
    if (type == NP_F16) return _mm256_cvtph_ps(_mm_loadu_si128((const void *)(row + 2 * j)));
    const __m256i quants = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(row + j)));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(quants), _mm256_broadcast_ss(scales + j / NP_GROUP));
}

NP_INLINE NP_AVX2 void add_lanes(const vector *sums, float *out) {
    vector halves[2];
    for (int i = 0; i < 2; i++)
        halves[i] = _mm256_hadd_ps(_mm256_hadd_ps(sums[4 * i], sums[4 * i + 1]), _mm256_hadd_ps(sums[4 * i + 2], sums[4 * i + 3]));
    const vector lower = _mm256_permute2f128_ps(halves[0], halves[1], 0x20), upper = _mm256_permute2f128_ps(halves[0], halves[1], 0x31);
    _mm256_storeu_ps(out, _mm256_add_ps(lower, upper));
}

#include "kernels/attend_products.h"
#endif

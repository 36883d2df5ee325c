/* Shared by avx512_dot.c and avx512_few.c: blocks of 16 groups of a quantized row, whose sums are the lanes of a
 * register. The code of four rows is unrolled by hand: a loop over them costs a tenth and more.
 *
 * The order of float additions, the same in np_dot_panel: 16 sums, of groups g = 0..15 modulo 16, each over ascending
 * g; then within each four of them (0+2)+(1+3), and of the fours (0+2)+(1+3). Adding up four rows at once costs little
 * more than one, and hides latency. Integers are exact in any order; only scaled sums are rounded. A group's minimum is
 * subtracted from its sum right after its products are added. */
#ifndef NP_KERNELS_AVX512_LANES_H
#define NP_KERNELS_AVX512_LANES_H
#include "kernels/avx512_minimum.h"
#include "kernels/codebook.h"
#include "kernels/three_bits.h"

#include <immintrin.h>

enum { NP_BLOCK_GROUPS = 16, NP_BLOCK_ROWS = 4 };

/* The job's rows with 2 to NP_TOKEN_BLOCK of its tokens; rows of NP_FEW_COLUMNS at most. */
enum { NP_FEW_COLUMNS = 8192 };
typedef void np_few_function(const np_dot_job *job, size_t token, size_t tokens);
np_few_function np_avx512_few_q8, np_avx512_few_q4, np_avx512_few_q3, np_avx512_few_q4k, np_avx512_few_q5k, np_avx512_few_q6k,
    np_avx512_few_iq4, np_avx512_few_mxfp4, np_avx512_few_q4h, np_avx512_few_q5h;

/* The groups of a block: 16, or fewer at the end of a row. Computed once for all rows, since short rows have few
 * blocks. */
typedef struct {
    size_t registers; /* of 64 bytes of quants, of q3 48 */
    __mmask16 scales; /* which of 16 scales are there */
    __mmask64 last;   /* which bytes of the last register are there */
    size_t lacking;   /* by how many bytes of a plane the last register's groups fall short of eight */
} np_block;

NP_INLINE size_t np_block_group_bytes(const int type) { return type == NP_Q8 ? NP_GROUP : type == NP_Q3 ? NP_Q3_GROUP_BYTES : 16; }

/* The bytes of two groups of q8, or of four of other types. */
NP_INLINE size_t np_register_bytes(const int type) { return type == NP_Q3 ? 4 * NP_Q3_GROUP_BYTES : 64; }

NP_INLINE np_block np_block_of(size_t groups, const int type) {
    const size_t register_bytes = np_register_bytes(type), bytes = groups * np_block_group_bytes(type);
    const size_t registers = (bytes + register_bytes - 1) / register_bytes, left = bytes - (registers - 1) * register_bytes;
    return (np_block){registers, (__mmask16)((1u << groups) - 1), left == 64 ? ~(__mmask64)0 : ((__mmask64)1 << left) - 1,
                      (4 - groups % 4) % 4 * 2};
}

NP_INLINE NP_AVX512 __m512i np_load_row(const uint8_t *w, size_t k, const np_block *block) {
    if (k + 1 < block->registers) return _mm512_loadu_si512(w + 64 * k);
    return block->last == ~(__mmask64)0 ? _mm512_loadu_si512(w + 64 * k) : _mm512_maskz_loadu_epi8(block->last, w + 64 * k);
}

/* Four groups' nibbles as they lie; of q3 their codes in the nibbles' lower three bits, and anything in the fourth:
 * np_nibble says what to keep. */
NP_INLINE NP_AVX512 __m512i np_load_nibbles(const int type, const uint8_t *w, size_t k, const np_block *block) {
    if (type != NP_Q3) return np_load_row(w, k, block);
    const __m512i lows = _mm512_setr_epi32(0, 1, 0, 1, 3, 4, 3, 4, 6, 7, 6, 7, 9, 10, 9, 10);
    const __m512i thirds = _mm512_setr_epi32(2, 2, 2, 2, 5, 5, 5, 5, 8, 8, 8, 8, 11, 11, 11, 11);
    const uint8_t *at = w + k * np_register_bytes(NP_Q3);
    const __mmask64 whole = ((__mmask64)1 << np_register_bytes(NP_Q3)) - 1, own = k + 1 < block->registers ? whole : block->last;
    const int goes_on = k + 2 < block->registers || (k + 1 < block->registers && block->last >> 15 & 1); /* by the 16 bytes that 48 lack of 64 */
    const __m512i four = goes_on ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi8(own, at);
    const __m512i low = _mm512_srlv_epi64(_mm512_permutexvar_epi32(lows, four), _mm512_setr_epi64(0, 2, 0, 2, 0, 2, 0, 2));
    const __m512i turns = _mm512_setr_epi32(2, 1, 0, 31, 2, 1, 0, 31, 2, 1, 0, 31, 2, 1, 0, 31);
    const __m512i third = _mm512_rolv_epi32(_mm512_permutexvar_epi32(thirds, four), turns);
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x33), low, third, 0xca); /* where 0x33 has a bit, that of low */
}

NP_INLINE char np_nibble(const int type) { return type == NP_Q3 ? 7 : 15; }

/* Weights are multiplied as unsigned numbers: nibbles of q4 as 0..15, codes of q3 as 0..7, values of a codebook plus
 * 128. So 2 to this power times a group's sum of activations must be subtracted. */
NP_INLINE unsigned np_offset_bits(const int type) { return np_has_codebook(type) ? 7 : type == NP_Q3 ? 2 : 3; }

/* Nibbles as unsigned weights: those of a codebook as its values plus 128, others as they are. */
NP_INLINE NP_AVX512 __m512i np_unsigned_values(const int type, __m512i nibbles) {
    if (!np_has_codebook(type)) return nibbles;
    const __m512i values = _mm512_broadcast_i32x4(_mm_load_si128((const void *)np_codebook(type)));
    return _mm512_xor_si512(_mm512_shuffle_epi8(values, nibbles), _mm512_set1_epi8(-128));
}

/* sum + dots of 16 groups * their scales. */
NP_INLINE NP_AVX512 __m512 np_add_scaled(__m512i dots, const uint16_t *scales, const np_block *block, const float *x_scales,
                                         __m512 sum) {
    const __m512 w_scales = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(block->scales, scales));
    const __m512 scale = _mm512_mul_ps(w_scales, _mm512_loadu_ps(x_scales));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, sum);
}

/* sum + dots of 16 groups * their scales - scaled sums of quants * their minimums. */
NP_INLINE NP_AVX512 __m512 np_add_with_minimums(__m512i dots, const np_lane_scales *s, __m512 x_scales, __m512 scaled_sums, __m512 sum) {
    sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), _mm512_mul_ps(s->scales, x_scales), sum);
    return _mm512_fnmadd_ps(s->minimums, scaled_sums, sum);
}

/* Results of the rows from r on, four or as many as there are, for one token, from their 16 sums each. */
NP_INLINE NP_AVX512 void np_put_four(const np_dot_job *job, size_t r, size_t token, __m512 a, __m512 b, __m512 c, __m512 d) {
    const size_t left = job->rows.rows - r;
    const __mmask8 there = left < NP_BLOCK_ROWS ? (__mmask8)((1u << left) - 1) : 15;
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512 fours = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    const __m256 pairs = _mm256_add_ps(_mm512_castps512_ps256(fours), _mm512_extractf32x8_ps(fours, 1));
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
    const __m128 bias = job->bias ? _mm_maskz_loadu_ps(there, job->bias + r) : _mm_setzero_ps();
    _mm_mask_storeu_ps(job->out + token * job->out_stride + r, there, _mm_add_ps(sums, bias));
}
#endif

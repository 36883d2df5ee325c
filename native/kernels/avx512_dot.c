/* AVX-512 with VNNI: dot products of rows. */
#include "kernels/activation.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* One step: 16 weights with 16 floats of each token, into accumulator `lane` of four, so that four sums are under way. */
NP_INLINE NP_AVX512 void f16_step(__m512 w, __mmask16 mask, size_t j, int lane, const uint8_t *activation, size_t stride,
                                  const int tokens, __m512 sum[NP_TOKEN_BLOCK][4]) {
    for (int t = 0; t < tokens; t++) {
        const float *x = (const float *)(const void *)(activation + t * stride);
        sum[t][lane] = _mm512_fmadd_ps(w, _mm512_maskz_loadu_ps(mask, x + j), sum[t][lane]);
    }
}

NP_INLINE NP_AVX512 void f16_row(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead,
                                 const uint8_t *activation, size_t stride, const int tokens, float *sums) {
    const uint16_t *w = (const uint16_t *)(const void *)quants;
    __m512 sum[NP_TOKEN_BLOCK][4];
    for (int t = 0; t < tokens; t++)
        for (int lane = 0; lane < 4; lane++) sum[t][lane] = _mm512_setzero_ps();
    size_t j = 0;
    for (; j + 64 <= n; j += 64)
        for (int lane = 0; lane < 4; lane++) {
            if (lane % 2 == 0) np_prefetch(quants + 2 * j + 32 * lane, ahead);
            const __m512 weights = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(w + j + 16 * lane)));
            f16_step(weights, 0xffff, j + 16 * lane, lane, activation, stride, tokens, sum);
        }
    for (; j < n; j += 16) {
        const __mmask16 mask = n - j < 16 ? (__mmask16)((1u << (n - j)) - 1) : 0xffff;
        f16_step(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, w + j)), mask, j, 0, activation, stride, tokens, sum);
    }
    for (int t = 0; t < tokens; t++)
        sums[t] = _mm512_reduce_add_ps(
            _mm512_add_ps(_mm512_add_ps(sum[t][0], sum[t][1]), _mm512_add_ps(sum[t][2], sum[t][3])));
}

/* The order of float additions of q8 and q4 rows, which np_dot_panel keeps, too: 16 sums, of groups g = 0..15 modulo 16, each over
 * ascending g; then within each four of them (0+2)+(1+3), and of the fours (0+2)+(1+3). Here the 16 sums are lanes of a register: of
 * four rows at once the adding up costs little more than of one, and its latency is hidden. */
NP_INLINE NP_AVX512 __m128 add_up_four(const __m512 a, const __m512 b, const __m512 c, const __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512 fours = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    const __m256 pairs = _mm256_add_ps(_mm512_castps512_ps256(fours), _mm512_extractf32x8_ps(fours, 1));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

/* Lane l of the 128-bit lane i of the result: the sum of the 128-bit lane i of the l-th argument. */
NP_INLINE NP_AVX512 __m512i add_up_quarters(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

/* sum += dots of 16 groups * their scales. `taken`: what the offset of unsigned weights put into the dots. */
NP_INLINE NP_AVX512 __m512 add_scaled(__m512i dots, __m512i taken, const uint16_t *scales, __mmask16 mask, const float *x_scales,
                                      __m512 sum) {
    const __m512 w_scales = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scales));
    const __m512 scale = _mm512_mul_ps(w_scales, _mm512_loadu_ps(x_scales));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(dots, taken)), scale, sum);
}

/* The groups of a block: 16, or fewer at the end of a row. Worked out once for all rows: short rows are hardly more than this. */
typedef struct {
    size_t registers;  /* of 64 bytes of quants */
    __mmask16 scales;  /* which of 16 scales are there */
    __mmask64 last;    /* which bytes of the last register are there */
} block_shape;

NP_INLINE block_shape shape_of(size_t groups, const size_t group_bytes) {
    const size_t bytes = groups * group_bytes, registers = (bytes + 63) / 64, left = bytes - (registers - 1) * 64;
    return (block_shape){registers, (__mmask16)((1u << groups) - 1), left == 64 ? ~(__mmask64)0 : ((__mmask64)1 << left) - 1};
}

NP_INLINE NP_AVX512 __m512i load_row(const uint8_t *w, size_t k, const block_shape *shape) {
    if (k + 1 < shape->registers) return _mm512_loadu_si512(w + 64 * k);
    return shape->last == ~(__mmask64)0 ? _mm512_loadu_si512(w + 64 * k) : _mm512_maskz_loadu_epi8(shape->last, w + 64 * k);
}

/* 16 groups from `group` on. dpbusd wants one side unsigned: weights plus 128; 128 times the group's sum of
 * activations is taken off again. Integers are exact; only scaled sums round. Each register holds two groups. */
NP_INLINE NP_AVX512 void q8_block(const uint8_t *w, const uint16_t *scales, size_t group, const block_shape *shape, size_t ahead,
                                  const np_activation *x, const int tokens, __m512 *sum) {
    const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    __m512i half[NP_TOKEN_BLOCK][2];
    for (size_t h = 0; h < 2; h++) {
        __m512i dot[NP_TOKEN_BLOCK][4];
        for (size_t k = 0; k < 4; k++) {
            const size_t at = 4 * h + k;
            for (int t = 0; t < tokens; t++) dot[t][k] = _mm512_setzero_si512();
            if (at >= shape->registers) continue;
            np_prefetch(w + 64 * at, ahead);
            const __m512i weights = _mm512_xor_si512(load_row(w, at, shape), _mm512_set1_epi8(-128));
            for (int t = 0; t < tokens; t++)
                dot[t][k] = _mm512_dpbusd_epi32(dot[t][k], weights, _mm512_loadu_si512(x[t].quants + group * NP_GROUP + 64 * at));
        }
        for (int t = 0; t < tokens; t++) half[t][h] = add_up_quarters(dot[t][0], dot[t][1], dot[t][2], dot[t][3]);
    }
    for (int t = 0; t < tokens; t++) {
        const __m512i dots = _mm512_add_epi32(_mm512_shuffle_i32x4(half[t][0], half[t][1], 0x88),
                                              _mm512_shuffle_i32x4(half[t][0], half[t][1], 0xdd));
        const __m512i taken = _mm512_slli_epi32(_mm512_loadu_si512(x[t].sums + group), 7);
        sum[t] = add_scaled(_mm512_permutexvar_epi32(order, dots), taken, scales, shape->scales, x[t].scales + group, sum[t]);
    }
}

/* The same for q4. Nibbles are taken as 0..15, 8 times the group's sum is taken off. Each register holds four groups. */
NP_INLINE NP_AVX512 void q4_block(const uint8_t *w, const uint16_t *scales, size_t group, const block_shape *shape, size_t ahead,
                                  const np_activation *x, const int tokens, __m512 *sum) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), nibble = _mm512_set1_epi8(15);
    __m512i dot[NP_TOKEN_BLOCK][4];
    for (size_t k = 0; k < 4; k++) {
        for (int t = 0; t < tokens; t++) dot[t][k] = _mm512_setzero_si512();
        if (k >= shape->registers) continue;
        np_prefetch(w + 64 * k, ahead);
        const __m512i packed = load_row(w, k, shape);
        const __m512i low = _mm512_and_si512(packed, nibble), high = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
        for (int t = 0; t < tokens; t++) {
            const int8_t *quants = x[t].quants + group * NP_GROUP + 128 * k;
            dot[t][k] = _mm512_dpbusd_epi32(dot[t][k], low, _mm512_loadu_si512(quants));
            dot[t][k] = _mm512_dpbusd_epi32(dot[t][k], high, _mm512_loadu_si512(quants + 64));
        }
    }
    for (int t = 0; t < tokens; t++) {
        const __m512i dots = _mm512_permutexvar_epi32(order, add_up_quarters(dot[t][0], dot[t][1], dot[t][2], dot[t][3]));
        const __m512i taken = _mm512_slli_epi32(_mm512_loadu_si512(x[t].sums + group), 3);
        sum[t] = add_scaled(dots, taken, scales, shape->scales, x[t].scales + group, sum[t]);
    }
}

typedef void block_function(const uint8_t *w, const uint16_t *scales, size_t group, const block_shape *shape, size_t ahead,
                            const np_activation *x, const int tokens, __m512 *sum);

/* The 16 sums of one row and some tokens. */
NP_INLINE NP_AVX512 void lane_row(block_function *block, const size_t group_bytes, np_row row, size_t groups,
                                  const block_shape *end, size_t ahead, const np_activation *x, const int tokens, __m512 *sum) {
    const block_shape whole = shape_of(16, group_bytes);
    const uint16_t *scales = (const uint16_t *)(const void *)row.scales;
    size_t g = 0;
    for (int t = 0; t < tokens; t++) sum[t] = _mm512_setzero_ps();
    for (; g + 16 <= groups; g += 16) block(row.quants + g * group_bytes, scales + g, g, &whole, ahead, x, tokens, sum);
    if (g < groups) block(row.quants + g * group_bytes, scales + g, g, end, ahead, x, tokens, sum);
}

/* Up to four rows from r on with some tokens. `there`: which of the four are. Of the tokens only the first `wanted` are asked for: the
 * others repeat the last one, since two or three together take less time than one by one. */
NP_INLINE NP_AVX512 void lane_rows(block_function *block, const size_t group_bytes, const np_dot_job *job, const np_rows *rows,
                                   const block_shape *end, size_t r, const __mmask8 there, size_t token, const int tokens,
                                   size_t wanted) {
    const __m128 bias = job->bias ? _mm_maskz_loadu_ps(there, job->bias + r) : _mm_setzero_ps();
    float *out = job->out + token * job->out_stride + r;
    np_activation x[NP_TOKEN_BLOCK];
    __m512 sum[4][NP_TOKEN_BLOCK];
    for (int t = 0; t < tokens; t++)
        x[t] = np_activation_at(
            job->activations + (token + ((size_t)t < wanted ? (size_t)t : wanted - 1)) * job->activation_stride_bytes, rows->n);
    for (size_t i = 0; i < 4; i++) {
        for (int t = 0; t < tokens; t++) sum[i][t] = _mm512_setzero_ps();
        if (!(there >> i & 1)) continue;
        np_prefetch_beside(rows, r + i);
        lane_row(block, group_bytes, np_row_at(rows, r + i), rows->n / NP_GROUP, end, np_ahead_bytes(rows, r + i), x, tokens,
                 sum[i]);
    }
    for (int t = 0; t < tokens; t++)
        if ((size_t)t < wanted) _mm_mask_storeu_ps(out + (size_t)t * job->out_stride, there,
                           _mm_add_ps(add_up_four(sum[0][t], sum[1][t], sum[2][t], sum[3][t]), bias));
}

NP_INLINE NP_AVX512 void lane_dot(block_function *block, const size_t group_bytes, const np_dot_job *job, const np_rows *rows) {
    const block_shape end = shape_of(rows->n / NP_GROUP % 16, group_bytes);
    for (size_t r = 0; r < rows->rows; r += 4) {
        const __mmask8 there = rows->rows - r < 4 ? (__mmask8)((1u << (rows->rows - r)) - 1) : 15;
        for (size_t token = 0; token < job->tokens; token += NP_TOKEN_BLOCK) {
            const size_t left = job->tokens - token;
            if (left == 1)
                lane_rows(block, group_bytes, job, rows, &end, r, there, token, 1, 1);
            else
                lane_rows(block, group_bytes, job, rows, &end, r, there, token, NP_TOKEN_BLOCK,
                          left < NP_TOKEN_BLOCK ? left : NP_TOKEN_BLOCK);
        }
    }
}

/* Twice, so that short rows that follow each other do not pay for the question whether they do. */
NP_INLINE NP_AVX512 void dot_at_or_in_order(block_function *block, const size_t group_bytes, const np_dot_job *job) {
    np_rows rows = job->rows;
    if (rows.quants_at) {
        lane_dot(block, group_bytes, job, &rows);
    } else {
        rows.quants_at = rows.scales_at = NULL;
        lane_dot(block, group_bytes, job, &rows);
    }
}

NP_DEFINE_DOT_ROWS(NP_AVX512, np_avx512_dot_f16, f16_row)
NP_AVX512 void np_avx512_dot_q8(const np_dot_job *job) { dot_at_or_in_order(q8_block, 32, job); }
NP_AVX512 void np_avx512_dot_q4(const np_dot_job *job) { dot_at_or_in_order(q4_block, 16, job); }
#endif

/* AVX-512 with VNNI: dot products of f16 rows, and of quantized rows with one token; avx512_few.c has a few tokens. */
#if defined(__x86_64__)
#include "kernels/avx512_lanes.h"

/* One step: 16 weights with 16 floats of each token, into accumulator `lane` of four, so that four sums are under
 * way. */
NP_INLINE NP_AVX512 void f16_step(__m512 w, __mmask16 mask, size_t j, int lane, const uint8_t *activation, size_t stride,
                                  const int tokens, __m512 sum[NP_TOKEN_BLOCK][4]) {
    for (int t = 0; t < tokens; t++) {
        const float *x = (const float *)(const void *)(activation + t * stride);
        sum[t][lane] = _mm512_fmadd_ps(w, _mm512_maskz_loadu_ps(mask, x + j), sum[t][lane]);
    }
}

/* The sums of four registers' lanes. Halves, quarters, pairs and lanes are added as _mm512_reduce_add_ps adds them, so
 * the bits are the same. */
NP_INLINE NP_AVX512 __m128 reduce_four(const __m512 x[4]) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x44), _mm512_shuffle_f32x4(x[0], x[1], 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x44), _mm512_shuffle_f32x4(x[2], x[3], 0xee));
    const __m512 abcd = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    const __m512 pairs = _mm512_add_ps(abcd, _mm512_permute_ps(abcd, 0x4e));
    const __m512 lanes = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xb1));
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), lanes));
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
    __m512 whole[NP_TOKEN_BLOCK];
    for (int t = 0; t < tokens; t++)
        whole[t] = _mm512_add_ps(_mm512_add_ps(sum[t][0], sum[t][1]), _mm512_add_ps(sum[t][2], sum[t][3]));
    if (tokens == NP_TOKEN_BLOCK) _mm_storeu_ps(sums, reduce_four(whole));
    else
        for (int t = 0; t < tokens; t++) sums[t] = _mm512_reduce_add_ps(whole[t]);
}

/* Lane l of the 128-bit lane i of the result: the sum of the 128-bit lane i of the l-th argument. */
NP_INLINE NP_AVX512 __m512i add_up_quarters(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

/* The distance to prefetch from row r at. */
NP_INLINE size_t row_ahead(const int type, const np_rows *rows, size_t r) {
    return np_high_bits(type) > 0 ? np_ahead_whole_rows(rows, r) : np_ahead_bytes(rows, r);
}

/* 16 groups from `group` on. dpbusd needs one unsigned side: weights plus 128; 128 times the group's sum of activations
 * is subtracted. Each register holds two groups. */
NP_INLINE NP_AVX512 __m512 q8_block(const int type, const np_row *row, size_t n, size_t group, const np_block *block, size_t ahead,
                                    const np_activation *x, __m512 sum) {
    const uint8_t *w = row->quants + group * NP_GROUP;
    const uint16_t *scales = (const uint16_t *)(const void *)row->scales + group;
    const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    __m512i half[2];
    for (size_t h = 0; h < 2; h++) {
        __m512i dot[4];
        for (size_t k = 0; k < 4; k++) {
            const size_t at = 4 * h + k;
            dot[k] = _mm512_setzero_si512();
            if (at >= block->registers) continue;
            np_prefetch(w + 64 * at, ahead);
            const __m512i weights = _mm512_xor_si512(np_load_row(w, at, block), _mm512_set1_epi8(-128));
            dot[k] = _mm512_dpbusd_epi32(dot[k], weights, _mm512_loadu_si512(x->quants + group * NP_GROUP + 64 * at));
        }
        half[h] = add_up_quarters(dot[0], dot[1], dot[2], dot[3]);
    }
    const __m512i dots =
        _mm512_add_epi32(_mm512_shuffle_i32x4(half[0], half[1], 0x88), _mm512_shuffle_i32x4(half[0], half[1], 0xdd));
    const __m512i taken = _mm512_slli_epi32(_mm512_loadu_si512(x->sums + group), 7);
    return np_add_scaled(_mm512_sub_epi32(_mm512_permutexvar_epi32(order, dots), taken), scales, block, x->scales + group, sum);
}

/* Products of four groups of any other type, a group in four lanes: those of register k from w on. */
NP_INLINE NP_AVX512 __m512i nibble_register(const int type, const uint8_t *w, const uint8_t *planes, size_t plane_bytes, size_t k,
                                            const np_block *block, size_t ahead, const int8_t *quants) {
    const __m512i nibble = _mm512_set1_epi8(np_nibble(type));
    np_prefetch(w + np_register_bytes(type) * k, ahead);
    const __m512i packed = np_load_nibbles(type, w, k, block);
    __m512i low = _mm512_and_si512(packed, nibble), high = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
    if (np_high_bits(type) > 0) {
        const size_t lacking = k + 1 < block->registers ? 0 : block->lacking;
        low = np_add_high_bits(type, low, planes + 8 * k, plane_bytes, lacking);
        high = np_add_high_bits(type, high, planes + 8 * k + plane_bytes, plane_bytes, lacking);
    }
    const __m512i products = _mm512_dpbusd_epi32(_mm512_setzero_si512(), np_unsigned_values(type, low), _mm512_loadu_si512(quants));
    return _mm512_dpbusd_epi32(products, np_unsigned_values(type, high), _mm512_loadu_si512(quants + 64));
}

NP_INLINE NP_AVX512 __m512i nibble_dots(const __m512i registers[4]) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, add_up_quarters(registers[0], registers[1], registers[2], registers[3]));
}

NP_INLINE void prefetch_planes(const int type, const uint8_t *planes, size_t plane_bytes, size_t ahead) {
    for (size_t plane = 0; plane < 2 * np_high_bits(type); plane++) np_prefetch(planes + plane * plane_bytes, ahead);
}

/* The same for all other types, those with minimums without an offset. Each register holds four groups. */
NP_INLINE NP_AVX512 __m512 nibble_block(const int type, const np_row *row, size_t n, size_t group, const np_block *block, size_t ahead,
                                        const np_activation *x, __m512 sum) {
    const uint8_t *w = row->quants + group * np_block_group_bytes(type), *planes = row->quants + n / 2 + 2 * group;
    const int8_t *quants = x->quants + group * NP_GROUP;
    __m512i registers[4];
    for (size_t k = 0; k < 4; k++)
        registers[k] = k < block->registers ? nibble_register(type, w, planes, n / 16, k, block, ahead, quants + 128 * k) : _mm512_setzero_si512();
    const __m512i dots = nibble_dots(registers);
    if (np_has_minimum(type)) {
        prefetch_planes(type, planes, n / 16, ahead);
        const np_lane_scales s = np_row_minimums(type, row->scales + np_minimum_bytes(type) * group, n / NP_GROUP - group);
        return np_add_with_minimums(dots, &s, _mm512_loadu_ps(x->scales + group), np_scaled_sums(x, group), sum);
    }
    const __m512i taken = _mm512_slli_epi32(_mm512_loadu_si512(x->sums + group), np_offset_bits(type));
    const uint16_t *scales = (const uint16_t *)(const void *)row->scales + group;
    return np_add_scaled(_mm512_sub_epi32(dots, taken), scales, block, x->scales + group, sum);
}

/* The last eight groups of two rows with minimums in one block, those of the first in lanes 0 to 7. Half a block costs
 * almost as much as a whole one: rows of 768 in q5k and q6k arrive from DRAM 1.2 times as fast (Zen 4). Rows of q4, whose
 * scales cost less, do not gain. */
NP_INLINE NP_AVX512 void add_two_ends(const int type, const np_rows *rows, size_t r, const np_activation *x, __m512 sum[2]) {
    const np_block half = np_block_of(NP_BLOCK_GROUPS / 2, type);
    const size_t n = rows->n, group = n / NP_GROUP - NP_BLOCK_GROUPS / 2;
    const np_row row[2] = {np_row_at(rows, r), np_row_at(rows, r + 1)};
    __m512i registers[4];
    for (size_t i = 0; i < 2; i++) {
        const size_t ahead = row_ahead(type, rows, r + i);
        const uint8_t *w = row[i].quants + group * np_block_group_bytes(type), *planes = row[i].quants + n / 2 + 2 * group;
        for (size_t k = 0; k < 2; k++)
            registers[2 * i + k] = nibble_register(type, w, planes, n / 16, k, &half, ahead, x->quants + group * NP_GROUP + 128 * k);
        prefetch_planes(type, planes, n / 16, ahead);
    }
    const __m512 x_scales = _mm512_broadcast_f32x8(_mm256_loadu_ps(x->scales + group));
    const __m512 x_sums = _mm512_cvtepi32_ps(_mm512_broadcast_i32x8(_mm256_loadu_si256((const void *)(x->sums + group))));
    const size_t at = np_minimum_bytes(type) * group;
    const np_lane_scales s = np_minimum_lanes(type, row[0].scales + at, row[1].scales + at);
    __m512 both = _mm512_insertf32x8(sum[0], _mm512_castps512_ps256(sum[1]), 1);
    both = np_add_with_minimums(nibble_dots(registers), &s, x_scales, _mm512_mul_ps(x_sums, x_scales), both);
    sum[0] = _mm512_mask_mov_ps(sum[0], 0x00ff, both);
    sum[1] = _mm512_mask_shuffle_f32x4(sum[1], 0x00ff, both, both, 0xee); /* its upper half */
}

typedef __m512 block_function(int type, const np_row *row, size_t n, size_t group, const np_block *block, size_t ahead,
                              const np_activation *x, __m512 sum);

/* The 16 sums of the first `groups` groups of row r; zeros if there is no such row, or this token does not need it. */
NP_INLINE NP_AVX512 __m512 lane_row(block_function *dot, const int type, const np_rows *rows, size_t r, int is_needed, size_t groups,
                                    const np_block *end, const np_activation *x) {
    const np_block whole = np_block_of(NP_BLOCK_GROUPS, type);
    __m512 sum = _mm512_setzero_ps();
    size_t g = 0;
    if (!is_needed) return sum;
    const size_t ahead = row_ahead(type, rows, r);
    const np_row row = np_row_at(rows, r);
    np_prefetch_extra(rows, r);
    for (; g + NP_BLOCK_GROUPS <= groups; g += NP_BLOCK_GROUPS)
        sum = dot(type, &row, rows->n, g, &whole, ahead, x, sum);
    return g < groups ? dot(type, &row, rows->n, g, end, ahead, x, sum) : sum;
}

/* True if there is a row r and this token needs it. */
NP_INLINE int needs_token(const np_dot_job *job, size_t r, size_t token) { return r < job->rows.rows && np_token_mask(job, r, token, 1); }

/* The 16 sums of rows r and r + 1. */
NP_INLINE NP_AVX512 void two_rows(block_function *dot, const int type, const np_dot_job *job, const np_rows *rows, size_t r, size_t token,
                                  const np_block *end, const np_activation *x, __m512 sum[2]) {
    const int first = needs_token(job, r, token), second = needs_token(job, r + 1, token);
    const size_t groups = rows->n / NP_GROUP;
    const int ends_together = np_has_minimum(type) && groups % NP_BLOCK_GROUPS == NP_BLOCK_GROUPS / 2 && first && second;
    const size_t own = ends_together ? groups - NP_BLOCK_GROUPS / 2 : groups;
    sum[0] = lane_row(dot, type, rows, r, first, own, end, x);
    sum[1] = lane_row(dot, type, rows, r + 1, second, own, end, x);
    if (ends_together) add_two_ends(type, rows, r, x, sum);
}

NP_INLINE NP_AVX512 void lane_rows(block_function *dot, const int type, const np_dot_job *job, const np_rows *rows, size_t token) {
    const np_block end = np_block_of(rows->n / NP_GROUP % NP_BLOCK_GROUPS, type);
    const np_activation x = np_activation_at(job->activations + token * job->activation_stride_bytes, rows->n);
    for (size_t r = 0; r < rows->rows; r += NP_BLOCK_ROWS) {
        __m512 sums[NP_BLOCK_ROWS];
        two_rows(dot, type, job, rows, r, token, &end, &x, sums);
        two_rows(dot, type, job, rows, r + 2, token, &end, &x, sums + 2);
        np_put_four(job, r, token, sums[0], sums[1], sums[2], sums[3]);
    }
}

/* Two copies, so that short consecutive rows need no check for scattered addresses. */
NP_INLINE NP_AVX512 void at_or_in_order(block_function *dot, const int type, const np_dot_job *job, size_t token) {
    np_rows rows = job->rows;
    if (rows.quants_at) {
        lane_rows(dot, type, job, &rows, token);
    } else {
        rows.quants_at = rows.scales_at = NULL;
        lane_rows(dot, type, job, &rows, token);
    }
}

static NP_AVX512 void one_q8(const np_dot_job *job, size_t token) { at_or_in_order(q8_block, NP_Q8, job, token); }
static NP_AVX512 void one_q4(const np_dot_job *job, size_t token) { at_or_in_order(nibble_block, NP_Q4, job, token); }
static NP_AVX512 void one_q3(const np_dot_job *job, size_t token) { at_or_in_order(nibble_block, NP_Q3, job, token); }
static NP_AVX512 void one_q4k(const np_dot_job *job, size_t token) { at_or_in_order(nibble_block, NP_Q4K, job, token); }
static NP_AVX512 void one_q5k(const np_dot_job *job, size_t token) { at_or_in_order(nibble_block, NP_Q5K, job, token); }
static NP_AVX512 void one_q6k(const np_dot_job *job, size_t token) { at_or_in_order(nibble_block, NP_Q6K, job, token); }

static NP_AVX512 void one_iq4(const np_dot_job *job, size_t token) { at_or_in_order(nibble_block, NP_IQ4, job, token); }
static NP_AVX512 void one_mxfp4(const np_dot_job *job, size_t token) { at_or_in_order(nibble_block, NP_MXFP4, job, token); }

static NP_AVX512 void one_q4h(const np_dot_job *job, size_t token) { at_or_in_order(nibble_block, NP_Q4H, job, token); }
static NP_AVX512 void one_q5h(const np_dot_job *job, size_t token) { at_or_in_order(nibble_block, NP_Q5H, job, token); }

static void dot_tokens(const np_dot_job *job, void (*one)(const np_dot_job *, size_t), np_few_function *few) {
    size_t token = 0;
    while (token < job->tokens) {
        const size_t left = job->tokens - token, tokens = left < NP_TOKEN_BLOCK ? left : NP_TOKEN_BLOCK;
        if (tokens > 1 && job->rows.n <= NP_FEW_COLUMNS) {
            few(job, token, tokens);
            token += tokens;
        } else {
            one(job, token++);
        }
    }
}

NP_DEFINE_DOT_ROWS(NP_AVX512, np_avx512_dot_f16, f16_row)
void np_avx512_dot_q8(const np_dot_job *job) { dot_tokens(job, one_q8, np_avx512_few_q8); }
void np_avx512_dot_q4(const np_dot_job *job) { dot_tokens(job, one_q4, np_avx512_few_q4); }
void np_avx512_dot_q3(const np_dot_job *job) { dot_tokens(job, one_q3, np_avx512_few_q3); }
void np_avx512_dot_q4k(const np_dot_job *job) { dot_tokens(job, one_q4k, np_avx512_few_q4k); }
void np_avx512_dot_q5k(const np_dot_job *job) { dot_tokens(job, one_q5k, np_avx512_few_q5k); }
void np_avx512_dot_q6k(const np_dot_job *job) { dot_tokens(job, one_q6k, np_avx512_few_q6k); }
void np_avx512_dot_iq4(const np_dot_job *job) { dot_tokens(job, one_iq4, np_avx512_few_iq4); }
void np_avx512_dot_mxfp4(const np_dot_job *job) { dot_tokens(job, one_mxfp4, np_avx512_few_mxfp4); }
void np_avx512_dot_q4h(const np_dot_job *job) { dot_tokens(job, one_q4h, np_avx512_few_q4h); }
void np_avx512_dot_q5h(const np_dot_job *job) { dot_tokens(job, one_q5h, np_avx512_few_q5h); }
#endif

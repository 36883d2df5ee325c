/* AVX-512 with VNNI: dot products of quantized rows with a few tokens.
 *
 * A row with one token spends more time on adding the lanes of a group than on multiplying. Here rows and activations
 * are transposed first, so that every lane of a register is a group: four bytes of each of the block's 16 groups, and
 * four more in the next register. Products then accumulate in place. A row is transposed once for all tokens, an
 * activation once for all rows.
 *
 *   transposed      q8, 8 registers    bytes 4j..4j+3 of groups 0..15, j = 0..7
 *                   q4, 4 registers    the same of packed groups, j = 0..3: low nibbles meet the activation's register j,
 *                                      high ones its register 4 + j
 *                   q3                 as q4, once its codes lie in nibbles
 *                   with minimums      as q4, then the bits above the nibble are added */
#if defined(__x86_64__)
#include "kernels/avx512_lanes.h"

enum { STEPS = NP_GROUP / 4, BLOCK_COLUMNS = NP_BLOCK_GROUPS * NP_GROUP };

/* In each 128-bit lane: four bytes j of the k-th argument become the k-th four of out[j]. */
NP_INLINE NP_AVX512 void turn_lanes(const __m512i in[4], __m512i out[4]) {
    const __m512i low = _mm512_unpacklo_epi32(in[0], in[1]), low_2 = _mm512_unpacklo_epi32(in[2], in[3]);
    const __m512i high = _mm512_unpackhi_epi32(in[0], in[1]), high_2 = _mm512_unpackhi_epi32(in[2], in[3]);
    out[0] = _mm512_unpacklo_epi64(low, low_2), out[1] = _mm512_unpackhi_epi64(low, low_2);
    out[2] = _mm512_unpacklo_epi64(high, high_2), out[3] = _mm512_unpackhi_epi64(high, high_2);
}

/* Registers of two groups each, a group in two 128-bit lanes. */
NP_INLINE NP_AVX512 void turn_pairs(const __m512i in[8], __m512i out[8]) {
    const __m512i first = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 16, 24, 17, 25, 18, 26, 19, 27);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
    __m512i even[4], odd[4]; /* of groups 0..7, of groups 8..15 */
    turn_lanes(in, even);
    turn_lanes(in + 4, odd);
    for (int j = 0; j < 4; j++) {
        out[j] = _mm512_permutex2var_epi32(even[j], first, odd[j]);
        out[4 + j] = _mm512_permutex2var_epi32(even[j], second, odd[j]);
    }
}

/* Registers of four groups each, a group in a 128-bit lane. */
NP_INLINE NP_AVX512 void turn_fours(const __m512i in[4], __m512i out[4]) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    turn_lanes(in, out);
    for (int j = 0; j < 4; j++) out[j] = _mm512_permutexvar_epi32(order, out[j]);
}

/* A block of an activation. */
typedef struct {
    __m512i quants[STEPS];
    union {
        __m512i owed;       /* the negative of what the offset of unsigned weights adds to the products */
        __m512 scaled_sums; /* for rows with minimums, which have no offset */
    };
} turned_activation;

/* All blocks of an activation, zeros behind the last register. */
NP_INLINE NP_AVX512 void turn_activation(const int type, const np_activation *x, size_t n, turned_activation *turned) {
    const size_t bytes = np_padded(n, 128);
    for (size_t from = 0; from < n; from += BLOCK_COLUMNS, turned++) {
        const __m512i sums = _mm512_loadu_si512(x->sums + from / NP_GROUP);
        __m512i in[STEPS];
        for (size_t k = 0; k < STEPS; k++) {
            const size_t place = type == NP_Q8 ? k : k % 4 * 2 + k / 4; /* nibbles: what meets low ones first */
            in[k] = from + 64 * place < bytes ? _mm512_loadu_si512(x->quants + from + 64 * place) : _mm512_setzero_si512();
        }
        if (type == NP_Q8) {
            turn_pairs(in, turned->quants);
        } else {
            turn_fours(in, turned->quants);
            turn_fours(in + 4, turned->quants + 4);
        }
        if (np_has_minimum(type)) turned->scaled_sums = np_scaled_sums(x, from / NP_GROUP);
        else turned->owed = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sums, type == NP_Q8 ? 7 : np_offset_bits(type)));
    }
}

/* A block of a row with unsigned quants: q8 plus 128, nibbles and codes as they are. */
NP_INLINE NP_AVX512 void turn_block(const int type, const uint8_t *w, const uint8_t *planes, size_t plane_bytes, const np_block *block,
                                    size_t ahead, __m512i turned[STEPS]) {
    const size_t registers = type == NP_Q8 ? 8 : 4;
    const __m512i nibble = _mm512_set1_epi8(np_nibble(type));
    __m512i in[STEPS];
    for (size_t k = 0; k < registers; k++) {
        in[k] = _mm512_setzero_si512();
        if (k >= block->registers) continue;
        np_prefetch(w + np_register_bytes(type) * k, ahead);
        if (type == NP_Q8) in[k] = _mm512_xor_si512(np_load_row(w, k, block), _mm512_set1_epi8(-128));
        else in[k] = np_load_nibbles(type, w, k, block);
    }
    if (type == NP_Q8) {
        turn_pairs(in, turned);
        return;
    }
    turn_fours(in, turned);
    for (int j = 0; j < 4; j++) {
        turned[4 + j] = np_unsigned_values(type, _mm512_and_si512(_mm512_srli_epi16(turned[j], 4), nibble));
        turned[j] = np_unsigned_values(type, _mm512_and_si512(turned[j], nibble));
    }
    for (size_t plane = 0; plane < 2 * np_high_bits(type); plane++) np_prefetch(planes + plane * plane_bytes, ahead);
    np_add_turned_bits(type, turned, planes, plane_bytes, block->scales);
    np_add_turned_bits(type, turned + 4, planes + plane_bytes, plane_bytes, block->scales);
}

/* The 16 sums of row r with each token that needs it; zeros for other tokens, and if there is no such row. */
NP_INLINE NP_AVX512 void few_row(const int type, const np_rows *rows, size_t r, unsigned mask, const np_block *end, const np_activation *x,
                                 const turned_activation *turned, size_t blocks, const size_t tokens, __m512 *sums) {
    const size_t group_bytes = np_block_group_bytes(type), groups = rows->n / NP_GROUP;
    const np_block whole = np_block_of(NP_BLOCK_GROUPS, type);
    __m512 sum[NP_TOKEN_BLOCK];
    for (size_t t = 0; t < tokens; t++) sums[t] = sum[t] = _mm512_setzero_ps();
    if (!mask) return;
    const size_t ahead = np_high_bits(type) > 0 ? np_ahead_whole_rows(rows, r) : np_ahead_bytes(rows, r);
    const np_row row = np_row_at(rows, r);
    np_prefetch_extra(rows, r);
    for (size_t g = 0; g < groups; g += NP_BLOCK_GROUPS, turned++) {
        const np_block *block = groups - g < NP_BLOCK_GROUPS ? end : &whole;
        const uint16_t *scales = (const uint16_t *)(const void *)row.scales + g;
        __m512i weights[STEPS];
        np_lane_scales s = {0};
        turn_block(type, row.quants + g * group_bytes, row.quants + rows->n / 2 + 2 * g, rows->n / 16, block, ahead, weights);
        if (np_has_minimum(type)) s = np_row_minimums(type, row.scales + np_minimum_bytes(type) * g, groups - g);
        for (size_t t = 0; t < tokens; t++) {
            if (!(mask >> t & 1)) continue;
            const turned_activation *own = &turned[t * blocks];
            __m512i dots = np_has_minimum(type) ? _mm512_setzero_si512() : own->owed;
            for (size_t j = 0; j < STEPS; j++) dots = _mm512_dpbusd_epi32(dots, weights[j], own->quants[j]);
            if (np_has_minimum(type)) sum[t] = np_add_with_minimums(dots, &s, _mm512_loadu_ps(x[t].scales + g), own->scaled_sums, sum[t]);
            else sum[t] = np_add_scaled(dots, scales, block, x[t].scales + g, sum[t]);
        }
    }
    for (size_t t = 0; t < tokens; t++) sums[t] = sum[t];
}

/* The tokens that need row r, as a mask; 0 if there is no such row. */
NP_INLINE unsigned token_mask(const np_dot_job *job, size_t r, size_t token, size_t tokens) {
    return r < job->rows.rows ? np_token_mask(job, r, token, tokens) : 0;
}

NP_INLINE NP_AVX512 void few_rows(const int type, const np_dot_job *job, size_t token, const size_t tokens) {
    const np_rows *rows = &job->rows;
    const size_t groups = rows->n / NP_GROUP, blocks = (groups + NP_BLOCK_GROUPS - 1) / NP_BLOCK_GROUPS;
    const np_block end = np_block_of(groups % NP_BLOCK_GROUPS, type);
    turned_activation turned[NP_TOKEN_BLOCK * NP_FEW_COLUMNS / BLOCK_COLUMNS];
    np_activation x[NP_TOKEN_BLOCK];
    for (size_t t = 0; t < tokens; t++) {
        x[t] = np_activation_at(job->activations + (token + t) * job->activation_stride_bytes, rows->n);
        turn_activation(type, &x[t], rows->n, turned + t * blocks);
    }
    for (size_t r = 0; r < rows->rows; r += NP_BLOCK_ROWS) {
        __m512 a[NP_TOKEN_BLOCK], b[NP_TOKEN_BLOCK], c[NP_TOKEN_BLOCK], d[NP_TOKEN_BLOCK];
        few_row(type, rows, r, token_mask(job, r, token, tokens), &end, x, turned, blocks, tokens, a);
        few_row(type, rows, r + 1, token_mask(job, r + 1, token, tokens), &end, x, turned, blocks, tokens, b);
        few_row(type, rows, r + 2, token_mask(job, r + 2, token, tokens), &end, x, turned, blocks, tokens, c);
        few_row(type, rows, r + 3, token_mask(job, r + 3, token, tokens), &end, x, turned, blocks, tokens, d);
        for (size_t t = 0; t < tokens; t++) np_put_four(job, r, token + t, a[t], b[t], c[t], d[t]);
    }
}

/* One function per number of tokens, so that the sums stay in registers. */
NP_INLINE NP_AVX512 void few(const int type, const np_dot_job *job, size_t token, size_t tokens) {
    if (tokens == 2) few_rows(type, job, token, 2);
    else if (tokens == 3) few_rows(type, job, token, 3);
    else few_rows(type, job, token, NP_TOKEN_BLOCK);
}

NP_AVX512 void np_avx512_few_q8(const np_dot_job *job, size_t token, size_t tokens) { few(NP_Q8, job, token, tokens); }
NP_AVX512 void np_avx512_few_q4(const np_dot_job *job, size_t token, size_t tokens) { few(NP_Q4, job, token, tokens); }
NP_AVX512 void np_avx512_few_q3(const np_dot_job *job, size_t token, size_t tokens) { few(NP_Q3, job, token, tokens); }
NP_AVX512 void np_avx512_few_q4k(const np_dot_job *job, size_t token, size_t tokens) { few(NP_Q4K, job, token, tokens); }
NP_AVX512 void np_avx512_few_q5k(const np_dot_job *job, size_t token, size_t tokens) { few(NP_Q5K, job, token, tokens); }
NP_AVX512 void np_avx512_few_q6k(const np_dot_job *job, size_t token, size_t tokens) { few(NP_Q6K, job, token, tokens); }
NP_AVX512 void np_avx512_few_iq4(const np_dot_job *job, size_t token, size_t tokens) { few(NP_IQ4, job, token, tokens); }
NP_AVX512 void np_avx512_few_mxfp4(const np_dot_job *job, size_t token, size_t tokens) { few(NP_MXFP4, job, token, tokens); }
NP_AVX512 void np_avx512_few_q4h(const np_dot_job *job, size_t token, size_t tokens) { few(NP_Q4H, job, token, tokens); }
NP_AVX512 void np_avx512_few_q5h(const np_dot_job *job, size_t token, size_t tokens) { few(NP_Q5H, job, token, tokens); }
#endif

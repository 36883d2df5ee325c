/* AVX-512 with VNNI: quantized rows added to a vector, as sums of integers.
 *
 * A list is processed in batches of ROWS rows, in order. For a batch and a group of 32 columns, the factors a * scale
 * are converted to 16-bit integers in steps of a 32639th of the largest one, each as two signed bytes: 256 * high +
 * low. Four rows (a quad) are interleaved bytewise, so that one dpbusd multiplies four rows' weights by a byte of their
 * factors and adds them. These sums are exact, and a batch adds them to y with one rounding: bits depend on the list
 * and y only.
 *
 * Of rows with minimums, the minimums of a batch are added up as floats, and a group's sum is subtracted from its
 * columns.
 *
 * Rows are copied piece by piece, one piece ahead of the sums: slots lie at multiples of 4 KiB, and reading one line
 * from each of many such rows in turn halves the speed of the second-level cache. */
#include "kernels/isa.h"

#if defined(__x86_64__)
#include "kernels/avx512_lanes.h"

enum { ROWS = 32, QUADS = ROWS / 4, LINES = 4, PIECE = 64 * LINES };
enum { MOST = 127 * 256 + 127 }; /* of a factor: both bytes 127 */

/* The current batch, padded to whole quads with its first row and a factor of zero; and the rows to prefetch, if
 * any. */
typedef struct {
    size_t quads, quant_bytes, fetched, n;
    np_row at[ROWS], next[ROWS];
    float a[ROWS];
} row_batch;

/* Of 16 groups: of each quad one byte of each factor, rows in the order 0, 2, 1, 3; the factors' sum; what one step
 * is; of rows with minimums the sum of a * minimum. */
typedef struct {
    __m512i high[QUADS], low[QUADS], sum;
    __m512 step, minimum;
} batch_factors;

typedef __m512i batch_piece[ROWS][LINES];

NP_INLINE void take_rows(const np_rows *rows, const float *a, size_t r, row_batch *b) {
    const size_t left = rows->rows - r, count = left < ROWS ? left : ROWS;
    b->quads = (count + 3) / 4;
    b->quant_bytes = rows->quant_bytes;
    b->n = rows->n;
    b->fetched = left - count < ROWS ? left - count : ROWS;
    for (size_t i = 0; i < b->fetched; i++) b->next[i] = np_row_at(rows, r + ROWS + i);
    for (size_t i = 0; i < 4 * b->quads; i++) {
        b->at[i] = np_row_at(rows, i < count ? r + i : r);
        b->a[i] = i < count ? a[r + i] : 0.0f;
    }
}

/* The scales and minimums of a row's groups from `group` on, up to 16, and a prefetch of those of the row ROWS later. */
NP_INLINE NP_AVX512 np_lane_scales row_scales(const int type, const row_batch *b, size_t row, size_t group, size_t groups) {
    const __mmask16 mask = groups < 16 ? (__mmask16)((1u << groups) - 1) : 0xffff;
    const uint8_t *scales = b->at[row].scales;
    if (row < b->fetched && group % 32 == 0) __builtin_prefetch(b->next[row].scales + 2 * group, 0, 2);
    if (np_has_minimum(type)) return np_row_minimums(type, scales + np_minimum_bytes(type) * group, groups);
    return (np_lane_scales){_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scales + 2 * group)), _mm512_setzero_ps()};
}

/* The factors of up to 16 groups from `group` on, from those of the rows. scales: what row_scales returns for the rows, if
 * it was called before; else NULL. A non-finite factor makes the step non-finite, and with it the
 * group's columns: compared as integers, NaN has the largest magnitude. */
NP_INLINE NP_AVX512 void take_factors(const int type, const row_batch *b, const float *a, const np_lane_scales *scales, size_t group, size_t groups,
                                      batch_factors *f) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512 factor[ROWS];
    __m512i most = _mm512_castps_si512(_mm512_set1_ps(0x1p-100f)); /* at least, so that the quotient does not overflow */
    f->minimum = _mm512_setzero_ps();
    for (size_t i = 0; i < 4 * b->quads; i++) {
        const np_lane_scales s = scales ? scales[i] : row_scales(type, b, i, group, groups);
        factor[i] = _mm512_mul_ps(_mm512_set1_ps(a[i]), s.scales);
        if (np_has_minimum(type)) f->minimum = _mm512_fmadd_ps(_mm512_set1_ps(a[i]), s.minimums, f->minimum);
        most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(factor[i]), magnitude));
    }
    const __m512 largest = _mm512_castsi512_ps(most), per_step = _mm512_div_ps(_mm512_set1_ps(MOST), largest);
    f->step = _mm512_div_ps(largest, _mm512_set1_ps(MOST));

    /* Added to 1.5 * 2^23, a factor in steps is rounded into the lowest bits of a float. 128 more makes its low byte
     * unsigned. */
    const __m512 rounding = _mm512_set1_ps(0x1.8p23f + 128.0f);
    const __m512i rounding_bits = _mm512_castps_si512(rounding), signs = _mm512_set1_epi8((char)0x80);
    f->sum = _mm512_setzero_si512();
    for (size_t q = 0; q < b->quads; q++) {
        __m512i v[4];
        for (size_t i = 0; i < 4; i++) {
            v[i] = _mm512_castps_si512(_mm512_fmadd_ps(factor[4 * q + i], per_step, rounding));
            f->sum = _mm512_add_epi32(f->sum, _mm512_sub_epi32(v[i], rounding_bits));
        }
        const __m512i v01 = _mm512_mask_blend_epi16(0xaaaaaaaa, v[0], _mm512_slli_epi32(v[1], 16));
        const __m512i v23 = _mm512_mask_blend_epi16(0xaaaaaaaa, v[2], _mm512_slli_epi32(v[3], 16));
        f->high[q] = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, _mm512_srli_epi32(v01, 8), v23);
        f->low[q] = _mm512_xor_si512(_mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, v01, _mm512_slli_epi32(v23, 8)), signs);
    }
}

/* Copy a row's bytes from `at` on, zero-padded to a whole line, and prefetch the row ROWS later. */
NP_INLINE NP_AVX512 void copy_piece(const row_batch *b, size_t row, size_t at, batch_piece piece) {
    if (at >= b->quant_bytes) return;
    const size_t left = b->quant_bytes - at;
    const uint8_t *quants = b->at[row].quants + at;
    if (row < b->fetched)
        for (size_t i = 0; i < PIECE && i < left; i += 64) __builtin_prefetch(b->next[row].quants + at + i, 0, 2);
    if (left >= PIECE) {
        for (size_t i = 0; i < LINES; i++) piece[row][i] = _mm512_loadu_si512(quants + 64 * i);
        return;
    }
    for (size_t i = 0; 64 * i < left; i++) {
        const size_t bytes = left - 64 * i;
        const __mmask64 mask = bytes < 64 ? ((__mmask64)1 << bytes) - 1 : ~(__mmask64)0;
        piece[row][i] = _mm512_maskz_loadu_epi8(mask, quants + 64 * i);
    }
}

/* The codes, or the values plus 128, of up to four groups of a row from `group` on: the first 16 of each, and the last. */
NP_INLINE NP_AVX512 void load_codes(const int type, const uint8_t *quants, size_t n, size_t group, __m512i codes[2]) {
    const size_t groups = n / NP_GROUP, plane_bytes = n / 16, lacking = groups - group < 4 ? 4 - (groups - group) : 0;
    const uint8_t *nibbles = quants + 16 * group, *planes = quants + n / 2 + 2 * group;
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i w = lacking ? _mm512_maskz_loadu_epi8(~(__mmask64)0 >> 16 * lacking, nibbles) : _mm512_loadu_si512(nibbles);
    const __m512i first = _mm512_and_si512(w, nibble), last = _mm512_and_si512(_mm512_srli_epi16(w, 4), nibble);
    codes[0] = np_unsigned_values(type, np_add_high_bits(type, first, planes, plane_bytes, 2 * lacking));
    codes[1] = np_unsigned_values(type, np_add_high_bits(type, last, planes + plane_bytes, plane_bytes, 2 * lacking));
}

/* Prefetch what the row ROWS later has of these groups. */
NP_INLINE void prefetch_codes(const int type, const row_batch *b, size_t row, size_t group) {
    if (row >= b->fetched) return;
    __builtin_prefetch(b->next[row].quants + 16 * group, 0, 2);
    for (size_t plane = 0; group % 32 == 0 && plane < 2 * np_high_bits(type); plane++)
        __builtin_prefetch(b->next[row].quants + b->n / 2 + plane * (b->n / 16) + 2 * group, 0, 2);
}

/* Copy the codes of a row's eight groups from `group` on, and prefetch the row ROWS later. A line of the piece has the
 * first 16 codes of four groups, the next one their last 16. */
NP_INLINE NP_AVX512 void copy_codes(const int type, const row_batch *b, size_t row, size_t group, batch_piece piece) {
    for (size_t i = 0; i < LINES && group < b->n / NP_GROUP; i += 2, group += 4) {
        load_codes(type, b->at[row].quants, b->n, group, &piece[row][i]);
        prefetch_codes(type, b, row, group);
    }
}

/* Register k gets bytes 4k to 4k + 3 of each 16, as dwords of the rows 0, 2, 1, 3. */
NP_INLINE NP_AVX512 void interleave_rows(__m512i row0, __m512i row1, __m512i row2, __m512i row3, __m512i w[4]) {
    const __m512i even_low = _mm512_unpacklo_epi8(row0, row2), even_high = _mm512_unpackhi_epi8(row0, row2);
    const __m512i odd_low = _mm512_unpacklo_epi8(row1, row3), odd_high = _mm512_unpackhi_epi8(row1, row3);
    w[0] = _mm512_unpacklo_epi16(even_low, odd_low), w[1] = _mm512_unpackhi_epi16(even_low, odd_low);
    w[2] = _mm512_unpacklo_epi16(even_high, odd_high), w[3] = _mm512_unpackhi_epi16(even_high, odd_high);
}

/* A line of each row of a quad. */
NP_INLINE NP_AVX512 void interleave(batch_piece piece, size_t quad, size_t line, __m512i w[4]) {
    interleave_rows(piece[4 * quad][line], piece[4 * quad + 1][line], piece[4 * quad + 2][line], piece[4 * quad + 3][line], w);
}

/* GCC 12 copies each sum before the intrinsic's instruction and runs out of registers. */
NP_INLINE NP_AVX512 void add_products(__m512i *sum, __m512i weights, __m512i factors) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(weights), "v"(factors));
}

NP_INLINE NP_AVX512 __m512i join(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

/* y[stride * i] .. += v * step[i] - minimum[i], 16 columns for each i < count. Columns 4k to 4k + 3 of them stand in
 * register k, quarter i. minimum: NULL for none. */
NP_INLINE NP_AVX512 void add_quarters(const __m512i v[4], const float *const step[4], const float *minimum, size_t count, size_t stride,
                                      float *y) {
    const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[2], v[3], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(v[0], v[1], 0xee), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
    const __m512i columns[4] = {_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd),
                                _mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xdd)};
    for (size_t i = 0; i < 4 && i < count; i++) {
        const __m512 before = _mm512_loadu_ps(y + stride * i), steps = _mm512_cvtepi32_ps(columns[i]);
        const __m512 sum = _mm512_fmadd_ps(steps, _mm512_set1_ps(*step[i]), before);
        _mm512_storeu_ps(y + stride * i, minimum ? _mm512_sub_ps(sum, _mm512_set1_ps(minimum[i])) : sum);
    }
}

/* Line `line` of a q4 or q4k piece: four groups from `group` on, `groups` of them there. A byte is 16 * upper + lower nibble:
 * sums of bytes and sums of lower nibbles leave those of upper nibbles, with no need to take these out. q4's nibbles
 * are weights plus 8. */
NP_INLINE NP_AVX512 void add_nibble_groups(const int type, const row_batch *b, const batch_factors *f, batch_piece piece, batch_piece later, size_t group,
                                           size_t groups, float *y) {
    const size_t first = group % 16, line = first / 4;
    const __m512i which = _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_set1_epi32((int)first));
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i byte_high[4], byte_low[4], lower_high[4], lower_low[4], lower[4], upper[4];
    for (int k = 0; k < 4; k++) byte_high[k] = byte_low[k] = lower_high[k] = lower_low[k] = _mm512_setzero_si512();
    for (size_t q = 0; q < b->quads; q++) {
        const __m512i high = _mm512_permutexvar_epi32(which, f->high[q]), low = _mm512_permutexvar_epi32(which, f->low[q]);
        __m512i w[4];
        interleave(piece, q, line, w);
        copy_piece(b, 4 * q + line, (group / 16 + 1) * PIECE, later);
        for (int k = 0; k < 4; k++) {
            const __m512i lower_nibbles = _mm512_and_si512(w[k], nibble);
            add_products(&byte_high[k], w[k], high), add_products(&byte_low[k], w[k], low);
            add_products(&lower_high[k], lower_nibbles, high), add_products(&lower_low[k], lower_nibbles, low);
        }
    }
    const __m512i offset = np_has_minimum(type) ? _mm512_setzero_si512() : _mm512_slli_epi32(_mm512_permutexvar_epi32(which, f->sum), 3);
    for (int k = 0; k < 4; k++) {
        const __m512i sum = join(lower_high[k], lower_low[k]);
        lower[k] = _mm512_sub_epi32(sum, offset);
        upper[k] = _mm512_sub_epi32(_mm512_srai_epi32(_mm512_sub_epi32(join(byte_high[k], byte_low[k]), sum), 4), offset);
    }
    const float *steps = (const float *)&f->step + first, *const step[4] = {steps, steps + 1, steps + 2, steps + 3};
    const float *minimum = np_has_minimum(type) ? (const float *)&f->minimum + first : NULL;
    add_quarters(lower, step, minimum, groups, NP_GROUP, y);
    add_quarters(upper, step, minimum, groups, NP_GROUP, y + 16);
}

/* Four groups of rows whose codes or values are copied to two lines. */
NP_INLINE NP_AVX512 void add_code_groups(const int type, const row_batch *b, const batch_factors *f, batch_piece piece, batch_piece later,
                                         size_t group, size_t groups, float *y) {
    const size_t first = group % 16, line = group % 8 / 2;
    const __m512i which = _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_set1_epi32((int)first));
    __m512i sum_high[2][4], sum_low[2][4], sum[2][4];
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 4; k++) sum_high[half][k] = sum_low[half][k] = _mm512_setzero_si512();
    for (size_t q = 0; q < b->quads; q++) {
        const __m512i high = _mm512_permutexvar_epi32(which, f->high[q]), low = _mm512_permutexvar_epi32(which, f->low[q]);
        for (size_t half = 0; half < 2; half++) {
            __m512i w[4];
            interleave(piece, q, line + half, w);
            copy_codes(type, b, 4 * q + line + half, (group / 8 + 1) * 8, later);
            for (int k = 0; k < 4; k++) add_products(&sum_high[half][k], w[k], high), add_products(&sum_low[half][k], w[k], low);
        }
    }
    const float *steps = (const float *)&f->step + first, *const step[4] = {steps, steps + 1, steps + 2, steps + 3};
    const float *minimum = np_has_minimum(type) ? (const float *)&f->minimum + first : NULL;
    const __m512i offset = np_has_minimum(type) ? _mm512_setzero_si512() : _mm512_slli_epi32(_mm512_permutexvar_epi32(which, f->sum), 7);
    for (int half = 0; half < 2; half++) {
        for (int k = 0; k < 4; k++) sum[half][k] = _mm512_sub_epi32(join(sum_high[half][k], sum_low[half][k]), offset);
        add_quarters(sum[half], step, minimum, groups, NP_GROUP, y + 16 * half);
    }
}

/* The same of q8: two groups a line. With the sign turned over, weights are weights plus 128. */
NP_INLINE NP_AVX512 void add_q8_groups(const int type, const row_batch *b, const batch_factors *f, batch_piece piece, batch_piece later,
                                       size_t group, size_t groups, float *y) {
    const size_t first = group % 16, line = group % 8 / 2;
    const __m512i which = _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), _mm512_set1_epi32((int)first));
    const __m512i signs = _mm512_set1_epi8((char)0x80);
    __m512i sum_high[4], sum_low[4], sum[4];
    for (int k = 0; k < 4; k++) sum_high[k] = sum_low[k] = _mm512_setzero_si512();
    for (size_t q = 0; q < b->quads; q++) {
        const __m512i high = _mm512_permutexvar_epi32(which, f->high[q]), low = _mm512_permutexvar_epi32(which, f->low[q]);
        __m512i w[4];
        interleave(piece, q, line, w);
        copy_piece(b, 4 * q + line, (group / 8 + 1) * PIECE, later);
        for (int k = 0; k < 4; k++) {
            const __m512i turned = _mm512_xor_si512(w[k], signs);
            add_products(&sum_high[k], turned, high), add_products(&sum_low[k], turned, low);
        }
    }
    const __m512i offset = _mm512_slli_epi32(_mm512_permutexvar_epi32(which, f->sum), 7);
    for (int k = 0; k < 4; k++) sum[k] = _mm512_sub_epi32(join(sum_high[k], sum_low[k]), offset);
    const float *steps = (const float *)&f->step + first, *const step[4] = {steps, steps, steps + 1, steps + 1};
    add_quarters(sum, step, NULL, 2 * groups, 16, y);
}

/* Define the np_add_function NAME from COPY, which copies the first piece of a row, and ADD_GROUPS, which adds PER_CALL of
 * the PER_PIECE groups of a piece and copies the following one. */
#define DEFINE_ADD(NAME, TYPE, PER_CALL, PER_PIECE, COPY, ADD_GROUPS)                                                     \
    NP_AVX512 void NAME(const np_rows *rows, const float *a, float *y) {                                                  \
        const size_t groups = rows->n / NP_GROUP;                                                                         \
        for (size_t r = 0; r < rows->rows; r += ROWS) {                                                                   \
            row_batch b;                                                                                                  \
            batch_factors f;                                                                                              \
            batch_piece pieces[2];                                                                                        \
            np_lane_scales scales[ROWS];                                                                                  \
            take_rows(rows, a, r, &b);                                                                                    \
            for (size_t i = 0; i < 4 * b.quads; i++) COPY(&b, i, 0, pieces[0]);                                           \
            for (size_t g = 0; g < groups; g += (PER_CALL)) {                                                             \
                const size_t piece = g / (PER_PIECE), left = groups - g;                                                  \
                if (g % 16 == 0) {                                                                                        \
                    for (size_t i = 0; np_has_minimum(TYPE) && i < 4 * b.quads; i++) scales[i] = row_scales(TYPE, &b, i, g, left); \
                    take_factors(TYPE, &b, b.a, np_has_minimum(TYPE) ? scales : NULL, g, left, &f); /* unpacked apart: 22 % faster */ \
                }                                                                                                         \
                ADD_GROUPS(TYPE, &b, &f, pieces[piece % 2], pieces[(piece + 1) % 2], g, left, y + g * NP_GROUP);          \
            }                                                                                                             \
        }                                                                                                                 \
    }
#define COPY_Q5K(b, row, group, piece) copy_codes(NP_Q5K, b, row, group, piece)
#define COPY_Q6K(b, row, group, piece) copy_codes(NP_Q6K, b, row, group, piece)
#define COPY_Q5H(b, row, group, piece) copy_codes(NP_Q5H, b, row, group, piece)
#define COPY_IQ4(b, row, group, piece) copy_codes(NP_IQ4, b, row, group, piece)
#define COPY_MXFP4(b, row, group, piece) copy_codes(NP_MXFP4, b, row, group, piece)
DEFINE_ADD(np_avx512_add_q4, NP_Q4, 4, 4 * LINES, copy_piece, add_nibble_groups)
DEFINE_ADD(np_avx512_add_q8, NP_Q8, 2, 2 * LINES, copy_piece, add_q8_groups)
DEFINE_ADD(np_avx512_add_q4k, NP_Q4K, 4, 4 * LINES, copy_piece, add_nibble_groups)
DEFINE_ADD(np_avx512_add_q5k, NP_Q5K, 4, 2 * LINES, COPY_Q5K, add_code_groups)
DEFINE_ADD(np_avx512_add_q6k, NP_Q6K, 4, 2 * LINES, COPY_Q6K, add_code_groups)
DEFINE_ADD(np_avx512_add_q4h, NP_Q4H, 4, 4 * LINES, copy_piece, add_nibble_groups)
DEFINE_ADD(np_avx512_add_q5h, NP_Q5H, 4, 2 * LINES, COPY_Q5H, add_code_groups)
DEFINE_ADD(np_avx512_add_iq4, NP_IQ4, 4, 2 * LINES, COPY_IQ4, add_code_groups)
DEFINE_ADD(np_avx512_add_mxfp4, NP_MXFP4, 4, 2 * LINES, COPY_MXFP4, add_code_groups)

/* ---- several tokens with the same rows ---- */
/* All sums of integers above are exact, so a token's bits need the same batches, factors and one addition for each of
 * them only: scales and codes of a batch are unpacked once for all tokens. */
typedef __m512i turned_codes[2][QUADS][4]; /* four groups, interleaved: first and last 16 codes */

/* As load_codes, of q8: weights plus 128. */
NP_INLINE NP_AVX512 void load_q8(const uint8_t *quants, size_t n, size_t group, __m512i codes[2]) {
    const size_t left = n - group * NP_GROUP, second = left > 64 ? left - 64 : 0;
    const __mmask64 all = ~(__mmask64)0;
    const __m512i w0 = _mm512_maskz_loadu_epi8(left < 64 ? all >> (64 - left) : all, quants + group * NP_GROUP);
    const __m512i w1 = _mm512_maskz_loadu_epi8(second < 64 ? ((__mmask64)1 << second) - 1 : all, quants + group * NP_GROUP + 64);
    const __m512i signs = _mm512_set1_epi8((char)0x80);
    codes[0] = _mm512_xor_si512(_mm512_shuffle_i32x4(w0, w1, 0x88), signs);
    codes[1] = _mm512_xor_si512(_mm512_shuffle_i32x4(w0, w1, 0xdd), signs);
}

NP_INLINE NP_AVX512 void turn_codes(const int type, const row_batch *b, size_t group, turned_codes turned) {
    for (size_t q = 0; q < b->quads; q++) {
        __m512i codes[4][2];
        for (size_t i = 0; i < 4; i++) {
            if (type == NP_Q8)
                load_q8(b->at[4 * q + i].quants, b->n, group, codes[i]);
            else
                load_codes(type, b->at[4 * q + i].quants, b->n, group, codes[i]);
            prefetch_codes(type, b, 4 * q + i, group * (type == NP_Q8 ? 2 : 1));
        }
        for (int half = 0; half < 2; half++)
            interleave_rows(codes[0][half], codes[1][half], codes[2][half], codes[3][half], turned[half][q]);
    }
}

/* Add four groups from `group` on, or `groups` if there are fewer, to one token's y. */
NP_INLINE NP_AVX512 void add_turned(const int type, size_t quads, const batch_factors *f, turned_codes turned, size_t group, size_t groups, float *y) {
    const size_t first = group % 16;
    const unsigned offset_bits = np_has_codebook(type) || type == NP_Q8 ? 7 : 3;
    const __m512i which = _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_set1_epi32((int)first));
    const __m512i offset = np_has_minimum(type) ? _mm512_setzero_si512() : _mm512_slli_epi32(_mm512_permutexvar_epi32(which, f->sum), offset_bits);
    const float *steps = (const float *)&f->step + first, *const step[4] = {steps, steps + 1, steps + 2, steps + 3};
    const float *minimum = np_has_minimum(type) ? (const float *)&f->minimum + first : NULL;
    __m512i sum_high[2][4], sum_low[2][4], sum[2][4];
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 4; k++) sum_high[half][k] = sum_low[half][k] = _mm512_setzero_si512();
    for (size_t q = 0; q < quads; q++) {
        const __m512i high = _mm512_permutexvar_epi32(which, f->high[q]), low = _mm512_permutexvar_epi32(which, f->low[q]);
        for (int half = 0; half < 2; half++)
            for (int k = 0; k < 4; k++)
                add_products(&sum_high[half][k], turned[half][q][k], high), add_products(&sum_low[half][k], turned[half][q][k], low);
    }
    for (int half = 0; half < 2; half++) {
        for (int k = 0; k < 4; k++) sum[half][k] = _mm512_sub_epi32(join(sum_high[half][k], sum_low[half][k]), offset);
        add_quarters(sum[half], step, minimum, groups, NP_GROUP, y + 16 * half);
    }
}

NP_INLINE NP_AVX512 void add_for_tokens(const int type, const np_rows *rows, const float *a, size_t a_stride, size_t tokens, float *y, size_t y_stride) {
    const size_t groups = rows->n / NP_GROUP;
    for (size_t r = 0; r < rows->rows; r += ROWS) {
        row_batch b;
        batch_factors f[NP_ADD_TOKENS];
        float factors[NP_ADD_TOKENS][ROWS];
        np_lane_scales scales[ROWS];
        turned_codes turned;
        take_rows(rows, a, r, &b);
        for (size_t t = 0; t < tokens; t++)
            for (size_t i = 0; i < 4 * b.quads; i++) factors[t][i] = r + i < rows->rows ? a[t * a_stride + r + i] : 0.0f;
        for (size_t g = 0; g < groups; g += 4) {
            if (g % 16 == 0) {
                for (size_t i = 0; i < 4 * b.quads; i++) scales[i] = row_scales(type, &b, i, g, groups - g);
                for (size_t t = 0; t < tokens; t++) take_factors(type, &b, factors[t], scales, g, groups - g, &f[t]);
            }
            turn_codes(type, &b, g, turned);
            for (size_t t = 0; t < tokens; t++) add_turned(type, b.quads, &f[t], turned, g, groups - g, y + t * y_stride + g * NP_GROUP);
        }
    }
}

NP_AVX512 int np_avx512_add_for_tokens(int type, const np_rows *rows, const float *a, size_t a_stride, size_t tokens, float *y, size_t y_stride) {
    switch (type) {
    case NP_F16: np_avx512_add_f16_for_tokens(rows, a, a_stride, tokens, y, y_stride); return 1;
#define CASE(TYPE) \
    case TYPE: add_for_tokens(TYPE, rows, a, a_stride, tokens, y, y_stride); return 1
        CASE(NP_Q8);
        CASE(NP_Q4);
        CASE(NP_Q4K);
        CASE(NP_Q5K);
        CASE(NP_Q6K);
        CASE(NP_IQ4);
        CASE(NP_MXFP4);
        CASE(NP_Q4H);
        CASE(NP_Q5H);
    default: return 0;
    }
}
#endif

/* NEON: sums of rows with a minimum; minimum.h describes the rows. Their dot products are in neon_rows.h. */
#if defined(__aarch64__)
#include "kernels/neon_minimum.h"

enum { TOGETHER = 4 }; /* rows that are added with one load and store of y */

/* Prefetch what the next rows have where these have four groups. */
NP_INLINE void prefetch_four(const int type, const np_rows *rows, size_t r, size_t first, size_t count) {
    for (; count > 0 && r < rows->rows; r++, count--) {
        const np_row row = np_row_at(rows, r);
        __builtin_prefetch(row.quants + first * 16, 0, 2);
        for (size_t plane = 0; first % 32 == 0 && plane < 2 * np_high_bits(type); plane++)
            __builtin_prefetch(row.quants + rows->n / 2 + plane * (rows->n / 16) + 2 * first, 0, 2);
        if (first % 32 == 0) __builtin_prefetch(row.scales + np_minimum_bytes(type) * first, 0, 2);
    }
}

/* y[0..15] += factor * codes. */
NP_INLINE void add_16(int8x16_t codes, float factor, float32x4_t y[4]) {
    const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(codes)), vmovl_high_s8(codes)};
    for (int k = 0; k < 2; k++) {
        y[2 * k] = vfmaq_n_f32(y[2 * k], vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves[k]))), factor);
        y[2 * k + 1] = vfmaq_n_f32(y[2 * k + 1], vcvtq_f32_s32(vmovl_high_s16(halves[k])), factor);
    }
}

/* Add `count` rows from r on. Their minimums are added up before they are subtracted. */
NP_INLINE void add_together(const int type, const np_rows *rows, size_t r, const size_t count, const float *a, float *y) {
    const size_t groups = rows->n / NP_GROUP;
    np_row row[TOGETHER];
    for (size_t i = 0; i < count; i++) row[i] = np_row_at(rows, r + i);
    for (size_t first = 0; first < groups; first += NP_FOUR) {
        const size_t four = groups - first < NP_FOUR ? groups - first : NP_FOUR;
        float factors[TOGETHER][NP_FOUR], minimums[NP_FOUR];
        np_neon_bits bits[TOGETHER];
        float32x4_t minimum = vdupq_n_f32(0);
        prefetch_four(type, rows, r + count, first, count);
        for (size_t i = 0; i < count; i++) {
            const np_neon_scales scales = np_neon_scales_of(type, row[i].scales, first);
            vst1q_f32(factors[i], vmulq_n_f32(scales.scales, a[r + i]));
            minimum = vfmaq_n_f32(minimum, scales.minimums, a[r + i]);
            bits[i] = np_neon_bits_of(type, row[i].quants, rows->n, first, four);
        }
        vst1q_f32(minimums, minimum);
        for (size_t g = 0; g < four; g++, y += NP_GROUP) {
            float32x4_t columns[8];
            for (int k = 0; k < 8; k++) columns[k] = vsubq_f32(vld1q_f32(y + 4 * k), vdupq_n_f32(minimums[g]));
            for (size_t i = 0; i < count; i++)
                for (int half = 0; half < 2; half++)
                    add_16(np_neon_codes(type, row[i].quants + (first + g) * 16, &bits[i], g, half), factors[i][g], columns + 4 * half);
            for (int k = 0; k < 8; k++) vst1q_f32(y + 4 * k, columns[k]);
        }
    }
}

NP_INLINE void add_rows(const int type, const np_rows *rows, const float *a, float *y) {
    size_t r = 0;
    for (; r + TOGETHER <= rows->rows; r += TOGETHER) add_together(type, rows, r, TOGETHER, a, y);
    for (; r < rows->rows; r++) add_together(type, rows, r, 1, a, y);
}

void np_neon_add_q4k(const np_rows *rows, const float *a, float *y) { add_rows(NP_Q4K, rows, a, y); }
void np_neon_add_q5k(const np_rows *rows, const float *a, float *y) { add_rows(NP_Q5K, rows, a, y); }
void np_neon_add_q6k(const np_rows *rows, const float *a, float *y) { add_rows(NP_Q6K, rows, a, y); }
void np_neon_add_q4h(const np_rows *rows, const float *a, float *y) { add_rows(NP_Q4H, rows, a, y); }
void np_neon_add_q5h(const np_rows *rows, const float *a, float *y) { add_rows(NP_Q5H, rows, a, y); }
#endif

/* AVX-512: rows of f16 added to a vector. Up to ROWS rows are added to a block of 128 columns together, so that y stays
 * in registers; the next rows are prefetched meanwhile. The bits are those of adding one row after the other. */
#include "kernels/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

enum { ROWS = 8, COLUMNS = 128, FEW_TOKENS = 4, FEW_COLUMNS = 64 };

/* The current rows, and those to prefetch; if none follow, the same rows, at no cost. */
typedef struct {
    size_t count;
    np_row at[ROWS], next[ROWS];
    float a[ROWS];
} row_block;

NP_INLINE NP_AVX512 __mmask16 first_lanes(size_t count) { return count < 16 ? (__mmask16)((1u << count) - 1) : 0xffff; }

NP_INLINE void take_rows(const np_rows *rows, const float *a, size_t r, row_block *b) {
    b->count = rows->rows - r < ROWS ? rows->rows - r : ROWS;
    for (size_t i = 0; i < b->count; i++) {
        b->at[i] = np_row_at(rows, r + i);
        b->next[i] = r + i + ROWS < rows->rows ? np_row_at(rows, r + i + ROWS) : b->at[i];
        b->a[i] = a[r + i];
    }
}

/* y[16 * k] .. += a * w for `vectors` times 16 columns from j on; of the last one only those in `mask`. */
NP_INLINE NP_AVX512 void add_f16_columns(const row_block *b, size_t j, const int vectors, __mmask16 mask, float *y) {
    __m512 sum[COLUMNS / 16];
    for (int k = 0; k < vectors; k++) sum[k] = _mm512_maskz_loadu_ps(mask, y + j + 16 * k);
    for (size_t i = 0; i < b->count; i++) {
        const __m512 factor = _mm512_set1_ps(b->a[i]);
        for (int k = 0; k < vectors; k++) {
            const size_t at = 2 * j + 32 * (size_t)k;
            if (k % 2 == 0) __builtin_prefetch(b->next[i].quants + at);
            const __m512 w = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, b->at[i].quants + at));
            sum[k] = _mm512_fmadd_ps(factor, w, sum[k]);
        }
    }
    for (int k = 0; k < vectors; k++) _mm512_mask_storeu_ps(y + j + 16 * k, mask, sum[k]);
}

NP_AVX512 void np_avx512_add_f16(const np_rows *rows, const float *a, float *y) {
    for (size_t r = 0; r < rows->rows; r += ROWS) {
        row_block b;
        size_t j = 0;
        take_rows(rows, a, r, &b);
        for (; j + COLUMNS <= rows->n; j += COLUMNS) add_f16_columns(&b, j, COLUMNS / 16, 0xffff, y);
        for (; j < rows->n; j += 16) add_f16_columns(&b, j, 1, first_lanes(rows->n - j), y);
    }
}

/* The same for `tokens` vectors at once, four times 64 columns of them in registers: a row is converted once for all. */
NP_INLINE NP_AVX512 void add_f16_to_four(const np_rows *rows, const float *a, size_t a_stride, size_t j, const int tokens, __mmask16 mask,
                                         const int vectors, float *y, size_t y_stride) {
    __m512 sum[FEW_TOKENS][FEW_COLUMNS / 16];
    for (int t = 0; t < tokens; t++)
        for (int k = 0; k < vectors; k++) sum[t][k] = _mm512_maskz_loadu_ps(mask, y + (size_t)t * y_stride + j + 16 * k);
    for (size_t r = 0; r < rows->rows; r++) {
        const uint8_t *w = np_row_at(rows, r).quants + 2 * j;
        __m512 row[FEW_COLUMNS / 16];
        for (int k = 0; k < vectors; k++) row[k] = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, w + 32 * k));
        for (int t = 0; t < tokens; t++) {
            const __m512 factor = _mm512_set1_ps(a[(size_t)t * a_stride + r]);
            for (int k = 0; k < vectors; k++) sum[t][k] = _mm512_fmadd_ps(factor, row[k], sum[t][k]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int k = 0; k < vectors; k++) _mm512_mask_storeu_ps(y + (size_t)t * y_stride + j + 16 * k, mask, sum[t][k]);
}

NP_AVX512 void np_avx512_add_f16_for_tokens(const np_rows *rows, const float *a, size_t a_stride, size_t tokens, float *y, size_t y_stride) {
    size_t t = 0;
    for (; t + FEW_TOKENS <= tokens; t += FEW_TOKENS) {
        const float *factors = a + t * a_stride;
        float *to = y + t * y_stride;
        size_t j = 0;
        for (; j + FEW_COLUMNS <= rows->n; j += FEW_COLUMNS)
            add_f16_to_four(rows, factors, a_stride, j, FEW_TOKENS, 0xffff, FEW_COLUMNS / 16, to, y_stride);
        for (; j < rows->n; j += 16) add_f16_to_four(rows, factors, a_stride, j, FEW_TOKENS, first_lanes(rows->n - j), 1, to, y_stride);
    }
    for (; t < tokens; t++) np_avx512_add_f16(rows, a + t * a_stride, y + t * y_stride);
}
#endif

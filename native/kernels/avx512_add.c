/* AVX-512: rows added to a vector. Up to ROWS rows go over a block of 128 columns together, so that y stays in registers
 * meanwhile; the rows after them are fetched from memory at the same pace. The bits are those of one row after the other. */
#include "kernels/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

enum { ROWS = 8, COLUMNS = 128, BLOCK_GROUPS = COLUMNS / NP_GROUP };

/* The rows under way, and those to fetch: the same as the rows where none follow, which costs nothing. */
typedef struct {
    size_t count;
    np_row at[ROWS], next[ROWS];
    float factor[ROWS][16]; /* a * scale of 16 groups; of f16, a */
} row_block;

NP_INLINE NP_AVX512 __mmask16 first_lanes(size_t count) { return count < 16 ? (__mmask16)((1u << count) - 1) : 0xffff; }

NP_INLINE void take_rows(const np_rows *rows, size_t r, row_block *b) {
    b->count = rows->rows - r < ROWS ? rows->rows - r : ROWS;
    for (size_t i = 0; i < b->count; i++) {
        b->at[i] = np_row_at(rows, r + i);
        b->next[i] = r + i + ROWS < rows->rows ? np_row_at(rows, r + i + ROWS) : b->at[i];
    }
}

NP_INLINE NP_AVX512 void take_factors(const float *a, size_t group, size_t groups, row_block *b) {
    for (size_t i = 0; i < b->count; i++) {
        const uint16_t *s = (const uint16_t *)(const void *)b->at[i].scales + group;
        const __m512 scales = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(groups - group), s));
        _mm512_storeu_ps(b->factor[i], _mm512_mul_ps(_mm512_set1_ps(a[i]), scales));
        if (group % 32 == 0) __builtin_prefetch(b->next[i].scales + 2 * group);
    }
}

/* y[16 * k] .. += a * w for `vectors` times 16 columns from j on; of the last one only those in `mask`. */
NP_INLINE NP_AVX512 void add_f16_columns(const row_block *b, size_t j, const int vectors, __mmask16 mask, float *y) {
    __m512 sum[COLUMNS / 16];
    for (int k = 0; k < vectors; k++) sum[k] = _mm512_maskz_loadu_ps(mask, y + j + 16 * k);
    for (size_t i = 0; i < b->count; i++) {
        const __m512 factor = _mm512_set1_ps(b->factor[i][0]);
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
        take_rows(rows, r, &b);
        for (size_t i = 0; i < b.count; i++) b.factor[i][0] = a[r + i];
        for (; j + COLUMNS <= rows->n; j += COLUMNS) add_f16_columns(&b, j, COLUMNS / 16, 0xffff, y);
        for (; j < rows->n; j += 16) add_f16_columns(&b, j, 1, first_lanes(rows->n - j), y);
    }
}

NP_INLINE NP_AVX512 void add_q8_groups(const row_block *b, size_t group, const int groups, float *y) {
    __m512 sum[2 * BLOCK_GROUPS];
    for (int k = 0; k < 2 * groups; k++) sum[k] = _mm512_loadu_ps(y + group * NP_GROUP + 16 * k);
    for (size_t i = 0; i < b->count; i++)
        for (int k = 0; k < 2 * groups; k++) {
            const size_t at = group * NP_GROUP + 16 * (size_t)k;
            if (k % 4 == 0) __builtin_prefetch(b->next[i].quants + at);
            const __m512i w = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(b->at[i].quants + at)));
            sum[k] = _mm512_fmadd_ps(_mm512_set1_ps(b->factor[i][(group + k / 2) % 16]), _mm512_cvtepi32_ps(w), sum[k]);
        }
    for (int k = 0; k < 2 * groups; k++) _mm512_storeu_ps(y + group * NP_GROUP + 16 * k, sum[k]);
}

NP_AVX512 void np_avx512_add_q8(const np_rows *rows, const float *a, float *y) {
    const size_t groups = rows->n / NP_GROUP;
    for (size_t r = 0; r < rows->rows; r += ROWS) {
        row_block b;
        take_rows(rows, r, &b);
        for (size_t g = 0; g < groups;) {
            if (g % 16 == 0) take_factors(a + r, g, groups, &b);
            const int whole = groups - g >= BLOCK_GROUPS;
            if (whole) add_q8_groups(&b, g, BLOCK_GROUPS, y);
            else add_q8_groups(&b, g, 1, y);
            g += whole ? BLOCK_GROUPS : 1;
        }
    }
}

/* q4 works on registers of 16 weights that are the same nibble of the 16 dwords of 64 bytes: four lanes of each of four groups. So a
 * nibble needs no widening, only its place in a dword made the mantissa of a float. y is brought into that order and back.
 *
 * to_nibbles: of sixteen columns of four groups each, lane 4q+b of register g, to lane 4g+q of register b. */
NP_INLINE NP_AVX512 void to_nibbles(__m512 v[4]) {
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
    const __m512 a = _mm512_permutex2var_ps(v[0], first, v[1]), b = _mm512_permutex2var_ps(v[0], second, v[1]);
    const __m512 c = _mm512_permutex2var_ps(v[2], first, v[3]), d = _mm512_permutex2var_ps(v[2], second, v[3]);
    v[0] = _mm512_shuffle_f32x4(a, c, 0x44), v[1] = _mm512_shuffle_f32x4(a, c, 0xee);
    v[2] = _mm512_shuffle_f32x4(b, d, 0x44), v[3] = _mm512_shuffle_f32x4(b, d, 0xee);
}

NP_INLINE NP_AVX512 void from_nibbles(__m512 v[4]) {
    const __m512i first = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
    const __m512 a = _mm512_shuffle_f32x4(v[0], v[1], 0x44), b = _mm512_shuffle_f32x4(v[2], v[3], 0x44);
    const __m512 c = _mm512_shuffle_f32x4(v[0], v[1], 0xee), d = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
    v[0] = _mm512_permutex2var_ps(a, first, b), v[1] = _mm512_permutex2var_ps(a, second, b);
    v[2] = _mm512_permutex2var_ps(c, first, d), v[3] = _mm512_permutex2var_ps(c, second, d);
}

/* What takes the nibble at bits 0, 4, 8, 12 and 16 of each lane out, as the lowest bits of 2^(23-bit) + 8. In registers: the compiler
 * must not know them, or it makes them anew at each use. */
enum { PLACES = 5 };
typedef struct {
    __m512i mask[PLACES], one[PLACES];
    __m512 offset[PLACES];
} nibble_places;

NP_INLINE NP_AVX512 nibble_places places(void) {
    nibble_places p;
    for (int k = 0; k < PLACES; k++) {
        p.mask[k] = _mm512_set1_epi32(15 << 4 * k);
        p.one[k] = _mm512_set1_epi32((150 - 4 * k) << 23);
        p.offset[k] = _mm512_set1_ps((float)(1 << (23 - 4 * k)) + 8.0f);
        __asm__("" : "+v"(p.mask[k]), "+v"(p.one[k]), "+v"(p.offset[k]));
    }
    return p;
}

NP_INLINE NP_AVX512 __m512 nibble_at(__m512i w, const int k, const nibble_places *p) { /* (w & mask) | one, - offset */
    return _mm512_sub_ps(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(w, p->mask[k], p->one[k], 0xea)), p->offset[k]);
}

/* Four groups from `group` on, `groups` of them there. */
NP_INLINE NP_AVX512 void add_q4_groups(const row_block *b, size_t group, size_t groups, const nibble_places *p, float *y) {
    const __mmask64 bytes = groups < 4 ? ((__mmask64)1 << 16 * groups) - 1 : ~(__mmask64)0;
    const __m512i which = _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                           _mm512_set1_epi32((int)(group % 16)));
    __m512 low[4], high[4];
    y += group * NP_GROUP;
    for (size_t g = 0; g < 4; g++) {
        low[g] = high[g] = _mm512_setzero_ps();
        if (g >= groups) continue;
        low[g] = _mm512_loadu_ps(y + g * NP_GROUP);
        high[g] = _mm512_loadu_ps(y + g * NP_GROUP + 16);
    }
    to_nibbles(low), to_nibbles(high);
#pragma GCC unroll 1
    for (size_t i = 0; i < b->count; i++) {
        __builtin_prefetch(b->next[i].quants + group * 16);
        const __m512 factor = _mm512_permutexvar_ps(which, _mm512_loadu_ps(b->factor[i]));
        const __m512i w = _mm512_maskz_loadu_epi8(bytes, b->at[i].quants + group * 16), upper = _mm512_srli_epi32(w, 12);
        low[0] = _mm512_fmadd_ps(factor, nibble_at(w, 0, p), low[0]);
        high[0] = _mm512_fmadd_ps(factor, nibble_at(w, 1, p), high[0]);
        low[1] = _mm512_fmadd_ps(factor, nibble_at(w, 2, p), low[1]);
        high[1] = _mm512_fmadd_ps(factor, nibble_at(w, 3, p), high[1]);
        low[2] = _mm512_fmadd_ps(factor, nibble_at(w, 4, p), low[2]);
        high[2] = _mm512_fmadd_ps(factor, nibble_at(upper, 2, p), high[2]);
        low[3] = _mm512_fmadd_ps(factor, nibble_at(upper, 3, p), low[3]);
        high[3] = _mm512_fmadd_ps(factor, nibble_at(upper, 4, p), high[3]);
    }
    from_nibbles(low), from_nibbles(high);
    for (size_t g = 0; g < 4 && g < groups; g++) {
        _mm512_storeu_ps(y + g * NP_GROUP, low[g]);
        _mm512_storeu_ps(y + g * NP_GROUP + 16, high[g]);
    }
}

NP_AVX512 void np_avx512_add_q4(const np_rows *rows, const float *a, float *y) {
    const nibble_places p = places();
    const size_t groups = rows->n / NP_GROUP;
    for (size_t r = 0; r < rows->rows; r += ROWS) {
        row_block b;
        take_rows(rows, r, &b);
        for (size_t g = 0; g < groups; g += BLOCK_GROUPS) {
            if (g % 16 == 0) take_factors(a + r, g, groups, &b);
            if (groups - g >= BLOCK_GROUPS) add_q4_groups(&b, g, BLOCK_GROUPS, &p, y);
            else add_q4_groups(&b, g, groups - g, &p, y);
        }
    }
}
#endif

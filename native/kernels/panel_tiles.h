/* Shared by avx512_panel.c and amx_panel.c: the panel's layout, the order of groups, unpacked weights.
 *
 *   panel, for each tile of 32 tokens    bytes
 *   quants [groups][8][32][4]            1024 for each group: 8 times 4 columns of each token
 *   scales [groups][32]                  128 for each group, float32
 *   scaled sums [groups][32]             128 for each group, float32: scale times the group's sum of quants; for rows
 *                                        with minimums only
 *
 * Floats are added as in avx512_dot.c: 16 sums over the groups g = 0..15 modulo 16, then a fixed tree. So groups are
 * visited remainder by remainder, in the order of the tree's leaves, and panel and rows are laid out in that order. */
#ifndef NP_KERNELS_PANEL_TILES_H
#define NP_KERNELS_PANEL_TILES_H
#include "kernels/avx512_minimum.h"
#include "kernels/codebook.h"
#include "kernels/three_bits.h"

#include <immintrin.h>

enum {
    TILE = 32,            /* tokens: two registers */
    STEPS = NP_GROUP / 4, /* of four columns */
    VISITS = 16,
    LEVELS = 5 /* of the tree over the visits' sums */
};

/* By visit (groups with one remainder modulo 16): the number of groups before it, and its own. */
typedef struct {
    size_t first[VISITS], count[VISITS], first_of_remainder[VISITS];
} visits;

static visits visits_of(size_t groups) {
    static const uint8_t order[VISITS] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
    visits v;
    size_t first = 0;
    for (int i = 0; i < VISITS; i++) {
        const size_t count = (groups + 15 - order[i]) / 16;
        v.first[i] = v.first_of_remainder[order[i]] = first;
        v.count[i] = count;
        first += count;
    }
    return v;
}

static size_t place_of(const visits *v, size_t group) { return v->first_of_remainder[group % 16] + group / 16; }

static size_t tile_bytes(int type, size_t n) {
    return n / NP_GROUP * (TILE * NP_GROUP + TILE * sizeof(float) * (np_has_minimum(type) ? 2 : 1));
}

static size_t panel_bytes(int type, size_t n, size_t tokens) { return (tokens + TILE - 1) / TILE * tile_bytes(type, n); }

/* flip: bits to invert in every four quants; 0x80808080 adds 128 and makes them unsigned. */
static void fill_panel(int type, const uint8_t *activations, size_t stride, size_t tokens, size_t n, uint32_t flip, uint8_t *panel) {
    const size_t groups = n / NP_GROUP;
    const visits v = visits_of(groups);
    for (size_t from = 0; from < tokens; from += TILE, panel += tile_bytes(type, n)) {
        float *scales = (float *)(void *)(panel + groups * TILE * NP_GROUP), *scaled_sums = scales + groups * TILE;
        for (size_t t = 0; t < TILE; t++) {
            const int is_token = from + t < tokens;
            const np_activation x = np_activation_at(activations + (is_token ? from + t : from) * stride, n);
            for (size_t g = 0; g < groups; g++) {
                const int8_t *low = x.quants + (type == NP_Q8 ? g * NP_GROUP : np_q4_place(g)), *high = low + (type == NP_Q8 ? 16 : 64);
                const size_t place = place_of(&v, g);
                uint8_t *to = panel + place * TILE * NP_GROUP + 4 * t;
                for (size_t step = 0; step < STEPS; step++, to += 4 * TILE) {
                    uint32_t four = 0;
                    if (is_token) memcpy(&four, step < 4 ? low + 4 * step : high + 4 * (step - 4), 4);
                    four ^= flip;
                    memcpy(to, &four, 4);
                }
                scales[place * TILE + t] = is_token ? x.scales[g] : 0.0f;
                if (np_has_minimum(type)) scaled_sums[place * TILE + t] = is_token ? (float)x.sums[g] * x.scales[g] : 0.0f;
            }
        }
    }
}

static void fetch_rows(const np_rows *rows, size_t r, size_t end) {
    for (; r < end && r < rows->rows; r++) {
        const np_row row = np_row_at(rows, r);
        for (size_t i = 0; i < rows->quant_bytes; i += 64) __builtin_prefetch(row.quants + i, 0, 2);
        for (size_t i = 0; i < rows->scale_bytes; i += 64) __builtin_prefetch(row.scales + i, 0, 2);
    }
}

/* The 32 weights of group g of a row of n as bytes; with a minimum their codes. */
NP_INLINE NP_AVX512 __m256i unpack(int type, const uint8_t *quants, size_t n, size_t g) {
    if (type == NP_Q8) return _mm256_loadu_si256((const void *)(quants + g * NP_GROUP));
    __m128i packed;
    if (type == NP_Q3) {
        const np_q4_group group = np_q4_of_q3(quants + g * NP_Q3_GROUP_BYTES);
        packed = _mm_set_epi64x((int64_t)group.words[1], (int64_t)group.words[0]);
    } else {
        packed = _mm_loadu_si128((const void *)(quants + g * 16));
    }
    const __m256i both = _mm256_set_m128i(_mm_srli_epi16(packed, 4), packed);
    const __m256i nibbles = _mm256_and_si256(both, _mm256_set1_epi8(15));
    if (np_has_minimum(type)) return np_add_group_bits(type, nibbles, quants + n / 2 + 2 * g, n / 16);
    if (!np_has_codebook(type)) return _mm256_sub_epi8(nibbles, _mm256_set1_epi8(8));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const void *)np_codebook(type))), nibbles);
}

/* The scales of 16 groups, and their minimums if they have some. */
typedef struct {
    _Alignas(64) float scales[16], minimums[16];
} unpacked_scales;

/* Scales of the 16 groups from g on. */
NP_INLINE NP_AVX512 void unpack_scales(int type, const uint8_t *scales, size_t g, size_t groups, unpacked_scales *to) {
    const __mmask16 there = groups - g < 16 ? (__mmask16)((1u << (groups - g)) - 1) : 0xffff;
    if (np_has_minimum(type)) {
        const np_lane_scales lanes = np_row_minimums(type, scales + np_minimum_bytes(type) * g, groups - g);
        _mm512_store_ps(to->scales, lanes.scales);
        _mm512_store_ps(to->minimums, lanes.minimums);
    } else {
        _mm512_store_ps(to->scales, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, scales + 2 * g)));
    }
}
#endif

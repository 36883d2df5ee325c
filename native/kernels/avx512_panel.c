/* AVX-512 with VNNI: quantized rows times a panel of many tokens, with the bits of np_dot_rows.
 *
 * Tokens lie across the lanes: a register is 4 columns of 16 tokens, and a weight is broadcast to all of them. dpbusd
 * needs one unsigned side: activations plus 128; the group's integer starts at -128 times its sum of weights. q4 and q3
 * rows are unpacked to bytes first, a block of rows at a time. The panel and the order of additions: panel_tiles.h. */
#if defined(__x86_64__)
#include "kernels/panel_tiles.h"

enum {
    FOUR = 4,                 /* rows that share the loads of a tile */
    BLOCK_ROWS = 16,          /* at most, unpacked at a time */
    BLOCK_COLUMNS = 64 << 10, /* of all these rows together: what fits the second-level cache beside a tile, and the stack */
    BLOCK_GROUPS = BLOCK_COLUMNS / NP_GROUP
};

/* Unpacked rows, in fours: groups in the order of visits, of each group its columns of four rows. */
typedef struct {
    int8_t quants[BLOCK_COLUMNS];
    int32_t start[BLOCK_GROUPS]; /* -128 times the group's sum */
    float scales[BLOCK_GROUPS], minimums[BLOCK_GROUPS]; /* the latter of rows that have some */
} row_block;

/* Partial sums of the tree, [level][row][token]. */
typedef struct {
    float sums[LEVELS][BLOCK_ROWS][TILE];
} sum_tree;

static void panel_prepare(int type, const uint8_t *activations, size_t stride, size_t tokens, size_t n, uint8_t *panel) {
    fill_panel(type, activations, stride, tokens, n, 0x80808080u, panel);
}

/* Unpack up to four rows from r on to the block's rows from `at` on; missing rows repeat the last one. */
NP_INLINE NP_AVX512 void unpack_four(int type, const np_rows *rows, size_t r, const visits *v, row_block *b, size_t at) {
    int8_t *quants = b->quants + at * rows->n;
    int32_t *start = b->start + at * (rows->n / NP_GROUP);
    float *scales = b->scales + at * (rows->n / NP_GROUP), *minimums = b->minimums + at * (rows->n / NP_GROUP);
    unpacked_scales s[FOUR];
    np_row row[FOUR];
    for (size_t i = 0; i < FOUR; i++) row[i] = np_row_at(rows, r + i < rows->rows ? r + i : rows->rows - 1);
    for (size_t g = 0; g < rows->n / NP_GROUP; g++) {
        const size_t place = place_of(v, g);
        __m256i sum[FOUR];
        for (size_t i = 0; i < FOUR && g % 16 == 0; i++) unpack_scales(type, row[i].scales, g, rows->n / NP_GROUP, &s[i]);
        for (size_t i = 0; i < FOUR; i++) {
            const __m256i w = unpack(type, row[i].quants, rows->n, g);
            _mm256_storeu_si256((void *)(quants + (place * FOUR + i) * NP_GROUP), w);
            sum[i] = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), w);
            scales[place * FOUR + i] = s[i].scales[g % 16];
            if (np_has_minimum(type)) minimums[place * FOUR + i] = s[i].minimums[g % 16];
        }
        const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(sum[0], sum[1]), _mm256_hadd_epi32(sum[2], sum[3]));
        const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
        _mm_storeu_si128((void *)(start + place * FOUR), _mm_slli_epi32(_mm_sub_epi32(_mm_setzero_si128(), sums), 7));
    }
}

/* The groups of one visit: four rows times `vectors` registers of 16 tokens. scaled_sums and minimums are
 * read if there are some. */
NP_INLINE NP_AVX512 void multiply(const uint8_t *x, const float *x_scales, const float *scaled_sums, const int8_t *w, const int32_t *start,
                                  const float *scales, const float *minimums, size_t groups, const int vectors, const int has_minimum,
                                  __m512 sum[FOUR][2]) {
    for (int i = 0; i < FOUR; i++)
        for (int k = 0; k < vectors; k++) sum[i][k] = _mm512_setzero_ps();
    for (size_t g = 0; g < groups; g++, x_scales += TILE, start += FOUR, scales += FOUR) {
        __m512i dot[FOUR][2];
        for (int i = 0; i < FOUR; i++)
            for (int k = 0; k < vectors; k++) dot[i][k] = _mm512_set1_epi32(start[i]);
        for (int step = 0; step < STEPS; step++, x += 4 * TILE) {
            __m512i columns[2];
            for (int k = 0; k < vectors; k++) columns[k] = _mm512_loadu_si512(x + 64 * k);
            for (int i = 0; i < FOUR; i++) {
                int32_t four;
                memcpy(&four, w + i * NP_GROUP + 4 * step, 4);
                for (int k = 0; k < vectors; k++) dot[i][k] = _mm512_dpbusd_epi32(dot[i][k], columns[k], _mm512_set1_epi32(four));
            }
        }
        w += FOUR * NP_GROUP;
        for (int k = 0; k < vectors; k++)
            for (int i = 0; i < FOUR; i++) {
                const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(scales[i]), _mm512_loadu_ps(x_scales + 16 * k));
                sum[i][k] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[i][k]), scale, sum[i][k]);
                if (!has_minimum) continue;
                const __m512 x_sums = _mm512_loadu_ps(scaled_sums + TILE * g + 16 * k);
                sum[i][k] = _mm512_fnmadd_ps(_mm512_set1_ps(minimums[FOUR * g + (size_t)i]), x_sums, sum[i][k]);
            }
    }
}

/* Multiply a block of rows with one tile of tokens, into the tree's top level. */
NP_INLINE NP_AVX512 void multiply_tile(const row_block *b, size_t rows, size_t groups, const visits *v, const uint8_t *tile,
                                       const int vectors, const int has_minimum, sum_tree *tree) {
    const float *x_scales = (const float *)(const void *)(tile + groups * TILE * NP_GROUP), *scaled_sums = x_scales + groups * TILE;
    for (unsigned visit = 0; visit < 16; visit++) {
        const size_t first = v->first[visit];
        for (size_t r = 0; r < rows; r += FOUR) {
            const size_t at = r * groups + first * FOUR; /* in groups of one row */
            __m512 sum[FOUR][2];
            multiply(tile + first * TILE * NP_GROUP, x_scales + first * TILE, scaled_sums + first * TILE, b->quants + at * NP_GROUP,
                     b->start + at, b->scales + at, b->minimums + at, v->count[visit], vectors, has_minimum, sum);
            int level = 0; /* a binary counter: 2^level visits are in the sum */
            for (; visit >> level & 1; level++)
                for (int i = 0; i < FOUR; i++)
                    for (int k = 0; k < vectors; k++)
                        sum[i][k] = _mm512_add_ps(_mm512_loadu_ps(tree->sums[level][r + (size_t)i] + 16 * k), sum[i][k]);
            for (int i = 0; i < FOUR; i++)
                for (int k = 0; k < vectors; k++) _mm512_storeu_ps(tree->sums[level][r + (size_t)i] + 16 * k, sum[i][k]);
        }
    }
}

static NP_AVX512 void panel_dot(int type, const np_dot_job *job) {
    const np_rows *rows = &job->rows;
    const size_t groups = rows->n / NP_GROUP, fit = BLOCK_COLUMNS / rows->n / FOUR * FOUR;
    const size_t block_rows = fit < BLOCK_ROWS ? fit : BLOCK_ROWS;
    const visits v = visits_of(groups);
    _Alignas(64) row_block b;
    _Alignas(64) sum_tree tree;
    for (size_t r = 0; r < rows->rows; r += block_rows) {
        const size_t count = rows->rows - r < block_rows ? rows->rows - r : block_rows;
        for (size_t i = 0; i < count; i += FOUR) {
            if (type == NP_Q4) unpack_four(NP_Q4, rows, r + i, &v, &b, i);
            else if (type == NP_Q3) unpack_four(NP_Q3, rows, r + i, &v, &b, i);
            else if (type == NP_IQ4) unpack_four(NP_IQ4, rows, r + i, &v, &b, i);
            else if (type == NP_Q4H) unpack_four(NP_Q4H, rows, r + i, &v, &b, i);
            else if (type == NP_Q5H) unpack_four(NP_Q5H, rows, r + i, &v, &b, i);
            else if (type == NP_MXFP4) unpack_four(NP_MXFP4, rows, r + i, &v, &b, i);
            else if (type == NP_Q4K) unpack_four(NP_Q4K, rows, r + i, &v, &b, i);
            else if (type == NP_Q5K) unpack_four(NP_Q5K, rows, r + i, &v, &b, i);
            else if (type == NP_Q6K) unpack_four(NP_Q6K, rows, r + i, &v, &b, i);
            else unpack_four(NP_Q8, rows, r + i, &v, &b, i);
        }
        fetch_rows(rows, r + block_rows, r + 2 * block_rows);
        const uint8_t *tile = job->activations;
        for (size_t from = 0; from < job->tokens; from += TILE, tile += tile_bytes(type, rows->n)) {
            const size_t tokens = job->tokens - from < TILE ? job->tokens - from : TILE;
            if (np_has_minimum(type) && tokens > 16) multiply_tile(&b, count, groups, &v, tile, 2, 1, &tree);
            else if (np_has_minimum(type)) multiply_tile(&b, count, groups, &v, tile, 1, 1, &tree);
            else if (tokens > 16) multiply_tile(&b, count, groups, &v, tile, 2, 0, &tree);
            else multiply_tile(&b, count, groups, &v, tile, 1, 0, &tree);
            for (size_t t = 0; t < tokens; t++)
                for (size_t i = 0; i < count; i++)
                    job->out[(from + t) * job->out_stride + r + i] = tree.sums[LEVELS - 1][i][t] + (job->bias ? job->bias[r + i] : 0.0f);
        }
    }
}

const np_panel_kernel np_avx512_panel = {BLOCK_COLUMNS / FOUR, panel_bytes, panel_prepare, panel_dot};
#endif

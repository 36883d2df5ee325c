/* AMX: quantized rows times a panel of many tokens, with the bits of avx512_panel.c.
 *
 * A tile product has 16 rows, 16 tokens and one group of 32 columns, half of what a tile could hold, since the next
 * group has other scales. Its integers go through memory to vectors of 16 tokens, where they are converted, scaled and
 * added in the order of panel_tiles.h. Both sides are signed, so quants are used as they are.
 *
 * The products of a few groups come first, then their additions: while a tile instruction executes, measured processors
 * give vectors of 64 bytes only one of two ports, and additions between products took a third longer than after
 * them. */
#if defined(__x86_64__)
#include "kernels/panel_tiles.h"

#include "kernels/amx_tiles.h"

enum {
    SIDE = 16,                 /* rows and tokens of a tile's integers */
    BLOCK_ROWS = 2 * SIDE,     /* at most, multiplied at a time */
    MOST_BLOCKS = 2,           /* unpacked at a time: a tile of the panel comes from the third cache once for all of them */
    BLOCK_COLUMNS = 256 << 10, /* of all these rows together */
    MAX_COLUMNS = BLOCK_COLUMNS / SIDE,
    BLOCK_GROUPS = BLOCK_COLUMNS / NP_GROUP,
    EIGHT = 8, /* rows whose sums stay in registers while groups are added */
    PIECE = 4, /* groups multiplied before they are added: their integers stay in the first cache */
    NEAR = 4,  /* groups that mostly share a cache line of q4 */
    MAX_PIECES = MAX_COLUMNS / NP_GROUP / PIECE + VISITS
};

/* Unpacked rows, groups in the order of visits. `height`: 16 or 32, rows that are there or repeat the last. */
typedef struct {
    int8_t *quants; /* [group][height][32] */
    float *scales;  /* [group][height] */
    float *minimums; /* the same; of rows that have some */
    size_t rows, height;
} row_block;

typedef struct {
    _Alignas(64) int8_t quants[BLOCK_COLUMNS];
    float scales[BLOCK_GROUPS], minimums[BLOCK_GROUPS];
} unpacked;

/* Partial sums of the tree, [level][row][token]. */
typedef struct {
    float sums[LEVELS][BLOCK_ROWS][TILE];
} sum_tree;

/* Up to PIECE groups of one visit; a visit without groups has one piece without groups. */
typedef struct {
    size_t first, count;
    int begins, ends; /* the visit */
    int level;        /* of the tree, where the visit's sum belongs */
} piece;

typedef int32_t group_dots[BLOCK_ROWS][TILE];

static size_t pieces_of(const visits *v, piece *pieces) {
    size_t count = 0;
    for (unsigned visit = 0; visit < VISITS; visit++)
        for (size_t from = 0; from == 0 || from < v->count[visit]; from += PIECE) {
            const size_t left = v->count[visit] - from;
            pieces[count++] = (piece){.first = v->first[visit] + from,
                                      .count = left < PIECE ? left : PIECE,
                                      .begins = from == 0,
                                      .ends = left <= PIECE,
                                      .level = __builtin_ctz(~visit)};
        }
    return count;
}

static void panel_prepare(int type, const uint8_t *activations, size_t stride, size_t tokens, size_t n, uint8_t *panel) {
    fill_panel(type, activations, stride, tokens, n, 0, panel);
}

/* Unpack the block's rows, from r on, a few groups of each at a time: rows 4 KiB apart evict each other from the
 * first-level cache. */
NP_INLINE NP_AVX512 void unpack_rows(int type, const np_rows *rows, size_t r, const visits *v, row_block *b) {
    const size_t groups = rows->n / NP_GROUP;
    unpacked_scales s[BLOCK_ROWS];
    np_row row[BLOCK_ROWS];
    b->height = b->rows > SIDE ? BLOCK_ROWS : SIDE;
    for (size_t i = 0; i < b->height; i++) row[i] = np_row_at(rows, r + (i < b->rows ? i : b->rows - 1));
    for (size_t from = 0; from < groups; from += NEAR)
        for (size_t i = 0; i < b->height; i++) {
            if (from % 16 == 0) unpack_scales(type, row[i].scales, from, groups, &s[i]);
            for (size_t g = from; g < groups && g < from + NEAR; g++) {
                const size_t at = place_of(v, g) * b->height + i;
                _mm256_store_si256((void *)(b->quants + at * NP_GROUP), unpack(type, row[i].quants, rows->n, g));
                b->scales[at] = s[i].scales[g % 16];
                if (np_has_minimum(type)) b->minimums[at] = s[i].minimums[g % 16];
            }
        }
}

/* The integers of one product: tile 0 or 1 of the rows times tile 0 or 1 of the tokens. */
NP_INLINE void store_dots(const int product, group_dots dots) {
    enum { STRIDE = TILE * 4 };
    if (product == 0) TILE_STORE(0, dots[0], STRIDE);
    if (product == 1) TILE_STORE(1, dots[0] + SIDE, STRIDE);
    if (product == 2) TILE_STORE(2, dots[SIDE], STRIDE);
    if (product == 3) TILE_STORE(3, dots[SIDE] + SIDE, STRIDE);
}

/* The integers of a piece's groups: `heights` times 16 rows and `vectors` times 16 tokens. Tiles 0 to 3: integers, 4
 * and 5: rows, 6 and 7: tokens. A store right behind its product would delay the next one by 32 cycles instead of 21,
 * so each store comes after the next product has begun. */
NP_INLINE void multiply_piece(const row_block *b, const uint8_t *tile, const piece *p, const int heights, const int vectors,
                              group_dots *dots) {
    enum { STRIDE = TILE * 4 };
    const int last = heights == 2 ? vectors + 1 : vectors - 1;
    const uint8_t *columns = tile + p->first * TILE * NP_GROUP;
    const int8_t *rows = b->quants + p->first * (size_t)heights * SIDE * NP_GROUP;
    for (size_t g = 0; g < p->count; g++, columns += TILE * NP_GROUP, rows += heights * SIDE * NP_GROUP) {
        TILE_LOAD(4, rows, NP_GROUP);
        TILE_LOAD(6, columns, STRIDE);
        if (g > 0 && last == 0) store_dots(0, dots[g - 1]);
        TILE_ZERO(0);
        TILE_DOT(0, 4, 6);
        if (g > 0 && last > 0) store_dots(last, dots[g - 1]);
        if (vectors == 2) {
            TILE_LOAD(7, columns + 4 * SIDE, STRIDE);
            TILE_ZERO(1);
            TILE_DOT(1, 4, 7);
            store_dots(0, dots[g]);
        }
        if (heights == 2) {
            TILE_LOAD(5, rows + SIDE * NP_GROUP, NP_GROUP);
            TILE_ZERO(2);
            TILE_DOT(2, 5, 6);
            store_dots(vectors - 1, dots[g]);
        }
        if (last == 3) {
            TILE_ZERO(3);
            TILE_DOT(3, 5, 7);
            store_dots(2, dots[g]);
        }
    }
    if (p->count > 0) store_dots(last, dots[p->count - 1]);
}

/* Add up eight rows over the groups of a piece; when a visit ends, its sums go up the tree. A visit's sum accumulates
 * in its final place in the tree, which is free until then. scaled_sums are read if there are
 * minimums. */
NP_INLINE NP_AVX512 void add_piece(const row_block *b, const float *x_scales, const float *scaled_sums, const piece *p,
                                   const group_dots *dots, size_t row, const int vectors, const int has_minimum, sum_tree *tree) {
    __m512 sum[EIGHT][2];
    for (size_t i = 0; i < EIGHT; i++)
        for (int k = 0; k < vectors; k++)
            sum[i][k] = p->begins ? _mm512_setzero_ps() : _mm512_loadu_ps(tree->sums[p->level][row + i] + SIDE * k);
    for (size_t g = 0; g < p->count; g++) {
        const float *scales = b->scales + (p->first + g) * b->height + row, *minimums = b->minimums + (p->first + g) * b->height + row;
        __m512 x_scale[2], x_sum[2];
        for (int k = 0; k < vectors; k++) x_scale[k] = _mm512_loadu_ps(x_scales + (p->first + g) * TILE + SIDE * k);
        for (int k = 0; k < vectors && has_minimum; k++) x_sum[k] = _mm512_loadu_ps(scaled_sums + (p->first + g) * TILE + SIDE * k);
        for (size_t i = 0; i < EIGHT; i++)
            for (int k = 0; k < vectors; k++) {
                const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(scales[i]), x_scale[k]);
                const __m512 dot = _mm512_cvtepi32_ps(_mm512_loadu_si512(dots[g][row + i] + SIDE * k));
                sum[i][k] = _mm512_fmadd_ps(dot, scale, sum[i][k]);
                if (has_minimum) sum[i][k] = _mm512_fnmadd_ps(_mm512_set1_ps(minimums[i]), x_sum[k], sum[i][k]);
            }
    }
    for (int level = 0; p->ends && level < p->level; level++) /* a binary counter: 2^level visits are in the sum */
        for (size_t i = 0; i < EIGHT; i++)
            for (int k = 0; k < vectors; k++)
                sum[i][k] = _mm512_add_ps(_mm512_loadu_ps(tree->sums[level][row + i] + SIDE * k), sum[i][k]);
    for (size_t i = 0; i < EIGHT; i++)
        for (int k = 0; k < vectors; k++) _mm512_storeu_ps(tree->sums[p->level][row + i] + SIDE * k, sum[i][k]);
}

/* Multiply a block of rows with one tile of tokens, into the tree's top level. */
NP_INLINE NP_AVX512 void multiply_tile(const row_block *b, size_t groups, const piece *pieces, size_t count, const uint8_t *tile,
                                       const int heights, const int vectors, const int has_minimum, sum_tree *tree) {
    _Alignas(64) group_dots dots[PIECE];
    const float *x_scales = (const float *)(const void *)(tile + groups * TILE * NP_GROUP), *scaled_sums = x_scales + groups * TILE;
    for (size_t p = 0; p < count; p++) {
        multiply_piece(b, tile, &pieces[p], heights, vectors, dots);
        for (size_t row = 0; row < b->rows; row += EIGHT) add_piece(b, x_scales, scaled_sums, &pieces[p], dots, row, vectors, has_minimum, tree);
    }
}

/* The same with the number of 16 rows and of 16 tokens as constants. */
NP_INLINE NP_AVX512 void multiply_sides(const row_block *b, size_t groups, const piece *pieces, size_t count, const uint8_t *tile,
                                        size_t tokens, const int has_minimum, sum_tree *tree) {
    if (b->height > SIDE && tokens > SIDE) multiply_tile(b, groups, pieces, count, tile, 2, 2, has_minimum, tree);
    else if (b->height > SIDE) multiply_tile(b, groups, pieces, count, tile, 2, 1, has_minimum, tree);
    else if (tokens > SIDE) multiply_tile(b, groups, pieces, count, tile, 1, 2, has_minimum, tree);
    else multiply_tile(b, groups, pieces, count, tile, 1, 1, has_minimum, tree);
}

/* Interleaving rows i and i + 8, four times over, turns the eight bits of an element's place around by four. */
NP_INLINE NP_AVX512 void transpose(__m512 v[SIDE]) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int round = 0; round < 4; round++) {
        __m512 w[SIDE];
        for (int i = 0; i < SIDE / 2; i++) {
            w[2 * i] = _mm512_permutex2var_ps(v[i], low, v[i + SIDE / 2]);
            w[2 * i + 1] = _mm512_permutex2var_ps(v[i], high, v[i + SIDE / 2]);
        }
        for (int i = 0; i < SIDE; i++) v[i] = w[i];
    }
}

/* Up to 16 rows and 16 tokens of results. */
NP_INLINE NP_AVX512 void write_out(float (*sums)[TILE], const float *bias, size_t rows, size_t tokens, float *out, size_t out_stride) {
    const __mmask16 there = (__mmask16)(rows < SIDE ? (1u << rows) - 1 : 0xffff);
    const __m512 more = bias ? _mm512_maskz_loadu_ps(there, bias) : _mm512_setzero_ps();
    __m512 v[SIDE];
    for (int i = 0; i < SIDE; i++) v[i] = _mm512_loadu_ps(sums[i]);
    transpose(v);
    for (size_t t = 0; t < tokens; t++) _mm512_mask_storeu_ps(out + t * out_stride, there, _mm512_add_ps(v[t], more));
}

static NP_AVX512 void panel_dot(int type, const np_dot_job *job) {
    static const tile_shapes shapes = {.palette = 1,
                                       .row_bytes = {64, 64, 64, 64, NP_GROUP, NP_GROUP, 64, 64},
                                       .rows = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, STEPS, STEPS}};
    const np_rows *rows = &job->rows;
    const size_t groups = rows->n / NP_GROUP, fit = BLOCK_COLUMNS / rows->n / SIDE * SIDE;
    const size_t block_rows = fit < MOST_BLOCKS * BLOCK_ROWS ? fit : MOST_BLOCKS * BLOCK_ROWS;
    const visits v = visits_of(groups);
    piece pieces[MAX_PIECES];
    const size_t count = pieces_of(&v, pieces);
    unpacked space;
    row_block blocks[MOST_BLOCKS];
    _Alignas(64) sum_tree tree;
    memset(&tree, 0, sizeof tree); /* rows behind the last one are not added up, but transposed with the others */
    TILE_CONFIGURE(&shapes);
    for (size_t r = 0; r < rows->rows; r += block_rows) {
        const size_t end = rows->rows - r < block_rows ? rows->rows : r + block_rows;
        size_t used = 0;
        for (size_t from = r; from < end; from += BLOCK_ROWS, used++) {
            row_block *b = &blocks[used];
            *b = (row_block){.quants = space.quants + (from - r) * rows->n,
                             .scales = space.scales + (from - r) * groups,
                             .minimums = space.minimums + (from - r) * groups,
                             .rows = end - from < BLOCK_ROWS ? end - from : BLOCK_ROWS};
            if (type == NP_Q4) unpack_rows(NP_Q4, rows, from, &v, b);
            else if (type == NP_Q3) unpack_rows(NP_Q3, rows, from, &v, b);
            else if (type == NP_IQ4) unpack_rows(NP_IQ4, rows, from, &v, b);
            else if (type == NP_Q4H) unpack_rows(NP_Q4H, rows, from, &v, b);
            else if (type == NP_Q5H) unpack_rows(NP_Q5H, rows, from, &v, b);
            else if (type == NP_MXFP4) unpack_rows(NP_MXFP4, rows, from, &v, b);
            else if (type == NP_Q4K) unpack_rows(NP_Q4K, rows, from, &v, b);
            else if (type == NP_Q5K) unpack_rows(NP_Q5K, rows, from, &v, b);
            else if (type == NP_Q6K) unpack_rows(NP_Q6K, rows, from, &v, b);
            else unpack_rows(NP_Q8, rows, from, &v, b);
        }
        fetch_rows(rows, end, end + block_rows);
        const uint8_t *tile = job->activations;
        for (size_t from = 0; from < job->tokens; from += TILE, tile += tile_bytes(type, rows->n)) {
            const size_t tokens = job->tokens - from < TILE ? job->tokens - from : TILE;
            for (size_t k = 0; k < used; k++) {
                const row_block *b = &blocks[k];
                if (np_has_minimum(type)) multiply_sides(b, groups, pieces, count, tile, tokens, 1, &tree);
                else multiply_sides(b, groups, pieces, count, tile, tokens, 0, &tree);
                for (size_t i = 0; i < b->rows; i += SIDE)
                    for (size_t t = 0; t < tokens; t += SIDE) {
                        const size_t row = r + k * BLOCK_ROWS + i;
                        float *out = job->out + (from + t) * job->out_stride + row;
                        float(*sums)[TILE] = (float(*)[TILE])(void *)&tree.sums[LEVELS - 1][i][t];
                        write_out(sums, job->bias ? job->bias + row : NULL, b->rows - i, tokens - t < SIDE ? tokens - t : SIDE, out,
                                  job->out_stride);
                    }
            }
        }
    }
    TILE_RELEASE(); /* a thread with tiles in use costs 8 KiB more at every switch */
}

const np_panel_kernel np_amx_panel = {MAX_COLUMNS, panel_bytes, panel_prepare, panel_dot};
#endif

/* AMX: q8 and q4 rows times a panel of many tokens, with the bits of avx512_panel.c.
 *
 * A tile product takes 16 rows and 16 tokens over one group of 32 columns, since the next group has other scales: half of what a
 * tile could hold. Its integers go through memory to vectors of 16 tokens, where they are converted, scaled and added in the
 * order of panel_tiles.h. These three operations for every 16 results bound the kernel (24 cycles for a product of 16), so products of
 * the next groups are started between the additions of the last ones. Both sides are signed: quants stay as they are.
 *
 * Untried on a processor with AMX: native/README.md says what was tried instead. */
#if defined(__x86_64__)
#include "kernels/panel_tiles.h"

#include "kernels/amx_tiles.h"

enum {
    SIDE = 16,                  /* rows and tokens of a tile's integers */
    BLOCK_ROWS = 2 * SIDE,      /* at most, unpacked at a time */
    BLOCK_COLUMNS = 256 << 10,  /* of all these rows together */
    MAX_COLUMNS = BLOCK_COLUMNS / SIDE,
    BLOCK_GROUPS = BLOCK_COLUMNS / NP_GROUP,
    EIGHT = 8,                  /* rows whose sums stay in registers while groups are added */
    PIECE = BLOCK_ROWS / EIGHT, /* groups at a time: one is multiplied while eight rows of the piece before are added */
    NEAR = 4,                   /* groups that mostly share a cache line of q4 */
    MAX_PIECES = MAX_COLUMNS / NP_GROUP / PIECE + VISITS
};

/* Unpacked rows, groups in the order of visits. `height`: 16 or 32, rows that are there or repeat the last. */
typedef struct {
    _Alignas(64) int8_t quants[BLOCK_COLUMNS]; /* [group][height][32] */
    float scales[BLOCK_GROUPS];                /* [group][height] */
    size_t rows, height;
} row_block;

/* Sums that wait for their other half, [level][row][token]. */
typedef struct {
    float sums[LEVELS][BLOCK_ROWS][TILE];
} sum_tree;

/* Up to PIECE groups of one visit; a visit without groups has one piece without groups. */
typedef struct {
    size_t first, count;
    int begins, ends; /* the visit */
    int level;        /* of the tree, where the visit's sum belongs */
} piece;

typedef int32_t piece_dots[PIECE][BLOCK_ROWS][TILE];

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

/* Up to `most` rows from r on. A few groups of each at a time: rows that lie 4 KiB apart push each other out of the first cache. */
NP_INLINE NP_AVX512 void unpack_rows(int type, const np_rows *rows, size_t r, size_t most, const visits *v, row_block *b) {
    const size_t groups = rows->n / NP_GROUP;
    np_row row[BLOCK_ROWS];
    b->rows = rows->rows - r < most ? rows->rows - r : most;
    b->height = b->rows > SIDE ? BLOCK_ROWS : SIDE;
    for (size_t i = 0; i < b->height; i++) row[i] = np_row_at(rows, r + (i < b->rows ? i : b->rows - 1));
    for (size_t from = 0; from < groups; from += NEAR)
        for (size_t i = 0; i < b->height; i++)
            for (size_t g = from; g < groups && g < from + NEAR; g++) {
                const size_t at = place_of(v, g) * b->height + i;
                _mm256_store_si256((void *)(b->quants + at * NP_GROUP), unpack(type, row[i].quants, g));
                b->scales[at] = _cvtsh_ss(((const uint16_t *)(const void *)row[i].scales)[g]);
            }
}

/* The integers of one group: all rows of the block times `vectors` registers of 16 tokens. Tiles 0 to 3: integers, 4 and 5: rows,
 * 6 and 7: tokens. */
NP_INLINE void multiply_group(const row_block *b, const uint8_t *tile, size_t group, const int vectors, int32_t dots[BLOCK_ROWS][TILE]) {
    enum { STRIDE = TILE * 4 };
    const uint8_t *columns = tile + group * TILE * NP_GROUP;
    const int8_t *rows = b->quants + group * b->height * NP_GROUP;
    TILE_LOAD(6, columns, STRIDE);
    TILE_LOAD(4, rows, NP_GROUP);
    TILE_ZERO(0);
    TILE_DOT(0, 4, 6);
    TILE_STORE(0, dots[0], STRIDE);
    if (vectors == 2) {
        TILE_LOAD(7, columns + 4 * SIDE, STRIDE);
        TILE_ZERO(1);
        TILE_DOT(1, 4, 7);
        TILE_STORE(1, dots[0] + SIDE, STRIDE);
    }
    if (b->height == SIDE) return;
    TILE_LOAD(5, rows + SIDE * NP_GROUP, NP_GROUP);
    TILE_ZERO(2);
    TILE_DOT(2, 5, 6);
    TILE_STORE(2, dots[SIDE], STRIDE);
    if (vectors == 2) {
        TILE_ZERO(3);
        TILE_DOT(3, 5, 7);
        TILE_STORE(3, dots[SIDE] + SIDE, STRIDE);
    }
}

/* Eight rows' sums over the groups of a piece, and up the tree when its visit ends. A visit's sum grows in the place of the tree that
 * it will have: that is free until then. */
NP_INLINE NP_AVX512 void add_piece(const row_block *b, const float *x_scales, const piece *p, const piece_dots dots, size_t row,
                                   const int vectors, sum_tree *tree) {
    __m512 sum[EIGHT][2];
    for (size_t i = 0; i < EIGHT; i++)
        for (int k = 0; k < vectors; k++)
            sum[i][k] = p->begins ? _mm512_setzero_ps() : _mm512_loadu_ps(tree->sums[p->level][row + i] + SIDE * k);
    for (size_t g = 0; g < p->count; g++) {
        const float *scales = b->scales + (p->first + g) * b->height + row;
        __m512 x_scale[2];
        for (int k = 0; k < vectors; k++) x_scale[k] = _mm512_loadu_ps(x_scales + (p->first + g) * TILE + SIDE * k);
        for (size_t i = 0; i < EIGHT; i++)
            for (int k = 0; k < vectors; k++) {
                const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(scales[i]), x_scale[k]);
                const __m512 dot = _mm512_cvtepi32_ps(_mm512_loadu_si512(dots[g][row + i] + SIDE * k));
                sum[i][k] = _mm512_fmadd_ps(dot, scale, sum[i][k]);
            }
    }
    for (int level = 0; p->ends && level < p->level; level++) /* a binary counter: 2^level visits are in the sum */
        for (size_t i = 0; i < EIGHT; i++)
            for (int k = 0; k < vectors; k++)
                sum[i][k] = _mm512_add_ps(_mm512_loadu_ps(tree->sums[level][row + i] + SIDE * k), sum[i][k]);
    for (size_t i = 0; i < EIGHT; i++)
        for (int k = 0; k < vectors; k++) _mm512_storeu_ps(tree->sums[p->level][row + i] + SIDE * k, sum[i][k]);
}

/* All of a block of rows times one tile of tokens into the tree's top level. */
NP_INLINE NP_AVX512 void multiply_tile(const row_block *b, size_t groups, const piece *pieces, size_t count, const uint8_t *tile,
                                       const int vectors, sum_tree *tree) {
    _Alignas(64) piece_dots dots[2];
    const float *x_scales = (const float *)(const void *)(tile + groups * TILE * NP_GROUP);
    for (size_t p = 0; p <= count; p++)
        for (size_t step = 0; step < PIECE; step++) {
            if (p < count && step < pieces[p].count) multiply_group(b, tile, pieces[p].first + step, vectors, dots[p % 2][step]);
            if (p > 0 && step * EIGHT < b->rows)
                add_piece(b, x_scales, &pieces[p - 1], dots[(p - 1) % 2], step * EIGHT, vectors, tree);
        }
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
    const size_t groups = rows->n / NP_GROUP, most = rows->n * BLOCK_ROWS <= BLOCK_COLUMNS ? BLOCK_ROWS : SIDE;
    const visits v = visits_of(groups);
    piece pieces[MAX_PIECES];
    const size_t count = pieces_of(&v, pieces);
    row_block b;
    _Alignas(64) sum_tree tree;
    memset(&tree, 0, sizeof tree); /* rows that are not there are never added up, but turned around with the others */
    TILE_CONFIGURE(&shapes);
    for (size_t r = 0; r < rows->rows; r += most) {
        if (type == NP_Q4) unpack_rows(NP_Q4, rows, r, most, &v, &b);
        else unpack_rows(NP_Q8, rows, r, most, &v, &b);
        fetch_rows(rows, r + most, r + 2 * most);
        const uint8_t *tile = job->activations;
        for (size_t from = 0; from < job->tokens; from += TILE, tile += tile_bytes(rows->n)) {
            const size_t tokens = job->tokens - from < TILE ? job->tokens - from : TILE;
            if (tokens > SIDE) multiply_tile(&b, groups, pieces, count, tile, 2, &tree);
            else multiply_tile(&b, groups, pieces, count, tile, 1, &tree);
            for (size_t i = 0; i < b.rows; i += SIDE)
                for (size_t t = 0; t < tokens; t += SIDE) {
                    float *out = job->out + (from + t) * job->out_stride + r + i;
                    float(*sums)[TILE] = (float(*)[TILE])(void *)&tree.sums[LEVELS - 1][i][t];
                    write_out(sums, job->bias ? job->bias + r + i : NULL, b.rows - i, tokens - t < SIDE ? tokens - t : SIDE, out,
                              job->out_stride);
                }
        }
    }
    TILE_RELEASE(); /* a thread with tiles in use costs 8 KiB more at every switch */
}

const np_panel_kernel np_amx_panel = {MAX_COLUMNS, panel_bytes, panel_prepare, panel_dot};
#endif

/* q4k, q5k, q6k: rows of one type have the bits of the same weights in a wider one, by every kernel and under every
 * instruction set; a scale that is not finite shows in every result; groups that a row lacks do not. */
#include "isa_loop.h"
#include "weights.h"

#include <math.h>
#include <stdlib.h>

enum { ROWS = 9, TOKENS = 19 };

typedef struct {
    size_t n, stride;
    void *quants[TYPES][ROWS], *scales[ROWS]; /* exact sizes, so that the sanitizer detects reads past the end */
    float *x;
    uint8_t *activations;
} wider_rows;

static wider_rows make_rows(size_t n) {
    wider_rows rows = {.n = n, .stride = (np_activation_bytes(NP_Q4K, n) + 63) / 64 * 64};
    for (int r = 0; r < ROWS; r++) {
        for (int type = NP_Q4K; type <= NP_Q6K; type++) {
            const size_t bytes = np_quant_bytes(type, n), narrower = type > NP_Q4K ? np_quant_bytes(type - 1, n) : 0;
            uint8_t *quants = rows.quants[type][r] = calloc(1, bytes);
            for (size_t i = 0; i < bytes; i++) quants[i] = i < narrower ? ((uint8_t *)rows.quants[type - 1][r])[i] : 0;
            if (type < NP_Q6K && r % 2 == type % 2)
                for (size_t i = narrower; i < bytes; i++) quants[i] = (uint8_t)random_bits();
        }
        rows.scales[r] = malloc(np_scale_bytes(NP_Q4K, n));
        fill_scales(NP_Q4K, rows.scales[r], np_scale_bytes(NP_Q4K, n), 0.01f);
    }
    rows.x = malloc(TOKENS * n * 4);
    rows.activations = aligned_alloc(64, TOKENS * rows.stride);
    for (size_t i = 0; i < TOKENS * n; i++) rows.x[i] = i < n ? 1.0f : random_float(); /* the first at 127 */
    for (size_t t = 0; t < TOKENS; t++) np_activation_prepare(NP_Q5K, rows.x + t * n, n, rows.activations + t * rows.stride);
    return rows;
}

static void free_rows(wider_rows *rows) {
    for (int r = 0; r < ROWS; r++) {
        for (int type = NP_Q4K; type <= NP_Q6K; type++) free(rows->quants[type][r]);
        free(rows->scales[r]);
    }
    free(rows->x), free(rows->activations);
}

static const void *const *at(void *const *rows) { return (const void *const *)rows; }

/* All kernels' results of the rows, one behind the other. */
typedef struct {
    float dots[TOKENS][ROWS], panel[TOKENS][ROWS], one, scales[ROWS];
} results;

static void compute(const wider_rows *rows, int type, const void *panel, results *r, float *sums, int8_t *bytes) {
    float a[ROWS];
    for (int i = 0; i < ROWS; i++) a[i] = 0.1f * (float)(i + 1);
    memset(r, 0, sizeof *r);
    memset(sums, 0, 4 * rows->n);
    np_dot_scattered(type, at(rows->quants[type]), at(rows->scales), ROWS, rows->n, NULL, rows->activations, rows->stride, TOKENS,
                     r->dots[0], ROWS);
    np_dot_panel(type, at(rows->quants[type]), at(rows->scales), ROWS, rows->n, panel, TOKENS, NULL, r->panel[0], ROWS);
    np_dot_rows(type, rows->quants[type][3], rows->scales[3], 1, rows->n, rows->activations, 0, 1, NULL, &r->one, 1);
    np_add_rows(type, at(rows->quants[type]), at(rows->scales), a, ROWS, rows->n, sums);
    np_rows_to_s8(type, at(rows->quants[type]), at(rows->scales), ROWS, rows->n, bytes, rows->n, r->scales);
}

/* The same weights as q4k, q5k and q6k: `type` in the types from it on. */
static void check_wider(const wider_rows *rows, int type, const char *isa) {
    wider_rows same = *rows;
    void *panel = aligned_alloc(64, (np_panel_bytes(NP_Q5K, rows->n, TOKENS) + 63) / 64 * 64);
    float *sums[2] = {malloc(4 * rows->n), malloc(4 * rows->n)};
    int8_t *bytes[2] = {malloc(ROWS * rows->n), malloc(ROWS * rows->n)};
    results narrow, wide;
    np_panel_prepare(NP_Q5K, rows->activations, rows->stride, TOKENS, rows->n, panel); /* one panel serves all */
    compute(rows, type, panel, &narrow, sums[0], bytes[0]);
    CHECK(memcmp(narrow.dots, narrow.panel, sizeof narrow.dots) == 0 && memcmp(&narrow.one, &narrow.dots[0][3], 4) == 0, "%s %s n=%zu: paths",
          isa, type_names[type], rows->n);
    for (int wider = type + 1; wider <= NP_Q6K; wider++) {
        const size_t count = np_quant_bytes(type, rows->n);
        for (int r = 0; r < ROWS; r++) {
            same.quants[wider][r] = calloc(1, np_quant_bytes(wider, rows->n));
            memcpy(same.quants[wider][r], rows->quants[type][r], count);
        }
        compute(&same, wider, panel, &wide, sums[1], bytes[1]);
        CHECK(memcmp(&narrow, &wide, sizeof narrow) == 0, "%s %s as %s n=%zu: products", isa, type_names[type], type_names[wider], rows->n);
        CHECK(memcmp(bytes[0], bytes[1], ROWS * rows->n) == 0, "%s %s as %s n=%zu: bytes", isa, type_names[type], type_names[wider], rows->n);
        for (size_t j = 0; j < rows->n; j++)
            CHECK(sums[0][j] == sums[1][j], "%s %s as %s n=%zu: sum %zu", isa, type_names[type], type_names[wider], rows->n, j);
        for (int r = 0; r < ROWS; r++) free(same.quants[wider][r]);
    }
    free(panel), free(sums[0]), free(sums[1]), free(bytes[0]), free(bytes[1]);
}

/* A block's d or dmin that is not finite, in any block, makes every product of the row not finite, and no other. */
static void check_not_finite(const wider_rows *rows, int type, const char *isa) {
    static const uint16_t bad[] = {0x7c00, 0xfc00, 0x7e00};
    void *panel = aligned_alloc(64, (np_panel_bytes(type, rows->n, TOKENS) + 63) / 64 * 64);
    float *sums = malloc(4 * rows->n);
    int8_t *bytes = malloc(ROWS * rows->n);
    results r;
    np_panel_prepare(type, rows->activations, rows->stride, TOKENS, rows->n, panel);
    for (size_t block = 0; block < (rows->n + 255) / 256; block++)
        for (int k = 0; k < 6; k++) {
            uint16_t *half = (uint16_t *)rows->scales[3] + 8 * block + k / 3;
            const uint16_t before = *half;
            *half = bad[k % 3];
            compute(rows, type, panel, &r, sums, bytes);
            *half = before;
            for (int t = 0; t < TOKENS; t++) {
                CHECK(!isfinite(r.dots[t][3]) && !isfinite(r.panel[t][3]), "%s %s n=%zu block %zu", isa, type_names[type], rows->n, block);
                CHECK(isfinite(r.dots[t][2]) && isfinite(r.panel[t][4]), "%s %s n=%zu block %zu", isa, type_names[type], rows->n, block);
            }
            CHECK(!isfinite(r.one) && isnan(r.scales[3]) && bytes[3 * rows->n] == 0, "%s %s n=%zu", isa, type_names[type], rows->n);
            for (size_t j = 0; j < rows->n; j++)
                CHECK(isfinite(sums[j]) == (j / 256 != block), "%s %s n=%zu block %zu: [%zu] is %g", isa, type_names[type], rows->n, block, j,
                      (double)sums[j]);
        }
    free(panel), free(sums), free(bytes);
}

/* Fields of groups that a short last block lacks. */
static void check_lacking_groups(const wider_rows *rows, int type, const char *isa) {
    void *panel = aligned_alloc(64, (np_panel_bytes(type, rows->n, TOKENS) + 63) / 64 * 64);
    float *sums[2] = {malloc(4 * rows->n), malloc(4 * rows->n)};
    int8_t *bytes[2] = {malloc(ROWS * rows->n), malloc(ROWS * rows->n)};
    results r[2];
    np_panel_prepare(type, rows->activations, rows->stride, TOKENS, rows->n, panel);
    compute(rows, type, panel, &r[0], sums[0], bytes[0]);
    for (int row = 0; row < ROWS; row++) {
        uint8_t *block = (uint8_t *)rows->scales[row] + (rows->n / 32 - 1) / 8 * 16;
        for (size_t i = rows->n / 32 % 8; i % 8; i++) {
            block[4 + i] = (uint8_t)random_bits();
            block[12 + i % 4] ^= (uint8_t)(random_bits() & (i < 4 ? 15 : 240));
        }
    }
    compute(rows, type, panel, &r[1], sums[1], bytes[1]);
    CHECK(memcmp(&r[0], &r[1], sizeof r[0]) == 0 && memcmp(sums[0], sums[1], 4 * rows->n) == 0 && memcmp(bytes[0], bytes[1], ROWS * rows->n) == 0,
          "%s %s n=%zu", isa, type_names[type], rows->n);
    free(panel), free(sums[0]), free(sums[1]), free(bytes[0]), free(bytes[1]);
}

static void test_isa(const char *isa) {
    for (size_t n = 32; n <= 1056; n += n < 544 ? 32 : 256) {
        wider_rows rows = make_rows(n);
        for (int type = NP_Q4K; type <= NP_Q6K; type++) {
            check_wider(&rows, type, isa);
            check_not_finite(&rows, type, isa);
            check_lacking_groups(&rows, type, isa);
        }
        free_rows(&rows);
    }
    wider_rows long_rows = make_rows(8192 + 288);
    for (int type = NP_Q4K; type <= NP_Q6K; type++) check_wider(&long_rows, type, isa);
    free_rows(&long_rows);
}

int main(void) {
    for_each_isa(test_isa);
    return checks_report();
}

/* q3: results have the bits of a q4 row with the same weights and scales, under every instruction set and by every
 * kernel; nothing is read past a row's end; unsupported operations do nothing. */
#include "isa_loop.h"
#include "kernels/half.h"

#include <stdlib.h>

enum { ROWS = 21, TOKENS = 19 };

typedef struct {
    size_t n, stride;
    void *three[ROWS], *four[ROWS], *scales[ROWS]; /* exact sizes, so that the sanitizer detects reads past the end */
    float *x;
    uint8_t *activations;
} rows_twice;

/* The format's definition: code j of a group is weight j plus 4. */
static void put(uint8_t *three, uint8_t *four, size_t j, int weight) {
    const unsigned code = (unsigned)(weight + 4), byte = j % 8, third = j % 4;
    three[byte] |= (uint8_t)((code & 3) << j / 8 * 2);
    three[8 + third] |= (uint8_t)((code >> 2) << j / 4);
    four[j % 16] |= (uint8_t)((weight + 8) << (j < 16 ? 0 : 4));
}

static rows_twice make_rows(size_t n) {
    rows_twice rows = {.n = n, .stride = (np_activation_bytes(NP_Q4, n) + 63) / 64 * 64};
    for (int r = 0; r < ROWS; r++) {
        rows.three[r] = calloc(1, np_quant_bytes(NP_Q3, n));
        rows.four[r] = calloc(1, np_quant_bytes(NP_Q4, n));
        uint16_t *scales = rows.scales[r] = malloc(np_scale_bytes(NP_Q3, n));
        for (size_t j = 0; j < n; j++)
            put((uint8_t *)rows.three[r] + j / 32 * 12, (uint8_t *)rows.four[r] + j / 32 * 16, j % 32,
                r == 1 ? -4 : r == 2 ? 3 : (int)(random_bits() % 8) - 4);
        for (size_t g = 0; g < n / 32; g++) scales[g] = np_float_to_half(0.02f * random_float());
    }
    rows.x = malloc(TOKENS * n * 4);
    rows.activations = aligned_alloc(64, TOKENS * rows.stride);
    for (size_t i = 0; i < TOKENS * n; i++) rows.x[i] = i < n ? (i % 2 ? 1.0f : -1.0f) : random_float(); /* the first at +-127 */
    for (size_t t = 0; t < TOKENS; t++) np_activation_prepare(NP_Q3, rows.x + t * n, n, rows.activations + t * rows.stride);
    return rows;
}

static void free_rows(rows_twice *rows) {
    for (int r = 0; r < ROWS; r++) free(rows->three[r]), free(rows->four[r]), free(rows->scales[r]);
    free(rows->x), free(rows->activations);
}

static const void *const *at(void *const *rows) { return (const void *const *)rows; }

static void check_same(const void *three, const void *four, size_t bytes, const char *isa, const char *what, size_t n, size_t tokens) {
    CHECK(memcmp(three, four, bytes) == 0, "%s %s n=%zu, %zu tokens: other bits than q4", isa, what, n, tokens);
}

static void check_activations(const rows_twice *rows, const char *isa) {
    void *again = aligned_alloc(64, rows->stride);
    np_activation_prepare(NP_Q4, rows->x, rows->n, again);
    check_same(rows->activations, again, np_activation_bytes(NP_Q3, rows->n), isa, "activation", rows->n, 1);
    CHECK(np_panel_bytes(NP_Q3, rows->n, TOKENS) == np_panel_bytes(NP_Q4, rows->n, TOKENS), "%s panel", isa);
    free(again);
}

static void check_dots(const rows_twice *rows, const char *isa) {
    static float out[2][TOKENS][ROWS];
    uint16_t wanted[ROWS];
    for (int r = 0; r < ROWS; r++) wanted[r] = (uint16_t)(r % 3 ? random_bits() : 0xffff);
    for (size_t tokens = 1; tokens <= TOKENS; tokens += tokens < 6 ? 1 : 13) {
        memset(out, 0, sizeof out);
        for (int k = 0; k < 2; k++)
            np_dot_scattered(k ? NP_Q4 : NP_Q3, at(k ? rows->four : rows->three), at(rows->scales), ROWS, rows->n, NULL, rows->activations,
                             rows->stride, tokens, out[k][0], ROWS);
        check_same(out[0], out[1], sizeof out[0], isa, "scattered", rows->n, tokens);
        for (int k = 0; k < 2 && tokens <= 16; k++)
            np_dot_masked(k ? NP_Q4 : NP_Q3, at(k ? rows->four : rows->three), at(rows->scales), wanted, ROWS, rows->n, NULL,
                          rows->activations, rows->stride, tokens, out[k][0], ROWS);
        for (size_t t = 0; t < tokens && tokens <= 16; t++)
            for (int r = 0; r < ROWS; r++)
                if (wanted[r] >> t & 1) check_same(&out[0][t][r], &out[1][t][r], 4, isa, "wanted", rows->n, tokens);
        float one[2];
        for (int k = 0; k < 2; k++)
            np_dot_rows(k ? NP_Q4 : NP_Q3, k ? rows->four[3] : rows->three[3], rows->scales[3], 1, rows->n, rows->activations, 0, 1, rows->x,
                        &one[k], 1);
        check_same(&one[0], &one[1], 4, isa, "one row with a bias", rows->n, 1);
    }
}

static void check_panels(const rows_twice *rows, const char *isa) {
    static float out[2][TOKENS][ROWS];
    for (size_t tokens = 1; tokens <= TOKENS; tokens += 6) {
        void *panel = aligned_alloc(64, (np_panel_bytes(NP_Q3, rows->n, tokens) + 63) / 64 * 64);
        memset(out, 0, sizeof out);
        np_panel_prepare(NP_Q3, rows->activations, rows->stride, tokens, rows->n, panel); /* one panel serves both */
        for (int k = 0; k < 2; k++)
            np_dot_panel(k ? NP_Q4 : NP_Q3, at(k ? rows->four : rows->three), at(rows->scales), ROWS, rows->n, panel, tokens, rows->x,
                         out[k][0], ROWS);
        check_same(out[0], out[1], sizeof out[0], isa, "panel", rows->n, tokens);
        free(panel);
    }
}

static void check_decoded(const rows_twice *rows, const char *isa) {
    int8_t *bytes[2] = {malloc(ROWS * rows->n), malloc(ROWS * rows->n)};
    float scales[2][ROWS], *w[2] = {malloc(4 * rows->n), malloc(4 * rows->n)};
    for (int k = 0; k < 2; k++) {
        np_rows_to_s8(k ? NP_Q4 : NP_Q3, at(k ? rows->four : rows->three), at(rows->scales), ROWS, rows->n, bytes[k], rows->n, scales[k]);
        np_decode_row(k ? NP_Q4 : NP_Q3, k ? rows->four[0] : rows->three[0], rows->scales[0], rows->n, w[k]);
    }
    check_same(bytes[0], bytes[1], ROWS * rows->n, isa, "bytes", rows->n, 0);
    check_same(scales[0], scales[1], sizeof scales[0], isa, "scales of bytes", rows->n, 0);
    check_same(w[0], w[1], 4 * rows->n, isa, "decoded", rows->n, 0);
    free(bytes[0]), free(bytes[1]), free(w[0]), free(w[1]);
}

static void check_not_added(const rows_twice *rows, const char *isa) {
    float *y = calloc(rows->n, 4), a[ROWS], sum = 0;
    for (int r = 0; r < ROWS; r++) a[r] = 1.0f;
    np_add_rows(NP_Q3, at(rows->three), at(rows->scales), a, ROWS, rows->n, y);
    for (size_t j = 0; j < rows->n; j++) sum += y[j] != 0;
    CHECK(sum == 0, "%s: rows of q3 were added", isa);
    free(y);
}

static void test_isa(const char *isa) {
    static const size_t lengths[] = {32, 64, 96, 128, 160, 352, 512, 544, 1056, 4096, 4096 + 32, 8224};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        rows_twice rows = make_rows(lengths[i]);
        check_activations(&rows, isa);
        check_dots(&rows, isa);
        check_panels(&rows, isa);
        check_decoded(&rows, isa);
        check_not_added(&rows, isa);
        free_rows(&rows);
    }
}

int main(void) {
    CHECK(np_quant_bytes(NP_Q3, 64) == 24 && np_scale_bytes(NP_Q3, 64) == 4 && np_quant_bytes(NP_Q3, 40) == 0, "sizes");
    for_each_isa(test_isa);
    return checks_report();
}

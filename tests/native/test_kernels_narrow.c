/* np_rows_to_s8: nearest bytes relative to a row's largest magnitude, the same under every instruction set, within
 * bounds. */
#include "isa_loop.h"
#include "weights.h"

#include <math.h>
#include <stdlib.h>

enum { ROWS = 5, BEHIND = 16 };

typedef struct {
    int type;
    size_t n;
    void *quants[ROWS], *scales[ROWS]; /* exact sizes, so that the sanitizer detects reads past the end */
} rows_of_groups;

static rows_of_groups make_rows(int type, size_t n) {
    rows_of_groups rows = {.type = type, .n = n};
    for (int r = 0; r < ROWS; r++) {
        const size_t quant_bytes = np_quant_bytes(type, n), scale_bytes = np_scale_bytes(type, n);
        uint8_t *quants = rows.quants[r] = malloc(quant_bytes);
        uint8_t *scales = rows.scales[r] = malloc(scale_bytes);
        for (size_t i = 0; i < quant_bytes; i++) quants[i] = (uint8_t)random_bits(); /* -128 among them */
        fill_scales(type, scales, scale_bytes, r == 1 ? 4e-7f : 0.02f);
        if (r == 2) memset(scales, 0, scale_bytes);
        if (r == 3) memcpy(scales, (uint8_t[]){0, 0x80}, 2); /* a negative zero */
    }
    return rows;
}

static void free_rows(rows_of_groups *rows) {
    for (int r = 0; r < ROWS; r++) free(rows->quants[r]), free(rows->scales[r]);
}

static int to_s8(const rows_of_groups *rows, int8_t *out, size_t stride, float *scales) {
    return np_rows_to_s8(rows->type, (const void *const *)rows->quants, (const void *const *)rows->scales, ROWS, rows->n, out, stride,
                         scales);
}

/* The definition in double precision. */
static void check_values(const rows_of_groups *rows, const int8_t *out, size_t stride, const float *scales, const char *isa) {
    float *w = malloc(4 * rows->n);
    for (size_t r = 0; r < ROWS; r++) {
        double most = 0;
        int reached = 0;
        np_decode_row(rows->type, rows->quants[r], rows->scales[r], rows->n, w);
        for (size_t j = 0; j < rows->n; j++) most = fmax(most, fabs((double)w[j]));
        CHECK(fabs(scales[r] - most / 127) <= most * 1e-7, "%s type %d n=%zu row %zu: %g", isa, rows->type, rows->n, r, (double)scales[r]);
        for (size_t j = 0; j < rows->n; j++) {
            const int q = out[r * stride + j];
            const double exact = most > 0 ? w[j] / (most / 127) : 0;
            CHECK(fabs(q - exact) <= 0.5 + 1e-4, "%s type %d n=%zu row %zu [%zu]: %d, want %g", isa, rows->type, rows->n, r, j, q, exact);
            reached |= abs(q) == 127;
        }
        CHECK(reached == (most > 0), "%s type %d n=%zu row %zu", isa, rows->type, rows->n, r);
        for (size_t j = rows->n; j < stride; j++) CHECK(out[r * stride + j] == 99, "%s row %zu: wrote behind it", isa, r);
    }
    free(w);
}

/* The results to compare with the scalar kernel's, the last in the list. */
static void check_same_bits(const rows_of_groups *rows, const int8_t *out, size_t stride, const float *scales, const char *isa) {
    int8_t *again = malloc(ROWS * stride);
    float again_scales[ROWS];
    memset(again, 99, ROWS * stride);
    np_isa_select("scalar");
    to_s8(rows, again, stride, again_scales);
    np_isa_select(isa);
    CHECK(memcmp(out, again, ROWS * stride) == 0 && memcmp(scales, again_scales, sizeof again_scales) == 0, "%s type %d n=%zu", isa,
          rows->type, rows->n);
    free(again);
}

static void check_not_finite(rows_of_groups *rows, const char *isa) {
    static const uint16_t bad[] = {0x7c00, 0xfc00, 0x7e00};
    int8_t *out = malloc(ROWS * rows->n);
    float scales[ROWS];
    for (int k = 0; k < 3; k++) {
        const size_t groups = rows->n / 32;
        const size_t block = (groups - 1) / 8 * (np_scale_bytes(rows->type, 256) / 2);
        const size_t place = has_minimum(rows->type) ? block + (k == 1 ? minimum_place(rows->type) : 0) : groups - 1;
        uint16_t *last = (uint16_t *)rows->scales[4] + place, before = *last;
        *last = bad[k];
        memset(out, 99, ROWS * rows->n);
        to_s8(rows, out, rows->n, scales);
        *last = before;
        CHECK(isnan(scales[4]) && isfinite(scales[0]), "%s type %d n=%zu: %g", isa, rows->type, rows->n, (double)scales[4]);
        for (size_t j = 0; j < rows->n; j++) CHECK(out[4 * rows->n + j] == 0, "%s: %d", isa, out[4 * rows->n + j]);
    }
    free(out);
}

static void check_refusals(const rows_of_groups *rows) {
    int8_t out[64] = {99};
    float scales[ROWS] = {99.0f};
    const void *const *quants = (const void *const *)rows->quants, *const *given = (const void *const *)rows->scales;
    CHECK(np_rows_to_s8(NP_F16, quants, given, 1, 32, out, 32, scales) == NP_E_ARGUMENT, "f16");
    CHECK(np_rows_to_s8(TYPES, quants, given, 1, 32, out, 32, scales) == NP_E_ARGUMENT, "an unknown type");
    CHECK(np_rows_to_s8(rows->type, quants, given, 1, 33, out, 64, scales) == NP_E_ARGUMENT, "half a group");
    CHECK(np_rows_to_s8(rows->type, quants, given, 1, 32, out, 31, scales) == NP_E_ARGUMENT, "rows that overlap");
    CHECK(out[0] == 99 && scales[0] == 99.0f, "a refusal wrote something");
}

static void test_isa(const char *isa) {
    static const size_t lengths[] = {32, 64, 96, 320, 4096 + 32};
    for (int type = NP_Q8; type < TYPES; type++)
        for (size_t i = 0; i < 5; i++)
            for (size_t stride = lengths[i]; stride <= lengths[i] + BEHIND; stride += BEHIND) {
                rows_of_groups rows = make_rows(type, lengths[i]);
                int8_t *out = malloc(ROWS * stride);
                float scales[ROWS];
                memset(out, 99, ROWS * stride);
                CHECK(to_s8(&rows, out, stride, scales) == NP_OK, "%s", isa);
                check_values(&rows, out, stride, scales, isa);
                check_same_bits(&rows, out, stride, scales, isa);
                check_not_finite(&rows, isa);
                check_refusals(&rows);
                free(out);
                free_rows(&rows);
            }
}

int main(void) {
    for_each_isa(test_isa);
    return checks_report();
}

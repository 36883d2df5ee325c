/* Rows at arbitrary addresses: np_dot_scattered gives the bits of np_dot_rows; np_add_rows gives bits that depend on
 * its list only, near the sum in double precision. */
#include "isa_loop.h"
#include "weights.h"

#include <math.h>
#include <stdlib.h>

enum { ROWS = 37 };

typedef struct {
    int type;
    size_t n;
    void *quants[ROWS], *scales[ROWS]; /* each row is an allocation of its exact size, so that the sanitizer detects reads past its end */
} scattered;

static scattered make_rows(int type, size_t n) {
    scattered s = {.type = type, .n = n};
    for (int r = 0; r < ROWS; r++) {
        const size_t quant_bytes = np_quant_bytes(type, n), scale_bytes = np_scale_bytes(type, n);
        uint8_t *quants = s.quants[r] = malloc(quant_bytes);
        s.scales[r] = malloc(scale_bytes + 1);
        for (size_t i = 0; i < quant_bytes; i++) quants[i] = (uint8_t)random_bits();
        fill_scales(type, s.scales[r], scale_bytes, 0.01f);
        for (size_t i = 0; type == NP_F16 && i < n; i++) ((uint16_t *)(void *)quants)[i] = np_float_to_half(random_float());
    }
    return s;
}

static void free_rows(scattered *s) {
    for (int r = 0; r < ROWS; r++) free(s->quants[r]), free(s->scales[r]);
}

static const void *const *as_rows(void *const *rows) { return (const void *const *)rows; }

static void check_dot(const scattered *s, const char *isa) {
    float *x = malloc(4 * s->n), out[ROWS], one;
    void *activation = aligned_alloc(64, (np_activation_bytes(s->type, s->n) + 63) / 64 * 64);
    for (size_t j = 0; j < s->n; j++) x[j] = random_float();
    np_activation_prepare(s->type, x, s->n, activation);
    for (size_t rows = 0; rows <= ROWS; rows = rows < 17 ? rows + 1 : rows + 20) {
        for (int r = 0; r < ROWS; r++) out[r] = 77.0f;
        np_dot_scattered(s->type, as_rows(s->quants), as_rows(s->scales), rows, s->n, NULL, activation, 0, 1, out, 0);
        for (size_t r = 0; r < ROWS; r++) {
            np_dot_rows(s->type, s->quants[r], s->scales[r], 1, s->n, activation, 0, 1, NULL, &one, 1);
            CHECK(out[r] == (r < rows ? one : 77.0f), "%s type %d n=%zu: row %zu of %zu: %g, want %g", isa, s->type, s->n, r, rows,
                  out[r], one);
        }
    }
    free(x), free(activation);
}

/* Some rows by some tokens: needed pairs have the bits of np_dot_rows, whatever the masks. */
static void check_wanted(const scattered *s, const char *isa) {
    enum { TOKENS = 16 };
    const size_t stride = (np_activation_bytes(s->type, s->n) + 63) / 64 * 64;
    float *x = malloc(4 * s->n), out[TOKENS][ROWS + 1], one;
    uint8_t *activations = aligned_alloc(64, TOKENS * stride);
    uint16_t wanted[ROWS];
    for (int t = 0; t < TOKENS; t++) {
        for (size_t j = 0; j < s->n; j++) x[j] = random_float();
        np_activation_prepare(s->type, x, s->n, activations + t * stride);
    }
    for (size_t tokens = 1; tokens <= TOKENS; tokens += tokens < 6 ? 1 : 5) {
        for (int r = 0; r < ROWS; r++) wanted[r] = (uint16_t)(r % 4 ? random_bits() & (r % 4 == 1 ? random_bits() : 0xffff) : r % 8 ? 0xffff : 0);
        for (size_t t = 0; t < TOKENS; t++) out[t][ROWS] = 77.0f;
        np_dot_masked(s->type, as_rows(s->quants), as_rows(s->scales), wanted, ROWS, s->n, NULL, activations, stride, tokens, out[0], ROWS + 1);
        for (size_t t = 0; t < tokens; t++)
            for (int r = 0; r < ROWS; r++) {
                if (!(wanted[r] >> t & 1)) continue;
                np_dot_rows(s->type, s->quants[r], s->scales[r], 1, s->n, activations + t * stride, 0, 1, NULL, &one, 1);
                CHECK(memcmp(&out[t][r], &one, 4) == 0, "%s type %d n=%zu: row %d, token %zu of %zu: %g, want %g", isa, s->type, s->n, r, t,
                      tokens, out[t][r], one);
            }
        for (size_t t = 0; t < TOKENS; t++) CHECK(out[t][ROWS] == 77.0f, "%s type %d n=%zu: written behind the rows", isa, s->type, s->n);
    }
    free(x), free(activations);
}

/* Factors of very different sizes: avx512 rounds them relative to the largest of 32 rows. */
static float factor_of(size_t r) { return r == 3 ? 0.0f : (r % 5 == 1 ? 3.0f : 0.1f) * random_float(); }

static void check_add(const scattered *s, const char *isa) {
    float *y = malloc(4 * s->n), *w = malloc(4 * ROWS * s->n), a[ROWS];
    double *want = malloc(8 * s->n), *room = malloc(8 * s->n), *scale = malloc(8 * s->n), *size = malloc(8 * ROWS * s->n);
    for (size_t r = 0; r < ROWS; r++) {
        a[r] = factor_of(r);
        np_decode_row(s->type, s->quants[r], s->scales[r], s->n, w + r * s->n);
        for (size_t j = 0; j < s->n; j++) {
            const weight_parts parts = weight_parts_at(s->type, s->quants[r], s->scales[r], s->n, j);
            size[r * s->n + j] = fabs(parts.product) + 2 * fabs(parts.minimum);
        }
    }
    for (size_t rows = 0; rows <= ROWS; rows = rows < 17 ? rows + 1 : rows + 20) {
        double most[2] = {0};
        for (size_t j = 0; j < s->n; j++) want[j] = y[j] = random_float(), room[j] = fabs(want[j]) * 2e-7;
        for (size_t r = 0; r < rows; r++) most[r / 32] = fmax(most[r / 32], fabsf(a[r]));
        for (size_t j = 0; j < s->n; j++) {
            scale[j] = 0; /* the largest of this group in any row */
            for (size_t i = 0; s->type != NP_F16 && i < rows; i++)
                scale[j] = fmax(scale[j], has_minimum(s->type) ? 63 * fabs(half_at((uint8_t *)s->scales[i] + j / 256 * 16))
                                                               : fabs(half_at((uint8_t *)s->scales[i] + j / 32 * 2)));
        }
        for (size_t r = 0; r < rows; r++) {
            const double step = most[r / 32] * (double)largest_code(s->type) / 32639 / 2;
            for (size_t j = 0; j < s->n; j++) {
                want[j] += (double)a[r] * w[r * s->n + j];
                room[j] += 1.01 * step * scale[j] + 1.3e-7 * (fabs(want[j]) + fabs((double)a[r]) * size[r * s->n + j]);
            }
        }
        np_add_rows(s->type, as_rows(s->quants), as_rows(s->scales), a, rows, s->n, y);
        for (size_t j = 0; j < s->n; j++)
            CHECK(fabs(y[j] - want[j]) <= room[j], "%s type %d n=%zu: %zu rows, [%zu]: %.9g, want %.9g +- %.2g", isa, s->type, s->n, rows,
                  j, y[j], want[j], room[j]);
    }
    free(y), free(w), free(want), free(room), free(scale), free(size);
}

/* Bits do not depend on addresses or on the number of columns that follow. */
static void check_add_bits(const scattered *s, const char *isa) {
    const size_t part = s->type == NP_F16 ? s->n : s->n / 64 * 32, quant_bytes = np_quant_bytes(s->type, part);
    const size_t scale_bytes = np_scale_bytes(s->type, s->n);
    uint8_t *quants = malloc(ROWS * quant_bytes + 1), *scales = malloc(ROWS * scale_bytes + 2);
    float *y = malloc(4 * s->n), *elsewhere = malloc(4 * s->n), a[ROWS];
    void *quants_at[ROWS], *scales_at[ROWS];
    for (size_t r = 0; r < ROWS; r++) {
        a[r] = factor_of(r);
        quants_at[r] = quants + r * quant_bytes;
        copy_columns(s->type, s->quants[r], s->n, part, quants_at[r]);
        scales_at[r] = memcpy(scales + r * scale_bytes, s->scales[r], scale_bytes);
    }
    for (size_t j = 0; j < s->n; j++) y[j] = elsewhere[j] = random_float();
    np_add_rows(s->type, as_rows(s->quants), as_rows(s->scales), a, ROWS, s->n, y);
    np_add_rows(s->type, as_rows(quants_at), as_rows(scales_at), a, ROWS, part, elsewhere);
    CHECK(memcmp(y, elsewhere, 4 * part) == 0, "%s type %d n=%zu", isa, s->type, s->n);
    free(quants), free(scales), free(y), free(elsewhere);
}

/* A non-finite factor or scale makes the result non-finite, in any row. */
static void check_not_finite_shows(scattered *s, const char *isa) {
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    float *y = malloc(4 * s->n), a[ROWS];
    for (size_t r = 0; r < ROWS; r++)
        for (int k = 0; k < 3; k++)
            for (int of_scale = 0; of_scale <= (s->type == NP_F16 ? 0 : has_minimum(s->type) ? 2 : 1); of_scale++) { /* 2: of the minimum */
                uint16_t *scale = (uint16_t *)s->scales[r] + (of_scale == 2 ? minimum_place(s->type) : 0);
                const uint16_t before = of_scale ? *scale : 0;
                for (size_t i = 0; i < ROWS; i++) a[i] = i == r && !of_scale ? bad[k] : 0.5f;
                if (of_scale) *scale = np_float_to_half(bad[k]);
                memset(y, 0, 4 * s->n);
                np_add_rows(s->type, as_rows(s->quants), as_rows(s->scales), a, ROWS, s->n, y);
                if (of_scale) *scale = before;
                for (size_t j = 0; j < (of_scale ? 32 : s->n); j++)
                    CHECK(!isfinite(y[j]), "%s type %d n=%zu row %zu: [%zu] is %g", isa, s->type, s->n, r, j, y[j]);
            }
    free(y);
}

/* Adding the same rows for several tokens gives each token the bits that it has alone, and writes nothing else. Long
 * rows take a third of the pairs of counts, `turn` says which: three lengths together have all. */
static void check_add_for_tokens(const scattered *s, size_t turn, const char *isa) {
    enum { MOST_TOKENS = 35, GAP = 3 };
    static const size_t row_counts[] = {0, 1, 5, 31, 32, 33, ROWS}, token_counts[] = {1, 2, 7, 16, 17, MOST_TOKENS};
    const size_t stride = s->n + GAP;
    float a[MOST_TOKENS][ROWS + 1], *y = malloc(4 * MOST_TOKENS * stride), *want = malloc(4 * MOST_TOKENS * stride);
    for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++)
        for (size_t k = 0; k < sizeof token_counts / sizeof *token_counts; k++) {
            const size_t rows = row_counts[i], tokens = token_counts[k];
            if (s->n > 128 && (i + k + turn) % 3) continue;
            for (size_t j = 0; j < MOST_TOKENS * stride; j++) y[j] = want[j] = random_float();
            for (size_t t = 0; t < tokens; t++)
                for (size_t r = 0; r < rows; r++) a[t][r] = random_float() * (t % 3 ? 1.0f : 100.0f);
            if (rows > 1 && tokens > 2) a[1][rows - 1] = INFINITY, a[2][0] = NAN;
            for (size_t t = 0; t < tokens; t++) np_add_rows(s->type, as_rows(s->quants), as_rows(s->scales), a[t], rows, s->n, want + t * stride);
            np_add_rows_for_tokens(s->type, as_rows(s->quants), as_rows(s->scales), a[0], ROWS + 1, rows, tokens, s->n, y, stride);
            const int same = memcmp(y, want, 4 * MOST_TOKENS * stride) == 0; /* then one check stands for all */
            for (size_t j = 0; j < (same ? 1 : MOST_TOKENS * stride); j++)
                CHECK(memcmp(&y[j], &want[j], 4) == 0 || (isnan(y[j]) && isnan(want[j])), "%s type %d n=%zu, %zu rows, %zu tokens: [%zu] %.9g, alone %.9g",
                      isa, s->type, s->n, rows, tokens, j, y[j], want[j]);
        }
    free(y), free(want);
}

static void test_isa(const char *isa) {
    static const size_t lengths[] = {32, 64, 96, 128, 256, 352, 512, 544, 768, 4096 + 32, 7, 333};
    for (int type = NP_F16; type < TYPES; type++)
        for (size_t i = 0; i < (type == NP_F16 ? 10 : 8); i++) {
            scattered s = make_rows(type, lengths[i]);
            check_dot(&s, isa);
            check_wanted(&s, isa);
            if (type != NP_Q3) { /* whose rows are never added */
                check_add(&s, isa);
                check_add_bits(&s, isa);
                if (lengths[i] < 600) check_add_for_tokens(&s, i, isa);
                if (lengths[i] < 500) check_not_finite_shows(&s, isa);
            }
            free_rows(&s);
        }
}

int main(void) {
    for_each_isa(test_isa);
    return checks_report();
}

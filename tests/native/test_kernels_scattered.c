/* Rows that lie anywhere: np_dot_scattered has the bits of np_dot_rows, np_add_rows those of np_add_row for each row in turn. */
#include "isa_loop.h"
#include "kernels/half.h"

#include <stdlib.h>

enum { ROWS = 37 };

typedef struct {
    int type;
    size_t n;
    void *quants[ROWS], *scales[ROWS]; /* each row an allocation of its exact size, so that the sanitizer sees a read past its end */
} scattered;

static scattered make_rows(int type, size_t n) {
    scattered s = {.type = type, .n = n};
    for (int r = 0; r < ROWS; r++) {
        const size_t quant_bytes = np_quant_bytes(type, n), scale_bytes = np_scale_bytes(type, n);
        uint8_t *quants = s.quants[r] = malloc(quant_bytes);
        uint16_t *scales = s.scales[r] = malloc(scale_bytes + 1);
        for (size_t i = 0; i < quant_bytes; i++) quants[i] = (uint8_t)random_bits();
        for (size_t i = 0; i < scale_bytes / 2; i++) scales[i] = np_float_to_half(0.01f * random_float());
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
        np_dot_scattered(s->type, as_rows(s->quants), as_rows(s->scales), rows, s->n, NULL, activation, out);
        for (size_t r = 0; r < ROWS; r++) {
            np_dot_rows(s->type, s->quants[r], s->scales[r], 1, s->n, activation, 0, 1, NULL, &one, 1);
            CHECK(out[r] == (r < rows ? one : 77.0f), "%s type %d n=%zu: row %zu of %zu: %g, want %g", isa, s->type, s->n, r, rows,
                  out[r], one);
        }
    }
    free(x), free(activation);
}

static void check_add(const scattered *s, const char *isa) {
    float *together = malloc(4 * s->n), *in_turn = malloc(4 * s->n), a[ROWS];
    for (int r = 0; r < ROWS; r++) a[r] = r == 3 ? 0.0f : random_float();
    for (size_t rows = 0; rows <= ROWS; rows = rows < 17 ? rows + 1 : rows + 20) {
        for (size_t j = 0; j < s->n; j++) together[j] = in_turn[j] = random_float();
        np_add_rows(s->type, as_rows(s->quants), as_rows(s->scales), a, rows, s->n, together);
        for (size_t r = 0; r < rows; r++) np_add_row(s->type, s->quants[r], s->scales[r], s->n, a[r], in_turn);
        CHECK(memcmp(together, in_turn, 4 * s->n) == 0, "%s type %d n=%zu: %zu rows", isa, s->type, s->n, rows);
    }
    free(together), free(in_turn);
}

static void test_isa(const char *isa) {
    static const size_t lengths[] = {32, 64, 96, 128, 352, 512, 544, 4096 + 32, 7, 333};
    for (int type = NP_F16; type <= NP_Q4; type++)
        for (size_t i = 0; i < (type == NP_F16 ? 10 : 8); i++) {
            scattered s = make_rows(type, lengths[i]);
            check_dot(&s, isa);
            check_add(&s, isa);
            free_rows(&s);
        }
}

int main(void) {
    for_each_isa(test_isa);
    return checks_report();
}

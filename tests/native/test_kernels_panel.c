/* np_dot_panel against np_dot_rows, bit for bit: every instruction set, awkward sizes, one to forty tokens, with and
 * without bias. */
#include "isa_loop.h"
#include "weights.h"

#include <stdlib.h>

enum { ROWS = 37, TOKENS = 40 };

typedef struct {
    int type;
    size_t n, stride;
    uint8_t *quants, *scales, *activations;
    const void *quants_at[ROWS], *scales_at[ROWS];
    float bias[ROWS], want[TOKENS][ROWS];
} product;

static product make_product(int type, size_t n) {
    product p = {.type = type, .n = n, .stride = (np_activation_bytes(type, n) + 63) / 64 * 64};
    const size_t quant_bytes = np_quant_bytes(type, n), scale_bytes = np_scale_bytes(type, n);
    float *x = malloc(4 * n);
    p.quants = malloc(ROWS * quant_bytes);
    p.scales = malloc(ROWS * scale_bytes + 1);
    p.activations = aligned_alloc(64, TOKENS * p.stride);
    for (size_t i = 0; i < ROWS * quant_bytes; i++) p.quants[i] = (uint8_t)random_bits();
    for (size_t i = 0; type == NP_F16 && i < ROWS * n; i++) ((uint16_t *)(void *)p.quants)[i] = np_float_to_half(random_float());
    fill_scales(type, p.scales, ROWS * scale_bytes, 0.01f);
    for (size_t t = 0; t < TOKENS; t++) {
        for (size_t j = 0; j < n; j++) x[j] = t == 5 ? 0.0f : t == 6 ? (j % 2 ? 1.0f : -1.0f) : random_float(); /* 6: all at +-127 */
        np_activation_prepare(type, x, n, p.activations + t * p.stride);
    }
    for (size_t r = 0; r < ROWS; r++) {
        p.quants_at[r] = p.quants + r * quant_bytes;
        p.scales_at[r] = p.scales + r * scale_bytes;
        p.bias[r] = random_float();
    }
    free(x);
    return p;
}

static void check_panel(const product *p, const char *isa, size_t rows, size_t tokens, const float *bias) {
    enum { STRIDE = ROWS + 3 };
    static float out[TOKENS + 1][STRIDE];
    void *panel = aligned_alloc(64, (np_panel_bytes(p->type, p->n, tokens) + 63) / 64 * 64);
    for (size_t t = 0; t <= TOKENS; t++)
        for (size_t r = 0; r < STRIDE; r++) out[t][r] = 77.0f;
    np_panel_prepare(p->type, p->activations, p->stride, tokens, p->n, panel);
    np_dot_panel(p->type, p->quants_at, p->scales_at, rows, p->n, panel, tokens, bias, out[0], STRIDE);
    np_dot_rows(p->type, p->quants, p->scales, rows, p->n, p->activations, p->stride, tokens, bias, (float *)p->want[0], ROWS);
    for (size_t t = 0; t <= TOKENS; t++) {
        float want[STRIDE];
        for (size_t r = 0; r < STRIDE; r++) want[r] = t < tokens && r < rows ? p->want[t][r] : 77.0f;
        const int same = memcmp(out[t], want, sizeof want) == 0; /* then one check stands for all */
        for (size_t r = 0; r < (same ? 1 : STRIDE); r++)
            CHECK(memcmp(&out[t][r], &want[r], 4) == 0, "%s type %d n=%zu, %zu rows, %zu tokens: row %zu token %zu: %.9g, want %.9g", isa,
                  p->type, p->n, rows, tokens, r, t, out[t][r], want[r]);
    }
    free(panel);
}

static void test_isa(const char *isa) {
    static const size_t lengths[] = {32, 96, 352, 512, 768, 1056, 4096 + 32};
    for (int type = NP_F16; type < TYPES; type++) {
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            product p = make_product(type, lengths[i]);
            for (size_t tokens = 1; tokens <= TOKENS; tokens += lengths[i] > 1000 ? 13 : 1)
                check_panel(&p, isa, 1 + random_bits() % 17, tokens, tokens % 2 ? p.bias : NULL);
            for (size_t rows = 1; rows <= 17; rows++) check_panel(&p, isa, rows, 3, p.bias);
            check_panel(&p, isa, ROWS, TOKENS, p.bias);
            free(p.quants), free(p.scales), free(p.activations);
        }
    }
    for (int type = NP_Q4; type <= NP_Q5K; type += NP_Q5K - NP_Q4) {
        product wide = make_product(type, 20480); /* more columns than a panel of its own takes */
        check_panel(&wide, isa, 3, 17, wide.bias);
        free(wide.quants), free(wide.scales), free(wide.activations);
    }
    /* Types with a minimum once took the slow path: a merge had left them out, and the bits were the same. */
    const int has_tiles = np_panel_bytes(NP_Q8, 256, 1) == np_panel_bytes(NP_Q8, 256, 32);
    for (int type = NP_Q8; type < TYPES; type++)
        CHECK((np_panel_bytes(type, 256, 1) == np_panel_bytes(type, 256, 32)) == has_tiles, "%s %s: path", isa, type_names[type]);
    CHECK(np_panel_bytes(NP_Q4, 40, 3) == 0 && np_panel_bytes(TYPES, 64, 3) == 0, "%s refused sizes", isa);
}

int main(void) {
    for_each_isa(test_isa);
    return checks_report();
}

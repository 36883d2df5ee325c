/* The AMX panel's source over a model of the tile instructions, compared bit for bit with avx512 rows, on processors
 * without AMX. It cannot show that the real instructions behave like the model. */
#define np_amx_panel modelled_panel
#include "tile_model.h"

#include "kernels/amx_panel.c"

#if defined(__x86_64__)
#include "weights.h"

#include <stdlib.h>

enum { MAX_ROWS = 67, MAX_TOKENS = 67, OUT_STRIDE = MAX_ROWS + 3 };

typedef struct {
    int type;
    size_t n, stride, quant_bytes, scale_bytes;
    uint8_t *quants, *scales, *activations;
    const void *quants_at[MAX_ROWS], *scales_at[MAX_ROWS];
    float bias[MAX_ROWS], want[MAX_TOKENS][MAX_ROWS];
} product;

/* Neighbours in the list are no neighbours in memory; row 3 and token 3 have the largest magnitudes. */
static product make_product(int type, size_t n) {
    product p = {.type = type, .n = n, .stride = np_padded(np_activation_bytes(type, n), 64)};
    p.quant_bytes = np_quant_bytes(type, n), p.scale_bytes = np_scale_bytes(type, n);
    float *x = malloc(4 * n);
    p.quants = malloc(MAX_ROWS * p.quant_bytes);
    p.scales = malloc(MAX_ROWS * p.scale_bytes);
    p.activations = aligned_alloc(64, MAX_TOKENS * p.stride);
    for (size_t i = 0; i < MAX_ROWS * p.quant_bytes; i++) p.quants[i] = (uint8_t)random_bits();
    fill_scales(type, p.scales, MAX_ROWS * p.scale_bytes, 0.01f);
    for (size_t r = 0; r < MAX_ROWS; r++) {
        const size_t at = (r * 5 + 2) % MAX_ROWS;
        p.quants_at[r] = p.quants + at * p.quant_bytes;
        p.scales_at[r] = p.scales + at * p.scale_bytes;
        if (r == 3) memset(p.quants + at * p.quant_bytes, type == NP_Q8 ? 0x80 : has_minimum(type) ? 0xff : 0, p.quant_bytes);
        p.bias[r] = random_float();
    }
    for (size_t t = 0; t < MAX_TOKENS; t++) {
        for (size_t j = 0; j < n; j++) x[j] = t == 3 ? 1.0f : t == 4 ? 0.0f : random_float();
        np_activation_prepare(type, x, n, p.activations + t * p.stride);
        np_dot_scattered(type, p.quants_at, p.scales_at, MAX_ROWS, n, NULL, p.activations + t * p.stride, 0, 1, p.want[t], 0);
    }
    free(x);
    return p;
}

static void free_product(product *p) { free(p->quants), free(p->scales), free(p->activations); }

static void check_panel(product *p, size_t rows, size_t tokens, const float *bias) {
    static float out[MAX_TOKENS + 1][OUT_STRIDE];
    uint8_t *panel = aligned_alloc(64, np_padded(modelled_panel.bytes(p->type, p->n, tokens), 64));
    for (size_t t = 0; t <= MAX_TOKENS; t++)
        for (size_t r = 0; r < OUT_STRIDE; r++) out[t][r] = 77.0f;
    const np_dot_job job = {
        .rows = {.quant_bytes = p->quant_bytes,
                 .scale_bytes = p->scale_bytes,
                 .quants_at = p->quants_at,
                 .scales_at = p->scales_at,
                 .rows = rows,
                 .n = p->n},
        .activations = panel,
        .tokens = tokens,
        .bias = bias,
        .out = out[0],
        .out_stride = OUT_STRIDE,
    };
    modelled_panel.prepare(p->type, p->activations, p->stride, tokens, p->n, panel);
    modelled_panel.dot(p->type, &job);
    CHECK(model.shapes.palette == 0, "tiles stay in use after the call");
    for (size_t t = 0; t <= MAX_TOKENS; t++) {
        float want[OUT_STRIDE];
        for (size_t r = 0; r < OUT_STRIDE; r++) want[r] = t < tokens && r < rows ? p->want[t][r] + (bias ? bias[r] : 0.0f) : 77.0f;
        const int same = memcmp(out[t], want, sizeof want) == 0; /* then one check stands for all */
        for (size_t r = 0; r < (same ? 1 : OUT_STRIDE); r++)
            CHECK(memcmp(&out[t][r], &want[r], 4) == 0, "type %d n=%zu, %zu rows, %zu tokens: row %zu token %zu: %.9g, want %.9g", p->type,
                  p->n, rows, tokens, r, t, out[t][r], want[r]);
    }
    free(panel);
}

static void test_shapes(int type) {
    static const size_t lengths[] = {32, 96, 352, 512, 1056, 2656};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        product p = make_product(type, lengths[i]);
        for (size_t rows = 1; rows <= MAX_ROWS; rows += lengths[i] > 1000 ? 22 : 7)
            check_panel(&p, rows, 1 + random_bits() % MAX_TOKENS, rows % 2 ? p.bias : NULL);
        for (size_t tokens = 1; tokens <= MAX_TOKENS; tokens += lengths[i] > 1000 ? 22 : 7)
            check_panel(&p, 1 + random_bits() % MAX_ROWS, tokens, tokens % 2 ? NULL : p.bias);
        static const size_t edges[] = {15, 16, 17, 31, 32, 33};
        for (size_t e = 0; e < 36; e++) check_panel(&p, edges[e / 6], edges[e % 6], p.bias);
        free_product(&p);
    }
}

/* Beyond 8192 columns a block has 16 rows, up to the last that the kernel takes. */
static void test_long_rows(int type) {
    static const size_t lengths[] = {8192, 8192 + 32, 16384};
    CHECK(modelled_panel.most_columns == 16384, "%zu", modelled_panel.most_columns);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        product p = make_product(type, lengths[i]);
        check_panel(&p, 35, 19, p.bias);
        free_product(&p);
    }
}

/* The instruction counts: one product per 16 rows, 16 tokens and a group; loads are shared by rows and by tokens. */
static void test_instructions(void) {
    product p = make_product(NP_Q4, 512);
    const long products = model.products, loads = model.loads, stores = model.stores;
    check_panel(&p, 64, 64, NULL);
    CHECK(model.products - products == 4 * 4 * 16, "%ld products", model.products - products);
    CHECK(model.loads - loads == 4 * 4 * 16, "%ld loads", model.loads - loads);
    CHECK(model.stores - stores == 4 * 4 * 16, "%ld stores", model.stores - stores);
    free_product(&p);
}

/* The trial accepts the kernel only if its bits are right, in every type. */
static void test_trial(void) {
    const long before = model.products;
    CHECK(np_panels_agree(&modelled_panel, &np_avx512_panel), "the model differs from avx512");
    const long products = model.products - before, of_a_type = products / (TYPES - NP_Q8);
    CHECK(products == of_a_type * (TYPES - NP_Q8), "%ld products of %d types", products, TYPES - NP_Q8);
    for (int type = NP_Q8; type < TYPES; type++) {
        const long first = model.products;
        model.fault_from = first + (type - NP_Q8) * of_a_type;
        CHECK(!np_panels_agree(&modelled_panel, &np_avx512_panel), "a missing row was not noticed in type %d", type);
        CHECK(model.products == model.fault_from + of_a_type, "the trial of type %d ended after %ld products", type, model.products - first);
    }
    model.fault_from = 0;
}

int main(void) {
    if (!np_isa_select("avx512")) {
        printf("no avx512 here, so nothing to compare with; ");
        return checks_report();
    }
    for (int type = NP_Q8; type < TYPES; type++) {
        test_shapes(type);
        test_long_rows(type);
    }
    test_instructions();
    test_trial();
    return checks_report();
}
#else
int main(void) {
    printf("no tiles on this architecture; ");
    return checks_report();
}
#endif

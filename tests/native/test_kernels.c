/* Row kernels of every instruction set against double precision, and batches against single rows. */
#include "isa_loop.h"
#include "weights.h"

#include <math.h>
#include <stdlib.h>

enum { ROWS = 7, TOKENS = 9 };

typedef struct {
    int type;
    size_t n, quant_bytes, scale_bytes;
    uint8_t *quants, *scales; /* exactly ROWS rows, so that the sanitizer sees a read past the end */
    double *w, *x;            /* decoded: [ROWS, n] and [TOKENS, n] */
    double *size;             /* [ROWS, n]: magnitudes of what a weight is the difference of */
    float *inputs;
    uint8_t *activations;
    size_t stride;
} matrix;

/* Kinds of content. Scales of every kind are finite fp16. */
enum { ORDINARY, EXTREME, ZERO_SCALES, TINY_SCALES, KINDS };

static uint16_t scale_of_kind(int kind, size_t g) {
    if (kind == ZERO_SCALES) return g % 2 ? 0x8000 : 0;
    if (kind == TINY_SCALES) return (uint16_t)(1 + random_bits() % 0x3ff); /* denormal */
    if (kind == EXTREME && g % 2) return 0x7bff;                          /* 65504 */
    return np_float_to_half(0.001f + 0.01f * fabsf(random_float()));
}

static uint8_t quant_of_kind(int type, int kind) {
    if (kind != EXTREME) return (uint8_t)random_bits();
    if (type == NP_Q8) return random_bits() % 2 ? 0x80 : 0x7f; /* -128 or 127 */
    return (uint8_t[]){0x00, 0xff, 0x0f, 0xf0}[random_bits() % 4];
}

static matrix make_matrix(int type, size_t n, int kind) {
    matrix m = {.type = type, .n = n, .quant_bytes = np_quant_bytes(type, n), .scale_bytes = np_scale_bytes(type, n)};
    m.quants = malloc(ROWS * m.quant_bytes);
    m.scales = malloc(ROWS * m.scale_bytes + 1);
    m.w = malloc(ROWS * n * sizeof *m.w);
    m.size = malloc(ROWS * n * sizeof *m.size);
    m.x = malloc(TOKENS * n * sizeof *m.x);
    m.inputs = malloc(TOKENS * n * sizeof *m.inputs);
    for (size_t i = 0; i < ROWS * m.quant_bytes; i++) m.quants[i] = quant_of_kind(type, kind);
    for (size_t i = 0; i < ROWS * m.scale_bytes; i++) m.scales[i] = (uint8_t)random_bits();
    for (size_t at = 0; at < ROWS * m.scale_bytes; at = next_half(type, at)) {
        const uint16_t half = scale_of_kind(kind, at / 2);
        memcpy(m.scales + at, &half, 2);
    }
    if (type == NP_F16)
        for (size_t i = 0; i < ROWS * n; i++) {
            const float tiny = kind == TINY_SCALES ? 1e-7f : kind == EXTREME ? 65504.0f : 1.0f;
            ((uint16_t *)(void *)m.quants)[i] = kind == ZERO_SCALES ? 0 : np_float_to_half(tiny * random_float());
        }
    for (size_t r = 0; r < ROWS; r++)
        for (size_t j = 0; j < n; j++) {
            const weight_parts parts = weight_parts_at(type, m.quants + r * m.quant_bytes, m.scales + r * m.scale_bytes, n, j);
            m.w[r * n + j] = weight_of(parts);
            m.size[r * n + j] = fabs(parts.product) + fabs(parts.minimum);
        }
    for (size_t i = 0; i < TOKENS * n; i++)
        m.inputs[i] = kind == EXTREME ? (random_bits() % 2 ? 1.0f : -1.0f) : i / 32 % 5 == 4 ? 0.0f : 3.0f * random_float();
    m.stride = (np_activation_bytes(type, n) + 63) / 64 * 64;
    m.activations = aligned_alloc(64, TOKENS * m.stride);
    for (size_t t = 0; t < TOKENS; t++) np_activation_prepare(type, m.inputs + t * n, n, m.activations + t * m.stride);
    for (size_t t = 0; t < TOKENS; t++) {
        for (size_t g = 0; g * 32 < n; g++) {
            const float *x = m.inputs + t * n + g * 32;
            const size_t count = n - g * 32 < 32 ? n - g * 32 : 32;
            double most = 0;
            for (size_t j = 0; j < count; j++) most = fmax(most, fabs(x[j]));
            for (size_t j = 0; j < count; j++) {
                const double step = (double)((float)most / 127.0f);
                const double quantized = most > 0 ? nearbyintf(x[j] * (127.0f / (float)most)) * step : 0;
                m.x[t * n + g * 32 + j] = type == NP_F16 ? x[j] : quantized;
            }
        }
    }
    return m;
}

static void free_matrix(matrix *m) {
    free(m->quants), free(m->scales), free(m->w), free(m->size), free(m->x), free(m->inputs), free(m->activations);
}

static void dot(const matrix *m, size_t row, size_t rows, size_t token, size_t tokens, const float *bias, float *out,
                size_t stride) {
    np_dot_rows(m->type, m->quants + row * m->quant_bytes, m->scales + row * m->scale_bytes, rows, m->n,
                m->activations + token * m->stride, m->stride, tokens, bias, out, stride);
}

static void test_dot(const matrix *m, const char *isa) {
    float out[TOKENS][ROWS + 1], bias[ROWS];
    for (int r = 0; r < ROWS; r++) bias[r] = random_float();
    dot(m, 0, ROWS, 0, TOKENS, NULL, out[0], ROWS + 1);
    for (size_t t = 0; t < TOKENS; t++) {
        for (size_t r = 0; r < ROWS; r++) {
            double want = 0, size = 0;
            for (size_t j = 0; j < m->n; j++) {
                want += m->w[r * m->n + j] * m->x[t * m->n + j];
                size += fabs(m->size[r * m->n + j] * m->x[t * m->n + j]);
            }
            CHECK(fabs(out[t][r] - want) <= 2e-6 * size + 1e-30, "%s %s n=%zu row %zu token %zu: %.9g, want %.9g", isa,
                  type_names[m->type], m->n, r, t, out[t][r], want);
        }
    }
    for (size_t tokens = 1; tokens <= TOKENS; tokens++) {
        for (size_t token = 0; token + tokens <= TOKENS; token++) {
            const size_t row = random_bits() % ROWS, rows = 1 + random_bits() % (ROWS - row);
            float part[TOKENS][ROWS];
            dot(m, row, rows, token, tokens, bias + row, part[0], ROWS);
            for (size_t t = 0; t < tokens; t++)
                for (size_t r = 0; r < rows; r++)
                    CHECK(part[t][r] == out[token + t][row + r] + bias[row + r], "%s %s n=%zu: rows %zu+%zu tokens %zu+%zu",
                          isa, type_names[m->type], m->n, row, rows, token, tokens);
        }
    }
}

static void test_add_and_decode(const matrix *m, const char *isa) {
    float *y = malloc(m->n * sizeof *y), *before = malloc(m->n * sizeof *y), *w = malloc(m->n * sizeof *w);
    for (size_t r = 0; r < ROWS; r++) {
        const uint8_t *quants = m->quants + r * m->quant_bytes, *scales = m->scales + r * m->scale_bytes;
        const float a = random_float();
        for (size_t j = 0; j < m->n; j++) y[j] = before[j] = random_float();
        np_decode_row(m->type, quants, scales, m->n, w);
        for (size_t j = 0; j < m->n; j++)
            CHECK(w[j] == m->w[r * m->n + j], "%s %s decode n=%zu [%zu]: %g", isa, type_names[m->type], m->n, j, w[j]);
        if (m->type == NP_Q3) continue; /* rows of q3 are never added */
        np_add_rows(m->type, (const void *[]){quants}, (const void *[]){scales}, &a, 1, m->n, y);
        for (size_t j = 0; j < m->n; j++) {
            const double added = (double)a * m->w[r * m->n + j], size = fabs((double)a) * m->size[r * m->n + j];
            CHECK(fabs(y[j] - (before[j] + added)) <= (has_minimum(m->type) ? 3e-7 : 2e-7) * (fabs(before[j]) + size), "%s %s add n=%zu [%zu]: %.9g", isa,
                  type_names[m->type], m->n, j, y[j]);
        }
    }
    free(y), free(before), free(w);
}

/* Equal values must give equal results in a vector's body and in its tail. */
static void test_tail_rounds_like_body(const char *isa) {
    for (int i = 0; i < 500; i++) {
        uint16_t w[37];
        float y[37];
        const float a = random_float(), start = random_float();
        const uint16_t weight = np_float_to_half(random_float());
        for (int j = 0; j < 37; j++) w[j] = weight, y[j] = start;
        np_add_rows(NP_F16, (const void *[]){w}, (const void *[]){NULL}, &a, 1, 37, y);
        for (int j = 1; j < 37; j++) CHECK(y[j] == y[0], "%s add f16 [%d]", isa, j);
    }
}

static void test_halves(const char *isa) {
    enum { COUNT = 65536 + 3 };
    static uint16_t halves[COUNT], back[COUNT];
    static float floats[COUNT];
    for (int i = 0; i < COUNT; i++) halves[i] = (uint16_t)i;
    np_f16_to_f32(halves, COUNT, floats);
    np_f32_to_f16(floats, COUNT, back);
    for (int i = 0; i < COUNT; i++) {
        CHECK(np_bits_of(floats[i]) == np_bits_of(np_half_to_float(halves[i])), "%s f16_to_f32 %04x", isa, halves[i]);
        CHECK(isnan(floats[i]) ? back[i] == (halves[i] | 0x200) : back[i] == halves[i], "%s round trip %04x", isa, halves[i]);
    }
    for (int i = 0; i < COUNT; i++) /* all exponents, and ties between neighbours */
        floats[i] = i % 3 ? np_float_of(random_bits()) : np_float_of((random_bits() & 0xffffe000) | 0x1000);
    np_f32_to_f16(floats, COUNT, back);
    for (int i = 0; i < COUNT; i++)
        CHECK(back[i] == np_float_to_half(floats[i]), "%s f32_to_f16 %a: %04x", isa, floats[i], back[i]);
}

/* A non-finite value must make the result non-finite. */
static void test_not_finite_shows(const char *isa) {
    for (int type = NP_Q8; type < TYPES; type++) {
        matrix m = make_matrix(type, 96, ORDINARY);
        for (int i = 0; i < 2; i++) {
            float out;
            m.inputs[40] = i ? INFINITY : NAN;
            np_activation_prepare(type, m.inputs, 96, m.activations);
            dot(&m, 0, 1, 0, 1, NULL, &out, 1);
            CHECK(!isfinite(out), "%s %s: %g", isa, type_names[type], out);
        }
        free_matrix(&m);
    }
}

static void test_isa(const char *isa) {
    static const size_t lengths[] = {32, 64, 96, 128, 160, 256, 320, 512, 544, 736, 768, 1024, 4096, 8192, 8224};
    static const size_t whole_groups = sizeof lengths / sizeof *lengths;
    static const size_t odd_lengths[] = {1, 7, 15, 17, 33, 63, 65, 80, 127, 333};
    for (int kind = 0; kind < KINDS; kind++) {
        for (int type = NP_F16; type < TYPES; type++) {
            for (size_t i = 0; i < whole_groups + (type == NP_F16 ? sizeof odd_lengths / sizeof *odd_lengths : 0); i++) {
                matrix m = make_matrix(type, i < whole_groups ? lengths[i] : odd_lengths[i - whole_groups], kind);
                test_dot(&m, isa);
                test_add_and_decode(&m, isa);
                free_matrix(&m);
            }
        }
    }
    test_tail_rounds_like_body(isa);
    test_halves(isa);
    test_not_finite_shows(isa);
}

/* Types of rows with the same number read the same inputs. */
static const int kind_of_inputs[TYPES] = {[NP_F16] = 0, [NP_Q8] = 1, [NP_Q4] = 2, [NP_Q3] = 2, [NP_IQ4] = 2, [NP_MXFP4] = 2,
                                          [NP_Q4K] = 3, [NP_Q5K] = 3, [NP_Q6K] = 3, [NP_Q4H] = 3, [NP_Q5H] = 3};

int main(void) {
    setenv("NEURONPIPE_ISA", "abacus", 1);
    CHECK(np_isa_name() == NULL, "a wish that cannot be met is no silent fallback");
    setenv("NEURONPIPE_ISA", "scalar", 1);
    CHECK(np_isa_name() && strcmp(np_isa_name(), "scalar") == 0, "the environment chooses");
    CHECK(np_isa_select("abacus") == NULL, "an unknown instruction set is refused");
    CHECK(np_isa_select(NULL) != NULL && strncmp(np_isa_names(), np_isa_name(), strlen(np_isa_name())) == 0, "best first");
    CHECK(np_quant_bytes(NP_Q4, 64) == 32 && np_scale_bytes(NP_Q4, 64) == 4 && np_quant_bytes(NP_F16, 3) == 6, "sizes");
    CHECK(np_quant_bytes(NP_Q4K, 288) == 144 && np_quant_bytes(NP_Q5K, 288) == 180 && np_quant_bytes(NP_Q6K, 288) == 216, "sizes");
    CHECK(np_quant_bytes(NP_IQ4, 64) == 32 && np_scale_bytes(NP_MXFP4, 64) == 4 && np_scale_bytes(NP_Q4H, 64) == 32 && np_quant_bytes(NP_MXFP4, 40) == 0, "sizes");
    for (int type = NP_F16; type < TYPES; type++)
        for (int other = NP_F16; other < TYPES; other++)
            CHECK(np_reads_inputs_of(type, other) == (kind_of_inputs[type] == kind_of_inputs[other]), "%s, %s", type_names[type],
                  type_names[other]);
    CHECK(np_scale_bytes(NP_Q4K, 256) == 16 && np_scale_bytes(NP_Q5K, 288) == 32 && np_scale_bytes(NP_Q6K, 32) == 16, "sizes");
    CHECK(np_quant_bytes(NP_Q5K, 40) == 0 && np_scale_bytes(NP_Q6K, 40) == 0 && np_activation_bytes(NP_Q4K, 40) == 0, "refused sizes");
    CHECK(np_quant_bytes(NP_Q8, 40) == 0 && np_quant_bytes(TYPES, 64) == 0 && np_scale_bytes(NP_F16, 64) == 0, "refused sizes");
    for_each_isa(test_isa);
    return checks_report();
}

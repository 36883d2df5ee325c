/* Memories and convolutions of recurrent layers: against double precision, in one call or token by token, and the same
 * bits on every instruction set. */
#include "isa_loop.h"
#include "kernels/activate.h"

#include <math.h>
#include <stdlib.h>

enum { KEYS = 37, VALUES = 16 * 8 + 16 * 4 + 16 + 3, TOKENS = 5, CHANNELS = 77, TAPS = 4 };

static float initial[KEYS * VALUES], keys[TOKENS * KEYS], queries[TOKENS * KEYS], values[TOKENS * VALUES];
static float kept[TOKENS], kept_rows[TOKENS * KEYS], shares[TOKENS];
enum { PLAIN = 0, DELTA = 1, DELTA_BY_ROW = 2, RULES }; /* how a token changes a memory */

static void fill(float *x, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++)
        x[i] = scale * random_float();
}

static void remember(size_t key_width, size_t value_width, const float *from, float *to, float *outputs, size_t first, size_t tokens, int rule)
{
    const int is_by_row = rule == DELTA_BY_ROW;
    memcpy(outputs + first * value_width, values + first * value_width, tokens * value_width * sizeof *outputs);
    np_remember(&(np_memory_job){.key_width = key_width, .value_width = value_width, .tokens = tokens, .from = from, .to = to,
                                 .keys = keys + first * key_width, .queries = queries + first * key_width, .keys_stride = key_width,
                                 .values = outputs + first * value_width, .values_stride = value_width, .shares = shares + first,
                                 .kept = is_by_row ? kept_rows + first * key_width : kept + first, .is_delta = rule != PLAIN, .is_by_row = is_by_row});
}

static void expect(size_t key_width, size_t value_width, const float *from, const float *outputs, const float *memory, int rule)
{
    for (size_t v = 0; v < value_width; v++) {
        double column[KEYS];
        for (size_t k = 0; k < key_width; k++)
            column[k] = from ? from[k * value_width + v] : 0.0;
        for (size_t t = 0; t < TOKENS; t++) {
            double known = 0.0, output = 0.0;
            for (size_t k = 0; k < key_width; k++)
                known += (column[k] *= rule == DELTA_BY_ROW ? kept_rows[t * key_width + k] : kept[t]) * keys[t * key_width + k];
            const double change = (values[t * value_width + v] - (rule ? known : 0.0)) * shares[t];
            for (size_t k = 0; k < key_width; k++) {
                column[k] = column[k] + keys[t * key_width + k] * change;
                output += column[k] * queries[t * key_width + k];
            }
            CHECK(fabs(output - outputs[t * value_width + v]) < 1e-4, "column %zu token %zu: %g", v, t, output);
        }
        for (size_t k = 0; k < key_width; k++)
            CHECK(fabs(column[k] - memory[k * value_width + v]) < 1e-4, "row %zu column %zu: %g", k, v, column[k]);
    }
}

/* The bits of the first instruction set, which every other one has to have. */
static float first_outputs[RULES][TOKENS * VALUES], first_memory[RULES][KEYS * VALUES];
static int has_first[RULES];

static void test_memories(const char *isa)
{
    static const size_t widths[][2] = {{1, 1}, {2, 15}, {3, 16}, {16, 64}, {37, 128}, {36, 131}, {KEYS, VALUES}};
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        for (int rule = 0; rule < RULES; rule++)
            for (int begins = 0; begins < 2; begins++) {
                const size_t rows = widths[w][0], columns = widths[w][1], size = rows * columns;
                const float *from = begins ? NULL : initial;
                float *memory = malloc(size * sizeof *memory), *stepped[2] = {malloc(size * sizeof *memory), malloc(size * sizeof *memory)};
                float *outputs = malloc(TOKENS * columns * sizeof *outputs), *one_by_one = malloc(TOKENS * columns * sizeof *outputs);
                remember(rows, columns, from, memory, outputs, 0, TOKENS, rule);
                expect(rows, columns, from, outputs, memory, rule);
                for (size_t t = 0; t < TOKENS; t++)
                    remember(rows, columns, t ? stepped[(t - 1) % 2] : from, stepped[t % 2], one_by_one, t, 1, rule);
                CHECK(memcmp(outputs, one_by_one, TOKENS * columns * sizeof *outputs) == 0, "%s %zu: the outputs of single tokens", isa, w);
                CHECK(memcmp(memory, stepped[(TOKENS - 1) % 2], size * sizeof *memory) == 0, "%s %zu: the memory after single tokens", isa, w);
                if (rows == KEYS && columns == VALUES && !begins) {
                    if (!has_first[rule]) {
                        memcpy(first_outputs[rule], outputs, sizeof first_outputs[rule]);
                        memcpy(first_memory[rule], memory, sizeof first_memory[rule]);
                        has_first[rule] = 1;
                    }
                    CHECK(memcmp(first_outputs[rule], outputs, sizeof first_outputs[rule]) == 0, "%s: other bits of outputs", isa);
                    CHECK(memcmp(first_memory[rule], memory, sizeof first_memory[rule]) == 0, "%s: other bits of the memory", isa);
                }
                free(memory), free(stepped[0]), free(stepped[1]), free(outputs), free(one_by_one);
            }
}

static float first_kept[KEYS];
static int has_kept;

static void test_kept_shares(const char *isa)
{
    static float rates[KEYS], biases[KEYS];
    if (!has_kept)
        fill(rates, KEYS, 30.0f), fill(biases, KEYS, 1.0f);
    float shares_of_rows[KEYS];
    np_keep(rates, biases, -0.3f, KEYS, shares_of_rows);
    for (size_t k = 0; k < KEYS; k++) {
        const double x = (double)rates[k] + biases[k], wanted = exp(-0.3 * (log1p(exp(-fabs(x))) + fmax(x, 0.0)));
        CHECK(fabs(shares_of_rows[k] - wanted) <= 3e-6 * wanted, "%s row %zu: %g for %g", isa, k, (double)shares_of_rows[k], wanted);
    }
    if (!has_kept)
        memcpy(first_kept, shares_of_rows, sizeof first_kept);
    has_kept = 1;
    CHECK(memcmp(first_kept, shares_of_rows, sizeof first_kept) == 0, "%s: other bits of the shares that rows keep", isa);
}

static float first_convolved[TOKENS * CHANNELS];
static int has_convolved;

static void test_convolutions(const char *isa)
{
    static float x[(TOKENS + TAPS - 1) * CHANNELS], weights[TAPS * CHANNELS], bias[CHANNELS];
    static int is_filled;
    if (!is_filled) {
        fill(x, sizeof x / sizeof *x, 2.0f), fill(weights, sizeof weights / sizeof *weights, 1.0f), fill(bias, CHANNELS, 1.0f);
        is_filled = 1;
    }
    const float *inputs[TOKENS + TAPS - 1];
    for (size_t t = 0; t < TOKENS + TAPS - 1; t++)
        inputs[t] = x + t * CHANNELS;
    for (int activated = 0; activated < 2; activated++) {
        float out[TOKENS * CHANNELS];
        np_convolve(&(np_convolution_job){.channels = CHANNELS, .tokens = TOKENS, .taps = TAPS, .inputs = inputs, .weights = weights, .bias = bias,
                                          .weights_stride = CHANNELS, .out = out, .out_stride = CHANNELS, .is_activated = activated});
        for (size_t t = 0; t < TOKENS; t++)
            for (size_t c = 0; c < CHANNELS; c++) {
                double sum = bias[c];
                for (size_t tap = 0; tap < TAPS; tap++)
                    sum += (double)weights[tap * CHANNELS + c] * inputs[t + tap][c];
                const double wanted = activated ? sum / (1.0 + exp(-sum)) : sum;
                CHECK(fabs(out[t * CHANNELS + c] - wanted) < 1e-5, "%s token %zu channel %zu: %g", isa, t, c, wanted);
            }
        if (activated && !has_convolved) {
            memcpy(first_convolved, out, sizeof out);
            has_convolved = 1;
        }
        CHECK(!activated || memcmp(first_convolved, out, sizeof out) == 0, "%s: other bits of a convolution", isa);
    }
}

static void test_activations(void)
{
    for (double x = -40.0; x <= 40.0; x += 0.0371) {
        const double sigmoid = 1.0 / (1.0 + exp(-(float)x)), softplus = log1p(exp(-fabs((float)x))) + fmax((float)x, 0.0);
        CHECK(fabs(np_sigmoid((float)x) - sigmoid) <= 4e-7 * sigmoid, "sigmoid of %g", x);
        CHECK(fabs(np_silu((float)x) - (float)x * sigmoid) <= 4e-7 * fabs((float)x * sigmoid), "silu of %g", x);
        CHECK(fabs(np_softplus((float)x) - softplus) <= 6e-7 * softplus, "softplus of %g: %g", x, (double)np_softplus((float)x));
    }
    CHECK(isnan(np_sigmoid(NAN)) && isnan(np_softplus(NAN)), "NaN stays NaN");
}

/* More than one lot of values, in place of gates and of ups, and the same bits for all instruction sets. */
static void test_values_of_neurons(const char *isa)
{
    enum { NEURONS = 5 * NP_VALUES + 3 };
    static const int activations[] = {NP_RELU, NP_DRELU, NP_RELU2, NP_SILU, NP_CLAMPED_SWIGLU, NP_GELU, NP_GELU_ERF, NP_SIGMOID};
    float gates[NEURONS], ups[NEURONS], out[NEURONS];
    for (int i = 0; i < NEURONS; i++)
        gates[i] = (float)(i - NEURONS / 2) * 0.61f, ups[i] = (float)(i % 7 - 3) * 1.9f;
    gates[1] = NAN;
    for (size_t k = 0; k < sizeof activations / sizeof *activations; k++) {
        const int activation = activations[k];
        np_activate(activation, 7.0f, gates, ups, NEURONS, out);
        for (int i = 0; i < NEURONS; i++) {
            const float wanted = np_activated(activation, 7.0f, gates[i], ups[i]);
            CHECK(np_bits_of(out[i]) == np_bits_of(wanted) || (isnan(out[i]) && isnan(wanted)), "%s activation %d neuron %d", isa, activation, i);
        }
        for (int place = 0; place < 2; place++) {
            float own[2][NEURONS];
            memcpy(own[0], gates, sizeof gates), memcpy(own[1], ups, sizeof ups);
            np_activate(activation, 7.0f, own[0], own[1], NEURONS, own[place]);
            CHECK(memcmp(own[place], out, sizeof out) == 0, "%s activation %d in place %d", isa, activation, place);
        }
    }
    for (int i = 2; i < NEURONS; i++) { /* against double precision */
        const double gate = gates[i], up = ups[i], below = gate > 7 ? 7 : gate, within = up > 7 ? 7 : up < -7 ? -7 : up;
        np_activate(NP_CLAMPED_SWIGLU, 7.0f, gates + i, ups + i, 1, out);
        const double wanted = (within + 1) * below / (1 + exp(-1.702 * below));
        CHECK(fabs(out[0] - wanted) <= 1e-6 * fabs(wanted) + 1e-12, "clamped SwiGLU of %g, %g", gate, up);
        np_activate(NP_SILU, 0.0f, gates + i, ups + i, 1, out);
        CHECK(fabs(out[0] - gate * up / (1 + exp(-gate))) <= 1e-6 * fabs(gate * up), "SiLU of %g, %g", gate, up);
    }
}

int main(void)
{
    fill(initial, KEYS * VALUES, 1.0f), fill(keys, TOKENS * KEYS, 0.3f), fill(queries, TOKENS * KEYS, 0.3f);
    fill(values, TOKENS * VALUES, 1.0f);
    for (int row = 0; row < TOKENS * KEYS; row++)
        kept_rows[row] = 0.75f + 0.25f * random_float();
    for (int t = 0; t < TOKENS; t++)
        kept[t] = 0.9f + 0.1f * random_float(), shares[t] = 0.5f + 0.4f * random_float();
    test_activations();
    for_each_isa(test_memories);
    for_each_isa(test_kept_shares);
    for_each_isa(test_convolutions);
    for_each_isa(test_values_of_neurons);
    return checks_report();
}

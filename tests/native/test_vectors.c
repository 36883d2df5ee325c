/* Norms, rotary positions, attention and sums against double precision. */
#include "isa_loop.h"
#include "kernels/exponential.h"

#include <math.h>
#include <stdlib.h>

static void test_rms_norm(const char *isa) {
    static const size_t lengths[] = {1, 7, 8, 31, 320, 4096};
    for (size_t k = 0; k < 6; k++) {
        const size_t n = lengths[k];
        float x[4096], weight[4096], out[4096];
        double sum = 0;
        for (size_t j = 0; j < n; j++) {
            x[j] = 5.0f * random_float(), weight[j] = random_float();
            sum += (double)x[j] * x[j];
        }
        const double root = sqrt(sum / (double)n + 1e-5);
        np_rms_norm(x, weight, n, 1e-5f, out);
        for (size_t j = 0; j < n; j++)
            CHECK(fabs(out[j] - x[j] / root * weight[j]) <= 3e-7 * fabs(out[j]), "%s n=%zu [%zu]: %g", isa, n, j, out[j]);
        np_rms_norm(x, weight, n, 1e-5f, x);
        CHECK(memcmp(x, out, n * sizeof *x) == 0, "%s n=%zu: out may be x", isa, n);
    }
    float zeros[32] = {0}, ones[32];
    for (int j = 0; j < 32; j++) ones[j] = 1.0f;
    np_rms_norm(zeros, ones, 32, 1e-6f, zeros);
    CHECK(zeros[0] == 0.0f, "zero stays zero: %g", zeros[0]);
}

/* offset: a constant added to all of x, which the norm removes. */
static void layer_norm_case(const char *isa, size_t n, float offset) {
    float x[4096] = {0}, weight[4096] = {0}, bias[4096] = {0}, out[4096];
    double mean = 0, square = 0;
    for (size_t j = 0; j < n; j++) {
        x[j] = offset + 5.0f * random_float(), weight[j] = random_float(), bias[j] = random_float();
        mean += (double)x[j] / (double)n;
    }
    for (size_t j = 0; j < n; j++) square += (x[j] - mean) * (x[j] - mean) / (double)n;
    np_layer_norm(x, weight, bias, n, 1e-5f, out);
    for (size_t j = 0; j < n; j++) {
        const double scaled = (x[j] - mean) / sqrt(square + 1e-5) * weight[j], want = scaled + bias[j];
        CHECK(fabs(out[j] - want) <= 4e-7 * (fabs(scaled) + fabs(want)), "%s n=%zu [%zu]: %g, want %g", isa, n, j, out[j], want);
    }
    np_layer_norm(x, weight, bias, n, 1e-5f, x);
    CHECK(memcmp(x, out, n * sizeof *x) == 0, "%s n=%zu: out may be x", isa, n);
}

static void test_layer_norm(const char *isa) {
    static const size_t lengths[] = {1, 7, 8, 31, 320, 4096};
    for (size_t k = 0; k < 6; k++) {
        layer_norm_case(isa, lengths[k], 0.0f);
        layer_norm_case(isa, lengths[k], 1000.0f);
    }
    float same[9], ones[9], bias[9];
    for (int j = 0; j < 9; j++) same[j] = 3.0f, ones[j] = 1.0f, bias[j] = (float)j;
    np_layer_norm(same, ones, bias, 9, 1e-5f, same);
    CHECK(memcmp(same, bias, sizeof same) == 0, "%s what does not deviate becomes the bias: %g", isa, same[1]);
}

static void test_rope(const char *isa) {
    static const int32_t positions[] = {0, 1, 2, 31, 4095, 131071, 900000};
    for (size_t k = 0; k < 7; k++) {
        enum { WIDTH = 74 };
        float head[WIDTH], before[WIDTH], inverse[WIDTH / 2];
        for (int j = 0; j < WIDTH; j++) before[j] = head[j] = random_float();
        for (int j = 0; j < WIDTH / 2; j++) inverse[j] = powf(10000.0f, -2.0f * (float)j / WIDTH);
        np_rope(head, WIDTH, inverse, positions[k]);
        for (int j = 0; j < WIDTH / 2; j++) {
            const double angle = (float)positions[k] * inverse[j], a = before[j], b = before[j + WIDTH / 2];
            const double first = a * cos(angle) - b * sin(angle), second = b * cos(angle) + a * sin(angle);
            CHECK(fabs(head[j] - first) <= 3e-7 && fabs(head[j + WIDTH / 2] - second) <= 3e-7,
                  "%s position %d pair %d: %g, want %g", isa, positions[k], j, head[j], first);
        }
    }
}

static void test_exponential(const char *isa) {
    double worst = 0;
    for (float x = 0.0f; x > -87.0f; x -= 0.00037f) worst = fmax(worst, fabs(np_exponential(x) / exp(x) - 1));
    CHECK(worst < 2e-7, "%s relative error %g", isa, worst);
    CHECK(np_exponential(0.0f) == 1.0f && np_exponential(-87.1f) == 0.0f && np_exponential(-INFINITY) == 0.0f, "%s", isa);
    CHECK(isnan(np_exponential(NAN)), "%s NaN", isa);
}

/* An element of a row of the KV cache. */
static double kv_value(int type, const uint8_t *row, size_t width, size_t j) {
    uint16_t half;
    memcpy(&half, type == NP_F16 ? row + 2 * j : row + width + j / 32 * 2, sizeof half);
    return (type == NP_F16 ? 1.0 : (double)(int8_t)row[j]) * np_half_to_float(half);
}

static void attend_case(const char *isa, int type, size_t positions, size_t width, float spread) {
    const size_t row_bytes = np_kv_row_bytes(type, width);
    float *query = malloc(width * sizeof *query), *out = malloc(width * sizeof *out), *vector = malloc(width * sizeof *vector);
    float *scores = malloc((positions + 1) * sizeof *scores);
    uint8_t *keys = malloc(positions * row_bytes), *values = malloc(positions * row_bytes);
    double *weights = malloc(positions * sizeof *weights), most = -INFINITY, sum = 0;
    for (size_t j = 0; j < width; j++) query[j] = random_float();
    for (size_t p = 0; p < positions; p++) {
        for (size_t j = 0; j < width; j++) vector[j] = spread * random_float();
        np_kv_store(type, vector, width, keys + p * row_bytes);
        for (size_t j = 0; j < width; j++) vector[j] = random_float();
        np_kv_store(type, vector, width, values + p * row_bytes);
    }
    const float scale = 1.0f / sqrtf((float)width);
    for (size_t p = 0; p < positions; p++) {
        weights[p] = 0;
        for (size_t j = 0; j < width; j++) weights[p] += (double)query[j] * kv_value(type, keys + p * row_bytes, width, j) * scale;
        most = fmax(most, weights[p]);
    }
    for (size_t p = 0; p < positions; p++) sum += weights[p] = exp(weights[p] - most);
    np_attend(&(np_attend_job){.queries = query, .heads = 1, .tokens = 1, .keys = keys, .values = values, .type = type, .positions = positions,
                               .width = width, .scale = scale, .scores = scores, .out = out});
    for (size_t j = 0; j < width; j++) {
        double want = 0;
        for (size_t p = 0; p < positions; p++) want += weights[p] / sum * kv_value(type, values + p * row_bytes, width, j);
        /* A score's rounding error is an error of the same absolute size in the logarithm of its weight. */
        CHECK(fabs(out[j] - want) <= 2e-6 * (1 + spread), "%s type %d positions %zu width %zu [%zu]: %.8g, want %.8g", isa, type, positions,
              width, j, out[j], want);
    }
    free(query), free(out), free(vector), free(scores), free(keys), free(values), free(weights);
}

static void test_attend(const char *isa) {
    for (int type = NP_F16; type <= NP_Q8; type++) {
        for (size_t positions = 1; positions <= 40; positions++) attend_case(isa, type, positions, 32, 1.0f);
        attend_case(isa, type, 1000, 128, 1.0f);
        attend_case(isa, type, 200, 576, 1.0f);
        attend_case(isa, type, 70, 1056, 1.0f);     /* wider than what vectors are for */
        attend_case(isa, type, 333, 96, 30.0f); /* scores far apart: most weights vanish */
    }
    attend_case(isa, NP_F16, 333, 80, 30.0f);
    static const size_t odd[] = {2, 7, 40, 46, 100, 120};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) attend_case(isa, NP_F16, 80, odd[i], 1.0f);
}

/* Tokens and heads that share keys have the bits of a head of a token alone, whatever their number, the window and the
 * chunks of positions. */
static void test_attend_together(const char *isa) {
    enum { HEADS = 11, TOKENS = 19, POSITIONS = 230, WIDTH = 96, STRIDE = HEADS * WIDTH + 3 };
    static float queries[TOKENS][STRIDE], together[TOKENS][STRIDE], alone[WIDTH], scores[NP_ATTEND_QUERIES * (POSITIONS + 1)];
    static uint16_t keys[POSITIONS * WIDTH], values[POSITIONS * WIDTH];
    static float vector[WIDTH];
    static const size_t firsts[] = {1, 2, 60, 64, POSITIONS - TOKENS + 1}, windows[] = {0, 1, 5, 64, 1000};
    float sinks[HEADS];
    for (int t = 0; t < TOKENS; t++)
        for (int j = 0; j < STRIDE; j++) queries[t][j] = random_float();
    for (int h = 0; h < HEADS; h++) sinks[h] = random_float();
    for (size_t width = 46; width <= WIDTH; width += WIDTH - 46) {
        const int type = width % 32 ? NP_F16 : NP_Q8;
        const size_t row_bytes = np_kv_row_bytes(type, width);
        for (int i = 0; i < 2 * POSITIONS; i++) {
            for (size_t j = 0; j < width; j++) vector[j] = random_float();
            np_kv_store(type, vector, width, (uint8_t *)(i % 2 ? keys : values) + (size_t)(i / 2) * row_bytes);
        }
        for (size_t tokens = 1; tokens <= TOKENS; tokens += tokens < 5 ? 1 : 7)
            for (size_t heads = 1; heads <= HEADS; heads += heads < 4 ? 3 : 7)
                for (int variant = 0; variant < 10; variant++) {
                    np_attend_job job = {
                        .queries = queries[0], .token_stride = STRIDE, .heads = heads, .tokens = tokens, .keys = keys, .values = values, .type = type,
                        .positions = firsts[variant % 5], .window = windows[(variant + tokens) % 5], .width = width, .scale = 0.3f,
                        .score_cap = variant % 2 ? 1.5f : 0.0f, .sinks = variant % 3 ? sinks : NULL, .scores = scores, .out = together[0]};
                    np_attend(&job);
                    for (size_t t = 0; t < tokens; t++)
                        for (size_t h = 0; h < heads; h++) {
                            np_attend_job one = job;
                            const size_t to = job.positions + t, from = job.window && to > job.window ? to - job.window : 0;
                            one.queries = queries[t] + h * width, one.out = alone, one.heads = one.tokens = 1, one.window = 0;
                            one.keys = (const uint8_t *)job.keys + from * row_bytes, one.values = (const uint8_t *)job.values + from * row_bytes;
                            one.positions = to - from;
                            if (one.sinks) one.sinks += h;
                            np_attend(&one);
                            CHECK(memcmp(together[t] + h * width, alone, width * sizeof *alone) == 0,
                                  "%s head %zu of %zu, token %zu of %zu, positions %zu, window %zu", isa, h, heads, t, tokens, to, job.window);
                        }
                }
    }
}

/* Rows of q8 are as near to what was stored as the scale of each group says. A group with an element that is not finite,
 * or too large for fp16, has no finite elements. */
static void test_stored_q8(const char *isa) {
    enum { WIDTH = 64, ROW_BYTES = WIDTH + WIDTH / 32 * 2 };
    float stored[WIDTH], scores[2 * NP_ATTEND_QUERIES], query[32] = {1.0f}, wild[32] = {1.0f}, out[32];
    _Alignas(2) uint8_t row[ROW_BYTES];
    CHECK(np_kv_row_bytes(NP_Q8, WIDTH) == ROW_BYTES && !np_kv_row_bytes(NP_Q8, 80) && !np_kv_row_bytes(NP_Q4, WIDTH), "bytes of a row");
    for (int repetition = 0; repetition < 100; repetition++) {
        for (int j = 0; j < WIDTH; j++) stored[j] = random_float() * (j < 32 ? 300.0f : 1e-2f) * (repetition != 0);
        np_kv_store(NP_Q8, stored, WIDTH, row);
        for (int first = 0; first < WIDTH; first += 32) {
            double most = 0;
            for (int j = first; j < first + 32; j++) most = fmax(most, fabs(stored[j]));
            for (int j = first; j < first + 32; j++)
                CHECK(fabs(kv_value(NP_Q8, row, WIDTH, (size_t)j) - stored[j]) <= most / 127 * 0.51, "%s element %d of %g", isa, j, stored[j]);
        }
    }
    for (int kind = 0; kind < 3; kind++) {
        wild[5] = kind == 0 ? NAN : kind == 1 ? -INFINITY : 3e38f;
        np_kv_store(NP_Q8, wild, 32, row);
        np_attend(&(np_attend_job){.queries = query, .heads = 1, .tokens = 1, .type = NP_Q8, .keys = row, .values = row, .positions = 1, .width = 32,
                                   .scale = 1.0f, .scores = scores, .out = out});
        CHECK(!isfinite(out[0]), "%s a group with %g reads as %g", isa, wild[5], out[0]);
    }
}

static void test_soft_cap(const char *isa) {
    enum { N = 4001 };
    static float x[N], capped[N];
    for (int i = 0; i < N; i++) capped[i] = x[i] = 0.1f * (float)(i - N / 2);
    np_soft_cap(capped, N, 30.0f);
    for (int i = 0; i < N; i++) {
        CHECK(fabs(capped[i] - 30.0 * tanh(x[i] / 30.0)) <= 30.0 * 2e-7, "%s soft cap of %g: %.9g", isa, x[i], capped[i]);
        const double u = 0.79788456080286535588 * (x[i] + 0.044715 * pow(x[i], 3)), want = 0.5 * x[i] * (1 + tanh(u));
        CHECK(fabs(np_gelu(x[i]) - want) <= 2e-6 * fabs(x[i]), "%s gelu of %g: %.9g, want %.9g", isa, x[i], np_gelu(x[i]), want);
        const double exact = x[i] * erfc(-x[i] * 0.70710678118654752440) / 2;
        CHECK(fabs(np_gelu_erf(x[i]) - exact) <= 3e-7 * fabs(x[i]), "%s exact gelu of %g: %.9g, want %.9g", isa, x[i], np_gelu_erf(x[i]), exact);
    }
    float extremes[] = {INFINITY, -INFINITY, NAN, 0.0f};
    np_soft_cap(extremes, 4, 2.0f);
    CHECK(extremes[0] == 2.0f && extremes[1] == -2.0f && isnan(extremes[2]) && extremes[3] == 0.0f, "%s soft cap of infinities and NaN", isa);
    CHECK(np_gelu(INFINITY) == INFINITY && isnan(np_gelu(NAN)) && np_gelu(0.0f) == 0.0f && np_gelu(1e30f) == 1e30f, "%s gelu of extremes", isa);
    CHECK(np_gelu_erf(INFINITY) == INFINITY && isnan(np_gelu_erf(NAN)) && np_gelu_erf(0.0f) == 0.0f && np_gelu_erf(1e30f) == 1e30f, "%s exact gelu of extremes", isa);
}

/* Scores that a cap makes nearly equal weigh nearly alike; sinks are not capped. */
static void test_capped_attend(const char *isa) {
    enum { POSITIONS = 3, WIDTH = 32 };
    float query[WIDTH] = {1.0f}, out[WIDTH], scores[POSITIONS + 1], sink = 3.0f;
    uint16_t keys[POSITIONS * WIDTH] = {0}, values[POSITIONS * WIDTH] = {0};
    double sum = exp(sink), want = 0;
    for (int p = 0; p < POSITIONS; p++) {
        keys[p * WIDTH] = np_float_to_half(5.0f * (float)p);
        values[p * WIDTH] = np_float_to_half((float)p);
        const double weight = exp(2.0 * tanh(5.0 * p / 2.0));
        sum += weight, want += weight * p;
    }
    np_attend(&(np_attend_job){.queries = query, .heads = 1, .tokens = 1, .keys = keys, .values = values, .positions = POSITIONS,
                               .width = WIDTH, .scale = 1.0f, .score_cap = 2.0f, .sinks = &sink, .scores = scores, .out = out});
    CHECK(fabs(out[0] - want / sum) < 1e-6, "%s capped attention: %.8g, want %.8g", isa, out[0], want / sum);
}

static void test_sums(const char *isa) {
    enum { COUNT = 40, WIDTH = 131, STRIDE = 135 };
    float *rows = malloc(COUNT * STRIDE * sizeof *rows), out[WIDTH], tree[COUNT];
    for (int i = 0; i < COUNT * STRIDE; i++) rows[i] = random_float();
    for (size_t count = 1; count <= COUNT; count++) {
        np_sum_tree(rows, count, STRIDE, WIDTH, out);
        for (size_t j = 0; j < WIDTH; j++) {
            size_t left = count;
            for (size_t i = 0; i < count; i++) tree[i] = rows[i * STRIDE + j];
            for (; left > 1; left = (left + 1) / 2)
                for (size_t i = 0; i < (left + 1) / 2; i++)
                    tree[i] = 2 * i + 1 < left ? tree[2 * i] + tree[2 * i + 1] : tree[2 * i];
            CHECK(out[j] == tree[0], "%s count %zu [%zu]: %.9g, want %.9g", isa, count, j, out[j], tree[0]);
        }
    }
    for (size_t count = 1; count <= COUNT; count++) {
        float wanted[WIDTH];
        np_sum_tree(rows, count, STRIDE, WIDTH, wanted);
        for (uint32_t summed = 0; summed <= count; summed++) { /* other places are not read */
            float *nodes = malloc(COUNT * STRIDE * sizeof *nodes);
            for (size_t i = 0; i < COUNT * STRIDE; i++) nodes[i] = i / STRIDE < summed ? NAN : rows[i];
            for (uint32_t node = 0; node < np_tree_nodes(summed); node++) {
                const uint32_t first = np_tree_node_first(summed, node);
                const uint32_t end = node + 1 < np_tree_nodes(summed) ? np_tree_node_first(summed, node + 1) : summed;
                np_sum_tree(rows + first * STRIDE, end - first, STRIDE, WIDTH, nodes + first * STRIDE);
            }
            np_sum_tree_on(nodes, summed, count, STRIDE, WIDTH, out);
            CHECK(memcmp(out, wanted, sizeof out) == 0, "%s the first %u of %zu rows summed before", isa, summed, count);
            free(nodes);
        }
    }
    CHECK(np_tree_nodes(13) == 3 && np_tree_node_first(13, 0) == 0 && np_tree_node_first(13, 1) == 8 && np_tree_node_first(13, 2) == 12,
          "13 rows are 8, 4 and 1");
    np_sum_tree(rows, 0, STRIDE, WIDTH, out);
    CHECK(out[0] == 0.0f && out[WIDTH - 1] == 0.0f, "%s no rows", isa);
    float y[3] = {1, 2, 3};
    np_add((float[]){10, 20, 30}, 3, y);
    CHECK(y[0] == 11 && y[1] == 22 && y[2] == 33, "%s np_add", isa);
    free(rows);
}

static void test_isa(const char *isa) {
    test_rms_norm(isa);
    test_layer_norm(isa);
    test_rope(isa);
    test_exponential(isa);
    test_attend(isa);
    test_attend_together(isa);
    test_stored_q8(isa);
    test_soft_cap(isa);
    test_capped_attend(isa);
    test_sums(isa);
}

int main(void) {
    for_each_isa(test_isa);
    return checks_report();
}

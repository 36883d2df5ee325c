/* Neurons of many tokens in one step: each token gets the bits that it gets alone, and neurons that are not predicted
 * have no value. The feed-forward of one layer with random weights, in every layout, with and without a predictor. */
#include "engine/feed_forward.h"
#include "engine/step.h"
#include "isa_loop.h"
#include "kernels/half.h"

#include <math.h>
#include <stdlib.h>

enum { WIDTH = 64, NEURONS = 40, BLOCK = 8, BLOCKS = NEURONS / BLOCK, TOKENS = 21, SLOT = 4 * WIDTH * 2 + 64, EXPERT = 32 };

typedef struct {
    np_shape shape;
    float residual[TOKENS][WIDTH], hidden[TOKENS][NEURONS], partials[TOKENS][BLOCKS][WIDTH], ranks[TOKENS][32];
    uint8_t predicted[NEURONS * ((TOKENS + 7) / 8)];
    uint8_t slots[2][NEURONS * SLOT];
    uint32_t entries[2][NEURONS], claims[64], words[16], epoch;
    uint64_t window;
    np_engine_counters counters;
} stage;

static float at_first[TOKENS][WIDTH];
static uint32_t wants[NEURONS]; /* bit t: token t, of all */
static float silent_below;      /* of the layer */

static uint32_t of_slot(const np_shape *s, uint32_t rows, int is_scales) {
    const size_t each = s->cluster_neurons;
    return (uint32_t)(rows * each * (np_quant_bytes(s->type, WIDTH) + (is_scales ? np_scale_bytes(s->type, WIDTH) : 0)));
}

/* The layout of packages: quants, and in the trigger part the scales of all rows behind them. */
static np_shape shape_of(int type, uint32_t each, int gated, int activation, int decides) {
    np_shape s = {
        .width = WIDTH, .neurons = NEURONS, .layers = 1, .query_heads = 1, .key_heads = 1, .head_width = WIDTH, .heads_width = WIDTH, .vocabulary = 1,
        .context_tokens = 1, .experts = 1, .experts_per_token = 1, .router_groups = 1, .groups_per_token = 1, .routed_scale = 1.0f, .rotary_scale = 1.0f, .norm_epsilon = 1e-5f, .rotary = 1, .type = type == NP_Q3 ? NP_Q4 : type,
        .activation = activation, .embedding_scale = 1, .logit_scale = 1, .attention_scale = 1, .local_attention_scale = 1, .residual_scale = 1, .gated = gated,
        .predictor_rank = decides ? 32 : 0, .predictor_type = type == NP_Q3 ? NP_Q4 : type, .predictor_reads = NP_READS_ATTENTION, .cluster_neurons = each,
        .clusters = NEURONS / each, .block_neurons = BLOCK, .blocks = BLOCKS, .slot_bytes = {SLOT * each, SLOT * each},
    };
    const uint32_t row = of_slot(&s, 1, 0), scales = (uint32_t)np_scale_bytes(type, WIDTH) * each;
    s.gate = (np_matrix_place){NP_TRIGGER, 0, NP_TRIGGER, row, type};
    s.up = gated ? (np_matrix_place){NP_VALUE, 0, NP_TRIGGER, row + scales, s.type} : s.gate;
    s.down = (np_matrix_place){NP_VALUE, gated ? row : 0, NP_TRIGGER, row + (gated ? 2 : 1) * scales, s.type};
    return s;
}

static void fill(stage *s, const np_shape *shape) {
    memset(s, 0, sizeof *s);
    s->shape = *shape;
    for (int part = 0; part < 2; part++)
        for (size_t i = 0; i < sizeof s->slots[part]; i += 2) { /* halves of a size that also serves as scale and as weight */
            const uint16_t bits = np_float_to_half(0.1f * random_float());
            memcpy(s->slots[part] + i, &bits, 2);
        }
    for (uint32_t part = 0; part < 2; part++)
        for (uint32_t c = 0; c < shape->clusters; c++) s->entries[part][c] = NP_ENTRY_PRESENT | (shape->clusters - 1 - c);
    for (uint32_t i = 0; i < NEURONS; i++) wants[i] = i % 5 == 0 ? 0 : i % 5 == 1 ? (1u << TOKENS) - 1 : random_bits() & random_bits() & ((1u << TOKENS) - 1);
}

/* Feed-forward of `count` tokens from `first` on. */
static void compute(stage *s, uint32_t first, uint32_t count) {
    static const int32_t zeros[TOKENS];
    static float ones[WIDTH];
    for (int j = 0; j < WIDTH; j++) ones[j] = 1.0f;
    const size_t mask_bytes = (count + 7) / 8;
    memset(s->predicted, 0, sizeof s->predicted);
    memset(s->claims, 0, sizeof s->claims);
    memset(s->hidden, 0x7f, sizeof s->hidden); /* of the step before */
    for (uint32_t i = 0; i < NEURONS; i++)
        for (uint32_t t = 0; t < count; t++)
            if (wants[i] >> (first + t) & 1) s->predicted[i * mask_bytes + t / 8] |= (uint8_t)(1u << t % 8);
    memcpy(s->residual, at_first[first], count * sizeof s->residual[0]);
    const np_layer layer = {.experts = 1, .key_heads = 1, .head_width = WIDTH, .ffn_norm = {ones, NULL}, .silent_below = silent_below};
    const np_fixed fixed = {.layers = &layer};
    const np_shared shared = {
        .residual = s->residual[0], .hidden = s->hidden[0], .partials = s->partials[0][0], .ranks = s->ranks[0], .predicted = s->predicted,
        .claims = s->claims, .slots = {s->slots[0], s->slots[1]}, .entries = {s->entries[0], s->entries[1]}, .window = &s->window,
        .arrivals = s->words, .epoch = &s->epoch,
    };
    const np_engine_config config = {.sequences = TOKENS, .max_tokens = count, .logit_rows = 1, .window_blocks = BLOCKS, .partial_tokens = count,
                                     .pipeline = 1};
    const np_step step = {.participants = 1, .sharers = 1, .end_block = s->shape.blocks, .count = count, .sequences = zeros, .positions = zeros, .tokens = zeros};
    const char *wrong = NULL;
    np_engine *engine = np_engine_create(&s->shape, &fixed, &shared, &config, &wrong);
    CHECK(engine != NULL, "refused: %s", wrong ? wrong : "memory");
    if (!engine) exit(checks_report());
    CHECK(np_begin_step(engine, &step) == NP_OK, "%u tokens", count);
    CHECK(np_feed_forward(engine, 0) >= 0, "%u tokens", count);
    np_engine_read_counters(engine, &s->counters);
    np_engine_destroy(engine);
}

static void compare(stage *s, stage *alone, const char *isa, uint32_t count) {
    np_engine_counters sum = {0};
    compute(s, 0, count);
    for (uint32_t t = 0; t < count; t++) {
        compute(alone, t, 1);
        sum.predicted += alone->counters.predicted, sum.fired += alone->counters.fired, sum.active += alone->counters.active;
        sum.gate_rows += alone->counters.gate_rows, sum.up_rows += alone->counters.up_rows, sum.down_rows += alone->counters.down_rows;
        CHECK(memcmp(s->hidden[t], alone->hidden[0], sizeof s->hidden[t]) == 0 && memcmp(s->residual[t], alone->residual[0], sizeof s->residual[t]) == 0,
              "%s type %d, clusters of %u, %u tokens: token %u has other bits than by itself", isa, s->shape.gate.type, s->shape.cluster_neurons, count, t);
        for (uint32_t i = 0; s->shape.predictor_rank && i < NEURONS; i++)
            CHECK((wants[i] >> t & 1) || s->hidden[t][i] == 0.0f, "%s: neuron %u is not predicted for token %u", isa, i, t);
    }
    const np_engine_counters *c = &s->counters;
    CHECK(c->predicted == sum.predicted && c->fired == sum.fired && c->active == sum.active && c->fired > 0, "%s: what %u tokens did", isa, count);
    CHECK(c->gate_rows == sum.gate_rows && c->up_rows == sum.up_rows && c->down_rows == sum.down_rows, "%s: rows of %u tokens", isa, count);
}

/* An expert of one cluster, whose down matrix has a row for each output. */
static np_shape shape_by_output(int type) {
    np_shape s = shape_of(type == NP_Q3 ? NP_Q4 : type, 1, 1, NP_SILU, 0);
    s.neurons = s.cluster_neurons = s.block_neurons = EXPERT;
    s.clusters = s.blocks = 1;
    s.slot_bytes[NP_TRIGGER] = s.slot_bytes[NP_VALUE] = NEURONS * SLOT;
    s.down_by_output = 1;
    const uint32_t quants = (uint32_t)np_quant_bytes(type, WIDTH) * EXPERT, scales = (uint32_t)np_scale_bytes(type, WIDTH) * EXPERT;
    s.gate = (np_matrix_place){NP_TRIGGER, 0, NP_TRIGGER, quants, s.type};
    s.up = (np_matrix_place){NP_VALUE, 0, NP_VALUE, quants, s.type};
    s.down = (np_matrix_place){NP_VALUE, quants + scales, NP_VALUE, 2 * quants + scales, s.type};
    return s;
}

/* What the down rows of a token add, by plain arithmetic on its values. */
static void check_down_by_output(const stage *s, const char *isa, uint32_t t) {
    const np_matrix_place *down = &s->shape.down;
    for (uint32_t row = 0; row < WIDTH; row++) {
        float weights[EXPERT], values[EXPERT];
        double sum = 0, size = 1e-6;
        np_decode_row(down->type, s->slots[NP_VALUE] + down->quants + row * np_quant_bytes(down->type, EXPERT),
                      s->slots[NP_VALUE] + down->scales + row * np_scale_bytes(down->type, EXPERT), EXPERT, weights);
        memcpy(values, s->hidden[0] + t * EXPERT, sizeof values);
        float largest = 0;
        for (int j = 0; j < EXPERT; j++) largest = fabsf(values[j]) > largest ? fabsf(values[j]) : largest;
        for (int j = 0; j < EXPERT; j++) sum += (double)weights[j] * values[j], size += fabs((double)weights[j]) * largest;
        const double change = (double)s->residual[t][row] - at_first[t][row];
        CHECK(fabs(change - sum) < size / 100 + 1e-5, "%s type %d: output %u is %g, not %g", isa, down->type, row, change, sum);
    }
}

static void test_down_by_output(const char *isa) {
    static stage s, alone;
    for (int type = NP_F16; type <= NP_Q4; type++) {
        const np_shape shape = shape_by_output(type);
        fill(&s, &shape);
        alone = s;
        for (uint32_t count = 1; count <= TOKENS; count += 4) {
            compute(&s, 0, count);
            CHECK(s.counters.down_rows == EXPERT * count, "%s: %u tokens counted", isa, count);
            for (uint32_t t = 0; t < count; t++) {
                compute(&alone, t, 1);
                CHECK(memcmp(s.residual[t], alone.residual[0], sizeof s.residual[t]) == 0, "%s type %d: token %u of %u has other bits than by itself", isa,
                      type, t, count);
                check_down_by_output(&s, isa, t);
            }
        }
    }
}

/* The values of an expert of which no neuron fires are zeros, which add nothing. */
static void test_silent_expert(const char *isa) {
    static stage s;
    const np_shape shape = shape_by_output(NP_Q8);
    fill(&s, &shape);
    silent_below = 1e9f;
    for (uint32_t count = 1; count <= TOKENS; count += 20) {
        compute(&s, 0, count);
        CHECK(memcmp(s.residual, at_first, count * sizeof s.residual[0]) == 0, "%s: a silent expert adds something", isa);
        CHECK(s.counters.fired == 0 && s.counters.active == 0, "%s: neurons of a silent expert", isa);
    }
    silent_below = 0.0f;
}

static void test_isa(const char *isa) {
    static const uint32_t counts[] = {1, 2, 4, 7, 15, 16, TOKENS};
    static stage s, alone;
    for (int type = NP_F16; type <= NP_Q3; type++) /* q3: only gates */
        for (uint32_t each = 1; each <= 4; each *= 2)
            for (int kind = 0; kind < 6; kind++) {
                const int gated = kind % 3 < 2;
                if (type == NP_Q3 && !gated) continue;
                const np_shape shape = shape_of(type, each, gated, kind % 3 == 0 ? NP_DRELU : kind % 3 == 1 ? NP_RELU : NP_RELU2, kind < 3);
                fill(&s, &shape);
                alone = s;
                for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) compare(&s, &alone, isa, counts[i]);
            }
}

int main(void) {
    for (uint32_t t = 0; t < TOKENS; t++)
        for (int j = 0; j < WIDTH; j++) at_first[t][j] = random_float();
    for_each_isa(test_isa);
    for_each_isa(test_down_by_output);
    for_each_isa(test_silent_expert);
    return checks_report();
}

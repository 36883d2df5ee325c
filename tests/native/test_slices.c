/* A dense model in slices, whose down matrices have a row for each output: the sum of all slices, with the same bits
 * whatever the window, and what is read ahead from the next layer. */
#include "engine/feed_forward.h"
#include "engine/step.h"
#include "isa_loop.h"
#include "kernels/half.h"

#include <math.h>
#include <stdlib.h>

enum { WIDTH = 64, SLICE = 32, SLICES = 3, LAYERS = 2, CLUSTERS = SLICES * LAYERS, TOKENS = 5, MATRIX = 2 * WIDTH * SLICE, RING = 16 };

typedef struct {
    float residual[TOKENS][WIDTH], hidden[TOKENS * SLICES][SLICE], partials[TOKENS * SLICES][WIDTH];
    uint32_t entries[2][CLUSTERS], claims[64], words[16], epoch, tail[16], head[16], requests[RING], asleep;
    uint64_t window;
    np_engine_counters counters;
} stage;

static uint16_t triggers[SLICES][WIDTH * SLICE], values[SLICES][2 * WIDTH * SLICE];
static float ones[WIDTH], at_first[TOKENS][WIDTH];

static const np_shape shape = {
    .width = WIDTH, .neurons = SLICE, .layers = LAYERS, .query_heads = 1, .key_heads = 1, .head_width = WIDTH, .heads_width = WIDTH, .vocabulary = 1,
    .context_tokens = 1, .experts = SLICES, .experts_per_token = SLICES, .router_groups = 1, .groups_per_token = 1, .routed_scale = 1, .rotary_scale = 1,
    .norm_epsilon = 1e-5f, .rotary = 1, .type = NP_F16, .activation = NP_SILU, .embedding_scale = 1, .logit_scale = 1, .attention_scale = 1,
    .local_attention_scale = 1, .residual_scale = 1, .gated = 1, .cluster_neurons = SLICE, .clusters = 1, .block_neurons = SLICE, .blocks = 1,
    .slot_bytes = {MATRIX, 2 * MATRIX}, .down_by_output = 1,
    .gate = {NP_TRIGGER, 0, NP_TRIGGER, 0, NP_F16}, .up = {NP_VALUE, 0, NP_VALUE, 0, NP_F16}, .down = {NP_VALUE, MATRIX, NP_VALUE, 0, NP_F16},
};

/* The first layer's feed-forward of all tokens. The slices of the second layer are absent. */
static void compute(stage *s, uint32_t window_blocks, uint32_t partial_tokens) {
    static const int32_t zeros[TOKENS];
    memset(s, 0, sizeof *s);
    memcpy(s->residual, at_first, sizeof at_first);
    for (uint32_t part = 0; part < 2; part++)
        for (uint32_t c = 0; c < SLICES; c++) s->entries[part][c] = NP_ENTRY_PRESENT | c;
    np_layer layers[LAYERS];
    for (uint32_t n = 0; n < LAYERS; n++)
        layers[n] = (np_layer){.first_ffn = n * SLICES, .experts = SLICES, .key_heads = 1, .head_width = WIDTH, .ffn_norm = {ones, NULL}};
    const np_fixed fixed = {.layers = layers};
    const np_shared shared = {
        .residual = s->residual[0], .hidden = s->hidden[0], .partials = s->partials[0], .claims = s->claims,
        .slots = {(const uint8_t *)triggers, (const uint8_t *)values}, .entries = {s->entries[0], s->entries[1]}, .window = &s->window,
        .requests = {s->tail, s->head, s->requests, RING, &s->asleep, -1}, .arrivals = s->words, .epoch = &s->epoch,
    };
    const np_engine_config config = {.sequences = 1, .max_tokens = TOKENS, .logit_rows = 1, .window_blocks = window_blocks,
                                     .partial_tokens = partial_tokens, .pipeline = 1, .prefetch = 1};
    const np_step step = {.participants = 1, .sharers = 1, .end_block = SLICES, .count = TOKENS, .sequences = zeros, .positions = zeros, .tokens = zeros};
    const char *wrong = NULL;
    np_engine *engine = np_engine_create(&shape, &fixed, &shared, &config, &wrong);
    CHECK(engine != NULL, "refused: %s", wrong ? wrong : "memory");
    if (!engine) exit(checks_report());
    CHECK(np_begin_step(engine, &step) == NP_OK, "window %u", window_blocks);
    CHECK(np_feed_forward(engine, 0) >= 0, "window %u", window_blocks);
    CHECK(s->window == 0, "window %u stays open", window_blocks);
    np_engine_read_counters(engine, &s->counters);
    np_engine_destroy(engine);
}

static double product(const uint16_t *row, const float *x, int n) {
    double sum = 0;
    for (int j = 0; j < n; j++) sum += (double)np_half_to_float(row[j]) * x[j];
    return sum;
}

/* What all slices add to a token, in double precision. */
static void check_sum(const stage *s, const char *isa, uint32_t t) {
    float x[WIDTH];
    double squares = 0, sums[WIDTH] = {0};
    for (int j = 0; j < WIDTH; j++) squares += (double)at_first[t][j] * at_first[t][j];
    for (int j = 0; j < WIDTH; j++) x[j] = (float)(at_first[t][j] / sqrt(squares / WIDTH + 1e-5));
    for (int c = 0; c < SLICES; c++) {
        float inner[SLICE];
        for (int i = 0; i < SLICE; i++) {
            const double gate = product(triggers[c] + i * WIDTH, x, WIDTH);
            inner[i] = (float)(gate / (1 + exp(-gate)) * product(values[c] + i * WIDTH, x, WIDTH));
        }
        for (int j = 0; j < WIDTH; j++) sums[j] += product(values[c] + WIDTH * SLICE + j * SLICE, inner, SLICE);
    }
    for (int j = 0; j < WIDTH; j++) {
        const double change = (double)s->residual[t][j] - at_first[t][j];
        CHECK(fabs(change - sums[j]) < 1e-2, "%s: output %d of token %u is %g, not %g", isa, j, t, change, sums[j]);
    }
}

/* The slices of the second layer that are requested, as bits. */
static uint32_t requested(const stage *s) {
    uint32_t bits = 0;
    for (uint32_t n = 0; n < s->tail[0]; n++) bits |= 1u << ((s->requests[n] & NP_REQUEST_CLUSTER_MASK) - SLICES);
    return bits;
}

static void test_slices(const char *isa) {
    /* Window, tokens whose sums fit; slices of the next layer that are requested, slices that count as foreseen. Half a
     * window is read ahead, or a whole layer if all of it is open, with the sums of all tokens. */
    static const uint32_t cases[][4] = {{1, TOKENS, 1, 3}, {1, 2, 1, 3}, {2, TOKENS, 1, 3}, {3, TOKENS, 7, 3}, {3, 2, 3, 4}};
    static stage s, first;
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        const uint32_t window = cases[n][0], fit = cases[n][1];
        compute(&s, window, fit);
        if (n == 0) first = s;
        CHECK(memcmp(s.residual, first.residual, sizeof s.residual) == 0, "%s: other bits with window %u, %u sums", isa, window, fit);
        CHECK(requested(&s) == cases[n][2], "%s, window %u, %u sums: slices %u are requested", isa, window, fit, requested(&s));
        CHECK(s.counters.foreseen == cases[n][3], "%s, window %u, %u sums: %llu slices foreseen", isa, window, fit, (unsigned long long)s.counters.foreseen);
        CHECK(s.counters.down_rows == SLICES * SLICE * TOKENS, "%s: rows of down", isa);
        for (uint32_t t = 0; t < TOKENS; t++) check_sum(&s, isa, t);
    }
}

int main(void) {
    for (int j = 0; j < WIDTH; j++) ones[j] = 1.0f;
    for (uint32_t t = 0; t < TOKENS; t++)
        for (int j = 0; j < WIDTH; j++) at_first[t][j] = random_float();
    for (int c = 0; c < SLICES; c++) {
        for (int i = 0; i < WIDTH * SLICE; i++) triggers[c][i] = np_float_to_half(0.2f * random_float());
        for (int i = 0; i < 2 * WIDTH * SLICE; i++) values[c][i] = np_float_to_half(0.2f * random_float());
    }
    for_each_isa(test_slices);
    return checks_report();
}

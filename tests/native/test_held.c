/* The edge of a step whose blocks another computes: which sums it takes, where they go, and what is refused. The model's weights are zero,
 * so that its residual stream is what the blocks' sums make of it. */
#include "check.h"
#include "neuronpipe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 32, BLOCKS = 6, TEXTS = 2, LAYERS = 2, VOCABULARY = 4, CONTEXT = 8 };

typedef struct {
    float residual[TEXTS][WIDTH], queries[TEXTS][WIDTH], attention[TEXTS][WIDTH], hidden[TEXTS][BLOCKS * 4];
    float partials[TEXTS][BLOCKS][WIDTH], logits[VOCABULARY];
    uint16_t kv[LAYERS * 2 * CONTEXT * WIDTH];
    uint32_t claims[64], entries[LAYERS * BLOCKS], words[16], epoch;
    uint64_t window;
    np_barrier barrier;
    float inputs[TEXTS + 1][WIDTH]; /* and a row that nobody may write */
} stage;

static const np_shape shape = {
    .width = WIDTH, .neurons = BLOCKS * 4, .layers = LAYERS, .query_heads = 1, .key_heads = 1, .head_width = WIDTH,
    .vocabulary = VOCABULARY, .context_tokens = CONTEXT, .experts = 1, .experts_per_token = 1, .norm_epsilon = 1e-5f, .rotary = 1,
    .type = NP_Q8, .activation = NP_RELU, .embedding_scale = 1, .logit_scale = 1, .attention_scale = 1, .residual_scale = 1, .gated = 1,
    .cluster_neurons = 4, .clusters = BLOCKS, .block_neurons = 4, .blocks = BLOCKS, .slot_bytes = {1024, 1024},
    .gate = {NP_TRIGGER, 0, NP_TRIGGER, 512}, .up = {NP_VALUE, 0, NP_TRIGGER, 600}, .down = {NP_VALUE, 256, NP_TRIGGER, 700},
};

static np_engine *made(stage *s, const void *zeros) {
    static np_layer layers[LAYERS];
    const np_matrix matrix = {zeros, zeros};
    const np_norm norm = {zeros, NULL};
    for (int n = 0; n < LAYERS; n++)
        layers[n] = (np_layer){.qkv = matrix, .attention_output = matrix, .attention_norm = norm, .ffn_norm = norm, .rotary = 1};
    const np_fixed fixed = {.embedding = matrix, .output = matrix, .output_norm = norm, .inverse_frequency = zeros, .layers = layers};
    const np_shared shared = {
        .residual = s->residual[0], .queries = s->queries[0], .attention = s->attention[0], .hidden = s->hidden[0],
        .partials = s->partials[0][0], .claims = s->claims, .logits = s->logits, .kv = s->kv, .slots = {zeros, zeros},
        .entries = {s->entries, s->entries}, .window = &s->window, .arrivals = s->words, .epoch = &s->epoch, .barrier = &s->barrier,
        .inputs = s->inputs[0],
    };
    const np_engine_config config = {.sequences = TEXTS, .max_tokens = TEXTS, .logit_rows = 1, .window_blocks = BLOCKS,
                                     .partial_tokens = TEXTS, .pipeline = 1, .held = 1};
    const char *wrong;
    np_engine *engine = np_engine_create(&shape, &fixed, &shared, &config, &wrong);
    CHECK(engine != NULL, "refused: %s", wrong ? wrong : "memory");
    if (!engine)
        exit(checks_report());
    return engine;
}

static np_step step_of(uint32_t held, uint32_t texts) {
    static const int32_t sequences[TEXTS] = {0, 1}, zero[TEXTS];
    return (np_step){.participants = 1, .sharers = 1, .end_block = held, .held_blocks = held, .count = texts, .sequences = sequences,
                     .positions = zero, .tokens = zero};
}

/* A step of so many texts with so many blocks held: their nodes' sums are taken, and nothing else of them is read or written. */
static void test_step(np_engine *engine, stage *s, uint32_t held, uint32_t texts) {
    const np_step step = step_of(held, texts);
    const uint32_t nodes = np_tree_nodes(held);
    const size_t count = (size_t)texts * nodes * WIDTH;
    float *sums = malloc((count + 1) * sizeof *sums), wanted[TEXTS][WIDTH] = {{0}};
    for (int t = 0; t < TEXTS; t++)
        for (int b = 0; b < BLOCKS; b++)
            for (int j = 0; j < WIDTH; j++) s->partials[t][b][j] = (uint32_t)b < held ? NAN : random_float();
    for (int t = 0; t <= TEXTS; t++)
        for (int j = 0; j < WIDTH; j++) s->inputs[t][j] = NAN;
    CHECK(np_engine_begin_held(engine, &step) == NP_OK, "held %u, texts %u", held, texts);
    np_wanted_blocks blocks;
    uint32_t layers = 0;
    for (int more; (more = np_engine_next_blocks(engine, &blocks)) != NP_OK; layers++) {
        CHECK(more == 1 && blocks.blocks == held && blocks.pairs == texts && blocks.layer == layers, "held %u: %d", held, more);
        if (more != 1)
            break;
        for (uint32_t t = 0; t <= TEXTS; t++) /* the norm's weights are zeros */
            CHECK(t < texts ? blocks.inputs[t * WIDTH] == 0 && blocks.inputs[t * WIDTH + WIDTH - 1] == 0 : isnan(s->inputs[t][0]),
                  "inputs of text %u of %u", t, texts);
        for (size_t i = 0; i < count; i++) sums[i] = random_float();
        CHECK(np_engine_put_sums(engine, sums, count + 1) == NP_E_ARGUMENT, "one sum too many");
        CHECK(np_engine_put_sums(engine, sums, count - 1) == NP_E_ARGUMENT, "one sum too few");
        CHECK(np_engine_put_sums(engine, sums, count) == NP_OK, "held %u, texts %u", held, texts);
        for (uint32_t t = 0; t < texts; t++) {
            float all[BLOCKS][WIDTH], sum[WIDTH];
            memcpy(all, s->partials[t], sizeof all);
            for (uint32_t n = 0, b = 0; b < held; b++) {
                const int is_node = n < nodes && np_tree_node_first(held, n) == b;
                const float *own = is_node ? sums + ((size_t)t * nodes + n++) * WIDTH : NULL;
                CHECK(own ? !memcmp(all[b], own, sizeof all[b]) : isnan(all[b][0]) && isnan(all[b][WIDTH - 1]), "held %u, block %u", held, b);
            }
            np_sum_tree_on(all[0], held, BLOCKS, WIDTH, WIDTH, sum);
            for (int j = 0; j < WIDTH; j++) wanted[t][j] += sum[j];
        }
    }
    CHECK(layers == (held ? LAYERS : 0), "held %u: %u layers", held, layers);
    for (uint32_t t = 0; t < texts && held; t++)
        CHECK(memcmp(s->residual[t], wanted[t], sizeof wanted[t]) == 0, "held %u, text %u", held, t);
    CHECK(np_engine_put_sums(engine, sums, count) == NP_E_ARGUMENT, "after the step");
    free(sums);
}

static void test_refusals(np_engine *engine) {
    np_wanted_blocks blocks;
    float sums[WIDTH] = {0};
    CHECK(np_engine_put_sums(engine, sums, WIDTH) == NP_E_ARGUMENT, "before any step");
    np_step step = step_of(1, 1);
    step.held_blocks = 2;
    CHECK(np_engine_begin_held(engine, &step) == NP_E_ARGUMENT, "others take it that more is held");
    CHECK(np_engine_next_blocks(engine, &blocks) == NP_E_ARGUMENT, "the step was refused");
    step = step_of(BLOCKS + 1, 1);
    CHECK(np_engine_begin_held(engine, &step) == NP_E_ARGUMENT, "more blocks than there are");
    step = step_of(1, 1);
    CHECK(np_engine_begin_held(engine, &step) == NP_OK && np_engine_next_blocks(engine, &blocks) == 1, "one block");
    CHECK(np_engine_next_blocks(engine, &blocks) == NP_E_ARGUMENT, "its sums were not given");
    CHECK(np_engine_put_sums(engine, sums, WIDTH) == NP_E_ARGUMENT, "the step has ended");
}

int main(void) {
    void *zeros = calloc(1, 1 << 16);
    stage *s = calloc(1, sizeof *s);
    if (!zeros || !s)
        return 1;
    np_engine *engine = made(s, zeros);
    test_refusals(engine);
    for (uint32_t held = 0; held <= BLOCKS; held++)
        for (uint32_t texts = 1; texts <= TEXTS; texts++) test_step(engine, s, held, texts);
    np_engine_destroy(engine);
    free(s);
    free(zeros);
    return checks_report();
}

/* A step with offloaded blocks: which sums it accepts, where they go, and what is refused. The model's weights are
 * zero, so the residual stream consists of the blocks' sums. */
#include "check.h"
#include "neuronpipe.h"
#include "step_thread.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 32, BLOCKS = 6, TEXTS = 2, LAYERS = 2, VOCABULARY = 4, CONTEXT = 8 };

typedef struct {
    float residual[TEXTS][WIDTH], queries[TEXTS][WIDTH], attention[TEXTS][WIDTH], hidden[TEXTS][BLOCKS * 4];
    float partials[TEXTS][BLOCKS][WIDTH], logits[VOCABULARY];
    uint16_t kv[LAYERS * TEXTS * 2 * CONTEXT * WIDTH];
    uint32_t claims[64], entries[LAYERS * BLOCKS], words[16], epoch;
    uint64_t window;
    np_barrier barrier;
    float inputs[TEXTS + 1][WIDTH]; /* and a row that must not be written */
    float outputs[TEXTS][3 * WIDTH];
} stage;

static const np_shape shape = {
    .width = WIDTH, .neurons = BLOCKS * 4, .layers = LAYERS, .query_heads = 1, .key_heads = 1, .head_width = WIDTH, .heads_width = WIDTH,
    .vocabulary = VOCABULARY, .context_tokens = CONTEXT, .experts = 1, .experts_per_token = 1, .router_groups = 1, .groups_per_token = 1, .routed_scale = 1.0f, .rotary_scale = 1.0f, .norm_epsilon = 1e-5f, .rotary = 1,
    .type = NP_Q8, .activation = NP_RELU, .embedding_scale = 1, .logit_scale = 1, .attention_scale = 1, .local_attention_scale = 1, .residual_scale = 1, .gated = 1,
    .cluster_neurons = 4, .clusters = BLOCKS, .block_neurons = 4, .blocks = BLOCKS, .slot_bytes = {1024, 1024},
    .gate = {NP_TRIGGER, 0, NP_TRIGGER, 512, NP_Q8}, .up = {NP_VALUE, 0, NP_TRIGGER, 600, NP_Q8}, .down = {NP_VALUE, 256, NP_TRIGGER, 700, NP_Q8},
};

static np_engine *made(stage *s, const void *zeros, int held) {
    static np_layer layers[LAYERS];
    const np_matrix matrix = {zeros, zeros, NP_Q8, 0};
    const np_norm norm = {zeros, NULL};
    for (int n = 0; n < LAYERS; n++)
        layers[n] = (np_layer){.first_ffn = (uint32_t)n, .key_heads = 1, .head_width = WIDTH, .cached_before = (uint32_t)n * 2 * WIDTH, .experts = 1, .qkv = matrix, .attention_output = matrix, .attention_norm = norm, .ffn_norm = norm, .rotary = 1};
    const np_fixed fixed = {.embedding = matrix, .output = matrix, .output_norm = norm, .inverse_frequency = zeros, .layers = layers};
    const np_shared shared = {
        .residual = s->residual[0], .queries = s->queries[0], .attention = s->attention[0], .hidden = s->hidden[0],
        .partials = s->partials[0][0], .claims = s->claims, .logits = s->logits, .kv = s->kv, .slots = {zeros, zeros},
        .entries = {s->entries, s->entries}, .window = &s->window, .arrivals = s->words, .epoch = &s->epoch, .barrier = &s->barrier,
        .inputs = s->inputs[0], .outputs = s->outputs[0],
    };
    const np_engine_config config = {.sequences = TEXTS, .max_tokens = TEXTS, .logit_rows = 1, .window_blocks = BLOCKS,
                                     .partial_tokens = TEXTS, .pipeline = 1, .offload_blocks = held};
    const char *wrong;
    np_engine *engine = np_engine_create(&shape, &fixed, &shared, &config, &wrong);
    CHECK(engine != NULL, "refused: %s", wrong ? wrong : "memory");
    if (!engine)
        exit(checks_report());
    return engine;
}

static np_step step_of(uint32_t held, uint32_t texts) {
    static const int32_t sequences[TEXTS] = {0, 1}, zero[TEXTS];
    return (np_step){.participants = 1, .sharers = 1, .end_block = held, .offloaded_blocks = held, .count = texts, .sequences = sequences,
                     .positions = zero, .tokens = zero};
}

/* A step of so many sequences with so many offloaded blocks: their nodes' sums are accepted, and their other places
 * neither read nor written. */
static void test_step(np_engine *engine, stage *s, uint32_t held, uint32_t texts) {
    const np_step step = step_of(held, texts);
    const uint32_t nodes = np_tree_nodes(held);
    const size_t count = (size_t)texts * nodes * WIDTH;
    float *sums = malloc((count + 1) * sizeof *sums), *zeros_of_step = calloc(count + 1, sizeof *sums), wanted[TEXTS][WIDTH] = {{0}};
    for (int t = 0; t < TEXTS; t++)
        for (int b = 0; b < BLOCKS; b++)
            for (int j = 0; j < WIDTH; j++) s->partials[t][b][j] = (uint32_t)b < held ? NAN : random_float();
    for (int t = 0; t <= TEXTS; t++)
        for (int j = 0; j < WIDTH; j++) s->inputs[t][j] = NAN;
    CHECK(np_engine_begin_offload(engine, &step) == NP_OK, "held %u, texts %u", held, texts);
    np_offloaded_blocks blocks;
    uint32_t layers = 0;
    for (int more; (more = np_engine_next_offload(engine, &blocks)) != NP_OK; layers++) {
        CHECK(more == 1 && blocks.blocks == held && blocks.pairs == texts && blocks.layer == layers, "held %u: %d", held, more);
        if (more != 1)
            break;
        for (uint32_t t = 0; t <= TEXTS; t++) /* the norm's weights are zeros */
            CHECK(t < texts ? blocks.inputs[t * WIDTH] == 0 && blocks.inputs[t * WIDTH + WIDTH - 1] == 0 : isnan(s->inputs[t][0]),
                  "inputs of text %u of %u", t, texts);
        for (size_t i = 0; i < count; i++) sums[i] = random_float();
        CHECK(np_engine_put_block_sums(engine, sums, count + 1) == NP_E_ARGUMENT, "one sum too many");
        CHECK(np_engine_put_block_sums(engine, sums, count - 1) == NP_E_ARGUMENT, "one sum too few");
        CHECK(np_engine_put_block_sums(engine, zeros_of_step, count) == NP_OK, "held %u, texts %u", held, texts);
        CHECK(np_engine_put_block_sums(engine, sums, count) == NP_OK, "given again, they replace those of before");
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
    CHECK(np_engine_put_block_sums(engine, sums, count) == NP_E_ARGUMENT, "after the step");
    free(sums);
    free(zeros_of_step);
}

static void test_refusals(np_engine *engine) {
    np_offloaded_blocks blocks;
    float sums[WIDTH] = {0};
    CHECK(np_engine_put_block_sums(engine, sums, WIDTH) == NP_E_ARGUMENT, "before any step");
    np_step step = step_of(1, 1);
    step.offloaded_blocks = 2;
    CHECK(np_engine_begin_offload(engine, &step) == NP_E_ARGUMENT, "others take it that more is held");
    CHECK(np_engine_next_offload(engine, &blocks) == NP_E_ARGUMENT, "the step was refused");
    const np_step one = step_of(1, 1);
    CHECK(np_engine_step(engine, &one) == NP_E_ARGUMENT, "its steps go by np_engine_begin_offload");
    step = step_of(1, 1);
    step.offloaded_matrices = NP_OFFLOAD_QKV;
    CHECK(np_engine_begin_offload(engine, &step) == NP_E_ARGUMENT, "nobody is there to attend");
    step = step_of(BLOCKS + 1, 1);
    CHECK(np_engine_begin_offload(engine, &step) == NP_E_ARGUMENT, "more blocks than there are");
    step = step_of(1, 1);
    CHECK(np_engine_begin_offload(engine, &step) == NP_OK && np_engine_next_offload(engine, &blocks) == 1, "one block");
    CHECK(np_engine_next_offload(engine, &blocks) == NP_E_ARGUMENT, "its sums were not given");
    CHECK(np_engine_put_block_sums(engine, sums, WIDTH) == NP_E_ARGUMENT, "the step has ended");
}

/* ---- offloaded matrices --------------------------------------------------------------------------------- */
enum { ALL_MATRICES = NP_OFFLOAD_QKV | NP_OFFLOAD_ATTENTION_OUTPUT | NP_OFFLOAD_OUTPUT };

/* The steps of two participants; the second one's backend computes all blocks and these matrices. */
static np_step step_of_holder(uint32_t matrices, uint32_t texts) {
    np_step step = step_of(BLOCKS, texts);
    step.participants = 2;
    step.participant = 1;
    step.offloaded_matrices = matrices;
    step.logits_count = 1;
    return step;
}

static np_step step_of_other(uint32_t matrices, uint32_t texts) {
    np_step step = step_of_holder(matrices, texts);
    step.participant = 0;
    step.first_block = BLOCKS;
    return step;
}

/* Write the rows of the pending matrix, all different; those of attention's output are added to the residual stream.
 * Meanwhile sums of any number are refused, and nothing is written. */
static void give_rows(np_engine *engine, stage *s, uint32_t layer, uint32_t texts, float gained[TEXTS][WIDTH], float values[TEXTS][WIDTH]) {
    static float sums[TEXTS * BLOCKS * WIDTH], before[TEXTS][BLOCKS][WIDTH];
    np_offloaded_matrix rows;
    np_engine_offloaded_matrix(engine, &rows);
    const int is_output = rows.matrix == NP_OFFLOAD_OUTPUT;
    CHECK(rows.matrix && rows.layer == (is_output ? 0 : layer) && rows.columns == WIDTH && rows.out_stride == rows.rows, "matrix %d", rows.matrix);
    CHECK(rows.rows == (is_output ? (uint32_t)VOCABULARY : rows.matrix == NP_OFFLOAD_QKV ? 3u * WIDTH : (uint32_t)WIDTH), "%u rows", rows.rows);
    CHECK(rows.tokens == (is_output ? 1 : texts), "%u tokens", rows.tokens);
    memcpy(before, s->partials, sizeof before);
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) sums[i] = random_float();
    for (size_t rest = 1; rest <= sizeof sums / sizeof *sums / WIDTH; rest++)
        CHECK(np_engine_put_block_sums(engine, sums, rest * WIDTH) == NP_E_ARGUMENT, "matrix %d is wanted, no sums", rows.matrix);
    CHECK(np_engine_put_block_sums(engine, sums, 0) == NP_E_ARGUMENT && memcmp(before, s->partials, sizeof before) == 0, "matrix %d", rows.matrix);
    for (uint32_t t = 0; t < rows.tokens; t++)
        for (uint32_t r = 0; r < rows.rows; r++) {
            const float value = (float)(int32_t)(random_bits() % 64) / 8; /* exact as f16 */
            rows.out[t * rows.out_stride + r] = value;
            if (rows.matrix == NP_OFFLOAD_ATTENTION_OUTPUT)
                gained[t][r] += value;
            else if (rows.matrix == NP_OFFLOAD_QKV && r >= 2 * WIDTH)
                values[t][r - 2 * WIDTH] = value;
        }
}

/* A step of two participants, one with all blocks and these matrices offloaded. Rows and sums become pending in
 * order. */
static void test_matrices(np_engine *holder, np_engine *other, stage *s, uint32_t matrices, uint32_t texts) {
    const uint32_t nodes = np_tree_nodes(BLOCKS), order[] = {NP_OFFLOAD_QKV, NP_OFFLOAD_ATTENTION_OUTPUT, 0};
    const size_t count = (size_t)texts * nodes * WIDTH;
    float sums[TEXTS * BLOCKS * WIDTH], gained[TEXTS][WIDTH] = {{0}}, values[TEXTS][WIDTH] = {{0}}, logits[VOCABULARY] = {0};
    memset(s->claims, 0, sizeof s->claims);
    memset(s->kv, 0, sizeof s->kv);
    for (int t = 0; t < TEXTS; t++)
        for (int b = 0; b < BLOCKS; b++)
            for (int j = 0; j < WIDTH; j++) s->partials[t][b][j] = NAN;
    worker peer = {.engine = other, .step = step_of_other(matrices, texts)};
    const np_step step = step_of_holder(matrices, texts);
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, &peer))
        exit(1);
    CHECK(np_engine_begin_offload(holder, &step) == NP_OK, "matrices %u", matrices);
    CHECK(np_engine_put_block_sums(holder, sums, count) == NP_E_ARGUMENT, "nothing is wanted yet");
    np_offloaded_blocks blocks;
    np_offloaded_matrix rows;
    int more = 1;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (int stage_of = 0; stage_of < 3; stage_of++) {
            if (order[stage_of] && !(matrices & order[stage_of]))
                continue;
            more = np_engine_next_offload(holder, &blocks);
            if (more != (order[stage_of] ? NP_OFFLOADED_MATRIX : 1)) { /* the other one waits at a barrier */
                fprintf(stderr, "matrices %u, layer %u, stage %d: %d\n", matrices, layer, stage_of, more);
                exit(1);
            }
            if (order[stage_of]) {
                give_rows(holder, s, layer, texts, gained, values);
                continue;
            }
            np_engine_offloaded_matrix(holder, &rows);
            CHECK(!rows.matrix && !rows.out, "no rows are wanted with blocks");
            CHECK(blocks.layer == layer && blocks.blocks == BLOCKS && blocks.pairs == texts, "layer %u", layer);
            for (uint32_t t = 0; matrices & NP_OFFLOAD_QKV && t < texts; t++) /* one position: attention is its values */
                CHECK(memcmp(s->attention[t], values[t], sizeof values[t]) == 0, "values of text %u", t);
            for (size_t i = 0; i < count; i++) sums[i] = (float)(int32_t)(random_bits() % 64) / 8; /* exact in any order */
            for (size_t i = 0; i < count; i++) gained[i / (nodes * WIDTH)][i % WIDTH] += sums[i];
            CHECK(np_engine_put_block_sums(holder, sums, count) == NP_OK, "layer %u", layer);
        }
    more = np_engine_next_offload(holder, &blocks);
    if (matrices & NP_OFFLOAD_OUTPUT) {
        CHECK(more == NP_OFFLOADED_MATRIX, "the output: %d", more);
        give_rows(holder, s, 0, texts, gained, values);
        memcpy(logits, s->logits, sizeof logits);
        more = np_engine_next_offload(holder, &blocks);
    }
    CHECK(more == NP_OK && np_engine_next_offload(holder, &blocks) == NP_OK, "matrices %u: %d", matrices, more);
    pthread_join(thread, NULL);
    CHECK(peer.done == NP_OK, "the other: %d", peer.done);
    for (uint32_t t = 0; t < texts; t++)
        CHECK(memcmp(s->residual[t], gained[t], sizeof gained[t]) == 0, "matrices %u, text %u", matrices, t);
    CHECK(memcmp(s->logits, logits, sizeof logits) == 0, "matrices %u: logits", matrices);
    CHECK(np_engine_put_block_sums(holder, sums, count) == NP_E_ARGUMENT, "after the step");
}

/* A step abandoned while a matrix is pending, because a participant was lost: late rows and sums have no effect, and
 * the repeated step starts from its beginning. */
static void test_step_that_ends_inside(np_engine *holder, np_engine *other, stage *s) {
    static float sums[BLOCKS * WIDTH];
    np_offloaded_blocks blocks;
    np_offloaded_matrix rows;
    worker peer = {.engine = other, .step = step_of_other(ALL_MATRICES, 1)};
    np_step step = step_of_holder(ALL_MATRICES, 1);
    pthread_t thread;
    memset(s->claims, 0, sizeof s->claims);
    if (pthread_create(&thread, NULL, work, &peer))
        exit(1);
    CHECK(np_engine_begin_offload(holder, &step) == NP_OK && np_engine_next_offload(holder, &blocks) == NP_OFFLOADED_MATRIX, "rows of qkv");
    np_word_store(&s->epoch, s->epoch + 1);
    CHECK(np_engine_next_offload(holder, &blocks) == NP_E_EPOCH, "the step is over");
    pthread_join(thread, NULL);
    CHECK(peer.done == NP_E_EPOCH, "the other: %d", peer.done);
    CHECK(np_engine_next_offload(holder, &blocks) == NP_E_EPOCH, "it stays over");
    CHECK(np_engine_put_block_sums(holder, sums, (size_t)np_tree_nodes(BLOCKS) * WIDTH) == NP_E_ARGUMENT, "sums that come late");
    np_engine_offloaded_matrix(holder, &rows);
    CHECK(!rows.matrix && !rows.out, "nothing is wanted of a step that is over");
    CHECK(np_engine_begin_offload(holder, &step) == NP_E_EPOCH, "a step of the epoch before");
    CHECK(np_engine_next_offload(holder, &blocks) == NP_E_EPOCH, "a step of the epoch before");
    np_word_store(&s->epoch, 0);
    memset(&s->barrier, 0, sizeof s->barrier); /* as the coordinator does before a step */
}

static void test_blocks_of_two(np_engine *other, stage *s) {
    np_step step = step_of_other(0, 1);
    step.first_block = BLOCKS - 1;
    CHECK(np_engine_step(other, &step) == NP_E_ARGUMENT, "it would compute a block whose sums another puts there");
    step.first_block = step.end_block = 0;
    step.offloaded_matrices = ALL_MATRICES + 1;
    CHECK(np_engine_step(other, &step) == NP_E_ARGUMENT, "an unknown matrix");
}

int main(void) {
    void *zeros = calloc(1, 1 << 16);
    stage *s = calloc(1, sizeof *s);
    if (!zeros || !s)
        return 1;
    np_engine *engine = made(s, zeros, 1), *other = made(s, zeros, 0);
    test_refusals(engine);
    for (uint32_t held = 0; held <= BLOCKS; held++)
        for (uint32_t texts = 1; texts <= TEXTS; texts++) test_step(engine, s, held, texts);
    for (uint32_t matrices = 0; matrices <= ALL_MATRICES; matrices++)
        for (uint32_t texts = 1; texts <= TEXTS; texts++) test_matrices(engine, other, s, matrices, texts);
    test_step_that_ends_inside(engine, other, s);
    test_matrices(engine, other, s, ALL_MATRICES, TEXTS);
    test_blocks_of_two(other, s);
    np_engine_destroy(engine);
    np_engine_destroy(other);
    free(s);
    free(zeros);
    return checks_report();
}

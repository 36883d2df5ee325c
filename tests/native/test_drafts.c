/* Steps with drafted tokens. Layers add nothing, embeddings are unit vectors, and the output matrix says of token t that
 * t + 1 comes next. So what a draft layer predicts depends on its input matrix alone: on the token that it reads, or on
 * the token before, whose hidden state it reads. */
#include "check.h"
#include "kernels/half.h"
#include "neuronpipe.h"
#include "step_thread.h"

#include <stdlib.h>
#include <string.h>

enum { WIDTH = 32, LAYERS = 2, VOCABULARY = 24, CONTEXT = 16, TOKENS = 6, ROWS = 4, STATES = 8, SEQUENCES = 2, MOST_PARTICIPANTS = 3 };

typedef struct {
    float residual[TOKENS][WIDTH], queries[TOKENS][2 * WIDTH], attention[TOKENS][2 * WIDTH], hidden[TOKENS][4];
    float partials[TOKENS][WIDTH], logits[ROWS][VOCABULARY], states[STATES][WIDTH];
    uint16_t kv[LAYERS * SEQUENCES * 2 * CONTEXT * WIDTH];
    uint32_t claims[64], entries[LAYERS], words[16], epoch;
    uint64_t windows[MOST_PARTICIPANTS];
    int32_t drafted[TOKENS];
    np_barrier barrier;
} stage;

static uint16_t zeros[4 * WIDTH * WIDTH], embedding[VOCABULARY][WIDTH], output[VOCABULARY][WIDTH];
static uint16_t reads_token[WIDTH][2 * WIDTH], reads_hidden[WIDTH][2 * WIDTH];
static float ones[WIDTH], no_frequencies[WIDTH];

static const np_shape shape = {
    .width = WIDTH, .neurons = 4, .layers = LAYERS, .draft_layers = 1, .state_elements = WIDTH, .query_heads = 1, .key_heads = 1, .head_width = WIDTH, .heads_width = 2 * WIDTH,
    .vocabulary = VOCABULARY, .context_tokens = CONTEXT, .experts = 1, .experts_per_token = 1, .router_groups = 1, .groups_per_token = 1, .routed_scale = 1, .rotary_scale = 1, .norm_epsilon = 1e-5f, .rotary = 1,
    .type = NP_F16, .activation = NP_RELU, .embedding_scale = 1, .logit_scale = 1, .attention_scale = 1, .local_attention_scale = 1, .residual_scale = 1, .gated = 1,
    .cluster_neurons = 4, .clusters = 1, .block_neurons = 4, .blocks = 1, .slot_bytes = {256, 512},
    .gate = {NP_TRIGGER, 0, NP_TRIGGER, 0, NP_F16}, .up = {NP_VALUE, 0, NP_TRIGGER, 0, NP_F16}, .down = {NP_VALUE, 256, NP_TRIGGER, 0, NP_F16},
};
static const np_engine_config config = {.sequences = SEQUENCES, .state_slots = STATES, .max_tokens = TOKENS, .logit_rows = ROWS, .window_blocks = 1, .partial_tokens = TOKENS, .pipeline = 1};

static void fill_matrices(void) {
    const uint16_t one = np_float_to_half(1.0f);
    for (int t = 0; t < VOCABULARY; t++) embedding[t][t] = output[(t + 1) % VOCABULARY][t] = one;
    for (int j = 0; j < WIDTH; j++) {
        ones[j] = 1.0f;
        reads_token[j][j] = reads_hidden[j][WIDTH + j] = one;
    }
}

static np_engine *made(stage *s, int participant, const void *input, const char **wrong) {
    static np_layer layers[MOST_PARTICIPANTS][2][LAYERS];
    const np_matrix nothing = {zeros, NULL, NP_F16, 0};
    const np_norm norm = {ones, NULL};
    np_layer *own = layers[participant][input == (const void *)reads_hidden];
    for (int n = 0; n < LAYERS; n++)
        own[n] = (np_layer){.first_ffn = (uint32_t)n, .key_heads = 1, .head_width = WIDTH, .cached_before = (uint32_t)n * 2 * WIDTH, .experts = 1, .qkv = nothing, .attention_output = nothing, .attention_norm = norm, .ffn_norm = norm, .rotary = 1};
    own[LAYERS - 1].draft_input = (np_matrix){input, NULL, NP_F16, 0};
    own[LAYERS - 1].draft_embedding_norm = own[LAYERS - 1].draft_hidden_norm = own[LAYERS - 1].draft_output_norm = norm;
    const np_fixed fixed = {.embedding = {embedding, NULL, NP_F16, 0}, .output = {output, NULL, NP_F16, 0}, .output_norm = norm, .inverse_frequency = no_frequencies, .layers = own};
    const np_shared shared = {
        .residual = s->residual[0], .queries = s->queries[0], .attention = s->attention[0], .hidden = s->hidden[0], .partials = s->partials[0],
        .claims = s->claims, .logits = s->logits[0], .states = s->states[0], .drafted = s->drafted, .kv = s->kv, .slots = {(const uint8_t *)zeros, (const uint8_t *)zeros},
        .entries = {s->entries, s->entries}, .window = &s->windows[participant], .arrivals = s->words, .epoch = &s->epoch, .barrier = &s->barrier,
    };
    return np_engine_create(&shape, &fixed, &shared, &config, wrong);
}

static void run(np_engine *const *engines, stage *s, uint32_t participants, np_step step) {
    worker workers[MOST_PARTICIPANTS];
    pthread_t threads[MOST_PARTICIPANTS];
    memset(s->claims, 0, sizeof s->claims);
    for (uint32_t n = 0; n < participants; n++) {
        step.participants = step.sharers = participants;
        step.participant = step.sharer = n;
        workers[n] = (worker){engines[n], step, 1};
        if (pthread_create(&threads[n], NULL, work, &workers[n]))
            exit(1);
    }
    for (uint32_t n = 0; n < participants; n++) {
        pthread_join(threads[n], NULL);
        CHECK(workers[n].done == NP_OK, "participant %u of %u: %d", n, participants, workers[n].done);
    }
}

static int32_t most_likely(const float *logits) {
    int32_t token;
    np_greatest(logits, VOCABULARY, 1, &token);
    return token;
}

static np_step step_of(const int32_t *sequences, const int32_t *positions, const int32_t *tokens, uint32_t count, const int32_t *from, const int32_t *to) {
    return (np_step){.participants = 1, .sharers = 1, .end_block = 1, .count = count, .sequences = sequences, .positions = positions, .tokens = tokens,
                     .states_from = from, .states_to = to, .logits_count = count};
}

static void check_drafted(const stage *s, const int32_t *expected, const char *why) {
    for (int n = 0; n < 2; n++) {
        CHECK(s->drafted[n] == expected[n], "%s, token %d: %d, not %d", why, n, s->drafted[n], expected[n]);
        CHECK(most_likely(s->logits[1 + n]) == s->drafted[n] + 1, "%s: the text goes on from drafted token %d", why, n);
    }
}

/* A prompt; steps that draft after it: twice the same step, one after an accepted token, one after a step of two
 * sequences. */
static void test_drafts(uint32_t participants, const void *input, const int32_t expected[3][2]) {
    static const int32_t sequences[TOKENS], ones_of_it[] = {1, 1, 1}, two[] = {0, 1};
    stage *s = calloc(1, sizeof *s);
    np_engine *engines[MOST_PARTICIPANTS];
    const char *wrong;
    for (uint32_t layer = 0; layer < LAYERS; layer++) s->entries[layer] = NP_ENTRY_PRESENT;
    for (uint32_t n = 0; n < participants; n++) {
        engines[n] = made(s, (int)n, input, &wrong);
        CHECK(engines[n] != NULL, "refused: %s", wrong ? wrong : "memory");
        if (!engines[n])
            exit(checks_report());
    }
    const int32_t prompt[] = {3, 9, 5, 7}, places[] = {0, 1, 2, 3}, none[] = {NP_NO_STATE, NP_NO_STATE, NP_NO_STATE, NP_NO_STATE}, zeros_to[] = {0, 0, 0, 0};
    np_step step = step_of(sequences, places, prompt, 4, none, zeros_to);
    step.logits_count = 0; /* as in a chunk that is not the last of its prompt */
    run(engines, s, participants, step);

    const int32_t next[] = {8, NP_DRAFTED, NP_DRAFTED}, next_places[] = {4, 5, 6}, from[] = {0, 1, 2}, to[] = {1, 2, 3};
    for (int attempt = 0; attempt < 2; attempt++) {
        run(engines, s, participants, step_of(sequences, next_places, next, 3, from, to));
        check_drafted(s, expected[0], attempt ? "the step once more" : "after the prompt");
        CHECK(most_likely(s->logits[0]) == 9, "after 8 comes %d", most_likely(s->logits[0]));
    }

    const int32_t later[] = {20, NP_DRAFTED, NP_DRAFTED}, later_places[] = {6, 7, 8}, later_from[] = {2, 0, 1}, later_to[] = {0, 1, 3};
    run(engines, s, participants, step_of(sequences, later_places, later, 3, later_from, later_to));
    check_drafted(s, expected[1], "after an accepted token");

    const int32_t first[] = {4, 6}, first_places[] = {0, 1}, first_to[] = {4, 4};
    run(engines, s, participants, step_of(ones_of_it, first_places, first, 2, none, first_to));
    const int32_t both[] = {21, 2}, both_places[] = {7, 2}, both_from[] = {0, 4}, both_to[] = {1, 5};
    run(engines, s, participants, step_of(two, both_places, both, 2, both_from, both_to));
    const int32_t alone[] = {12, NP_DRAFTED, NP_DRAFTED}, alone_places[] = {3, 4, 5}, alone_from[] = {5, 6, 7}, alone_to[] = {6, 7, 2};
    run(engines, s, participants, step_of(ones_of_it, alone_places, alone, 3, alone_from, alone_to));
    check_drafted(s, expected[2], "after a step of two sequences");
    for (uint32_t n = 0; n < participants; n++) np_engine_destroy(engines[n]);
    free(s);
}

static void test_refusals(void) {
    static const int32_t sequences[TOKENS], places[] = {4, 5, 6, 7, 8, 9}, tokens[] = {1, NP_DRAFTED, 3, 4, 5, 6}, from[] = {0, 1, 2}, to[] = {1, 2, 3};
    static const int32_t gap[] = {4, 6}, first[] = {0, 1}, none[] = {NP_NO_STATE, 1}, only_drafted[] = {NP_DRAFTED, NP_DRAFTED}, two[] = {1, 2, NP_DRAFTED};
    static const int32_t other[] = {0, 1}, start[] = {0, 0}, both_from[] = {0, NP_NO_STATE}, both_to[] = {1, 2};
    stage *s = calloc(1, sizeof *s);
    const char *wrong;
    for (uint32_t layer = 0; layer < LAYERS; layer++) s->entries[layer] = NP_ENTRY_PRESENT;
    np_engine *engine = made(s, 0, reads_token, &wrong);
    const struct {
        const char *why;
        np_step step;
    } cases[] = {
        {"a drafted token inside", step_of(sequences, places, tokens, 3, from, to)},
        {"drafted tokens behind two others", step_of(sequences, places, two, 3, from, to)},
        {"positions with a gap", step_of(sequences, gap, tokens, 2, from, to)},
        {"a text with no token before", step_of(sequences, first, tokens, 2, none, to)},
        {"only drafted tokens", step_of(sequences, places, only_drafted, 2, from, to)},
        {"two sequences", step_of(other, start, tokens, 2, both_from, both_to)},
    };
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++)
        CHECK(np_engine_step(engine, &cases[n].step) == NP_E_ARGUMENT, "%s", cases[n].why);
    np_step step = step_of(sequences, places, tokens, 2, from, to);
    CHECK(np_engine_step(engine, &step) == NP_OK, "the step that the others differ from");
    np_engine_destroy(engine);
    np_shape lone = shape;
    lone.layers = lone.draft_layers;
    const np_layer layer = {.experts = 1};
    const np_fixed fixed = {.layers = &layer};
    CHECK(np_engine_create(&lone, &fixed, &(np_shared){0}, &config, &wrong) == NULL && wrong, "a draft layer alone");
    CHECK(made(s, 0, NULL, &wrong) == NULL && wrong && !strcmp(wrong, "draft_input"), "a draft layer without its matrix: %s", wrong ? wrong : "none");
    free(s);
}

int main(void) {
    fill_matrices();
    for (uint32_t participants = 1; participants <= MOST_PARTICIPANTS; participants++) {
        test_drafts(participants, reads_token, (const int32_t[3][2]){{9, 10}, {21, 22}, {13, 14}});
        /* The hidden state of 7 predicts 8, that of the drafted 8 predicts 9, and that of 2 predicts 3; then the layer reads
         * its own, which are the same, as no layer adds anything. */
        test_drafts(participants, reads_hidden, (const int32_t[3][2]){{8, 8}, {9, 9}, {3, 3}});
    }
    test_refusals();
    return checks_report();
}

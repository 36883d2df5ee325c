/* Creating and destroying an engine, and its counters. */
#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>

#include "engine/config_check.h"
#include "engine/experts.h"
#include "engine/feed_forward.h"
#include "engine/prediction.h"
#include "engine/recurrent.h"
#include "engine/reuse.h"

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static void *aligned_zeros(size_t bytes)
{
    bytes = (bytes + 127) & ~(size_t)63;
    void *memory = aligned_alloc(64, bytes);
    if (memory)
        memset(memory, 0, bytes);
    return memory;
}

/* Allocate vectors of up to max_n elements, and a panel of panel_bytes. Returns 0 if memory is short. */
static int vectors_create_with(np_vectors *vectors, int type, size_t max_n, size_t tokens, size_t panel_bytes)
{
    vectors->type = type;
    vectors->stride = (np_activation_bytes(type, max_n) + 63) & ~(size_t)63;
    vectors->prepared = aligned_zeros(tokens * vectors->stride);
    vectors->panel = tokens >= NP_PANEL_TOKENS ? aligned_zeros(panel_bytes) : NULL;
    return vectors->prepared && (tokens < NP_PANEL_TOKENS || vectors->panel);
}

static int vectors_create(np_vectors *vectors, int type, size_t max_n, size_t tokens)
{
    return vectors_create_with(vectors, type, max_n, tokens, np_panel_bytes(type, max_n, tokens));
}

/* The bytes of a panel for any matrix of the layers. */
static size_t layer_panel_bytes(const np_shape *shape, const np_fixed *fixed, size_t max_n, size_t tokens)
{
    size_t bytes = np_panel_bytes(shape->type, max_n, tokens);
    for (uint32_t n = 0; fixed->layers && n < shape->layers; n++) {
        const np_layer *l = &fixed->layers[n];
        const np_matrix *all[] = {&l->attention_output, &l->qkv, &l->latent_down, &l->query_down, &l->query, &l->value_up,
                                  &l->recurrent_input, &l->recurrent_rates, &l->recurrent_output, &l->recurrent_decays, &l->recurrent_gates, &l->draft_input};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            if (i == 0 || all[i]->quants || (i == 1 && !shape->latent_width))
                bytes = larger(bytes, np_panel_bytes(all[i]->type, max_n, tokens));
    }
    return bytes;
}

np_engine *np_engine_create(const np_shape *shape, const np_fixed *fixed, const np_shared *shared, const np_engine_config *config,
                            const char **wrong)
{
    *wrong = np_invalid_field(shape, fixed, shared, config);
    np_engine *engine = *wrong ? NULL : calloc(1, sizeof *engine);
    if (!engine)
        return NULL;
    engine->shape = *shape;
    engine->fixed = *fixed;
    engine->shared = *shared;
    engine->config = *config;
    engine->counters.damaged_word = -1;
    engine->counted_step = UINT64_MAX;
    engine->reuse_inverse = np_odd_inverse(shared->reuse.stride);
    engine->external.result = engine->offload.result = NP_E_ARGUMENT; /* no step has begun */

    const size_t tokens = config->max_tokens;
    const size_t of_states = (size_t)shape->state_heads * shape->state_value_width;
    size_t max_n = larger(larger(shape->width, larger(of_states, shape->state_rank)), larger(shape->latent_width, shape->query_rank)), max_head_width = shape->value_width;
    max_n = larger(max_n, shape->draft_layers ? 2 * (size_t)shape->width : 0);
    for (uint32_t n = 0; n < shape->layers; n++) {
        max_n = larger(max_n, np_output_columns(shape, &fixed->layers[n]));
        max_head_width = larger(max_head_width, fixed->layers[n].head_width);
    }
    engine->layer_neurons = (size_t)shape->blocks * shape->block_neurons;
    engine->mask_bytes = (tokens + 7) / 8;
    const size_t pairs = tokens * shape->experts_per_token, groups = larger(1, smaller(pairs, shape->experts));
    engine->max_rows = larger(NP_PIECE_ROWS, larger(larger(max_head_width, np_state_rows(shape)), 2 * (size_t)shape->block_neurons));

    engine->sequence = aligned_zeros(tokens * sizeof(int32_t));
    engine->position = aligned_zeros(tokens * sizeof(int32_t));
    engine->token = aligned_zeros(tokens * sizeof(int32_t));
    engine->drafted = aligned_zeros(tokens * sizeof(int32_t));
    engine->runs = aligned_zeros(tokens * sizeof(np_run));
    engine->vector = aligned_zeros(max_n * sizeof(float));
    engine->rows = aligned_zeros(tokens * engine->max_rows * sizeof(float));
    engine->scores = aligned_zeros(NP_ATTEND_QUERIES * ((size_t)shape->context_tokens + 1) * sizeof(float));
    engine->max_open_groups = (uint32_t)(np_opens_whole_layers(engine) ? smaller(groups, (size_t)config->partial_tokens * shape->experts_per_token) : 1);
    engine->states = aligned_zeros((size_t)engine->max_open_groups * shape->clusters);
    for (int part = 0; part < NP_PARTS; part++)
        engine->slot_tables[part] = aligned_zeros((size_t)engine->max_open_groups * shape->clusters * sizeof(uint32_t));
    engine->pieces = shape->down_by_output ? np_neuron_pieces(shape) : shape->blocks;
    engine->pending = aligned_zeros((size_t)engine->max_open_groups * engine->pieces * sizeof(uint32_t));
    engine->open = aligned_zeros(shape->block_neurons / shape->cluster_neurons * sizeof(uint32_t));
    engine->list.quants = aligned_zeros(shape->block_neurons * sizeof(void *));
    engine->list.scales = aligned_zeros(shape->block_neurons * sizeof(void *));
    engine->list.prefetch = aligned_zeros(shape->block_neurons * sizeof(void *));
    engine->list.values = aligned_zeros((size_t)NP_DOWN_TOKENS * shape->block_neurons * sizeof(float));
    engine->list.token_masks = aligned_zeros(shape->block_neurons * sizeof(uint16_t));
    engine->list.neurons = aligned_zeros(shape->block_neurons * sizeof(uint32_t));
    engine->request_entries = aligned_zeros(groups * shape->clusters * sizeof(uint32_t));
    engine->groups = aligned_zeros(groups * sizeof(np_group));
    engine->pair_token = aligned_zeros(pairs * sizeof(uint32_t));
    engine->pair_weight = aligned_zeros(pairs * sizeof(float));
    engine->token_pairs = aligned_zeros(pairs * sizeof(uint32_t));
    engine->expert_weights = aligned_zeros(pairs * sizeof(float));
    engine->expert_counts = aligned_zeros(shape->experts * sizeof(uint32_t));
    engine->expert_values = aligned_zeros(shape->experts * sizeof(float));
    engine->expert_scores = aligned_zeros(shape->experts * sizeof(float));
    engine->likely_counts = aligned_zeros(shape->layers * sizeof(np_likely_counts));
    engine->likely_experts = aligned_zeros(shape->experts);
    const void *allocated[] = {engine->sequence,      engine->position,         engine->token,           engine->vector,       engine->runs,
                               engine->rows,          engine->scores,           engine->states,          engine->slot_tables[NP_TRIGGER],
                               engine->slot_tables[NP_VALUE], engine->pending,        engine->list.quants,     engine->list.scales,
                               engine->list.prefetch,   engine->list.values,      engine->list.neurons,    engine->request_entries,
                               engine->groups,        engine->pair_token,       engine->pair_weight,     engine->token_pairs,
                               engine->expert_weights,        engine->expert_counts,    engine->expert_values,   engine->expert_scores,    engine->likely_counts,
                               engine->likely_experts,       engine->open,
                               engine->list.token_masks,     engine->drafted};
    /* Vectors of all quantized types have the same size, so the output matrix's inputs fit as well. */
    int complete = vectors_create_with(&engine->vectors, shape->type, max_n, tokens, layer_panel_bytes(shape, fixed, max_n, tokens));
    for (size_t i = 0; i < sizeof allocated / sizeof *allocated; i++)
        complete &= allocated[i] != NULL;
    if (np_predictor_has_input(shape))
        complete &= vectors_create(&engine->predictor_input, shape->predictor_type, shape->width, tokens);
    if (shape->predictor_rank)
        complete &= vectors_create(&engine->ranks, shape->predictor_type, shape->predictor_rank, tokens);
    if (shape->chosen_per_token)
        complete &= vectors_create(&engine->gathered, shape->type, max_n, tokens);
    if (shape->branch_norms)
        complete &= vectors_create(&engine->routed, shape->type, shape->width, tokens);
    if (shape->experts > 1 && np_predictor_has_input(shape))
        complete &= vectors_create(&engine->gathered_input, shape->predictor_type, shape->width, tokens);
    if (shape->down_by_output)
        complete &= vectors_create(&engine->values, shape->down.type, shape->neurons, smaller(tokens, NP_OUTPUT_TOKENS));
    if (!complete) {
        np_engine_destroy(engine);
        return NULL;
    }
    if (shared->window) /* a previous incarnation of this process may have died with a window open */
        np_long_store(shared->window, 0);
    return engine;
}

/* Free the reader of external products' rows (offload/product_rows.c). */
static void destroy_row_reader(np_engine *engine)
{
    np_external_state *e = &engine->external;
    np_engine_destroy(e->reader);
    for (int i = 0; i < 3; i++) {
        free(e->quants[i]);
        free(e->scales[i]);
    }
}

void np_engine_destroy(np_engine *engine)
{
    if (!engine)
        return;
    free(engine->sequence);
    free(engine->position);
    free(engine->token);
    free(engine->drafted);
    free(engine->runs);
    np_vectors *all[] = {&engine->vectors,        &engine->predictor_input, &engine->ranks, &engine->routed, &engine->gathered,
                         &engine->gathered_input, &engine->values};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]->prepared);
        free(all[i]->panel);
    }
    free(engine->vector);
    free(engine->rows);
    free(engine->scores);
    free(engine->states);
    for (int part = 0; part < NP_PARTS; part++)
        free(engine->slot_tables[part]);
    free(engine->pending);
    free(engine->open);
    free(engine->list.quants);
    free(engine->list.scales);
    free(engine->list.prefetch);
    free(engine->list.values);
    free(engine->list.token_masks);
    free(engine->list.neurons);
    free(engine->request_entries);
    free(engine->groups);
    free(engine->pair_token);
    free(engine->pair_weight);
    free(engine->token_pairs);
    free(engine->expert_weights);
    free(engine->expert_counts);
    free(engine->expert_values);
    free(engine->expert_scores);
    destroy_row_reader(engine);
    free(engine->likely_counts);
    free(engine->likely_experts);
    free(engine);
}

/* Move the row reader's counters to those of its engine. */
static void add_row_reader_counters(np_engine *engine, np_engine_counters *to)
{
    np_engine_counters c;
    if (!engine->external.reader)
        return;
    np_engine_read_counters(engine->external.reader, &c);
    to->flash_ns += c.flash_ns;
    to->foreseen += c.foreseen;
    to->foreseen_missed += c.foreseen_missed;
    for (int part = 0; part < NP_PARTS; part++) {
        to->clusters[part] += c.clusters[part];
        to->missed[part] += c.missed[part];
    }
    if (c.damaged_word >= 0) {
        to->damaged_word = c.damaged_word;
        to->damaged_part = c.damaged_part;
    }
}

void np_engine_read_counters(np_engine *engine, np_engine_counters *out)
{
    *out = engine->counters;
    add_row_reader_counters(engine, out);
    memset(&engine->counters, 0, sizeof engine->counters);
    engine->counters.damaged_word = -1;
}

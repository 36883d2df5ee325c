/* Life of an engine, a step from end to end, and what its stages share. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

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

/* Room for vectors of up to `longest` elements; 0 when memory is short. */
static int vectors_create(np_vectors *vectors, int type, size_t longest, size_t tokens)
{
    vectors->type = type;
    vectors->stride = (np_activation_bytes(type, longest) + 63) & ~(size_t)63;
    vectors->prepared = aligned_zeros(tokens * vectors->stride);
    vectors->panel = tokens >= NP_PANEL_TOKENS ? aligned_zeros(np_panel_bytes(type, longest, tokens)) : NULL;
    return vectors->prepared && (tokens < NP_PANEL_TOKENS || vectors->panel);
}

np_engine *np_engine_create(const np_shape *shape, const np_fixed *fixed, const np_shared *shared, const np_engine_config *config,
                            const char **wrong)
{
    *wrong = np_engine_wrong_field(shape, fixed, shared, config);
    np_engine *engine = *wrong ? NULL : calloc(1, sizeof *engine);
    if (!engine)
        return NULL;
    engine->shape = *shape;
    engine->fixed = *fixed;
    engine->shared = *shared;
    engine->config = *config;
    engine->counters.damaged_word = -1;
    engine->outside.result = engine->held.result = NP_E_ARGUMENT; /* no step was begun */

    const size_t heads_width = (size_t)shape->query_heads * shape->head_width, tokens = config->max_tokens;
    const size_t longest = larger(shape->width, heads_width);
    engine->layer_neurons = (size_t)shape->blocks * shape->block_neurons;
    engine->mask_bytes = (tokens + 7) / 8;
    const size_t pairs = tokens * shape->experts_per_token, groups = larger(1, smaller(pairs, shape->experts));
    engine->row_quant_bytes = (uint32_t)np_quant_bytes(shape->type, shape->width);
    engine->row_scale_bytes = (uint32_t)np_scale_bytes(shape->type, shape->width);
    engine->trigger_quant_bytes = (uint32_t)np_quant_bytes(shape->trigger_type, shape->width);
    engine->max_rows = larger(NP_PIECE_ROWS, larger(shape->head_width, 2 * (size_t)shape->block_neurons));

    engine->sequence = aligned_zeros(tokens * sizeof(int32_t));
    engine->position = aligned_zeros(tokens * sizeof(int32_t));
    engine->token = aligned_zeros(tokens * sizeof(int32_t));
    engine->vector = aligned_zeros(longest * sizeof(float));
    engine->rows = aligned_zeros(tokens * engine->max_rows * sizeof(float));
    engine->scores = aligned_zeros(4 * (size_t)shape->context_tokens * sizeof(float)); /* as np_attend wants them */
    engine->open_groups = (uint32_t)(np_may_open_layers(engine) ? smaller(groups, (size_t)config->partial_tokens * shape->experts_per_token) : 1);
    engine->states = aligned_zeros((size_t)engine->open_groups * shape->clusters);
    for (int part = 0; part < NP_PARTS; part++)
        engine->found[part] = aligned_zeros((size_t)engine->open_groups * shape->clusters * sizeof(uint32_t));
    engine->pending = aligned_zeros((size_t)engine->open_groups * shape->blocks * sizeof(uint32_t));
    engine->open = aligned_zeros(shape->block_neurons / shape->cluster_neurons * sizeof(uint32_t));
    engine->list.quants = aligned_zeros(shape->block_neurons * sizeof(void *));
    engine->list.scales = aligned_zeros(shape->block_neurons * sizeof(void *));
    engine->list.beside = aligned_zeros(shape->block_neurons * sizeof(void *));
    engine->list.values = aligned_zeros(shape->block_neurons * sizeof(float));
    engine->list.wanted = aligned_zeros(shape->block_neurons * sizeof(uint16_t));
    engine->list.neurons = aligned_zeros(shape->block_neurons * sizeof(uint32_t));
    engine->asked = aligned_zeros(groups * shape->clusters * sizeof(uint32_t));
    engine->groups = aligned_zeros(groups * sizeof(np_group));
    engine->pair_token = aligned_zeros(pairs * sizeof(uint32_t));
    engine->pair_weight = aligned_zeros(pairs * sizeof(float));
    engine->token_pairs = aligned_zeros(pairs * sizeof(uint32_t));
    engine->shares = aligned_zeros(pairs * sizeof(float));
    engine->expert_counts = aligned_zeros(shape->experts * sizeof(uint32_t));
    engine->expert_values = aligned_zeros(shape->experts * sizeof(float));
    engine->guesses = aligned_zeros(shape->layers * sizeof(np_guesses));
    engine->guessed = aligned_zeros(shape->experts);
    const void *allocated[] = {engine->sequence,      engine->position,         engine->token,           engine->vector,
                               engine->rows,          engine->scores,           engine->states,          engine->found[NP_TRIGGER],
                               engine->found[NP_VALUE], engine->pending,        engine->list.quants,     engine->list.scales,
                               engine->list.beside,   engine->list.values,      engine->list.neurons,    engine->asked,
                               engine->groups,        engine->pair_token,       engine->pair_weight,     engine->token_pairs,
                               engine->shares,        engine->expert_counts,    engine->expert_values,   engine->guesses,
                               engine->guessed,       engine->open,
                               engine->list.wanted};
    /* Vectors for q8 take as much room as those for q4, so the output's fit too. */
    int complete = vectors_create(&engine->vectors, shape->type, longest, tokens);
    for (size_t i = 0; i < sizeof allocated / sizeof *allocated; i++)
        complete &= allocated[i] != NULL;
    if (np_predictor_has_input(shape))
        complete &= vectors_create(&engine->predictor_input, shape->predictor_type, shape->width, tokens);
    if (shape->predictor_rank)
        complete &= vectors_create(&engine->ranks, shape->predictor_type, shape->predictor_rank, tokens);
    if (shape->experts > 1)
        complete &= vectors_create(&engine->gathered, shape->type, longest, tokens);
    if (shape->experts > 1 && np_predictor_has_input(shape))
        complete &= vectors_create(&engine->gathered_input, shape->predictor_type, shape->width, tokens);
    if (!complete) {
        np_engine_destroy(engine);
        return NULL;
    }
    if (shared->window) /* whoever was this participant before may have died with a window open */
        np_long_store(shared->window, 0);
    return engine;
}

void np_engine_destroy(np_engine *engine)
{
    if (!engine)
        return;
    free(engine->sequence);
    free(engine->position);
    free(engine->token);
    np_vectors *all[] = {&engine->vectors, &engine->predictor_input, &engine->ranks, &engine->gathered, &engine->gathered_input};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]->prepared);
        free(all[i]->panel);
    }
    free(engine->vector);
    free(engine->rows);
    free(engine->scores);
    free(engine->states);
    for (int part = 0; part < NP_PARTS; part++)
        free(engine->found[part]);
    free(engine->pending);
    free(engine->open);
    free(engine->list.quants);
    free(engine->list.scales);
    free(engine->list.beside);
    free(engine->list.values);
    free(engine->list.wanted);
    free(engine->list.neurons);
    free(engine->asked);
    free(engine->groups);
    free(engine->pair_token);
    free(engine->pair_weight);
    free(engine->token_pairs);
    free(engine->shares);
    free(engine->expert_counts);
    free(engine->expert_values);
    np_rows_destroy(engine);
    free(engine->guesses);
    free(engine->guessed);
    free(engine);
}

/* Whether matrices may be one participant's alone: there are others, and if it is this one it has room for what another computes. */
static int may_be_held(const np_engine *engine, const np_step *step)
{
    const uint32_t all = NP_HELD_QKV | NP_HELD_ATTENTION_OUTPUT | NP_HELD_OUTPUT;
    const int has_room = engine->shared.outputs && engine->shared.kv;
    return !(step->held_matrices & ~all) && step->participants > 1 && !engine->config.outside && (!engine->config.held || has_room);
}

/* Whether these may be rated: every token has its logits here, in this memory, and nobody else's are asked for. */
static int may_be_rated(const np_engine *engine, const np_step *step)
{
    const np_ratings *r = step->ratings;
    if (!r->count || r->count > step->count || r->likely > engine->shape.vocabulary || step->logits_count || step->held_matrices)
        return 0;
    for (uint32_t t = 0; t < r->count; t++) {
        const int32_t target = r->ids[(size_t)t * (1 + r->likely)];
        if (target < 0 || (uint32_t)target >= engine->shape.vocabulary)
            return 0;
    }
    return engine->config.logit_rows > 0;
}

int np_engine_take_step(np_engine *engine, const np_step *step)
{
    const np_shape *s = &engine->shape;
    const uint32_t count = step->count;
    if (!count || count > engine->config.max_tokens || step->logits_first > count || step->logits_count > count - step->logits_first ||
        step->logits_count > engine->config.logit_rows)
        return NP_E_ARGUMENT;
    if (step->participant >= step->participants || step->sharer >= step->sharers || step->sharers > step->participants ||
        step->first_block > step->end_block || step->end_block > s->blocks || step->held_blocks > s->blocks)
        return NP_E_ARGUMENT;
    if (step->held_matrices && !may_be_held(engine, step))
        return NP_E_ARGUMENT;
    if (step->ratings && !may_be_rated(engine, step))
        return NP_E_ARGUMENT;
    if (!engine->config.held && step->first_block < step->end_block && step->first_block < step->held_blocks)
        return NP_E_ARGUMENT; /* its block sums would lie where those of nodes belong */
    if (!engine->config.pipeline && step->end_block - step->first_block != s->blocks)
        return NP_E_ARGUMENT; /* all participants go through the same windows then, with barriers between */
    for (uint32_t t = 0; t < count; t++)
        if (step->sequences[t] < 0 || (uint32_t)step->sequences[t] >= engine->config.sequences || step->positions[t] < 0 ||
            (uint32_t)step->positions[t] >= s->context_tokens || step->tokens[t] < 0 || (uint32_t)step->tokens[t] >= s->vocabulary)
            return NP_E_ARGUMENT;
    engine->started = np_clock_ns();
    engine->step = step->number;
    engine->epoch = step->epoch;
    engine->participants = step->participants;
    engine->participant = step->participant;
    engine->blocks = (np_range){step->first_block, step->end_block};
    engine->held_blocks = step->held_blocks;
    engine->held_matrices = step->held_matrices;
    engine->sharers = step->sharers;
    engine->sharer = step->sharer;
    engine->count = count;
    engine->logits_first = step->logits_first;
    engine->logits_count = step->logits_count;
    engine->ratings = step->ratings;
    memcpy(engine->sequence, step->sequences, count * sizeof *step->sequences);
    memcpy(engine->position, step->positions, count * sizeof *step->positions);
    memcpy(engine->token, step->tokens, count * sizeof *step->tokens);
    if (s->experts == 1)
        np_engine_route_all(engine);
    return NP_OK;
}

void np_engine_begin_layer(np_engine *engine, uint32_t layer)
{
    if (np_engine_routes(engine, NP_READS_LAYER))
        np_engine_route(engine, layer);
    else
        np_engine_guess(engine, layer);
}

np_stage *np_engine_stage(const np_engine *engine, uint32_t number)
{
    static np_stage *const stages[2][NP_STAGES] = {
        {np_engine_attention, np_engine_project, np_engine_feed_forward},
        {np_engine_attention, np_engine_feed_forward, np_engine_project}, /* parallel: both read what the layer gets */
    };
    return stages[engine->shape.parallel != 0][number];
}

static int layer_of(np_engine *engine, uint32_t layer)
{
    int done = NP_OK;
    np_engine_begin_layer(engine, layer);
    for (uint32_t i = 0; i < NP_STAGES && done >= 0; i++)
        done = np_engine_stage(engine, i)(engine, layer);
    return done;
}

int np_engine_end_step(np_engine *engine, int done)
{
    if (done >= 0 && engine->logits_count)
        done = np_engine_logits(engine);
    if (done >= 0 && engine->ratings)
        done = np_engine_rate(engine);
    np_trace_put(&engine->shared.trace, NP_SPAN_STEP, 0, engine->count, engine->step, engine->started);
    engine->counters.step_ns += np_clock_ns() - engine->started;
    return done < 0 ? done : NP_OK;
}

int np_engine_step(np_engine *engine, const np_step *step)
{
    int done = engine->config.outside || engine->config.held ? NP_E_ARGUMENT : np_engine_take_step(engine, step);
    if (done < 0)
        return done;
    done = np_engine_embed(engine);
    for (uint32_t layer = 0; layer < engine->shape.layers && done >= 0; layer++)
        done = layer_of(engine, layer);
    return np_engine_end_step(engine, done);
}

uint32_t np_engine_claims(uint32_t layers)
{
    return layers * NP_WORKS + 1;
}

uint32_t np_engine_claim(np_engine *engine, uint32_t layer, int work, uint32_t pieces)
{
    if (engine->config.held)
        return np_held_claim(engine, work, pieces); /* who waits for another's device holds nobody up */
    /* Relaxed: a barrier lies between this work and what it reads, and between it and who reads what it writes. */
    const uint32_t piece = __atomic_fetch_add(&engine->shared.claims[layer * NP_WORKS + (uint32_t)work], 1, __ATOMIC_RELAXED);
    return piece < pieces ? piece : NP_NO_PIECE;
}

uint32_t np_engine_claim_own(np_engine *engine, int work, uint32_t pieces)
{
    if (engine->sharers > 1)
        return np_engine_claim(engine, engine->layer, work, pieces);
    uint32_t *next = &engine->claimed[work == NP_WORK_DOWNS];
    return *next < pieces ? (*next)++ : NP_NO_PIECE;
}

np_range np_engine_share(const np_engine *engine, uint32_t n)
{
    const uint64_t participants = engine->participants, participant = engine->participant;
    return (np_range){(uint32_t)(n * participant / participants), (uint32_t)(n * (participant + 1) / participants)};
}

int np_engine_barrier(np_engine *engine)
{
    if (engine->participants == 1)
        return np_word_load(engine->shared.epoch) == engine->epoch ? 1 : NP_E_EPOCH;
    const uint64_t before = np_clock_ns();
    const int last = np_barrier_wait(engine->shared.barrier, engine->participants, engine->shared.epoch, engine->epoch,
                                     engine->config.spin_us, 0);
    engine->counters.barrier_ns += np_clock_ns() - before;
    np_trace_put(&engine->shared.trace, NP_SPAN_BARRIER, engine->layer, 0, engine->step, before);
    return last;
}

void np_engine_norm(const np_engine *engine, const np_norm *norm, const float *x, size_t n, float *out)
{
    if (engine->shape.norm == NP_NORM_LAYER)
        np_layer_norm(x, norm->weight, norm->bias, n, engine->shape.norm_epsilon, out);
    else
        np_rms_norm(x, norm->weight, n, engine->shape.norm_epsilon, out);
}

void np_engine_prepare(np_engine *engine, np_vectors *to, const float *source, uint32_t count, size_t stride, size_t n, const np_norm *norm)
{
    to->n = n;
    to->count = count;
    for (uint32_t t = 0; t < count; t++) {
        const float *x = source + t * stride;
        if (norm) {
            np_engine_norm(engine, norm, x, n, engine->vector);
            x = engine->vector;
        }
        np_activation_prepare(to->type, x, n, to->prepared + t * to->stride);
    }
    if (count >= NP_PANEL_TOKENS)
        np_panel_prepare(to->type, to->prepared, to->stride, count, n, to->panel);
}

void np_engine_dot(const np_engine *engine, const np_vectors *x, const np_matrix *m, uint32_t first_row, uint32_t rows,
                   const float *bias, float *out, size_t out_stride)
{
    const size_t quant_bytes = np_quant_bytes(x->type, x->n), scale_bytes = np_scale_bytes(x->type, x->n);
    const uint8_t *quants = (const uint8_t *)m->quants + first_row * quant_bytes;
    const uint8_t *scales = scale_bytes ? (const uint8_t *)m->scales + first_row * scale_bytes : NULL;
    if (x->count < NP_PANEL_TOKENS) {
        np_dot_rows(x->type, quants, scales, rows, x->n, x->prepared, x->stride, x->count, bias ? bias + first_row : NULL, out,
                    out_stride);
        return;
    }
    const void *quants_at[NP_PIECE_ROWS], *scales_at[NP_PIECE_ROWS];
    for (uint32_t row = 0; row < rows; row += NP_PIECE_ROWS) {
        const uint32_t some = rows - row < NP_PIECE_ROWS ? rows - row : NP_PIECE_ROWS;
        for (uint32_t r = 0; r < some; r++) {
            quants_at[r] = quants + (row + r) * quant_bytes;
            scales_at[r] = scales ? scales + (row + r) * scale_bytes : NULL;
        }
        np_dot_panel(x->type, quants_at, scales_at, some, x->n, x->panel, x->count, bias ? bias + first_row + row : NULL,
                     out + row, out_stride);
    }
}

int np_engine_embed(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    const np_range tokens = np_engine_share(engine, engine->count);
    const np_matrix *m = &engine->fixed.embedding;
    const size_t quant_bytes = np_quant_bytes(s->embedding_type, s->width), scale_bytes = np_scale_bytes(s->embedding_type, s->width);
    for (uint32_t t = tokens.from; t < tokens.to; t++) {
        float *residual = engine->shared.residual + (size_t)t * s->width;
        np_decode_row(s->embedding_type, (const uint8_t *)m->quants + engine->token[t] * quant_bytes,
                      (const uint8_t *)m->scales + engine->token[t] * scale_bytes, s->width, residual);
        np_scale(residual, s->width, s->embedding_scale);
        if (!s->rotary)
            np_add(engine->fixed.position_embedding + (size_t)engine->position[t] * s->width, s->width, residual);
    }
    return np_engine_barrier(engine);
}

void np_engine_begin_logits(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    for (uint32_t t = 0; t < engine->logits_count; t++) {
        np_engine_norm(engine, &engine->fixed.output_norm, engine->shared.residual + (size_t)(engine->logits_first + t) * s->width, s->width,
                       engine->vector);
        np_scale(engine->vector, s->width, s->logit_scale);
        np_activation_prepare(s->embedding_type, engine->vector, s->width, engine->vectors.prepared + t * engine->vectors.stride);
    }
}

static void compute_logits(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    const np_matrix *m = &engine->fixed.output;
    const size_t quant_bytes = np_quant_bytes(s->embedding_type, s->width), scale_bytes = np_scale_bytes(s->embedding_type, s->width);
    const uint32_t pieces = (s->vocabulary + NP_PIECE_ROWS - 1) / NP_PIECE_ROWS;
    np_engine_begin_logits(engine);
    for (uint32_t piece; (piece = np_engine_claim(engine, s->layers, 0, pieces)) != NP_NO_PIECE;) {
        const uint32_t row = piece * NP_PIECE_ROWS, rows = s->vocabulary - row < NP_PIECE_ROWS ? s->vocabulary - row : NP_PIECE_ROWS;
        np_dot_rows(s->embedding_type, (const uint8_t *)m->quants + row * quant_bytes, (const uint8_t *)m->scales + row * scale_bytes, rows,
                    s->width, engine->vectors.prepared, engine->vectors.stride, engine->logits_count, NULL, engine->shared.logits + row,
                    s->vocabulary);
        engine->counters.matrix_rows += (uint64_t)rows * engine->logits_count;
    }
}

int np_engine_logits(np_engine *engine)
{
    const uint64_t started = np_clock_ns();
    if (!(engine->held_matrices & NP_HELD_OUTPUT)) /* else they are there, or will be at the barrier */
        compute_logits(engine);
    np_trace_put(&engine->shared.trace, NP_SPAN_LOGITS, engine->shape.layers, engine->logits_count, engine->step, started);
    return np_engine_barrier(engine);
}

void np_engine_read_counters(np_engine *engine, np_engine_counters *out)
{
    *out = engine->counters;
    np_rows_count(engine, out);
    memset(&engine->counters, 0, sizeof engine->counters);
    engine->counters.damaged_word = -1;
}

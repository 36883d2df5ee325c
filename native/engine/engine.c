/* Life of an engine, the ends of a step (embedding, logits), and what the middle shares. */
#include "engine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NP_MOST_BLOCK_CLUSTERS = 65536 };

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static void *aligned_zeros(size_t bytes)
{
    bytes = (bytes + 127) & ~(size_t)63;
    void *memory = aligned_alloc(64, bytes);
    if (memory)
        memset(memory, 0, bytes);
    return memory;
}

np_range np_engine_share(const np_engine *engine, uint32_t n)
{
    np_range range = {(uint32_t)floor(n * engine->share_from + 0.5), (uint32_t)floor(n * engine->share_to + 0.5)};
    if (range.to > n)
        range.to = n;
    return range;
}

static int shape_is_consistent(const np_shape *s)
{
    return s->width && s->neurons && s->layers && s->query_heads && s->key_heads && s->head_width && s->vocabulary &&
           s->context_tokens && s->head_width % 2 == 0 && s->query_heads % s->key_heads == 0 && s->cluster_neurons &&
           s->block_neurons && s->block_neurons % s->cluster_neurons == 0 &&
           s->block_neurons / s->cluster_neurons <= NP_MOST_BLOCK_CLUSTERS &&
           (uint64_t)s->clusters * s->cluster_neurons >= s->neurons &&
           (uint64_t)s->blocks * s->block_neurons >= s->neurons && s->activation >= NP_RELU && s->activation <= NP_SILU &&
           np_quant_bytes(s->type, s->width) > 0 && np_quant_bytes(s->type, (size_t)s->query_heads * s->head_width) > 0;
}

np_engine *np_engine_create(const np_shape *shape, const np_fixed *fixed, const np_shared *shared, uint32_t sequences,
                            uint32_t max_tokens, uint32_t logit_rows, uint32_t members, double share_from, double share_to,
                            uint32_t spin_us)
{
    if (!shape_is_consistent(shape) || !sequences || !max_tokens || !logit_rows || !members ||
        !(share_from >= 0 && share_to <= 1 && share_from <= share_to)) /* so that NaN is refused, too */
        return NULL;
    np_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return NULL;
    engine->shape = *shape;
    engine->fixed = *fixed;
    engine->shared = *shared;
    engine->sequences = sequences;
    engine->max_tokens = max_tokens;
    engine->logit_rows = logit_rows;
    engine->members = members;
    engine->share_from = share_from;
    engine->share_to = share_to;
    engine->spin_us = spin_us;
    engine->counters.damaged_word = -1;

    const size_t heads_width = (size_t)shape->query_heads * shape->head_width;
    const size_t longest = larger(shape->width, heads_width);
    engine->own_blocks = np_engine_share(engine, shape->blocks);
    const size_t own = engine->own_blocks.to - engine->own_blocks.from;
    const size_t clusters_per_block = shape->block_neurons / shape->cluster_neurons;
    engine->hidden_stride = own * shape->block_neurons;
    engine->row_quant_bytes = (uint32_t)np_quant_bytes(shape->type, shape->width);
    engine->row_scale_bytes = (uint32_t)np_scale_bytes(shape->type, shape->width);
    engine->activation_stride = (np_activation_bytes(shape->type, longest) + 63) & ~(size_t)63;
    const np_range rows = np_engine_share(engine, shape->width);
    engine->max_rows = larger(rows.to - rows.from, shape->head_width);

    engine->sequence = aligned_zeros(max_tokens * sizeof(int32_t));
    engine->position = aligned_zeros(max_tokens * sizeof(int32_t));
    engine->token = aligned_zeros(max_tokens * sizeof(int32_t));
    engine->activations = aligned_zeros(max_tokens * engine->activation_stride);
    engine->vector = aligned_zeros(longest * sizeof(float));
    engine->rows = aligned_zeros(max_tokens * engine->max_rows * sizeof(float));
    engine->scores = aligned_zeros(shape->context_tokens * sizeof(float));
    engine->hidden = aligned_zeros(max_tokens * engine->hidden_stride * sizeof(float));
    engine->cluster_state = aligned_zeros(own * clusters_per_block);
    engine->block_done = aligned_zeros(own);
    engine->block_slots = aligned_zeros(clusters_per_block * sizeof *engine->block_slots);
    if (!engine->sequence || !engine->position || !engine->token || !engine->activations || !engine->vector || !engine->rows ||
        !engine->scores || !engine->hidden || !engine->cluster_state || !engine->block_done ||
        !engine->block_slots) {
        np_engine_destroy(engine);
        return NULL;
    }
    return engine;
}

void np_engine_destroy(np_engine *engine)
{
    if (!engine)
        return;
    free(engine->sequence);
    free(engine->position);
    free(engine->token);
    free(engine->activations);
    free(engine->vector);
    free(engine->rows);
    free(engine->scores);
    free(engine->hidden);
    free(engine->cluster_state);
    free(engine->block_done);
    free(engine->block_slots);
    free(engine);
}

int np_engine_begin(np_engine *engine, uint32_t epoch, const int32_t *sequences, const int32_t *positions,
                    const int32_t *tokens, uint32_t count)
{
    const np_shape *s = &engine->shape;
    if (!count || count > engine->max_tokens)
        return NP_E_ARGUMENT;
    for (uint32_t t = 0; t < count; t++)
        if (sequences[t] < 0 || (uint32_t)sequences[t] >= engine->sequences || positions[t] < 0 ||
            (uint32_t)positions[t] >= s->context_tokens || tokens[t] < 0 || (uint32_t)tokens[t] >= s->vocabulary)
            return NP_E_ARGUMENT;
    engine->epoch = epoch;
    engine->count = count;
    memcpy(engine->sequence, sequences, count * sizeof *sequences);
    memcpy(engine->position, positions, count * sizeof *positions);
    memcpy(engine->token, tokens, count * sizeof *tokens);
    return NP_OK;
}

int np_engine_meet(np_engine *engine)
{
    if (engine->members == 1)
        return np_word_load(engine->shared.epoch) == engine->epoch ? 1 : NP_E_EPOCH;
    const uint64_t before = np_clock_ns();
    const int last = np_barrier_wait(engine->shared.barrier, engine->members, engine->shared.epoch, engine->epoch, engine->spin_us, 0);
    engine->counters.meet_us += (np_clock_ns() - before) / 1000;
    return last;
}

void np_engine_prepare(np_engine *engine, const float *source, size_t stride, size_t n, const float *norm)
{
    for (uint32_t t = 0; t < engine->count; t++) {
        const float *x = source + t * stride;
        if (norm) {
            np_rms_norm(x, norm, n, engine->shape.norm_epsilon, engine->vector);
            x = engine->vector;
        }
        np_activation_prepare(engine->shape.type, x, n, engine->activations + t * engine->activation_stride);
    }
}

int np_engine_embed(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    const np_range tokens = np_engine_share(engine, engine->count);
    const np_matrix *m = &engine->fixed.embedding;
    for (uint32_t t = tokens.from; t < tokens.to; t++)
        np_decode_row(s->type, (const uint8_t *)m->quants + (size_t)engine->token[t] * engine->row_quant_bytes,
                      (const uint8_t *)m->scales + (size_t)engine->token[t] * engine->row_scale_bytes, s->width,
                      engine->shared.residual + (size_t)t * s->width);
    return np_engine_meet(engine);
}

int np_engine_logits(np_engine *engine, uint32_t first, uint32_t count, uint32_t row)
{
    const np_shape *s = &engine->shape;
    if (first > engine->count || count > engine->count - first || row > engine->logit_rows || count > engine->logit_rows - row)
        return NP_E_ARGUMENT;
    const np_range own = np_engine_share(engine, s->vocabulary);
    const np_matrix *m = &engine->fixed.output;
    for (uint32_t t = 0; t < count; t++) {
        np_rms_norm(engine->shared.residual + (size_t)(first + t) * s->width, engine->fixed.output_norm, s->width,
                    s->norm_epsilon, engine->vector);
        np_activation_prepare(s->type, engine->vector, s->width, engine->activations + t * engine->activation_stride);
    }
    np_dot_rows(s->type, (const uint8_t *)m->quants + (size_t)own.from * engine->row_quant_bytes,
                (const uint8_t *)m->scales + (size_t)own.from * engine->row_scale_bytes, own.to - own.from, s->width,
                engine->activations, engine->activation_stride, count, NULL,
                engine->shared.logits + (size_t)row * s->vocabulary + own.from, s->vocabulary);
    return np_engine_meet(engine);
}

void np_engine_read_counters(np_engine *engine, np_engine_counters *out)
{
    *out = engine->counters;
    memset(&engine->counters, 0, sizeof engine->counters);
    engine->counters.damaged_word = -1;
}

/* The two ends of the model: embeddings at the start of a step; logits and scored tokens at its end. */
#include "engine/logits.h"

#include <string.h>

#include "engine/vectors.h"
#include "engine/work.h"

/* The quants of a token's embedding; NULL: they cannot be read. */
static const uint8_t *embedding_quants(np_engine *engine, int32_t token)
{
    const np_matrix *m = &engine->fixed.embedding;
    if (engine->fixed.embedding_rows)
        return np_row_file_read(engine->fixed.embedding_rows, (uint32_t)token);
    return (const uint8_t *)m->quants + (size_t)token * np_quant_bytes(m->type, engine->shape.width);
}

int np_embed_token(np_engine *engine, int32_t token, float *out)
{
    const np_shape *s = &engine->shape;
    const np_matrix *m = &engine->fixed.embedding;
    const uint8_t *quants = embedding_quants(engine, token);
    if (!quants)
        return NP_E_IO;
    np_decode_row(m->type, quants, (const uint8_t *)m->scales + token * np_scale_bytes(m->type, s->width), s->width, out);
    np_scale(out, s->width, s->embedding_scale);
    return NP_OK;
}

int np_embed(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    const np_range tokens = np_even_share(engine, engine->count);
    for (uint32_t t = tokens.from; t < tokens.to; t++) {
        float *residual = engine->shared.residual + (size_t)t * s->width;
        const int done = np_embed_token(engine, engine->token[t], residual);
        if (done < 0)
            return done;
        if (!s->rotary)
            np_add(engine->fixed.position_embedding + (size_t)engine->position[t] * s->width, s->width, residual);
    }
    return np_meet(engine);
}

void np_begin_logits(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    for (uint32_t t = 0; t < engine->logits_count; t++) {
        np_norm_vector(engine, engine->logits_norm, engine->shared.residual + (size_t)(engine->logits_first + t) * s->width, s->width,
                       engine->vector);
        np_scale(engine->vector, s->width, s->logit_scale);
        np_activation_prepare(engine->fixed.output.type, engine->vector, s->width, engine->vectors.prepared + t * engine->vectors.stride);
    }
}

static void multiply_output(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    const np_matrix *m = &engine->fixed.output;
    const float *bias = engine->fixed.output_bias;
    const size_t quant_bytes = np_quant_bytes(m->type, s->width), scale_bytes = np_scale_bytes(m->type, s->width);
    const uint32_t pieces = (s->vocabulary + NP_PIECE_ROWS - 1) / NP_PIECE_ROWS;
    np_begin_logits(engine);
    for (uint32_t piece; (piece = np_claim(engine, s->layers, 0, pieces)) != NP_NONE;) {
        const uint32_t row = piece * NP_PIECE_ROWS, rows = s->vocabulary - row < NP_PIECE_ROWS ? s->vocabulary - row : NP_PIECE_ROWS;
        np_dot_rows(m->type, (const uint8_t *)m->quants + row * quant_bytes, (const uint8_t *)m->scales + row * scale_bytes, rows,
                    s->width, engine->vectors.prepared, engine->vectors.stride, engine->logits_count, bias ? bias + row : NULL, engine->shared.logits + row,
                    s->vocabulary);
        for (uint32_t t = 0; s->logit_cap != 0.0f && t < engine->logits_count; t++)
            np_soft_cap(engine->shared.logits + (size_t)t * s->vocabulary + row, rows, s->logit_cap);
        engine->counters.matrix_rows += (uint64_t)rows * engine->logits_count;
    }
}

int np_compute_logits(np_engine *engine)
{
    const uint64_t started = np_clock_ns();
    if (!(engine->offloaded_matrices & NP_OFFLOAD_OUTPUT)) /* otherwise the offload participant writes them before the barrier */
        multiply_output(engine);
    np_trace_put(&engine->shared.trace, NP_SPAN_LOGITS, engine->shape.layers, engine->logits_count, engine->step, started);
    return np_meet(engine);
}

void np_reset_logits_claims(np_engine *engine)
{
    if (!engine->participant)
        __atomic_store_n(&engine->shared.claims[engine->shape.layers * NP_WORKS], 0, __ATOMIC_RELAXED);
}

/* ---- scored tokens ------------------------------------------------------------------------------------------------ */
/* Logits are computed for a few tokens at a time, read at once and overwritten by the next ones', so that a text of any
 * length needs no more memory than a decode step. */
/* Score the targets of token t by its row of logits. */
static void score(const np_engine *engine, uint32_t row, uint32_t t)
{
    const np_token_scores *r = engine->token_scores;
    const size_t vocabulary = engine->shape.vocabulary, place = (size_t)t * (1 + r->likely);
    const float *logits = engine->shared.logits + row * vocabulary;
    if (r->likely)
        np_greatest(logits, vocabulary, r->likely, r->ids + place + 1);
    np_log_probabilities(logits, vocabulary, r->ids + place, 1 + r->likely, r->logs + place);
}

int np_score_tokens(np_engine *engine)
{
    const np_token_scores *r = engine->token_scores;
    for (uint32_t first = 0; first < r->count; first += engine->logits_count) {
        const uint32_t left = r->count - first, room = engine->config.logit_rows;
        engine->logits_first = first;
        engine->logits_count = left < room ? left : room;
        const int done = np_compute_logits(engine);
        if (done < 0)
            return done;
        np_reset_logits_claims(engine);
        for (uint32_t row = engine->participant; row < engine->logits_count; row += engine->participants)
            score(engine, row, first + row);
        const int met = np_meet(engine);
        if (met < 0)
            return met;
    }
    return NP_OK;
}

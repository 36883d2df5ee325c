/* The draft layer (multi-token prediction): it reads a token and the last hidden state of the token before it, and
 * predicts the token after it. For further tokens it reads its own hidden state instead.
 *
 *   stage   work                              writes
 *   join    tokens, in even shares            queries: a token's normed embedding, then the normed hidden state
 *   input   rows of draft_input, likewise     residual
 *   the stages of a layer, those of the logits
 *
 * A token's keys and values lie at the position of the token before it, whose hidden state it reads. */
#include "engine/drafts.h"

#include <string.h>

#include "engine/logits.h"
#include "engine/routing.h"
#include "engine/step.h"
#include "engine/vectors.h"
#include "engine/work.h"

/* The hidden states that the layer reads, [count][width]. norm: still to be applied; NULL: none. */
typedef struct {
    const float *states;
    const np_norm *norm;
} np_draft_source;

uint32_t np_drafted_tokens(const np_step *step)
{
    uint32_t drafted = 0;
    while (step->draft_count && drafted < step->count && step->tokens[step->count - 1 - drafted] == NP_DRAFTED)
        drafted++;
    return drafted;
}

int np_drafts_fit(const np_engine *engine, const np_step *step)
{
    const np_shape *s = &engine->shape;
    const uint32_t drafted = np_drafted_tokens(step);
    if (!s->draft_layers || engine->config.external_products || engine->config.offload_blocks || step->offloaded_matrices || step->offloaded_blocks)
        return 0;
    if (step->draft_count > (drafted ? engine->config.logit_rows : step->count) || step->draft_count > engine->config.max_tokens || drafted == step->count)
        return 0;
    for (uint32_t t = 0; t < step->draft_count; t++)
        if (!np_is_token(s, step->draft_tokens[t]))
            return 0;
    for (uint32_t t = 1; drafted && t < step->count; t++)
        if (step->sequences[t] != step->sequences[0] || step->positions[t] != (int64_t)step->positions[0] + t)
            return 0;
    return !drafted || step->positions[0] >= (int32_t)step->draft_count;
}

/* Let the layer compute `count` tokens of the step's first sequence, at consecutive positions. */
static void take_tokens(np_engine *engine, const np_step *step, const int32_t *tokens, uint32_t count, int32_t position)
{
    engine->count = count;
    for (uint32_t t = 0; t < count; t++) {
        engine->sequence[t] = step->sequences[0];
        engine->position[t] = position + (int32_t)t;
        engine->token[t] = tokens[t];
    }
    if (engine->shape.experts == 1)
        np_route_dense(engine);
}

static int join(np_engine *engine, const np_layer *l, np_draft_source source)
{
    const np_shape *s = &engine->shape;
    const np_range tokens = np_even_share(engine, engine->count);
    for (uint32_t t = tokens.from; t < tokens.to; t++) {
        float *embedding = engine->shared.queries + (size_t)t * s->heads_width, *hidden = embedding + s->width;
        const int done = np_embed_token(engine, engine->token[t], embedding);
        if (done < 0)
            return done;
        np_norm_vector(engine, &l->draft_embedding_norm, embedding, s->width, embedding);
        memcpy(hidden, source.states + (size_t)t * s->width, s->width * sizeof *hidden);
        if (source.norm)
            np_norm_vector(engine, source.norm, hidden, s->width, hidden);
        np_norm_vector(engine, &l->draft_hidden_norm, hidden, s->width, hidden);
    }
    return np_meet(engine);
}

static int compute_input(np_engine *engine, const np_layer *l)
{
    const np_shape *s = &engine->shape;
    const np_range all = np_even_share(engine, s->width);
    engine->vectors.type = l->draft_input.type;
    np_prepare_vectors(engine, &engine->vectors, engine->shared.queries, engine->count, s->heads_width, 2 * (size_t)s->width, NULL);
    np_multiply_rows(engine, &engine->vectors, &l->draft_input, all.from, all.to - all.from, NULL, engine->shared.residual + all.from, s->width);
    engine->counters.matrix_rows += (uint64_t)(all.to - all.from) * engine->count;
    return np_meet(engine);
}

static int compute_draft_layer(np_engine *engine, np_draft_source source)
{
    const uint32_t layer = np_text_layers(&engine->shape);
    const np_layer *l = &engine->fixed.layers[layer];
    engine->layer = layer;
    engine->end_layer = layer + 1;
    int done = join(engine, l, source);
    if (done >= 0)
        done = compute_input(engine, l);
    return done < 0 ? done : np_compute_layer(engine, layer);
}

/* The most likely token after the last one that the layer has computed; or an error. */
static int predict(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    const uint32_t layer = np_text_layers(s);
    int32_t token = 0;
    engine->logits_first = engine->count - 1;
    engine->logits_count = 1;
    engine->logits_norm = &engine->fixed.layers[layer].draft_output_norm;
    const int done = np_compute_logits(engine);
    if (done < 0)
        return done;
    np_greatest(engine->shared.logits, s->vocabulary, 1, &token);
    /* Nobody claims now: the pieces of this layer and of the logits may be claimed again behind the next barrier. */
    np_reset_logits_claims(engine);
    for (uint32_t work = 0; work < NP_WORKS && !engine->participant; work++)
        __atomic_store_n(&engine->shared.claims[layer * NP_WORKS + work], 0, __ATOMIC_RELAXED);
    return np_is_token(s, token) ? token : 0;
}

int np_draft_tokens(np_engine *engine, const np_step *step)
{
    const np_shape *s = &engine->shape;
    const uint32_t logits_first = engine->logits_first, logits_count = engine->logits_count;
    const uint32_t drafted = np_drafted_tokens(step), first = step->count - drafted;
    const np_norm *own_norm = &engine->fixed.layers[np_text_layers(s)].draft_output_norm;
    np_draft_source source = {engine->shared.last_hidden, NULL};
    take_tokens(engine, step, step->draft_tokens, step->draft_count, step->positions[0] - (int32_t)step->draft_count);
    for (uint32_t n = 0; n < drafted; n++) {
        int done = compute_draft_layer(engine, source);
        done = done < 0 ? done : predict(engine);
        if (done < 0)
            return done;
        engine->drafted[n] = done;
        source = (np_draft_source){engine->shared.residual + (size_t)(engine->count - 1) * s->width, own_norm};
        take_tokens(engine, step, engine->drafted + n, 1, step->positions[0] + (int32_t)n);
    }
    engine->count = step->count;
    memcpy(engine->sequence, step->sequences, step->count * sizeof *step->sequences);
    memcpy(engine->position, step->positions, step->count * sizeof *step->positions);
    memcpy(engine->token, step->tokens, first * sizeof *step->tokens);
    memcpy(engine->token + first, engine->drafted, drafted * sizeof *engine->drafted);
    if (!engine->participant)
        memcpy(engine->shared.drafted, engine->drafted, drafted * sizeof *engine->drafted);
    if (s->experts == 1)
        np_route_dense(engine);
    engine->logits_first = logits_first;
    engine->logits_count = logits_count;
    engine->logits_norm = &engine->fixed.output_norm;
    engine->end_layer = np_text_layers(s);
    return NP_OK;
}

int np_fill_draft_cache(np_engine *engine, const np_step *step)
{
    engine->count = step->draft_count;
    memcpy(engine->token, step->draft_tokens, step->draft_count * sizeof *step->draft_tokens);
    if (engine->shape.experts == 1)
        np_route_dense(engine);
    return compute_draft_layer(engine, (np_draft_source){engine->shared.residual, &engine->fixed.output_norm});
}

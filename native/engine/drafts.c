/* The draft layer (multi-token prediction): it reads a token and the last hidden state of the token before it, and
 * predicts the token after it. For further tokens it reads its own hidden state instead.
 *
 *   stage   work                              writes
 *   join    tokens: at a step's end in even   queries: a token's normed embedding, then the normed hidden state
 *           shares, a draft's by one
 *   input   rows of draft_input, likewise     residual
 *   the stages of a layer, those of the logits
 *
 * The last hidden state of a sequence's latest token is the layer's state. Every step ends with the layer's keys and
 * values of its tokens, and with this state, whether tokens are drafted or not. So a step that drafts finds both, and
 * they are stored, copied and restored like those of other layers. Position 0 has no keys: no token is before it. */
#include "engine/drafts.h"

#include <string.h>

#include "engine/attention.h"
#include "engine/logits.h"
#include "engine/recurrent.h"
#include "engine/routing.h"
#include "engine/step.h"
#include "engine/vectors.h"
#include "engine/work.h"

uint32_t np_drafted_tokens(const np_step *step)
{
    uint32_t drafted = 0;
    while (drafted < step->count && step->tokens[step->count - 1 - drafted] == NP_DRAFTED)
        drafted++;
    return drafted;
}

int np_keeps_draft_state(const np_engine *engine)
{
    return engine->shape.draft_layers && !engine->config.external_products && !engine->config.offload_blocks && !engine->offloaded_matrices &&
           !engine->offloaded_blocks;
}

int np_drafts_fit(const np_engine *engine, const np_step *step)
{
    if (!engine->shape.draft_layers || engine->config.external_products || engine->config.offload_blocks || step->offloaded_matrices || step->offloaded_blocks)
        return 0;
    if (!engine->config.logit_rows || np_drafted_tokens(step) + 1 != step->count)
        return 0;
    for (uint32_t t = 1; t < step->count; t++)
        if (step->sequences[t] != step->sequences[0] || step->positions[t] != (int64_t)step->positions[0] + t)
            return 0;
    return step->positions[0] > 0;
}

/* ---- input -------------------------------------------------------------------------------------------------------- */
/* Join token t and the hidden state of the token before it. hidden: NULL: there is none. norm: of this state. */
static int join(np_engine *engine, const np_layer *l, uint32_t t, const float *hidden, const np_norm *norm)
{
    const np_shape *s = &engine->shape;
    float *embedding = engine->shared.queries + (size_t)t * s->heads_width, *normed = embedding + s->width;
    const int done = np_embed_token(engine, engine->token[t], embedding);
    if (done < 0)
        return done;
    np_norm_vector(engine, &l->draft_embedding_norm, embedding, s->width, embedding);
    if (!hidden) {
        memset(normed, 0, s->width * sizeof *normed);
        return NP_OK;
    }
    np_norm_vector(engine, norm, hidden, s->width, normed);
    np_norm_vector(engine, &l->draft_hidden_norm, normed, s->width, normed);
    return NP_OK;
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

/* ---- drafted tokens ----------------------------------------------------------------------------------------------- */
/* Let the layer compute one token: that of the step's first sequence at this position. */
static int compute_draft_layer(np_engine *engine, const np_step *step, int32_t token, int32_t position, const float *hidden, const np_norm *norm)
{
    const uint32_t layer = np_text_layers(&engine->shape);
    const np_layer *l = &engine->fixed.layers[layer];
    engine->layer = layer;
    engine->end_layer = layer + 1;
    engine->count = 1;
    engine->sequence[0] = step->sequences[0];
    engine->position[0] = position;
    engine->token[0] = token;
    if (engine->shape.experts == 1)
        np_route_dense(engine);
    int done = engine->participant ? NP_OK : join(engine, l, 0, hidden, norm);
    done = done < 0 ? done : np_meet(engine);
    done = done < 0 ? done : compute_input(engine, l);
    return done < 0 ? done : np_compute_layer(engine, layer);
}

/* The most likely token after the one that the layer has computed; or an error. */
static int predict(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    const uint32_t layer = np_text_layers(s);
    int32_t token = 0;
    engine->logits_first = 0;
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
    const np_layer *l = &engine->fixed.layers[np_text_layers(s)];
    const uint32_t logits_first = engine->logits_first, logits_count = engine->logits_count;
    const uint32_t drafted = step->count - 1;
    const float *hidden = np_state_at(engine, l, engine->runs[0].from, 0);
    const np_norm *norm = &engine->fixed.output_norm;
    int32_t token = step->tokens[0];
    for (uint32_t n = 0; n < drafted; n++) {
        int done = compute_draft_layer(engine, step, token, step->positions[n], hidden, norm);
        done = done < 0 ? done : predict(engine);
        if (done < 0)
            return done;
        engine->drafted[n] = token = done;
        hidden = engine->shared.residual;
        norm = &l->draft_output_norm;
    }
    engine->count = step->count;
    memcpy(engine->sequence, step->sequences, step->count * sizeof *step->sequences);
    memcpy(engine->position, step->positions, step->count * sizeof *step->positions);
    engine->token[0] = step->tokens[0];
    memcpy(engine->token + 1, engine->drafted, drafted * sizeof *engine->drafted);
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

/* ---- the state ---------------------------------------------------------------------------------------------------- */
/* Join this participant's share of the step's tokens, and store the hidden states of the last ones of each run. */
static int join_step(np_engine *engine, const np_layer *l)
{
    const np_shape *s = &engine->shape;
    const np_range tokens = np_even_share(engine, engine->count);
    for (uint32_t r = 0; r < engine->run_count; r++) {
        const np_run *run = &engine->runs[r];
        for (uint32_t t = run->first; t < run->first + run->count; t++) {
            if (t < tokens.from || t >= tokens.to)
                continue;
            const float *own = engine->shared.residual + (size_t)t * s->width;
            const int is_first = t == run->first && !run->continues;
            const int done = join(engine, l, t, is_first ? np_state_at(engine, l, run->from, 0) : own - s->width, &engine->fixed.output_norm);
            if (done < 0)
                return done;
            if (t + 1 == run->first + run->count)
                memcpy(np_state_at(engine, l, run->to, 0), own, s->width * sizeof *own);
        }
    }
    return np_meet(engine);
}

int np_store_draft_state(np_engine *engine)
{
    const uint32_t layer = np_text_layers(&engine->shape);
    const np_layer *l = &engine->fixed.layers[layer];
    engine->layer = layer;
    int done = join_step(engine, l);
    done = done < 0 ? done : compute_input(engine, l);
    return done < 0 ? done : np_store_keys_and_values(engine, layer);
}

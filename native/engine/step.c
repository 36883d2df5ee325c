/* A step from end to end: its arguments, its layers in order, its end. */
#include "engine/step.h"

#include <string.h>

#include "engine/attention.h"
#include "engine/drafts.h"
#include "engine/feed_forward.h"
#include "engine/logits.h"
#include "engine/prefetch.h"
#include "engine/recurrent.h"
#include "engine/reuse.h"
#include "engine/routing.h"
#include "engine/work.h"

/* True if this step may have offloaded matrices: other participants exist, and the offload participant has room for
 * their rows. */
static int may_offload_matrices(const np_engine *engine, const np_step *step)
{
    const uint32_t all = NP_OFFLOAD_QKV | NP_OFFLOAD_ATTENTION_OUTPUT | NP_OFFLOAD_OUTPUT;
    const int has_room = engine->shared.outputs && engine->shared.kv;
    return !(step->offloaded_matrices & ~all) && step->participants > 1 && !engine->config.external_products &&
           !engine->shape.latent_width && (!engine->config.offload_blocks || has_room);
}

/* True if the step may have token scores: the logits of all its tokens are computed in this memory, and no others are
 * requested. */
static int may_score_tokens(const np_engine *engine, const np_step *step)
{
    const np_token_scores *r = step->token_scores;
    if (!r->count || r->count > step->count || r->likely > engine->shape.vocabulary || step->logits_count || step->offloaded_matrices)
        return 0;
    for (uint32_t t = 0; t < r->count; t++) {
        const int32_t target = r->ids[(size_t)t * (1 + r->likely)];
        if (target < 0 || (uint32_t)target >= engine->shape.vocabulary)
            return 0;
    }
    return engine->config.logit_rows > 0;
}

int np_begin_step(np_engine *engine, const np_step *step)
{
    const np_shape *s = &engine->shape;
    const uint32_t count = step->count, blocks = np_has_slices(s) ? s->experts : s->blocks;
    if (!count || count > engine->config.max_tokens || step->logits_first > count || step->logits_count > count - step->logits_first ||
        step->logits_count > engine->config.logit_rows)
        return NP_E_ARGUMENT;
    if (step->participant >= step->participants || step->sharer >= step->sharers || step->sharers > step->participants ||
        step->first_block > step->end_block || step->end_block > blocks || step->offloaded_blocks > s->blocks)
        return NP_E_ARGUMENT;
    if (step->offloaded_matrices && !may_offload_matrices(engine, step))
        return NP_E_ARGUMENT;
    if (step->token_scores && !may_score_tokens(engine, step))
        return NP_E_ARGUMENT;
    if (!engine->config.offload_blocks && step->first_block < step->end_block && step->first_block < step->offloaded_blocks)
        return NP_E_ARGUMENT; /* its block sums would overwrite those of the offloaded blocks */
    if (!engine->config.pipeline && step->end_block - step->first_block != blocks)
        return NP_E_ARGUMENT; /* without a pipeline all participants go through the same windows, with barriers between them */
    const uint32_t drafted = np_drafted_tokens(step);
    if (drafted && !np_drafts_fit(engine, step))
        return NP_E_ARGUMENT;
    for (uint32_t t = 0; t < count; t++)
        if (step->sequences[t] < 0 || (uint32_t)step->sequences[t] >= engine->config.sequences || step->positions[t] < 0 ||
            (uint32_t)step->positions[t] >= s->context_tokens || (t < count - drafted && !np_is_token(s, step->tokens[t])))
            return NP_E_ARGUMENT;
    if (np_find_runs(engine, step) < 0)
        return NP_E_ARGUMENT;
    engine->started = np_clock_ns();
    engine->step = step->number;
    engine->epoch = step->epoch;
    engine->participants = step->participants;
    engine->participant = step->participant;
    /* Participants share the pieces of every slice, so each has the only block of all of them or none. */
    engine->blocks = np_has_slices(s) ? (np_range){0, step->first_block < step->end_block} : (np_range){step->first_block, step->end_block};
    engine->offloaded_blocks = step->offloaded_blocks;
    engine->offloaded_matrices = step->offloaded_matrices;
    engine->sharers = step->sharers;
    engine->sharer = step->sharer;
    engine->count = count;
    engine->is_counted = count == 1;
    engine->logits_first = step->logits_first;
    engine->logits_count = step->logits_count;
    engine->logits_norm = &engine->fixed.output_norm;
    engine->end_layer = np_text_layers(s);
    engine->token_scores = step->token_scores;
    memcpy(engine->sequence, step->sequences, count * sizeof *step->sequences);
    memcpy(engine->position, step->positions, count * sizeof *step->positions);
    memcpy(engine->token, step->tokens, count * sizeof *step->tokens);
    if (s->experts == 1)
        np_route_dense(engine);
    np_count_step(engine);
    return NP_OK;
}

np_stage *np_layer_stage(const np_engine *engine, uint32_t number)
{
    static np_stage *const stages[2][NP_STAGES] = {
        {np_attention, np_project, np_feed_forward},
        {np_attention, np_feed_forward, np_project}, /* parallel: both read the layer's input */
    };
    return stages[engine->shape.parallel != 0][number];
}

int np_compute_layer(np_engine *engine, uint32_t layer)
{
    int done = np_begin_layer(engine, layer);
    for (uint32_t i = 0; i < NP_STAGES && done >= 0; i++)
        done = np_layer_stage(engine, i)(engine, layer);
    return done;
}

static int compute_outputs(np_engine *engine)
{
    const int done = engine->logits_count ? np_compute_logits(engine) : NP_OK;
    return done >= 0 && engine->token_scores ? np_score_tokens(engine) : done;
}

int np_end_step(np_engine *engine, int result)
{
    if (result >= 0)
        result = compute_outputs(engine);
    if (result >= 0 && np_keeps_draft_state(engine))
        result = np_store_draft_state(engine);
    np_trace_put(&engine->shared.trace, NP_SPAN_STEP, 0, engine->count, engine->step, engine->started);
    engine->counters.step_ns += np_clock_ns() - engine->started;
    return result < 0 ? result : NP_OK;
}

int np_engine_step(np_engine *engine, const np_step *step)
{
    int done = engine->config.external_products || engine->config.offload_blocks ? NP_E_ARGUMENT : np_begin_step(engine, step);
    if (done < 0)
        return done;
    if (np_drafted_tokens(step))
        done = np_draft_tokens(engine, step);
    if (done >= 0)
        done = np_embed(engine);
    for (uint32_t layer = 0; layer < engine->end_layer && done >= 0; layer++)
        done = np_compute_layer(engine, layer);
    return np_end_step(engine, done);
}

/* Requests ahead of need: of a dense model's next window, and by the experts that a router has chosen or will probably
 * choose.
 *
 * A router that reads the feed-forward's input names its experts only when their weights are needed. Its values for the
 * residual stream before attention name most of them earlier. These likely experts are prefetched speculatively, while
 * flash is idle and as long as earlier ones of the layer were mostly right; a wrong one costs slots and the time of a
 * read. Nothing is computed from them, so they change no bit. Off unless config.hints is set: on measured machines it
 * did not pay (tests/bench). */
#include "engine/prefetch.h"

#include <string.h>

#include "engine/clusters.h"
#include "engine/routing.h"

enum {
    MIN_COUNTED = 64,   /* experts prefetched in a layer before it is judged */
    MAX_COUNTED = 2048, /* from so many on, all counts are halved, so that recent steps weigh more */
    TRIAL_STEPS = 32,   /* in layers that are mostly wrong, one step of so many prefetches again */
};

/* ---- dense models ------------------------------------------------------------------------------------------------- */
/* Prefetch slices behind the open window: as many as a layer has if the whole layer is open. Otherwise half as many as
 * the window may have blocks, since the cache evicts slices that were read too early. Each sharer requests some of them.
 * Slices that an earlier window of the step has requested are requested again, in case that they were evicted, but do
 * not count again. */
static void prefetch_slices(np_engine *engine)
{
    const np_layer *l = &engine->fixed.layers[engine->layer];
    const uint32_t ahead = engine->is_layer_open ? engine->shape.experts : (engine->config.window_blocks + 1) / 2;
    uint32_t layer = engine->layer, slice = engine->is_layer_open ? l->experts : engine->group->expert + 1;
    const int is_first = slice == 1 && (l->first_ffn == 0 || layer == np_text_layers(&engine->shape));
    for (uint32_t n = 0; n < ahead && n < engine->shape.experts; n++, slice++) {
        for (; layer < engine->end_layer && slice >= engine->fixed.layers[layer].experts; layer++)
            slice = 0;
        if (layer == engine->end_layer)
            return;
        if (n % engine->sharers != engine->sharer)
            continue;
        const uint64_t foreseen = engine->counters.foreseen, missed = engine->counters.foreseen_missed;
        np_request_ahead(engine, layer, slice, engine->blocks, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE, NP_REQUEST_PREFETCH);
        if (engine->is_layer_open || is_first || n + 1 == ahead)
            continue;
        engine->counters.foreseen = foreseen;
        engine->counters.foreseen_missed = missed;
    }
}

void np_prefetch_next_window(np_engine *engine, uint32_t block)
{
    const np_range blocks = engine->blocks;
    const uint32_t end = engine->window.to, width = engine->config.window_blocks;
    if (!engine->config.prefetch || np_predictor_decides(engine) || engine->shape.chosen_per_token)
        return;
    if (np_has_slices(&engine->shape)) {
        prefetch_slices(engine);
        return;
    }
    if (block != engine->window.from)
        return;
    const uint32_t layer = end < blocks.to ? engine->layer : engine->layer + 1, next = end < blocks.to ? end : blocks.from;
    if (layer < engine->end_layer)
        np_request_ahead(engine, layer, 0, (np_range){next, blocks.to - next < width ? blocks.to : next + width},
                         np_parts_ahead(engine, layer, engine->group->count), NP_REQUEST_PREFETCH);
}

/* ---- chosen experts ---------------------------------------------------------------------------------------------- */
/* Prefetch the clusters of all chosen experts that were not requested before. Each sharer requests those of some
 * groups. */
static void prefetch_groups(np_engine *engine, uint32_t layer)
{
    /* With external products the reader of their rows makes the requests. */
    if (!engine->config.prefetch || np_predictor_decides(engine) || engine->config.external_products)
        return;
    const int were_always_active_requested = engine->shape.router_reads == NP_READS_FEED_FORWARD; /* np_begin_layer */
    const uint32_t end = were_always_active_requested ? engine->fixed.layers[layer].routed_experts : engine->fixed.layers[layer].experts;
    for (uint32_t g = engine->sharer; g < engine->group_count && engine->groups[g].expert < end; g += engine->sharers)
        np_request_ahead(engine, layer, engine->groups[g].expert, engine->blocks, np_parts_ahead(engine, layer, engine->groups[g].count),
                         NP_REQUEST_PREFETCH);
}

/* Prefetch the experts of a mixture's layer that compute every token, while attention is computed. */
static void prefetch_always_active(np_engine *engine, uint32_t layer)
{
    const np_layer *l = &engine->fixed.layers[layer];
    if (!engine->shape.chosen_per_token || !engine->config.prefetch || np_predictor_decides(engine) || engine->config.external_products)
        return;
    for (uint32_t expert = l->routed_experts + engine->sharer; expert < l->experts; expert += engine->sharers)
        np_request_ahead(engine, layer, expert, engine->blocks, np_parts_ahead(engine, layer, engine->count), NP_REQUEST_PREFETCH);
}

/* ---- likely experts ---------------------------------------------------------------------------------------------- */
static int is_promising(const np_engine *engine, uint32_t layer)
{
    const np_likely_counts *counts = &engine->likely_counts[layer];
    return counts->requested < MIN_COUNTED || 2 * counts->chosen >= counts->requested || engine->step % TRIAL_STEPS == 0;
}

/* True if flash is idle and this participant is the one that makes its blocks' requests. With many tokens nearly every
 * expert is needed, and prefetched once it is chosen. */
static int may_speculate(const np_engine *engine, uint32_t layer)
{
    return engine->shape.experts > 1 && engine->shape.router_reads == NP_READS_FEED_FORWARD && !np_predictor_decides(engine) &&
           engine->config.hints && engine->config.prefetch && !engine->config.external_products && engine->sharer == 0 &&
           engine->count < NP_DENSE_TOKENS && engine->shared.in_flight && np_word_load(engine->shared.in_flight) == 0 &&
           is_promising(engine, layer);
}

static void prefetch_likely_experts(np_engine *engine, uint32_t layer)
{
    engine->likely_layer = NP_NONE;
    if (!engine->fixed.layers[layer].routed_experts || !may_speculate(engine, layer))
        return;
    const np_shape *s = &engine->shape;
    memset(engine->likely_experts, 0, s->experts);
    for (uint32_t t = 0; t < engine->count; t++) {
        uint32_t *chosen = engine->token_pairs; /* scratch: not in use before this layer is routed */
        np_choose_experts(engine, layer, engine->shared.residual + (size_t)t * s->width, chosen);
        for (uint32_t n = 0; n < s->chosen_per_token; n++)
            engine->likely_experts[chosen[n]] = 1;
    }
    engine->likely_layer = layer;
    for (uint32_t expert = 0; expert < engine->fixed.layers[layer].routed_experts; expert++)
        if (engine->likely_experts[expert])
            np_request_ahead(engine, layer, expert, engine->blocks, np_parts_ahead(engine, layer, engine->count), NP_REQUEST_SPECULATIVE);
}

/* Once a layer is routed: count how many of its likely experts were chosen. */
static void count_likely_experts(np_engine *engine, uint32_t layer)
{
    if (engine->likely_layer != layer)
        return;
    np_likely_counts *counts = &engine->likely_counts[layer];
    uint32_t requested = 0, chosen = 0;
    for (uint32_t expert = 0; expert < engine->shape.experts; expert++)
        requested += engine->likely_experts[expert];
    for (uint32_t g = 0; g < engine->group_count; g++)
        chosen += engine->likely_experts[engine->groups[g].expert];
    engine->counters.guessed += requested;
    engine->counters.guessed_right += chosen;
    counts->requested += requested;
    counts->chosen += chosen;
    if (counts->requested > MAX_COUNTED) {
        counts->requested /= 2;
        counts->chosen /= 2;
    }
}

int np_route_and_prefetch(np_engine *engine, uint32_t layer)
{
    const int done = np_route_tokens(engine, layer);
    if (done < 0)
        return done;
    count_likely_experts(engine, layer);
    prefetch_groups(engine, layer);
    return done;
}

int np_begin_layer(np_engine *engine, uint32_t layer)
{
    if (np_router_reads(engine, NP_READS_LAYER))
        return np_route_and_prefetch(engine, layer);
    prefetch_always_active(engine, layer);
    prefetch_likely_experts(engine, layer);
    return NP_OK;
}

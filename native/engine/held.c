/* Steps of a participant whose blocks another computes, who holds their weights: a GPU say. The engine goes through the stages with the
 * others and takes no piece of their work. It has the blocks of each layer computed between the two halves of the feed-forward: when
 * vectors, routes and predictions are there, and before block sums meet. What it is given are sums of the tree's nodes, and they are all
 * that who adds block sums reads of these blocks: the others' places may hold anything. */
#include <string.h>

#include "engine.h"

int np_engine_begin_held(np_engine *engine, const np_step *step)
{
    np_held *h = &engine->held;
    const int fits = engine->config.held && step->first_block == 0 && step->held_blocks == step->end_block;
    int done = fits ? np_engine_take_step(engine, step) : NP_E_ARGUMENT;
    h->layer = h->stage = 0;
    h->are_wanted = h->are_there = 0;
    if (done >= 0)
        done = np_engine_embed(engine);
    h->result = done < 0 ? done : 1;
    return done < 0 ? done : NP_OK;
}

/* Pairs of a token and its expert in this layer. */
static uint32_t pairs_of(const np_engine *engine)
{
    const np_group *last = &engine->groups[engine->group_count - 1];
    return last->first + last->count;
}

/* The tokens' normed inputs as floats, for who takes no prepared vectors. Nobody changes the residual stream before all block sums are
 * there. */
static void norm_inputs(const np_engine *engine)
{
    const size_t width = engine->shape.width;
    for (size_t t = 0; engine->shared.inputs && t < engine->count; t++)
        np_engine_norm(engine, &engine->fixed.layers[engine->layer].ffn_norm, engine->shared.residual + t * width, width,
                       engine->shared.inputs + t * width);
}

static void want_blocks(np_engine *engine, np_wanted_blocks *wanted)
{
    const np_range clusters = np_clusters_of(engine, engine->blocks.from, engine->blocks.to);
    norm_inputs(engine);
    *wanted = (np_wanted_blocks){
        .layer = engine->layer,
        .tokens = engine->count,
        .pairs = pairs_of(engine),
        .blocks = engine->blocks.to,
        .groups = engine->group_count,
        .group = engine->groups,
        .pair_token = engine->pair_token,
        .pair_weight = engine->pair_weight,
        .vectors = engine->vectors.prepared,
        .vector_stride = engine->vectors.stride,
        .predicted = np_decides(engine) ? engine->shared.predicted : NULL,
        .mask_bytes = (uint32_t)engine->mask_bytes,
        .predicted_neurons = (uint32_t)engine->layer_neurons,
        .inputs = engine->shared.inputs,
    };
    engine->counters.neurons += (uint64_t)(clusters.to - clusters.from) * engine->shape.cluster_neurons * wanted->pairs;
    engine->held.wanted = np_clock_ns();
}

int np_engine_put_sums(np_engine *engine, const float *sums, size_t count)
{
    np_held *h = &engine->held;
    const np_shape *s = &engine->shape;
    const size_t width = s->width;
    const uint32_t blocks = engine->blocks.to, nodes = np_tree_nodes(blocks);
    if (h->result != 1 || !h->are_wanted || count != (size_t)pairs_of(engine) * nodes * width)
        return NP_E_ARGUMENT;
    for (uint32_t pair = 0; pair < pairs_of(engine); pair++)
        for (uint32_t node = 0; node < nodes; node++, sums += width)
            memcpy(engine->shared.partials + ((size_t)pair * s->blocks + np_tree_node_first(blocks, node)) * width, sums, width * sizeof *sums);
    h->are_there = 1;
    return NP_OK;
}

/* The half of the feed-forward that comes next. */
static int feed_forward(np_engine *engine, np_wanted_blocks *wanted)
{
    np_held *h = &engine->held;
    if (h->are_wanted) {
        if (!h->are_there)
            return NP_E_ARGUMENT;
        np_trace_put(&engine->shared.trace, NP_SPAN_NEURONS, h->layer, 0, engine->step, h->wanted);
        h->are_wanted = h->are_there = 0;
        return np_feed_forward_end(engine);
    }
    const int done = np_feed_forward_begin(engine, h->layer);
    if (done < 0)
        return done;
    if (engine->blocks.to == 0)
        return np_feed_forward_end(engine);
    want_blocks(engine, wanted);
    h->are_wanted = 1;
    return NP_OK;
}

/* Go on until the blocks of a layer are wanted (1), all layers are done (NP_OK), or an error. */
static int go_on(np_engine *engine, np_wanted_blocks *wanted)
{
    np_held *h = &engine->held;
    while (h->layer < engine->shape.layers) {
        np_stage *stage = np_engine_stage(engine, h->stage);
        if (h->stage == 0)
            np_engine_begin_layer(engine, h->layer);
        const int done = stage == np_engine_feed_forward ? feed_forward(engine, wanted) : stage(engine, h->layer);
        if (done < 0)
            return done;
        if (h->are_wanted)
            return 1;
        if (++h->stage == NP_STAGES) {
            h->stage = 0;
            h->layer++;
        }
    }
    return NP_OK;
}

int np_engine_next_blocks(np_engine *engine, np_wanted_blocks *wanted)
{
    np_held *h = &engine->held;
    if (h->result != 1)
        return h->result;
    const int done = go_on(engine, wanted);
    if (done == 1)
        return 1;
    h->result = np_engine_end_step(engine, done);
    return h->result;
}

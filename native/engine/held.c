/* Steps of a participant whose blocks another computes, who holds their weights: a GPU say. The engine goes through the stages with the
 * others and takes no piece of their work. It has the blocks of each layer computed between the two halves of the feed-forward: when
 * vectors, routes and predictions are there, and before block sums meet. What it is given are sums of the tree's nodes, and they are all
 * that who adds block sums reads of these blocks: the others' places may hold anything. Likewise the rows of matrices that are held as
 * well, between the halves of their stages; what follows from these rows is this participant's alone: heads with their keys and values,
 * sums, logits.
 *
 *   stage         first half                    wanted                         then
 *   attention     inputs, predictions           rows of qkv                    heads; the others attend
 *   projection    inputs                        rows of attention's output     added to the residual stream
 *   feed-forward  inputs, routes, predictions   blocks                         block sums meet
 *   logits        inputs                        rows of the output             nothing: they are where they belong */
#include <string.h>

#include "engine.h"

int np_engine_begin_held(np_engine *engine, const np_step *step)
{
    np_held *h = &engine->held;
    const int fits = engine->config.held && step->first_block == 0 && step->held_blocks == step->end_block;
    int done = fits ? np_engine_take_step(engine, step) : NP_E_ARGUMENT;
    h->layer = h->stage = h->matrix = 0;
    h->are_wanted = h->are_there = 0;
    if (done >= 0)
        done = np_engine_embed(engine);
    h->result = done < 0 ? done : 1;
    return done < 0 ? done : NP_OK;
}

/* ---- what is wanted ---------------------------------------------------------------------------------------------- */
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
    if (h->result != 1 || !h->are_wanted || h->matrix || count != (size_t)pairs_of(engine) * nodes * width)
        return NP_E_ARGUMENT;
    for (uint32_t pair = 0; pair < pairs_of(engine); pair++)
        for (uint32_t node = 0; node < nodes; node++, sums += width)
            memcpy(engine->shared.partials + ((size_t)pair * s->blocks + np_tree_node_first(blocks, node)) * width, sums, width * sizeof *sums);
    h->are_there = 1;
    return NP_OK;
}

/* Returns 1 if this matrix is held: its rows are wanted now. */
static int want_rows(np_engine *engine, uint32_t matrix)
{
    np_held *h = &engine->held;
    if (!(engine->held_matrices & matrix))
        return 0;
    h->matrix = matrix;
    h->taken = 0;
    h->wanted = np_clock_ns();
    h->are_wanted = 1;
    return 1;
}

void np_engine_wanted_rows(const np_engine *engine, np_wanted_rows *wanted)
{
    const np_shape *s = &engine->shape;
    const np_held *h = &engine->held;
    *wanted = (np_wanted_rows){0};
    if (!h->are_wanted || !h->matrix)
        return;
    wanted->matrix = (int32_t)h->matrix;
    wanted->vectors = engine->vectors.prepared;
    wanted->vector_stride = engine->vectors.stride;
    if (h->matrix == NP_HELD_OUTPUT) {
        wanted->tokens = engine->logits_count;
        wanted->columns = s->width;
        wanted->out = engine->shared.logits;
        wanted->rows = s->vocabulary;
    } else {
        const int is_qkv = h->matrix == NP_HELD_QKV;
        wanted->layer = h->layer;
        wanted->tokens = engine->count;
        wanted->columns = is_qkv ? s->width : s->query_heads * s->head_width;
        wanted->out = engine->shared.outputs;
        wanted->rows = is_qkv ? np_qkv_rows(s) : s->width;
    }
    wanted->out_stride = wanted->rows;
}

uint32_t np_held_claim(np_engine *engine, int work, uint32_t pieces)
{
    np_held *h = &engine->held;
    const int work_of_rows = h->matrix == NP_HELD_QKV ? NP_WORK_QKV : h->matrix == NP_HELD_ATTENTION_OUTPUT ? NP_WORK_PROJECT : NP_WORKS;
    return work == work_of_rows && h->taken < pieces ? h->taken++ : NP_NO_PIECE;
}

/* ---- halves of stages -------------------------------------------------------------------------------------------- */
/* The half of a stage that comes next. */
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

/* Returns 1 if the rows that were wanted are there now. */
static int take_rows(np_engine *engine, int span)
{
    np_held *h = &engine->held;
    if (!h->are_wanted)
        return 0;
    np_trace_put(&engine->shared.trace, span, h->layer, 0, engine->step, h->wanted);
    h->are_wanted = 0;
    return 1;
}

static int attention(np_engine *engine)
{
    const uint32_t layer = engine->held.layer;
    if (!take_rows(engine, NP_SPAN_QKV)) {
        const int done = np_engine_begin_attention(engine, layer);
        if (done < 0 || want_rows(engine, NP_HELD_QKV))
            return done;
    }
    return np_engine_heads(engine, layer);
}

static int projection(np_engine *engine)
{
    const uint32_t layer = engine->held.layer;
    if (!take_rows(engine, NP_SPAN_PROJECT) && want_rows(engine, NP_HELD_ATTENTION_OUTPUT)) {
        np_engine_begin_projection(engine);
        return NP_OK;
    }
    return np_engine_add_projection(engine, layer);
}

static int half_stage(np_engine *engine, np_wanted_blocks *wanted)
{
    np_stage *stage = np_engine_stage(engine, engine->held.stage);
    if (stage == np_engine_feed_forward)
        return feed_forward(engine, wanted);
    return stage == np_engine_attention ? attention(engine) : projection(engine);
}

/* Returns 1 when the logits' rows are wanted; 0 when they are there, or the others'. */
static int want_logits(np_engine *engine)
{
    if (take_rows(engine, NP_SPAN_LOGITS)) {
        engine->counters.matrix_rows += (uint64_t)engine->shape.vocabulary * engine->logits_count;
        return 0;
    }
    if (!engine->logits_count || !want_rows(engine, NP_HELD_OUTPUT))
        return 0;
    np_engine_begin_logits(engine);
    return 1;
}

/* Go on until the blocks of a layer or the rows of a matrix are wanted (1), all is done but the step's end (NP_OK), or an error. */
static int go_on(np_engine *engine, np_wanted_blocks *wanted)
{
    np_held *h = &engine->held;
    while (h->layer < engine->shape.layers) {
        if (h->stage == 0 && !h->are_wanted)
            np_engine_begin_layer(engine, h->layer);
        const int done = half_stage(engine, wanted);
        if (done < 0)
            return done;
        if (h->are_wanted)
            return 1;
        h->matrix = 0;
        if (++h->stage == NP_STAGES) {
            h->stage = 0;
            h->layer++;
        }
    }
    return want_logits(engine) ? 1 : NP_OK;
}

int np_engine_next_blocks(np_engine *engine, np_wanted_blocks *wanted)
{
    np_held *h = &engine->held;
    if (h->result != 1)
        return h->result;
    const int done = go_on(engine, wanted);
    if (done == 1)
        return h->matrix ? NP_WANTED_ROWS : 1;
    h->result = np_engine_end_step(engine, done);
    return h->result;
}

/* A step of the participant whose blocks an offload backend computes, a GPU for example.
 *
 * The engine goes through the stages with the other participants and claims none of their work. Between the two halves
 * of a feed-forward, when inputs, routes and predictions are computed and before block sums are added,
 * np_engine_next_offload returns the blocks to compute. The backend delivers the sums of the nodes of the tree that
 * these blocks make up (np_sum_tree_on); the other places in `partials` are not read. Offloaded matrices are requested
 * in the same way between the halves of their stages. What depends on their rows, up to the next barrier, is computed
 * by this participant alone.
 *
 *   stage         first half                    offloaded                     second half
 *   attention     inputs, predictions           rows of qkv                   heads, keys and values; then all participants attend
 *   projection    inputs                        rows of the attention output  added to the residual stream
 *   feed-forward  inputs, routes, predictions   blocks                        all block sums are added
 *   logits        inputs                        rows of the output            none: the backend writes the logits
 *
 * If a participant is lost, the epoch changes: the next call returns NP_E_EPOCH, and sums are refused from then on.
 * What a participant of the old epoch still writes (sums, rows, keys and values) is not read: the step is sent again
 * once all participants have answered or died, and writes it anew. Sums delivered twice overwrite each other; they are
 * read only after the next barrier. All of these are plain stores, ordered by the barrier's acquire-release; the
 * device's own thread has finished its copies when the backend returns. */
#include <string.h>

#include "engine/attention.h"
#include "engine/clusters.h"
#include "engine/feed_forward.h"
#include "engine/logits.h"
#include "engine/prefetch.h"
#include "engine/step.h"
#include "engine/vectors.h"

int np_engine_begin_offload(np_engine *engine, const np_step *step)
{
    np_offload_state *o = &engine->offload;
    const int fits = engine->config.offload_blocks && step->first_block == 0 && step->offloaded_blocks == step->end_block;
    int done = fits ? np_begin_step(engine, step) : NP_E_ARGUMENT;
    o->layer = o->stage = o->matrix = 0;
    o->is_pending = o->has_sums = 0;
    if (done >= 0)
        done = np_embed(engine);
    o->result = done < 0 ? done : 1;
    return done < 0 ? done : NP_OK;
}

/* ---- requests to the backend ---------------------------------------------------------------------------------------------- */
/* The layer's pairs of a token and one of its experts. */
static uint32_t count_pairs(const np_engine *engine)
{
    const np_group *last = &engine->groups[engine->group_count - 1];
    return last->first + last->count;
}

/* Write the tokens' normed inputs as floats, for backends that do not read prepared vectors. The residual stream does
 * not change before all block sums are delivered. */
static void norm_inputs(const np_engine *engine)
{
    const size_t width = engine->shape.width;
    for (size_t t = 0; engine->shared.inputs && t < engine->count; t++)
        np_norm_vector(engine, &engine->fixed.layers[engine->layer].ffn_norm, engine->shared.residual + t * width, width,
                       engine->shared.inputs + t * width);
}

static void describe_blocks(np_engine *engine, np_offloaded_blocks *blocks)
{
    const np_range clusters = np_block_clusters(engine, engine->blocks.from, engine->blocks.to);
    norm_inputs(engine);
    *blocks = (np_offloaded_blocks){
        .layer = engine->layer,
        .tokens = engine->count,
        .pairs = count_pairs(engine),
        .blocks = engine->blocks.to,
        .groups = engine->group_count,
        .group = engine->groups,
        .pair_token = engine->pair_token,
        .pair_weight = engine->pair_weight,
        .vectors = engine->vectors.prepared,
        .vector_stride = engine->vectors.stride,
        .predicted = np_predictor_decides(engine) ? engine->shared.predicted : NULL,
        .mask_bytes = (uint32_t)engine->mask_bytes,
        .predicted_neurons = (uint32_t)engine->layer_neurons,
        .inputs = engine->shared.inputs,
    };
    engine->counters.neurons += (uint64_t)(clusters.to - clusters.from) * engine->shape.cluster_neurons * blocks->pairs;
    engine->offload.requested_ns = np_clock_ns();
}

int np_engine_put_block_sums(np_engine *engine, const float *sums, size_t count)
{
    np_offload_state *o = &engine->offload;
    const np_shape *s = &engine->shape;
    const size_t width = s->width;
    const uint32_t blocks = engine->blocks.to, nodes = np_tree_nodes(blocks);
    if (o->result != 1 || !o->is_pending || o->matrix || count != (size_t)count_pairs(engine) * nodes * width)
        return NP_E_ARGUMENT;
    for (uint32_t pair = 0; pair < count_pairs(engine); pair++)
        for (uint32_t node = 0; node < nodes; node++, sums += width)
            memcpy(engine->shared.partials + ((size_t)pair * s->blocks + np_tree_node_first(blocks, node)) * width, sums, width * sizeof *sums);
    o->has_sums = 1;
    return NP_OK;
}

/* Make a matrix pending. Returns 0 if it is not offloaded. */
static int request_matrix(np_engine *engine, uint32_t matrix)
{
    np_offload_state *o = &engine->offload;
    if (!(engine->offloaded_matrices & matrix))
        return 0;
    o->matrix = matrix;
    o->claimed = 0;
    o->requested_ns = np_clock_ns();
    o->is_pending = 1;
    return 1;
}

void np_engine_offloaded_matrix(const np_engine *engine, np_offloaded_matrix *out)
{
    const np_shape *s = &engine->shape;
    const np_offload_state *o = &engine->offload;
    *out = (np_offloaded_matrix){0};
    if (!o->is_pending || !o->matrix)
        return;
    out->matrix = (int32_t)o->matrix;
    out->vectors = engine->vectors.prepared;
    out->vector_stride = engine->vectors.stride;
    if (o->matrix == NP_OFFLOAD_OUTPUT) {
        out->tokens = engine->logits_count;
        out->columns = s->width;
        out->out = engine->shared.logits;
        out->rows = s->vocabulary;
    } else {
        const int is_qkv = o->matrix == NP_OFFLOAD_QKV;
        out->layer = o->layer;
        out->tokens = engine->count;
        out->columns = is_qkv ? s->width : s->query_heads * s->head_width;
        out->out = engine->shared.outputs;
        out->rows = is_qkv ? np_qkv_rows(s, &engine->fixed.layers[o->layer]) : s->width;
    }
    out->out_stride = out->rows;
}

/* ---- halves of stages -------------------------------------------------------------------------------------------- */
/* Each of these three runs its stage's first half and makes the offloaded work pending; called again, it runs the
 * second half. Without offloaded work it runs both. */
static int feed_forward(np_engine *engine, np_offloaded_blocks *blocks)
{
    np_offload_state *o = &engine->offload;
    if (o->is_pending) {
        if (!o->has_sums)
            return NP_E_ARGUMENT;
        np_trace_put(&engine->shared.trace, NP_SPAN_NEURONS, o->layer, 0, engine->step, o->requested_ns);
        o->is_pending = o->has_sums = 0;
        return np_end_feed_forward(engine);
    }
    const int done = np_begin_feed_forward(engine, o->layer);
    if (done < 0)
        return done;
    if (engine->blocks.to == 0)
        return np_end_feed_forward(engine);
    describe_blocks(engine, blocks);
    o->is_pending = 1;
    return NP_OK;
}

/* Returns 1 if a matrix was pending: its rows are computed now. */
static int finish_matrix(np_engine *engine, int span)
{
    np_offload_state *o = &engine->offload;
    if (!o->is_pending)
        return 0;
    np_trace_put(&engine->shared.trace, span, o->layer, 0, engine->step, o->requested_ns);
    o->is_pending = 0;
    return 1;
}

static int attention(np_engine *engine)
{
    const uint32_t layer = engine->offload.layer;
    if (!finish_matrix(engine, NP_SPAN_QKV)) {
        const int done = np_begin_attention(engine, layer);
        if (done < 0 || request_matrix(engine, NP_OFFLOAD_QKV))
            return done;
    }
    return np_attend_heads(engine, layer);
}

static int projection(np_engine *engine)
{
    const uint32_t layer = engine->offload.layer;
    if (!finish_matrix(engine, NP_SPAN_PROJECT) && request_matrix(engine, NP_OFFLOAD_ATTENTION_OUTPUT)) {
        np_begin_projection(engine);
        return NP_OK;
    }
    return np_add_projection(engine, layer);
}

static int half_stage(np_engine *engine, np_offloaded_blocks *blocks)
{
    np_stage *stage = np_layer_stage(engine, engine->offload.stage);
    if (stage == np_feed_forward)
        return feed_forward(engine, blocks);
    return stage == np_attention ? attention(engine) : projection(engine);
}

/* Make the output matrix pending. Returns 0 if its rows are computed, or if it is not offloaded. */
static int request_logits(np_engine *engine)
{
    if (finish_matrix(engine, NP_SPAN_LOGITS)) {
        engine->counters.matrix_rows += (uint64_t)engine->shape.vocabulary * engine->logits_count;
        return 0;
    }
    if (!engine->logits_count || !request_matrix(engine, NP_OFFLOAD_OUTPUT))
        return 0;
    np_begin_logits(engine);
    return 1;
}

/* Run until offloaded work is pending (1), all layers are done (NP_OK), or an error. */
static int run_until_pending(np_engine *engine, np_offloaded_blocks *blocks)
{
    np_offload_state *o = &engine->offload;
    while (o->layer < engine->end_layer) {
        int done = o->stage == 0 && !o->is_pending ? np_begin_layer(engine, o->layer) : NP_OK;
        if (done >= 0)
            done = half_stage(engine, blocks);
        if (done < 0)
            return done;
        if (o->is_pending)
            return 1;
        o->matrix = 0;
        if (++o->stage == NP_STAGES) {
            o->stage = 0;
            o->layer++;
        }
    }
    return request_logits(engine) ? 1 : NP_OK;
}

int np_engine_next_offload(np_engine *engine, np_offloaded_blocks *blocks)
{
    np_offload_state *o = &engine->offload;
    if (o->result != 1)
        return o->result;
    const int done = run_until_pending(engine, blocks);
    if (done == 1)
        return o->matrix ? NP_OFFLOADED_MATRIX : 1;
    o->result = np_end_step(engine, done);
    return o->result;
}

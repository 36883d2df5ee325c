/* A step whose matrix products an external runtime computes, that of a neural processor for example. The engine does
 * everything between the products. The rows of the products are read ahead of them (product_rows.c).
 *
 * A layer is a sequence of turns (turns.h). A turn has three phases, with a barrier behind the first two:
 *
 *   phase      participant 0                                                     other participants
 *   prepare    writes its share of `inputs`                                      the same
 *   multiply   np_engine_next_product returns 1 for each product of the turn     wait at the barrier
 *   finish     heads and attention, or its share of adding `outputs`             the same */
#include <string.h>

#include "engine/attention.h"
#include "engine/clusters.h"
#include "engine/logits.h"
#include "engine/offload/product_rows.h"
#include "engine/offload/turns.h"
#include "engine/prefetch.h"
#include "engine/routing.h"
#include "engine/step.h"
#include "engine/vectors.h"
#include "engine/work.h"

/* ---- inputs ------------------------------------------------------------------------------------------------------ */
/* Norm this participant's share of the tokens into `inputs`. */
static void norm_inputs(np_engine *engine, const np_norm *norm)
{
    const size_t width = engine->shape.width;
    const np_range share = np_even_share(engine, engine->count);
    for (size_t t = share.from; t < share.to; t++)
        np_norm_vector(engine, norm, engine->shared.residual + t * width, width, engine->shared.inputs + t * width);
}

static void clear_outputs(np_engine *engine, uint32_t count)
{
    const np_range share = np_even_share(engine, count);
    const size_t width = engine->shape.width;
    memset(engine->shared.outputs + share.from * width, 0, (share.to - share.from) * width * sizeof(float));
}

static int begin_qkv(np_engine *engine, uint32_t layer)
{
    const int done = np_begin_layer(engine, layer);
    if (done < 0)
        return done;
    engine->external.groups = 1; /* at least: the number is known when the first group begins */
    if (np_router_reads(engine, NP_READS_LAYER))
        np_word_store(&engine->external.routed, layer + 1);
    norm_inputs(engine, &engine->fixed.layers[layer].attention_norm);
    engine->external.products = 1;
    return np_meet(engine);
}

static int begin_output(np_engine *engine, uint32_t layer)
{
    const size_t columns = (size_t)engine->shape.query_heads * engine->shape.head_width;
    const np_range share = np_even_share(engine, engine->count);
    memcpy(engine->shared.inputs + share.from * columns, engine->shared.attention + share.from * columns,
           (share.to - share.from) * columns * sizeof(float));
    engine->external.products = 1;
    return np_meet(engine);
}

/* number: the group's number. Before a layer's first group the inputs are written and the tokens routed. */
static int begin_group(np_engine *engine, uint32_t layer, uint32_t number)
{
    if (number == 0) {
        norm_inputs(engine, &engine->fixed.layers[layer].ffn_norm);
        const int done = np_router_reads(engine, NP_READS_FEED_FORWARD) ? np_route_and_prefetch(engine, layer) : NP_OK;
        if (done < 0)
            return done;
        engine->external.groups = engine->group_count;
        np_word_store(&engine->external.routed, layer + 1);
    }
    clear_outputs(engine, engine->groups[number].count);
    engine->external.products = np_neuron_products(engine);
    return np_meet(engine);
}

/* ---- products ---------------------------------------------------------------------------------------------------- */
static void describe_matrix(const np_engine *engine, int kind, uint32_t rows, uint32_t columns, np_product *product)
{
    product->kind = kind;
    product->tokens = engine->count;
    product->rows = product->outputs_stride = rows;
    product->columns = product->inputs_stride = columns;
}

static void describe_neurons(np_engine *engine, const np_group *group, np_product *product)
{
    const np_shape *s = &engine->shape;
    const np_range blocks = np_product_blocks(engine, engine->external.product), clusters = np_block_clusters(engine, blocks.from, blocks.to);
    product->kind = NP_PRODUCT_NEURONS;
    product->tokens = group->count;
    product->rows = (clusters.to - clusters.from) * s->cluster_neurons;
    product->columns = product->inputs_stride = product->outputs_stride = s->width;
    product->token = s->experts == 1 ? NULL : engine->pair_token + group->first;
    engine->counters.neurons += (uint64_t)product->rows * group->count;
}

/* ---- outputs ----------------------------------------------------------------------------------------------------- */
/* Add a group's outputs to the residual stream. Groups follow each other by ascending expert, as in feed_forward.c. */
static int add_group(np_engine *engine, const np_group *group)
{
    const np_shape *s = &engine->shape;
    const np_range share = np_even_share(engine, group->count);
    for (uint32_t t = share.from; t < share.to; t++) {
        float *sum = engine->shared.outputs + (size_t)t * s->width;
        np_scale(sum, s->width, engine->pair_weight[group->first + t]);
        np_scale(sum, s->width, s->residual_scale);
        np_add(sum, s->width, engine->shared.residual + (size_t)engine->pair_token[group->first + t] * s->width);
    }
    return np_meet(engine);
}

/* ---- turns ------------------------------------------------------------------------------------------------------- */
static int current_turn(const np_engine *engine, uint32_t *number)
{
    return np_turn_kind(engine, engine->external.turn, engine->external.groups, number);
}

static int begin_turn(np_engine *engine)
{
    const np_external_state *e = &engine->external;
    uint32_t number;
    engine->layer = e->layer;
    switch (current_turn(engine, &number)) {
    case NP_TURN_QKV:
        return begin_qkv(engine, e->layer);
    case NP_TURN_OUTPUT:
        return begin_output(engine, e->layer);
    default:
        return begin_group(engine, e->layer, number);
    }
}

static void describe_product(np_engine *engine, np_product *product)
{
    const np_shape *s = &engine->shape;
    uint32_t number;
    memset(product, 0, sizeof *product);
    switch (current_turn(engine, &number)) {
    case NP_TURN_QKV:
        describe_matrix(engine, NP_PRODUCT_QKV, np_qkv_rows(s, &engine->fixed.layers[engine->external.layer]), s->width, product);
        break;
    case NP_TURN_OUTPUT:
        describe_matrix(engine, NP_PRODUCT_ATTENTION_OUTPUT, s->width, s->query_heads * s->head_width, product);
        break;
    default:
        describe_neurons(engine, &engine->groups[number], product);
    }
    product->layer = engine->external.layer;
    product->number = engine->external.product;
    product->count = engine->external.products;
    product->inputs = engine->shared.inputs;
    product->outputs = engine->shared.outputs;
}

/* Behind this barrier all products of the turn are computed. */
static int end_turn(np_engine *engine)
{
    uint32_t number;
    const int done = np_meet(engine);
    if (done < 0)
        return done;
    switch (current_turn(engine, &number)) {
    case NP_TURN_QKV:
        return np_attend_heads(engine, engine->external.layer);
    case NP_TURN_OUTPUT:
        return np_add_projection(engine, engine->external.layer);
    default:
        return add_group(engine, &engine->groups[number]);
    }
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */
int np_engine_begin_external(np_engine *engine, const np_step *step)
{
    np_external_state *e = &engine->external;
    int done = engine->config.external_products && step->end_block - step->first_block == engine->shape.blocks ? np_begin_step(engine, step)
                                                                                                     : NP_E_ARGUMENT;
    e->layer = e->turn = e->product = 0;
    e->is_prepared = 0;
    np_word_store(&e->routed, 0);
    if (done >= 0 && step->participant == 0 && !np_row_reader_begin(engine))
        done = NP_E_MEMORY;
    if (done >= 0)
        done = np_embed(engine);
    e->result = done < 0 ? done : 1;
    return done < 0 ? done : NP_OK;
}

/* Run until participant 0 needs a product (1), all layers are done (NP_OK), or an error. */
static int run_until_product(np_engine *engine, np_product *product)
{
    np_external_state *e = &engine->external;
    while (e->layer < engine->end_layer) {
        int done = e->is_prepared ? NP_OK : begin_turn(engine);
        e->is_prepared = 1;
        if (done >= 0 && engine->participant == 0 && e->product < e->products) {
            describe_product(engine, product);
            e->product++;
            return 1;
        }
        if (done >= 0)
            done = end_turn(engine);
        if (done < 0)
            return done;
        e->is_prepared = 0;
        e->product = 0;
        e->turn++;
        if (e->turn == e->groups + NP_MATRIX_TURNS) {
            e->turn = 0;
            e->layer++;
        }
    }
    return NP_OK;
}

int np_engine_next_product(np_engine *engine, np_product *product)
{
    np_external_state *e = &engine->external;
    if (e->result != 1)
        return e->result;
    const int done = run_until_product(engine, product);
    if (done == 1)
        return 1;
    e->result = np_end_step(engine, done);
    return e->result;
}

/* A step whose products of layers another computes: the engine does all that lies between them. Their rows are read ahead of them (rows.c).
 * A layer goes by turns. Each turn has inputs, made by all participants together; products, which participant 0 hands out one after the
 * other; and what is made of the outputs, again by all. native/README.md has the states.
 *
 *   turn    inputs                      products                           then
 *   qkv     the normed residual stream  one                                heads, attention
 *   output  attention                   one                                added to the residual stream
 *   group   the normed residual stream  one for each few blocks            added to the residual stream, times the expert's share
 *
 * A dense layer has one group, a mixture one for each chosen expert. In a parallel layer the groups come before the output. */
#include <string.h>

#include "engine.h"

uint32_t np_qkv_rows(const np_shape *s)
{
    return (s->query_heads + 2 * s->key_heads) * s->head_width;
}

/* ---- inputs ------------------------------------------------------------------------------------------------------ */
/* This participant's tokens, normed. */
static void norm_inputs(np_engine *engine, const np_norm *norm)
{
    const size_t width = engine->shape.width;
    const np_range own = np_engine_share(engine, engine->count);
    for (size_t t = own.from; t < own.to; t++)
        np_engine_norm(engine, norm, engine->shared.residual + t * width, width, engine->shared.inputs + t * width);
}

static void clear_outputs(np_engine *engine, uint32_t count)
{
    const np_range own = np_engine_share(engine, count);
    const size_t width = engine->shape.width;
    memset(engine->shared.outputs + own.from * width, 0, (own.to - own.from) * width * sizeof(float));
}

static int begin_qkv(np_engine *engine, uint32_t layer)
{
    np_engine_begin_layer(engine, layer);
    engine->outside.groups = 1; /* at least: more may be known when the first begins */
    if (np_engine_routes(engine, NP_READS_LAYER))
        np_word_store(&engine->outside.routed, layer + 1);
    norm_inputs(engine, &engine->fixed.layers[layer].attention_norm);
    engine->outside.products = 1;
    return np_engine_barrier(engine);
}

static int begin_output(np_engine *engine, uint32_t layer)
{
    const size_t columns = (size_t)engine->shape.query_heads * engine->shape.head_width;
    const np_range own = np_engine_share(engine, engine->count);
    memcpy(engine->shared.inputs + own.from * columns, engine->shared.attention + own.from * columns,
           (own.to - own.from) * columns * sizeof(float));
    engine->outside.products = 1;
    return np_engine_barrier(engine);
}

/* number: of the group in this layer. Before its first the inputs are made, and tokens get their experts. */
static int begin_group(np_engine *engine, uint32_t layer, uint32_t number)
{
    if (number == 0) {
        norm_inputs(engine, &engine->fixed.layers[layer].ffn_norm);
        if (np_engine_routes(engine, NP_READS_FEED_FORWARD))
            np_engine_route(engine, layer);
        engine->outside.groups = engine->group_count;
        np_word_store(&engine->outside.routed, layer + 1);
    }
    clear_outputs(engine, engine->groups[number].count);
    engine->outside.products = np_neuron_products(engine);
    return np_engine_barrier(engine);
}

/* ---- products ---------------------------------------------------------------------------------------------------- */
uint32_t np_neuron_products(const np_engine *engine)
{
    return (engine->shape.blocks + engine->config.product_blocks - 1) / engine->config.product_blocks;
}

np_range np_product_blocks(const np_engine *engine, uint32_t number)
{
    const uint32_t each = engine->config.product_blocks, all = engine->shape.blocks, from = number * each;
    return (np_range){from, all - from < each ? all : from + each};
}

static void want_matrix(const np_engine *engine, int kind, uint32_t rows, uint32_t columns, np_product *wanted)
{
    wanted->kind = kind;
    wanted->tokens = engine->count;
    wanted->rows = wanted->outputs_stride = rows;
    wanted->columns = wanted->inputs_stride = columns;
}

static void want_neurons(np_engine *engine, const np_group *group, np_product *wanted)
{
    const np_shape *s = &engine->shape;
    const np_range blocks = np_product_blocks(engine, engine->outside.product), clusters = np_clusters_of(engine, blocks.from, blocks.to);
    wanted->kind = NP_PRODUCT_NEURONS;
    wanted->tokens = group->count;
    wanted->rows = (clusters.to - clusters.from) * s->cluster_neurons;
    wanted->columns = wanted->inputs_stride = wanted->outputs_stride = s->width;
    wanted->token = s->experts == 1 ? NULL : engine->pair_token + group->first;
    engine->counters.neurons += (uint64_t)wanted->rows * group->count;
}

/* ---- outputs ----------------------------------------------------------------------------------------------------- */
/* A token's experts are added to its residual stream one after the other, by number. */
static int add_group(np_engine *engine, const np_group *group)
{
    const np_shape *s = &engine->shape;
    const np_range own = np_engine_share(engine, group->count);
    for (uint32_t t = own.from; t < own.to; t++) {
        float *sum = engine->shared.outputs + (size_t)t * s->width;
        np_scale(sum, s->width, engine->pair_weight[group->first + t]);
        np_scale(sum, s->width, s->residual_scale);
        np_add(sum, s->width, engine->shared.residual + (size_t)engine->pair_token[group->first + t] * s->width);
    }
    return np_engine_barrier(engine);
}

/* ---- turns ------------------------------------------------------------------------------------------------------- */
/* A layer has as many turns as groups, and two more. */
int np_turn(const np_engine *engine, uint32_t turn, uint32_t groups, uint32_t *number)
{
    const uint32_t first = engine->shape.parallel ? 1 : 2;
    *number = turn - first;
    if (turn == 0)
        return NP_TURN_QKV;
    if (engine->shape.parallel)
        return *number < groups ? NP_TURN_GROUP : NP_TURN_OUTPUT;
    return turn == 1 ? NP_TURN_OUTPUT : NP_TURN_GROUP;
}

static int this_turn(const np_engine *engine, uint32_t *number)
{
    return np_turn(engine, engine->outside.turn, engine->outside.groups, number);
}

static int begin_turn(np_engine *engine)
{
    const np_outside *o = &engine->outside;
    uint32_t number;
    engine->layer = o->layer;
    switch (this_turn(engine, &number)) {
    case NP_TURN_QKV:
        return begin_qkv(engine, o->layer);
    case NP_TURN_OUTPUT:
        return begin_output(engine, o->layer);
    default:
        return begin_group(engine, o->layer, number);
    }
}

static void want_product(np_engine *engine, np_product *wanted)
{
    const np_shape *s = &engine->shape;
    uint32_t number;
    memset(wanted, 0, sizeof *wanted);
    switch (this_turn(engine, &number)) {
    case NP_TURN_QKV:
        want_matrix(engine, NP_PRODUCT_QKV, np_qkv_rows(s), s->width, wanted);
        break;
    case NP_TURN_OUTPUT:
        want_matrix(engine, NP_PRODUCT_ATTENTION_OUTPUT, s->width, s->query_heads * s->head_width, wanted);
        break;
    default:
        want_neurons(engine, &engine->groups[number], wanted);
    }
    wanted->layer = engine->outside.layer;
    wanted->number = engine->outside.product;
    wanted->of = engine->outside.products;
    wanted->inputs = engine->shared.inputs;
    wanted->outputs = engine->shared.outputs;
}

/* All products of the turn are computed, once everybody is here. */
static int end_turn(np_engine *engine)
{
    uint32_t number;
    const int done = np_engine_barrier(engine);
    if (done < 0)
        return done;
    switch (this_turn(engine, &number)) {
    case NP_TURN_QKV:
        return np_engine_heads(engine, engine->outside.layer);
    case NP_TURN_OUTPUT:
        return np_engine_add_projection(engine, engine->outside.layer);
    default:
        return add_group(engine, &engine->groups[number]);
    }
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */
int np_engine_begin(np_engine *engine, const np_step *step)
{
    np_outside *o = &engine->outside;
    int done = engine->config.outside && step->end_block - step->first_block == engine->shape.blocks ? np_engine_take_step(engine, step)
                                                                                                     : NP_E_ARGUMENT;
    o->layer = o->turn = o->product = 0;
    o->begun = 0;
    np_word_store(&o->routed, 0);
    if (done >= 0 && step->participant == 0 && !np_rows_begin(engine))
        done = NP_E_MEMORY;
    if (done >= 0)
        done = np_engine_embed(engine);
    o->result = done < 0 ? done : 1;
    return done < 0 ? done : NP_OK;
}

/* Go on until participant 0 wants a product (1), all layers are done (NP_OK), or an error. */
static int go_on(np_engine *engine, np_product *wanted)
{
    np_outside *o = &engine->outside;
    while (o->layer < engine->shape.layers) {
        int done = o->begun ? NP_OK : begin_turn(engine);
        o->begun = 1;
        if (done >= 0 && engine->participant == 0 && o->product < o->products) {
            want_product(engine, wanted);
            o->product++;
            return 1;
        }
        if (done >= 0)
            done = end_turn(engine);
        if (done < 0)
            return done;
        o->begun = 0;
        o->product = 0;
        o->turn++;
        if (o->turn == o->groups + 2) {
            o->turn = 0;
            o->layer++;
        }
    }
    return NP_OK;
}

int np_engine_next(np_engine *engine, np_product *wanted)
{
    np_outside *o = &engine->outside;
    if (o->result != 1)
        return o->result;
    const int done = go_on(engine, wanted);
    if (done == 1)
        return 1;
    o->result = np_engine_end_step(engine, done);
    return o->result;
}

/* The rows of external products, read ahead of the products. Rows of attention are always in memory; rows of neurons
 * lie in windows, which are opened one after the other, each prefetching the next.
 *
 * The reader is an engine of its own with participant 0's window and request ring, so that it can be layers ahead, in
 * another thread. In a step with external products nobody else opens windows or makes requests. Of the step's engine it
 * reads a layer's groups only, once `routed` says that they are known. They change when all products of the layer are
 * computed, which needs the rows. */
#include "engine/offload/product_rows.h"

#include <stdlib.h>
#include <string.h>

#include "engine/clusters.h"
#include "engine/feed_forward.h"
#include "engine/neurons.h"
#include "engine/offload/turns.h"

static uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* ---- the reader -------------------------------------------------------------------------------------------------------- */
static int allocate_addresses(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    np_external_state *e = &engine->external;
    int complete = 1;
    e->max_rows = larger(larger(np_qkv_rows(s, engine->fixed.layers), s->width), engine->config.product_blocks * s->block_neurons);
    for (int i = 0; i < 3; i++) {
        if (!e->quants[i]) /* an earlier attempt may have allocated some */
            e->quants[i] = calloc(e->max_rows, sizeof(void *));
        if (!e->scales[i])
            e->scales[i] = calloc(e->max_rows, sizeof(void *));
        complete &= e->quants[i] && e->scales[i];
    }
    return complete;
}

static np_engine *reader_create(const np_engine *engine)
{
    const char *wrong;
    const uint32_t product_blocks = engine->config.product_blocks, blocks = engine->shape.blocks, window_blocks = engine->config.window_blocks;
    np_shared shared = engine->shared;
    np_engine_config config = engine->config;
    memset(&shared.trace, 0, sizeof shared.trace); /* a trace ring has one writer: the step's engine */
    config.max_tokens = config.logit_rows = config.partial_tokens = 1;
    config.window_blocks = window_blocks < blocks ? window_blocks / product_blocks * product_blocks : larger(blocks, product_blocks);
    return np_engine_create(&engine->shape, &engine->fixed, &shared, &config, &wrong);
}

int np_row_reader_begin(np_engine *engine)
{
    np_external_state *e = &engine->external;
    if (!e->reader && (!allocate_addresses(engine) || !(e->reader = reader_create(engine))))
        return 0; /* np_engine_destroy frees what was allocated */
    e->rows_layer = e->rows_turn = e->rows_product = 0;
    np_engine *reader = e->reader;
    reader->epoch = engine->epoch;
    reader->step = engine->step;
    reader->participants = reader->sharers = 1;
    reader->blocks = (np_range){0, engine->shape.blocks};
    reader->group = NULL;
    np_close_window(reader);
    return 1;
}

/* ---- which rows are next ---------------------------------------------------------------------------------------------- */
static void advance(np_external_state *e, uint32_t products, uint32_t groups)
{
    if (++e->rows_product < products)
        return;
    e->rows_product = 0;
    if (++e->rows_turn < groups + NP_MATRIX_TURNS)
        return;
    e->rows_turn = 0;
    e->rows_layer++;
}

static void describe_neurons(const np_engine *engine, uint32_t expert, np_product_rows *rows)
{
    const np_range blocks = np_product_blocks(engine, engine->external.rows_product);
    const np_range clusters = np_block_clusters(engine, blocks.from, blocks.to);
    rows->kind = NP_PRODUCT_NEURONS;
    rows->expert = expert;
    rows->first_block = blocks.from;
    rows->rows = (clusters.to - clusters.from) * engine->shape.cluster_neurons;
    rows->columns = engine->shape.width;
}

int np_engine_next_rows(np_engine *engine, np_product_rows *next)
{
    const np_shape *s = &engine->shape;
    np_external_state *e = &engine->external;
    uint32_t number;
    memset(next, 0, sizeof *next);
    if (!e->reader)
        return NP_E_ARGUMENT;
    if (e->rows_layer == np_text_layers(s))
        return NP_OK;
    const int may_be_group = e->rows_turn >= (s->parallel ? 1u : 2u);
    if (may_be_group && s->experts > 1 && np_word_load(&e->routed) <= e->rows_layer)
        return NP_ROWS_UNKNOWN;
    const uint32_t groups = may_be_group ? engine->group_count : 1;
    const int turn = np_turn_kind(engine, e->rows_turn, groups, &number);
    next->layer = e->rows_layer;
    if (turn == NP_TURN_GROUP) {
        describe_neurons(engine, engine->groups[number].expert, next);
    } else {
        next->kind = turn == NP_TURN_QKV ? NP_PRODUCT_QKV : NP_PRODUCT_ATTENTION_OUTPUT;
        next->rows = turn == NP_TURN_QKV ? np_qkv_rows(s, engine->fixed.layers) : s->width;
        next->columns = turn == NP_TURN_QKV ? s->width : s->query_heads * s->head_width;
    }
    advance(e, turn == NP_TURN_GROUP ? np_neuron_products(engine) : 1, groups);
    return 1;
}

/* ---- where the rows lie ---------------------------------------------------------------------------------------------- */
static void open_matrix(np_engine *engine, const np_matrix *matrix, np_product_rows *rows)
{
    np_external_state *e = &engine->external;
    const size_t quant_bytes = np_quant_bytes(matrix->type, rows->columns), scale_bytes = np_scale_bytes(matrix->type, rows->columns);
    rows->types[0] = matrix->type;
    for (uint32_t r = 0; r < rows->rows; r++) {
        e->quants[0][r] = (const uint8_t *)matrix->quants + r * quant_bytes;
        e->scales[0][r] = (const uint8_t *)matrix->scales + r * scale_bytes;
    }
}

/* In a mixture, prefetch the rows of all groups of a layer when its first group is opened; later request those of the
 * next group again, because a full ring drops prefetches. */
static void prefetch_groups(np_engine *engine, uint32_t layer, uint32_t expert)
{
    np_engine *reader = engine->external.reader;
    uint32_t current = 0;
    while (current < engine->group_count && engine->groups[current].expert != expert)
        current++;
    const uint32_t end = current && current + 2 < engine->group_count ? current + 2 : engine->group_count;
    for (uint32_t g = current; g < end; g++)
        np_request_ahead(reader, layer, engine->groups[g].expert, reader->blocks, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE, NP_REQUEST_PREFETCH);
}

static int open_neurons(np_engine *engine, np_product_rows *rows)
{
    const np_shape *s = &engine->shape;
    const np_matrix_place *const places[3] = {&s->gate, &s->up, &s->down};
    np_external_state *e = &engine->external;
    np_engine *reader = e->reader;
    if (!reader->group || reader->layer != rows->layer || reader->groups[0].expert != rows->expert) {
        np_close_window(reader);
        reader->group = NULL;
        reader->layer = rows->layer;
        reader->groups[0] = (np_group){rows->expert, 0, larger(engine->count, NP_DENSE_TOKENS)}; /* NP_DENSE_TOKENS: all parts are needed, however few the tokens */
        if (s->experts > 1 && rows->first_block == 0 && engine->config.prefetch)
            prefetch_groups(engine, rows->layer, rows->expert);
    }
    const uint32_t neurons = rows->rows, first = rows->first_block * s->block_neurons;
    const np_range blocks = {rows->first_block, rows->first_block + (neurons + s->block_neurons - 1) / s->block_neurons};
    const int done = np_fetch_blocks(reader, &reader->groups[0], blocks);
    if (done < 0)
        return done;
    for (int i = 0; i < 3; i++) {
        rows->types[i] = places[i]->type;
        for (uint32_t r = 0; r < neurons; r++)
            np_neuron_row(reader, places[i], first + r, &e->quants[i][r], &e->scales[i][r]);
    }
    return NP_OK;
}

int np_engine_open_rows(np_engine *engine, np_product_rows *rows)
{
    const np_shape *s = &engine->shape;
    const np_external_state *e = &engine->external;
    if (!e->reader || rows->layer >= s->layers || rows->rows > e->max_rows || rows->expert >= engine->fixed.layers[rows->layer].experts || rows->first_block >= s->blocks)
        return NP_E_ARGUMENT;
    if (np_word_load(engine->shared.epoch) != engine->epoch)
        return NP_E_EPOCH;
    const np_layer *l = &engine->fixed.layers[rows->layer];
    int done = NP_OK;
    if (rows->kind == NP_PRODUCT_NEURONS)
        done = open_neurons(engine, rows);
    else
        open_matrix(engine, rows->kind == NP_PRODUCT_QKV ? &l->qkv : &l->attention_output, rows);
    for (int i = 0; i < (rows->kind == NP_PRODUCT_NEURONS ? 3 : 1); i++) {
        rows->quants[i] = e->quants[i];
        rows->scales[i] = e->scales[i];
    }
    return done;
}

void np_engine_close_rows(np_engine *engine)
{
    if (!engine->external.reader)
        return;
    np_close_window(engine->external.reader);
    engine->external.reader->group = NULL;
}

/* ---- products by the engine's own kernels ----------------------------------------------------------------------------------- */
/* Compute the neurons of one token, whose vector is prepared, in lists of at most block_neurons rows. */
static void multiply_neurons(np_engine *engine, const np_product_rows *p, float *out)
{
    const np_shape *s = &engine->shape;
    float *gates = engine->rows, *ups = engine->rows + s->block_neurons; /* engine->max_rows is at least 2 * block_neurons */
    memset(out, 0, s->width * sizeof *out);
    for (uint32_t row = 0; row < p->rows; row += s->block_neurons) {
        const uint32_t count = p->rows - row < s->block_neurons ? p->rows - row : s->block_neurons;
        np_row_list *list = &engine->list;
        np_dot_scattered(p->types[0], p->quants[0] + row, p->scales[0] + row, count, s->width, NULL, engine->vectors.prepared, 0, 1, gates, 0);
        np_dot_scattered(p->types[1], p->quants[1] + row, p->scales[1] + row, count, s->width, NULL, engine->vectors.prepared, 0, 1, ups, 0);
        list->count = 0;
        for (uint32_t r = 0; r < count; r++) {
            const float value = np_neuron_value(engine, gates[r], ups[r]);
            if (value == 0.0f)
                continue;
            list->quants[list->count] = p->quants[2][row + r];
            list->scales[list->count] = p->scales[2][row + r];
            list->values[list->count++] = value;
        }
        np_add_rows(p->types[2], list->quants, list->scales, list->values, list->count, s->width, out);
    }
}

int np_engine_compute_product(np_engine *engine, const np_product *product, const np_product_rows *rows, const uint32_t *tokens, uint32_t count, float *out,
                      size_t out_stride)
{
    const np_shape *s = &engine->shape;
    np_engine *reader = engine->external.reader;
    if (!reader || out_stride < product->outputs_stride || product->kind != rows->kind || product->rows != rows->rows ||
        product->columns != rows->columns || !rows->quants[0])
        return NP_E_ARGUMENT;
    for (uint32_t i = 0; i < count; i++)
        if (tokens[i] >= product->tokens)
            return NP_E_ARGUMENT;
    for (uint32_t i = 0; i < count; i++) {
        const float *x = product->inputs + (size_t)(product->token ? product->token[tokens[i]] : tokens[i]) * product->inputs_stride;
        np_activation_prepare(s->type, x, product->columns, reader->vectors.prepared);
        if (product->kind == NP_PRODUCT_NEURONS)
            multiply_neurons(reader, rows, out + i * out_stride);
        else
            np_dot_scattered(rows->types[0], rows->quants[0], rows->scales[0], rows->rows, rows->columns, NULL, reader->vectors.prepared, 0, 1,
                             out + i * out_stride, 0);
    }
    return NP_OK;
}

/* Rows of a step's products, for who computes those (outside.c) and reads rows ahead of them. Rows of attention lie in memory for good; those
 * of neurons in windows, which are opened one after the other and ask the loader for the next.
 *
 * The reader has an engine of its own, with participant 0's window word and ring of requests and nothing of its step: so it may be
 * layers ahead, in another thread. Of the step it reads the groups of a layer alone, once `routed` says that they are known; they stay as they are until
 * all products of that layer are computed, which is after their rows were read. */
#include <stdlib.h>
#include <string.h>

#include "engine.h"

static uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* ---- life -------------------------------------------------------------------------------------------------------- */
static int pointers_create(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    np_outside *o = &engine->outside;
    int complete = 1;
    o->most_rows = larger(larger(np_qkv_rows(s), s->width), engine->config.product_blocks * s->block_neurons);
    for (int i = 0; i < 3; i++) {
        o->quants[i] = calloc(o->most_rows, sizeof(void *));
        o->scales[i] = calloc(o->most_rows, sizeof(void *));
        complete &= o->quants[i] && o->scales[i];
    }
    return complete;
}

static np_engine *reader_create(const np_engine *engine)
{
    const char *wrong;
    const uint32_t each = engine->config.product_blocks, blocks = engine->shape.blocks, wide = engine->config.window_blocks;
    np_shared shared = engine->shared;
    np_engine_config config = engine->config;
    memset(&shared.trace, 0, sizeof shared.trace); /* a ring has one writer */
    config.max_tokens = config.logit_rows = config.partial_tokens = 1;
    config.window_blocks = wide < blocks ? wide / each * each : larger(blocks, each);
    return np_engine_create(&engine->shape, &engine->fixed, &shared, &config, &wrong);
}

int np_rows_begin(np_engine *engine)
{
    np_outside *o = &engine->outside;
    if (!o->reader && (!pointers_create(engine) || !(o->reader = reader_create(engine)))) {
        np_rows_destroy(engine);
        return 0;
    }
    o->rows_layer = o->rows_turn = o->rows_product = 0;
    np_engine *reader = o->reader;
    reader->epoch = engine->epoch;
    reader->step = engine->step;
    reader->participants = reader->sharers = 1;
    reader->blocks = (np_range){0, engine->shape.blocks};
    reader->group = NULL;
    np_close_window(reader);
    return 1;
}

void np_rows_destroy(np_engine *engine)
{
    np_outside *o = &engine->outside;
    np_engine_destroy(o->reader);
    o->reader = NULL;
    for (int i = 0; i < 3; i++) {
        free(o->quants[i]);
        free(o->scales[i]);
        o->quants[i] = o->scales[i] = NULL;
    }
}

void np_rows_count(np_engine *engine, np_engine_counters *to)
{
    np_engine_counters c;
    if (!engine->outside.reader)
        return;
    np_engine_read_counters(engine->outside.reader, &c);
    to->flash_ns += c.flash_ns;
    to->foreseen += c.foreseen;
    to->foreseen_missed += c.foreseen_missed;
    for (int part = 0; part < NP_PARTS; part++) {
        to->clusters[part] += c.clusters[part];
        to->missed[part] += c.missed[part];
    }
    if (c.damaged_word >= 0) {
        to->damaged_word = c.damaged_word;
        to->damaged_part = c.damaged_part;
    }
}

/* ---- which are next ---------------------------------------------------------------------------------------------- */
static void advance(np_outside *o, uint32_t products, uint32_t groups)
{
    if (++o->rows_product < products)
        return;
    o->rows_product = 0;
    if (++o->rows_turn < groups + 2)
        return;
    o->rows_turn = 0;
    o->rows_layer++;
}

static void name_neurons(const np_engine *engine, uint32_t expert, np_product_rows *rows)
{
    const np_range blocks = np_product_blocks(engine, engine->outside.rows_product);
    const np_range clusters = np_clusters_of(engine, blocks.from, blocks.to);
    rows->kind = NP_PRODUCT_NEURONS;
    rows->expert = expert;
    rows->first_block = blocks.from;
    rows->rows = (clusters.to - clusters.from) * engine->shape.cluster_neurons;
    rows->columns = engine->shape.width;
}

int np_engine_next_rows(np_engine *engine, np_product_rows *next)
{
    const np_shape *s = &engine->shape;
    np_outside *o = &engine->outside;
    uint32_t number;
    memset(next, 0, sizeof *next);
    if (!o->reader)
        return NP_E_ARGUMENT;
    if (o->rows_layer == s->layers)
        return NP_OK;
    const int may_be_group = o->rows_turn >= (s->parallel ? 1u : 2u);
    if (may_be_group && s->experts > 1 && np_word_load(&o->routed) <= o->rows_layer)
        return NP_ROWS_UNKNOWN;
    const uint32_t groups = may_be_group ? engine->group_count : 1;
    const int turn = np_turn(engine, o->rows_turn, groups, &number);
    next->layer = o->rows_layer;
    if (turn == NP_TURN_GROUP) {
        name_neurons(engine, engine->groups[number].expert, next);
    } else {
        next->kind = turn == NP_TURN_QKV ? NP_PRODUCT_QKV : NP_PRODUCT_ATTENTION_OUTPUT;
        next->rows = turn == NP_TURN_QKV ? np_qkv_rows(s) : s->width;
        next->columns = turn == NP_TURN_QKV ? s->width : s->query_heads * s->head_width;
    }
    advance(o, turn == NP_TURN_GROUP ? np_neuron_products(engine) : 1, groups);
    return 1;
}

/* ---- where they lie ---------------------------------------------------------------------------------------------- */
static void open_matrix(np_engine *engine, const np_matrix *matrix, const np_product_rows *rows)
{
    np_outside *o = &engine->outside;
    const size_t quant_bytes = np_quant_bytes(engine->shape.type, rows->columns), scale_bytes = np_scale_bytes(engine->shape.type, rows->columns);
    for (uint32_t r = 0; r < rows->rows; r++) {
        o->quants[0][r] = (const uint8_t *)matrix->quants + r * quant_bytes;
        o->scales[0][r] = (const uint8_t *)matrix->scales + r * scale_bytes;
    }
}

/* Of a mixture's layer all that its groups want, when the first of them is opened; later what the next one lacks once more, for a full ring
 * lets go of some. */
static void ask_for_groups(np_engine *engine, uint32_t layer, uint32_t expert)
{
    np_engine *reader = engine->outside.reader;
    uint32_t at = 0;
    while (at < engine->group_count && engine->groups[at].expert != expert)
        at++;
    const uint32_t end = at && at + 2 < engine->group_count ? at + 2 : engine->group_count;
    for (uint32_t g = at; g < end; g++)
        np_ask_ahead(reader, layer, engine->groups[g].expert, reader->blocks, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE, NP_REQUEST_PREFETCH);
}

static int open_neurons(np_engine *engine, const np_product_rows *rows)
{
    const np_shape *s = &engine->shape;
    const np_matrix_place *const places[3] = {&s->gate, &s->up, &s->down};
    np_outside *o = &engine->outside;
    np_engine *reader = o->reader;
    if (!reader->group || reader->layer != rows->layer || reader->groups[0].expert != rows->expert) {
        np_close_window(reader);
        reader->group = NULL;
        reader->layer = rows->layer;
        reader->groups[0] = (np_group){rows->expert, 0, larger(engine->count, NP_DENSE_TOKENS)}; /* every row is wanted, however few the tokens */
        if (s->experts > 1 && rows->first_block == 0 && engine->config.prefetch)
            ask_for_groups(engine, rows->layer, rows->expert);
    }
    const uint32_t neurons = rows->rows, first = rows->first_block * s->block_neurons;
    const np_range blocks = {rows->first_block, rows->first_block + (neurons + s->block_neurons - 1) / s->block_neurons};
    const int there = np_fetch_blocks(reader, &reader->groups[0], blocks);
    if (there < 0)
        return there;
    for (int i = 0; i < 3; i++)
        for (uint32_t r = 0; r < neurons; r++)
            np_neuron_row(reader, places[i], first + r, &o->quants[i][r], &o->scales[i][r]);
    return NP_OK;
}

int np_engine_open_rows(np_engine *engine, np_product_rows *rows)
{
    const np_shape *s = &engine->shape;
    const np_outside *o = &engine->outside;
    if (!o->reader || rows->layer >= s->layers || rows->rows > o->most_rows || rows->expert >= s->experts || rows->first_block >= s->blocks)
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
        rows->quants[i] = o->quants[i];
        rows->scales[i] = o->scales[i];
    }
    return done;
}

void np_engine_close_rows(np_engine *engine)
{
    if (!engine->outside.reader)
        return;
    np_close_window(engine->outside.reader);
    engine->outside.reader->group = NULL;
}

/* ---- by the engine's own kernels ----------------------------------------------------------------------------------- */
/* Neurons of one token, whose vector is prepared, in lists of a block's length. */
static void neurons_alone(np_engine *engine, const np_product_rows *p, float *out)
{
    const np_shape *s = &engine->shape;
    float *gates = engine->rows, *ups = engine->rows + s->block_neurons; /* max_rows is twice block_neurons at least */
    memset(out, 0, s->width * sizeof *out);
    for (uint32_t row = 0; row < p->rows; row += s->block_neurons) {
        const uint32_t some = p->rows - row < s->block_neurons ? p->rows - row : s->block_neurons;
        np_row_list *list = &engine->list;
        np_dot_scattered(s->trigger_type, p->quants[0] + row, p->scales[0] + row, some, s->width, NULL, engine->vectors.prepared, 0, 1, gates, 0);
        np_dot_scattered(s->type, p->quants[1] + row, p->scales[1] + row, some, s->width, NULL, engine->vectors.prepared, 0, 1, ups, 0);
        list->count = 0;
        for (uint32_t r = 0; r < some; r++) {
            const float value = np_neuron_value(engine, gates[r], ups[r]);
            if (value == 0.0f)
                continue;
            list->quants[list->count] = p->quants[2][row + r];
            list->scales[list->count] = p->scales[2][row + r];
            list->values[list->count++] = value;
        }
        np_add_rows(s->type, list->quants, list->scales, list->values, list->count, s->width, out);
    }
}

int np_engine_product(np_engine *engine, const np_product *product, const np_product_rows *rows, const uint32_t *tokens, uint32_t count, float *out,
                      size_t out_stride)
{
    const np_shape *s = &engine->shape;
    np_engine *reader = engine->outside.reader;
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
            neurons_alone(reader, rows, out + i * out_stride);
        else
            np_dot_scattered(s->type, rows->quants[0], rows->scales[0], rows->rows, rows->columns, NULL, reader->vectors.prepared, 0, 1,
                             out + i * out_stride, 0);
    }
    return NP_OK;
}

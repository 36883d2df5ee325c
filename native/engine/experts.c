/* The rows of a piece lie one behind the other, so they are multiplied as rows of attention's matrices are. A value is
 * the product of whole rows, and an output the product of one row and all values: the bits depend neither on the pieces
 * nor on who computes them. */
#include "engine/experts.h"

#include "engine/clusters.h"
#include "engine/neuron_rows.h"
#include "engine/neurons.h"
#include "engine/prediction.h"
#include "engine/reuse.h"
#include "engine/vectors.h"

enum { OUTPUT_PIECE_ROWS = 128 }; /* rows of down are shorter than rows of gate and up: a few microseconds */

/* The group's expert has one cluster. */
enum { CLUSTER = 0 };

static np_range piece_rows(uint32_t piece, uint32_t rows, uint32_t all)
{
    const uint32_t from = piece * rows;
    return (np_range){from, all - from < rows ? all : from + rows};
}

uint32_t np_neuron_pieces(const np_shape *shape)
{
    return (shape->neurons + NP_PIECE_ROWS - 1) / NP_PIECE_ROWS;
}

uint32_t np_output_pieces(const np_shape *shape)
{
    return (shape->width + OUTPUT_PIECE_ROWS - 1) / OUTPUT_PIECE_ROWS;
}

static np_matrix matrix_at(const np_engine *engine, const np_matrix_place *place)
{
    return (np_matrix){.quants = quants_of(engine, place, CLUSTER), .scales = scales_of(engine, place, CLUSTER), .type = place->type};
}

/* ---- residency ---------------------------------------------------------------------------------------------------- */
/* Count the expert's look-up, once among all participants, and request its absent parts. */
static int request_expert(np_engine *engine, int is_absent[NP_PARTS])
{
    engine->cluster_state[CLUSTER] |= NP_CLUSTER_LOOKED_UP;
    for (int part = 0; part < NP_PARTS; part++) {
        np_count_use(engine, part, CLUSTER);
        engine->counters.clusters[part]++;
        engine->counters.missed[part] += is_absent[part];
    }
    engine->counters.hinted_fired += (uint64_t)np_was_hinted(engine, CLUSTER);
    const uint32_t entry =
        np_absent_parts(engine, engine->layer, engine->group->expert, CLUSTER, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE);
    return entry ? np_request_clusters(engine, &entry, 1) : NP_OK;
}

/* Look up the parts of the expert whose slots are not known yet. Returns 1 if both are present, 0 if not, or an error. */
static int find_expert(np_engine *engine, int requests)
{
    int is_absent[NP_PARTS] = {0};
    for (int part = 0; part < NP_PARTS; part++) {
        const int is_present = engine->slot[part][CLUSTER] != NP_NONE ? 1 : np_look_up(engine, part, CLUSTER);
        if (is_present < 0)
            return is_present;
        is_absent[part] = !is_present;
    }
    if (requests && !(engine->cluster_state[CLUSTER] & NP_CLUSTER_LOOKED_UP)) {
        const int done = request_expert(engine, is_absent);
        if (done < 0)
            return done;
    }
    return !is_absent[NP_TRIGGER] && !is_absent[NP_VALUE];
}

/* ---- neurons ------------------------------------------------------------------------------------------------------ */
/* Turn the gates and ups of consecutive neurons into their values for token t, and count and record their activity. */
static void store_values(np_engine *engine, uint32_t t, np_range neurons, const float *gates, const float *ups)
{
    const np_shape *s = &engine->shape;
    const uint32_t count = neurons.to - neurons.from;
    float *values = hidden_of(engine, t, neurons.from);
    np_activate(s->activation, s->activation_limit, gates, ups, count, values);
    uint32_t fired = 0, active = 0;
    for (uint32_t i = 0; i < count; i++) {
        const int is_fired = fires(engine, gates[i]);
        values[i] = is_fired ? values[i] : 0.0f;
        fired += (uint32_t)is_fired;
        active += values[i] != 0.0f;
    }
    engine->counters.fired += fired;
    engine->counters.active += active;
    for (uint32_t i = 0; engine->shared.activity && i < count; i++)
        record(engine, neurons.from + i,
               (uint8_t)(NP_TRIGGERED | (fires(engine, gates[i]) ? NP_FIRED : 0) | (values[i] != 0.0f ? NP_ACTIVE : 0)));
}

int np_compute_neuron_piece(np_engine *engine, uint32_t piece)
{
    const np_shape *s = &engine->shape;
    const int is_present = find_expert(engine, piece == 0);
    if (is_present != 1)
        return is_present;
    const np_range neurons = piece_rows(piece, NP_PIECE_ROWS, s->neurons);
    const uint32_t count = neurons.to - neurons.from, tokens = engine->group->count;
    const np_matrix gate = matrix_at(engine, &s->gate), up = matrix_at(engine, &s->up);
    float *gates = engine->rows, *ups = gates + count; /* max_rows >= 2 * block_neurons */
    const np_layer *l = &engine->fixed.layers[engine->layer];
    np_multiply_rows(engine, engine->inputs, &gate, neurons.from, count, np_bias_of(engine, l->gate_bias, s->neurons), gates, engine->max_rows);
    np_multiply_rows(engine, engine->inputs, &up, neurons.from, count, np_bias_of(engine, l->up_bias, s->neurons), ups, engine->max_rows);
    for (uint32_t t = 0; t < tokens; t++, gates += engine->max_rows, ups += engine->max_rows)
        store_values(engine, t, neurons, gates, ups);
    const uint64_t rows = (uint64_t)count * tokens;
    engine->counters.neurons += rows;
    engine->counters.predicted += rows;
    engine->counters.gate_rows += rows;
    engine->counters.up_rows += rows;
    return 1;
}

/* ---- outputs ------------------------------------------------------------------------------------------------------ */
/* Prepare the values of some of the group's tokens, unless they are: the next piece reads the same ones. */
static void prepare_values(np_engine *engine, uint32_t t, uint32_t count)
{
    const uint32_t pair = engine->group->first + t;
    if (engine->values_pair == pair)
        return;
    np_prepare_vectors(engine, &engine->values, hidden_of(engine, t, 0), count, engine->layer_neurons, engine->shape.neurons, NULL);
    engine->values_pair = pair;
}

int np_multiply_output_piece(np_engine *engine, uint32_t piece, np_range tokens, uint32_t first_row)
{
    const np_shape *s = &engine->shape;
    const int is_present = np_look_up(engine, NP_VALUE, CLUSTER);
    if (is_present != 1)
        return is_present < 0 ? is_present : NP_E_ARGUMENT; /* the expert is in no open window */
    const np_range outputs = piece_rows(piece, OUTPUT_PIECE_ROWS, s->width);
    const uint32_t rows = outputs.to - outputs.from;
    const np_matrix down = matrix_at(engine, &s->down);
    const float *bias = np_bias_of(engine, engine->fixed.layers[engine->layer].down_bias, s->width);
    for (uint32_t t = tokens.from, count; t < tokens.to; t += count) {
        float *sums = engine->shared.partials + (size_t)(first_row + t - tokens.from) * s->width + outputs.from;
        count = tokens.to - t < NP_OUTPUT_TOKENS ? tokens.to - t : NP_OUTPUT_TOKENS;
        prepare_values(engine, t, count);
        np_multiply_rows(engine, &engine->values, &down, outputs.from, rows, bias, sums, s->width);
        for (uint32_t i = 0; i < count; i++)
            np_scale(sums + (size_t)i * s->width, rows, engine->pair_weight[engine->group->first + t + i]);
    }
    if (piece == 0)
        engine->counters.down_rows += (uint64_t)s->neurons * (tokens.to - tokens.from);
    return NP_OK;
}

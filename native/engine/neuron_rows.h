/* Shared by triggers.c and neurons.c: token lots, row lists, and the open clusters of a block.
 *
 * Tokens are processed in lots of up to 16. A gate or up row is read once for all tokens of a lot that need it. Down
 * rows are added together only for tokens with the same list of rows: the bits of np_add_rows depend on it, and it must
 * be the same whatever the batch. */
#ifndef NP_NEURON_ROWS_H
#define NP_NEURON_ROWS_H
#include "engine/engine.h"
#include "kernels/exponential.h"

#include <math.h>

/* A neuron's value for the group's token t. */
static inline float *hidden_of(np_engine *engine, uint32_t t, uint32_t neuron)
{
    return engine->shared.hidden + (engine->group->first + t) * engine->layer_neurons + neuron;
}

/* True if a neuron fires, by its trigger: its value can differ from zero or, with SiLU, is not below the layer's
 * threshold. NaN fires, so that it shows in the result. */
static inline int fires(const np_engine *engine, float trigger)
{
    if (!np_is_smooth(&engine->shape))
        return trigger > engine->shape.activation_threshold;
    const float silent_below = engine->fixed.layers[engine->layer].silent_below;
    return silent_below == 0.0f ? trigger != 0.0f : !(fabsf(np_silu(trigger)) < silent_below);
}

/* ---- rows of neurons, for the tokens of a lot ---------------------------------------------------------------------------------- */
/* Tokens [first, first + count) of the group. Bit t of a token mask is token first + t. */
typedef struct {
    uint32_t first, count;
} token_lot;
enum { LOT_TOKENS = 16 };

static inline token_lot lot_from(const np_engine *engine, uint32_t first)
{
    const uint32_t left = engine->group->count - first;
    return (token_lot){first, left < LOT_TOKENS ? left : LOT_TOKENS};
}

/* Remove the lowest token from a mask and return it. */
static inline uint32_t pop_token(uint32_t *bits)
{
    const uint32_t t = (uint32_t)__builtin_ctz(*bits);
    *bits &= *bits - 1;
    return t;
}

/* Append a neuron's row and the tokens of the lot that need it. */
static inline void list_row(np_engine *engine, const uint8_t *quants, const uint8_t *scales, uint32_t neuron, uint32_t token_mask)
{
    np_row_list *list = &engine->list;
    list->quants[list->count] = quants;
    list->scales[list->count] = scales;
    list->neurons[list->count] = neuron;
    list->token_masks[list->count++] = (uint16_t)token_mask;
}

/* Multiply the listed rows of one matrix with the tokens that need them. product_of reads the results. */
static inline void dot_listed(np_engine *engine, const np_matrix_place *matrix, token_lot lot, const np_fetch *fetch)
{
    const np_vectors *x = engine->inputs;
    const np_row_list *list = &engine->list;
    np_dot_masked(matrix->type, list->quants, list->scales, list->token_masks, list->count, engine->shape.width, fetch,
                  x->prepared + lot.first * x->stride, x->stride, lot.count, engine->rows + lot.first * engine->max_rows, engine->max_rows);
}

/* Multiply the listed rows of one matrix with all tokens of the group, by a panel. */
static inline void dot_panel(np_engine *engine, const np_matrix_place *matrix)
{
    const np_row_list *list = &engine->list;
    np_dot_panel(matrix->type, list->quants, list->scales, list->count, engine->shape.width, engine->inputs->panel, engine->group->count, NULL,
                 engine->rows, engine->max_rows);
}

static inline float product_of(const np_engine *engine, uint32_t r, uint32_t t)
{
    return engine->rows[t * engine->max_rows + r];
}

/* The slot of a cluster's part, and a matrix's first row in it. */
static inline const uint8_t *slot_of(const np_engine *engine, uint32_t part, uint32_t cluster)
{
    return engine->shared.slots[part] + (size_t)engine->slot[part][cluster] * engine->shape.slot_bytes[part];
}

static inline const uint8_t *quants_of(const np_engine *engine, const np_matrix_place *matrix, uint32_t cluster)
{
    return slot_of(engine, matrix->part, cluster) + matrix->quants;
}

static inline const uint8_t *scales_of(const np_engine *engine, const np_matrix_place *matrix, uint32_t cluster)
{
    return slot_of(engine, matrix->scales_part, cluster) + matrix->scales;
}

/* ---- clusters of a block ------------------------------------------------------------------------------------------ */
/* List the clusters that are not done. Clusters that a predictor does not name are marked as done at the first
 * look-up. */
static inline void list_open(np_engine *engine, np_range clusters)
{
    const uint64_t done = 0x0101010101010101u * NP_CLUSTER_DONE;
    engine->open_count = 0;
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster += 8)
        for (uint64_t left = ~np_eight_bytes(engine->cluster_state + cluster, clusters.to - cluster, done) & done; left; left &= left - 1)
            engine->open[engine->open_count++] = cluster + (uint32_t)__builtin_ctzll(left) / 8;
}

/* Record a neuron's activity, for runs that count it. */
static inline void record(np_engine *engine, uint32_t neuron, uint8_t activity)
{
    if (engine->shared.activity) {
        const size_t ffn = engine->fixed.layers[engine->layer].first_ffn + engine->group->expert;
        engine->shared.activity[ffn * engine->layer_neurons + neuron] |= activity;
    }
}

/* Store a neuron's value for token t. */
static inline void store_value(np_engine *engine, uint32_t t, uint32_t neuron, float value)
{
    *hidden_of(engine, t, neuron) = value;
    if (value == 0.0f)
        return;
    engine->counters.active++;
    record(engine, neuron, NP_ACTIVE);
}

#endif

/* What triggers.c and neurons.c share: lots of tokens, lists of rows, clusters of a block that are not done.
 *
 * Tokens go by lots. A row of Gate or Up is read once for all tokens of a lot that want it; rows of Down are added token by token, since the
 * bits of a sum depend on who is added together. */
#ifndef NP_NEURONS_H
#define NP_NEURONS_H
#include "engine.h"

#include <math.h>

/* A neuron's value for the group's token t. */
static inline float *hidden_of(np_engine *engine, uint32_t t, uint32_t neuron)
{
    return engine->shared.hidden + (engine->group->first + t) * engine->layer_neurons + neuron;
}

static inline float silu(float gate)
{
    return gate / (1.0f + expf(-gate));
}

/* Whether a neuron takes part, from its trigger alone: whether its value can be other than zero, or, with SiLU, is not to count as such.
 * A gate that is no number takes part: it must show in the result. */
static inline int fires(const np_engine *engine, float trigger)
{
    if (engine->shape.activation != NP_SILU)
        return trigger > engine->shape.activation_threshold;
    const float silent_below = engine->fixed.layers[engine->layer].silent_below;
    return silent_below == 0.0f ? trigger != 0.0f : !(fabsf(silu(trigger)) < silent_below);
}

/* ---- rows of a lot's neurons ---------------------------------------------------------------------------------- */
/* Tokens [first, first + count) of the group: bit t of a word is token first + t. */
typedef struct {
    uint32_t first, count;
} token_lot;
enum { LOT_TOKENS = 16 };

static inline token_lot lot_from(const np_engine *engine, uint32_t first)
{
    const uint32_t left = engine->group->count - first;
    return (token_lot){first, left < LOT_TOKENS ? left : LOT_TOKENS};
}

/* The lowest token of `*bits`, which loses it. */
static inline uint32_t next_token(uint32_t *bits)
{
    const uint32_t t = (uint32_t)__builtin_ctz(*bits);
    *bits &= *bits - 1;
    return t;
}

/* A row of a neuron, and which tokens of the lot want it. */
static inline void list_row(np_engine *engine, const uint8_t *quants, const uint8_t *scales, uint32_t neuron, uint32_t wanted)
{
    np_row_list *list = &engine->list;
    list->quants[list->count] = quants;
    list->scales[list->count] = scales;
    list->neurons[list->count] = neuron;
    list->wanted[list->count++] = (uint16_t)wanted;
}

/* Products of the listed rows, which are of this matrix, with the lot's tokens that want them; product_of has them. */
static inline void dot_listed(np_engine *engine, const np_matrix_place *matrix, token_lot lot, const np_fetch *fetch)
{
    const np_vectors *x = engine->inputs;
    const np_row_list *list = &engine->list;
    np_dot_wanted(np_type_of(engine, matrix), list->quants, list->scales, list->wanted, list->count, engine->shape.width, fetch,
                  x->prepared + lot.first * x->stride, x->stride, lot.count, engine->rows + lot.first * engine->max_rows, engine->max_rows);
}

static inline float product_of(const np_engine *engine, uint32_t r, uint32_t t)
{
    return engine->rows[t * engine->max_rows + r];
}

/* The first rows of a cluster in its slots. */
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
/* List those of these clusters that are not done: of those that a predictor does not name nobody says anything after the first look. */
static inline void list_open(np_engine *engine, np_range clusters)
{
    const uint64_t done = 0x0101010101010101u * NP_CLUSTER_DONE;
    engine->open_count = 0;
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster += 8)
        for (uint64_t left = ~np_eight_bytes(engine->cluster_state + cluster, clusters.to - cluster, done) & done; left; left &= left - 1)
            engine->open[engine->open_count++] = cluster + (uint32_t)__builtin_ctzll(left) / 8;
}

/* For who records what neurons do. */
static inline void note(np_engine *engine, uint32_t neuron, uint8_t what)
{
    if (engine->shared.activity) {
        const size_t ffn = engine->layer * engine->shape.experts + engine->group->expert;
        engine->shared.activity[ffn * engine->layer_neurons + neuron] |= what;
    }
}

/* A neuron's value for token t is known. */
static inline void take_value(np_engine *engine, uint32_t t, uint32_t neuron, float value)
{
    *hidden_of(engine, t, neuron) = value;
    if (value == 0.0f)
        return;
    engine->counters.active++;
    note(engine, neuron, NP_ACTIVE);
}

#endif

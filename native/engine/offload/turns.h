/* The turns of a layer with external products, and the products of a turn.
 *
 *   turn    inputs                      products                   afterwards
 *   qkv     the normed residual stream  one                        heads, attention
 *   output  attention                   one                        added to the residual stream
 *   group   the normed residual stream  one per product_blocks     added to the residual stream, weighted
 *
 * A dense layer has one group, a layer of a mixture one per chosen expert. In a parallel layer the groups come before
 * the output. */
#ifndef NP_TURNS_H
#define NP_TURNS_H
#include "engine/engine.h"

enum { NP_TURN_QKV, NP_TURN_OUTPUT, NP_TURN_GROUP };
enum { NP_MATRIX_TURNS = 2 }; /* a layer has as many turns as groups, and these */

/* The kind of a layer's turn; number: the group's number if it is NP_TURN_GROUP. */
static inline int np_turn_kind(const np_engine *engine, uint32_t turn, uint32_t groups, uint32_t *number)
{
    const uint32_t first = engine->shape.parallel ? 1 : 2;
    *number = turn - first;
    if (turn == 0)
        return NP_TURN_QKV;
    if (engine->shape.parallel)
        return *number < groups ? NP_TURN_GROUP : NP_TURN_OUTPUT;
    return turn == 1 ? NP_TURN_OUTPUT : NP_TURN_GROUP;
}

/* The number of products of one group's neurons. */
static inline uint32_t np_neuron_products(const np_engine *engine)
{
    return (engine->shape.blocks + engine->config.product_blocks - 1) / engine->config.product_blocks;
}

/* The blocks of one of these products. */
static inline np_range np_product_blocks(const np_engine *engine, uint32_t number)
{
    const uint32_t blocks = engine->config.product_blocks, all = engine->shape.blocks, from = number * blocks;
    return (np_range){from, all - from < blocks ? all : from + blocks};
}

#endif

#include "engine/block_sums.h"

#include "engine/changes.h"
#include "engine/work.h"

int np_fit_all_sums(const np_engine *engine)
{
    return engine->count <= engine->config.partial_tokens;
}

/* Add a row of block sums to a token's residual stream or changes, in these columns. is_routed: a router chose the
 * expert */
static void add_block_sums(np_engine *engine, uint32_t row, uint32_t token, int is_routed, np_range columns)
{
    const np_shape *s = &engine->shape;
    const float *bias = s->experts == 1 ? engine->fixed.layers[engine->layer].down_bias : NULL; /* a mixture's is in its sums */
    for (uint32_t column = columns.from; column < columns.to; column += NP_PIECE_ROWS) {
        const uint32_t count = columns.to - column < NP_PIECE_ROWS ? columns.to - column : NP_PIECE_ROWS;
        const float *sums = engine->shared.partials + (size_t)row * s->blocks * s->width + column;
        np_sum_tree_on(sums, engine->offloaded_blocks, s->blocks, s->width, count, engine->rows);
        if (bias)
            np_add(bias + column, count, engine->rows);
        np_add_change(engine, token, s->branch_norms && is_routed, column, count, engine->rows);
    }
}

int np_add_sums(np_engine *engine, const np_group *group, np_range tokens)
{
    const np_range columns = np_even_share(engine, engine->shape.width);
    const uint32_t per_token = np_active_experts(engine, engine->layer), routed = engine->fixed.layers[engine->layer].routed_experts;
    const uint32_t chosen = routed ? engine->shape.chosen_per_token : 0; /* a token's first pairs */
    const int done = np_meet(engine);
    if (done < 0)
        return done;
    const uint64_t started = np_clock_ns();
    for (uint32_t t = tokens.from; t < tokens.to; t++) {
        if (group)
            add_block_sums(engine, t - tokens.from, engine->pair_token[group->first + t], group->expert < routed, columns);
        for (uint32_t n = 0; !group && n < per_token; n++)
            add_block_sums(engine, engine->token_pairs[t * per_token + n], t, n < chosen, columns);
    }
    np_trace_put(&engine->shared.trace, NP_SPAN_COMBINE, engine->layer, tokens.to - tokens.from, engine->step, started);
    return np_meet(engine);
}

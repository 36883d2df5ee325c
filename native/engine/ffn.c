/* Feed-forward of one layer: the blocks this participant takes, what is resident of them first.
 *
 *   a cluster    looked  ->  triggered (fired or not)  ->  done   its two parts may arrive at any time, in any order
 *   a block      claimed ->  pending, while some cluster of it is not done  ->  done: its rows of Down are added
 *
 * The promise of equal bits rests on three rules kept here and in neurons.c: a gate or up value is one whole row product; the
 * neurons of a block add to the block's partial sum in index order; block sums meet in a fixed tree (np_sum_tree). When a cluster
 * arrives, and who computes a block, changes nothing. */
#include <string.h>

#include "engine.h"

/* Whether the block sums of all tokens fit the partials at once, so that a block's rows of Down are added as soon as its values are
 * there. Otherwise all blocks' values come first, and sums are made for some tokens after the others. */
static int sums_at_once(const np_engine *engine)
{
    return engine->count <= engine->config.partial_tokens;
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */
/* The values of a block are there. Returns 1, or an error. */
static int finish(np_engine *engine, uint32_t block)
{
    const np_range clusters = np_clusters_of(engine, block, block + 1);
    engine->counters.neurons += (uint64_t)(clusters.to - clusters.from) * engine->shape.cluster_neurons * engine->count;
    const int added = sums_at_once(engine) ? np_add_downs(engine, block, (np_range){0, engine->count}) : NP_OK;
    return added < 0 ? added : 1;
}

/* Compute what can be computed of a block. Returns 1 when it is done, 0 when clusters are still to come, or an error. */
static int advance(np_engine *engine, uint32_t block)
{
    const np_range clusters = np_clusters_of(engine, block, block + 1);
    const int triggers = np_find_triggers(engine, clusters);
    if (triggers < 0)
        return triggers;
    np_compute_triggers(engine, clusters);
    const int values = np_find_values(engine, clusters);
    if (values < 0)
        return values;
    np_compute_values(engine, clusters);
    return triggers || values ? 0 : finish(engine, block);
}

/* Go on with the blocks that wait for clusters until `step` has done with all of them, sleeping between two passes. */
static int finish_pending(np_engine *engine, int (*step)(np_engine *, uint32_t))
{
    while (engine->pending_count) {
        const uint32_t seen = np_word_load(engine->shared.arrivals); /* before the pass: no arrival is slept through */
        uint32_t left = 0;
        for (uint32_t i = 0; i < engine->pending_count; i++) {
            const int done = step(engine, engine->pending[i]);
            if (done < 0)
                return done;
            if (!done)
                engine->pending[left++] = engine->pending[i];
        }
        engine->pending_count = left;
        if (!left)
            break;
        const uint64_t before = np_clock_ns();
        const int woken = np_word_wait(engine->shared.arrivals, seen, engine->shared.epoch, engine->epoch, engine->config.spin_us, 0);
        engine->counters.flash_ns += np_clock_ns() - before;
        np_trace_put(&engine->shared.trace, NP_SPAN_FLASH, engine->layer, left, engine->step, before);
        if (woken < 0)
            return woken;
    }
    return NP_OK;
}

/* ---- windows ---------------------------------------------------------------------------------------------------- */
static void close_window(np_engine *engine)
{
    np_long_store(engine->shared.window, 0);
    engine->window = (np_range){0, 0};
}

/* Publish the window that holds `block`: what the cache must leave alone while this participant reads it. Whoever takes a window's first
 * block asks for what the next window lacks, where every trigger is needed anyway. */
static void open_window(np_engine *engine, uint32_t block)
{
    const np_shape *s = &engine->shape;
    const np_range own = engine->blocks;
    const uint32_t wide = engine->config.window_blocks, first = own.from + (block - own.from) / wide * wide;
    const uint32_t end = own.to - first < wide ? own.to : first + wide;
    const np_range clusters = np_clusters_of(engine, first, end);
    const uint64_t base = np_cluster_index(engine, engine->layer, 0, 0);
    engine->window = (np_range){first, end};
    np_long_store(engine->shared.window, (base + clusters.from) << 32 | (base + clusters.to));
    memset(engine->cluster_state + clusters.from, 0, clusters.to - clusters.from);
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++)
        engine->slot[NP_TRIGGER][cluster] = engine->slot[NP_VALUE][cluster] = NP_NO_PIECE;
    if (!engine->config.prefetch || s->predictor_rank || block != first)
        return;
    const uint32_t parts = engine->count >= NP_DENSE_TOKENS ? NP_REQUEST_TRIGGER | NP_REQUEST_VALUE : NP_REQUEST_TRIGGER;
    const uint32_t layer = end < own.to ? engine->layer : engine->layer + 1, next = end < own.to ? end : own.from;
    if (layer < s->layers)
        np_ask_ahead(engine, layer, next, own.to - next < wide ? own.to : next + wide, parts);
}

/* ---- without a pipeline ------------------------------------------------------------------------------------------ */
static int triggers_there(np_engine *engine, uint32_t block)
{
    const int missing = np_find_triggers(engine, np_clusters_of(engine, block, block + 1));
    return missing < 0 ? missing : !missing;
}

static int values_there(np_engine *engine, uint32_t block)
{
    const int missing = np_find_values(engine, np_clusters_of(engine, block, block + 1));
    return missing < 0 ? missing : !missing;
}

static int triggers_then_values(np_engine *engine, uint32_t block)
{
    np_compute_triggers(engine, np_clusters_of(engine, block, block + 1));
    return values_there(engine, block);
}

static int values_then_downs(np_engine *engine, uint32_t block)
{
    np_compute_values(engine, np_clusters_of(engine, block, block + 1));
    return finish(engine, block);
}

/* Do `first` for this participant's blocks of the window, and `again` until it has done with all of them. */
static int do_own(np_engine *engine, int (*first)(np_engine *, uint32_t), int (*again)(np_engine *, uint32_t))
{
    engine->pending_count = 0;
    for (uint32_t block = engine->window.from; block < engine->window.to; block++) {
        if ((block - engine->blocks.from) % engine->sharers != engine->sharer)
            continue;
        const int done = first(engine, block);
        if (done < 0)
            return done;
        if (!done)
            engine->pending[engine->pending_count++] = block;
    }
    return finish_pending(engine, again);
}

/* One part after the other, as engines without a pipeline do it: a window's triggers are all there before the first is computed, and
 * all participants have computed theirs before the value parts begin, which wait for each other likewise. For comparison. */
static int compute_matrices(np_engine *engine)
{
    int done = NP_OK;
    for (uint32_t block = engine->blocks.from; block < engine->blocks.to && done >= 0; block = engine->window.to) {
        open_window(engine, block);
        done = do_own(engine, triggers_there, triggers_there);
        if (done >= 0)
            done = np_engine_barrier(engine);
        if (done >= 0)
            done = do_own(engine, triggers_then_values, values_there);
        if (done >= 0)
            done = np_engine_barrier(engine);
        if (done >= 0)
            done = do_own(engine, values_then_downs, NULL);
    }
    return done;
}

/* ---- the pipeline ------------------------------------------------------------------------------------------------- */
static int compute_blocks(np_engine *engine)
{
    if (!engine->config.pipeline)
        return compute_matrices(engine);
    int done = NP_OK;
    engine->pending_count = 0;
    const uint32_t pieces = engine->blocks.to - engine->blocks.from;
    for (uint32_t piece; (piece = np_engine_claim_own(engine, NP_WORK_BLOCKS, pieces)) != NP_NO_PIECE;) {
        const uint32_t block = engine->blocks.from + piece;
        if (block < engine->window.from || block >= engine->window.to) {
            done = finish_pending(engine, advance);
            if (done < 0)
                return done;
            open_window(engine, block);
        }
        done = advance(engine, block);
        if (done < 0)
            return done;
        if (!done)
            engine->pending[engine->pending_count++] = block;
    }
    return finish_pending(engine, advance);
}

/* Add the sums of all blocks, and Down's bias, to the residual stream, for the tokens [from, to). */
static int combine(np_engine *engine, np_range tokens)
{
    const np_shape *s = &engine->shape;
    const np_range own = np_engine_share(engine, s->width);
    const float *bias = engine->fixed.layers[engine->layer].down_bias;
    int done = np_engine_barrier(engine);
    if (done < 0)
        return done;
    const uint64_t started = np_clock_ns();
    for (uint32_t t = tokens.from; t < tokens.to; t++)
        for (uint32_t column = own.from; column < own.to; column += NP_PIECE_ROWS) {
            const uint32_t columns = own.to - column < NP_PIECE_ROWS ? own.to - column : NP_PIECE_ROWS;
            np_sum_tree(engine->shared.partials + (size_t)(t - tokens.from) * s->blocks * s->width + column, s->blocks, s->width,
                        columns, engine->rows);
            if (bias)
                np_add(bias + column, columns, engine->rows);
            np_scale(engine->rows, columns, s->residual_scale);
            np_add(engine->rows, columns, engine->shared.residual + (size_t)t * s->width + column);
        }
    np_trace_put(&engine->shared.trace, NP_SPAN_COMBINE, engine->layer, tokens.to - tokens.from, engine->step, started);
    return np_engine_barrier(engine);
}

/* Many tokens: block sums of some tokens, their combination, then those of the next. The window, a whole layer, is still open. */
static int sum_by_turns(np_engine *engine)
{
    const uint32_t blocks = engine->blocks.to - engine->blocks.from, at_once = engine->config.partial_tokens;
    const uint32_t turns = (engine->count + at_once - 1) / at_once;
    int done = np_engine_barrier(engine);
    if (engine->window.to == 0)
        open_window(engine, engine->blocks.from); /* this participant had no block */
    uint32_t piece = np_engine_claim_own(engine, NP_WORK_DOWNS, turns * blocks);
    for (uint32_t turn = 0; turn < turns && done >= 0; turn++) {
        const uint32_t from = turn * at_once;
        const np_range tokens = {from, engine->count - from < at_once ? engine->count : from + at_once};
        for (; piece != NP_NO_PIECE && piece / blocks == turn && done >= 0;
             piece = np_engine_claim_own(engine, NP_WORK_DOWNS, turns * blocks))
            done = np_add_downs(engine, engine->blocks.from + piece % blocks, tokens);
        if (done >= 0)
            done = combine(engine, tokens);
    }
    return done;
}

int np_engine_feed_forward(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    int done = NP_OK;
    engine->layer = layer;
    engine->claimed[0] = engine->claimed[1] = 0;
    const np_norm *norm = &engine->fixed.layers[layer].ffn_norm;
    np_engine_prepare(engine, &engine->vectors, engine->shared.residual, s->width, s->width, norm);
    if (np_predicts(engine, NP_READS_FEED_FORWARD)) {
        np_predict_ranks(engine, norm);
        done = np_engine_barrier(engine);
        if (done >= 0)
            done = np_predict_scores(engine);
        if (done >= 0)
            done = np_engine_barrier(engine);
    }
    const uint64_t started = np_clock_ns(), active = engine->counters.active;
    if (done >= 0)
        done = compute_blocks(engine);
    np_trace_put(&engine->shared.trace, NP_SPAN_NEURONS, layer, (uint32_t)(engine->counters.active - active), engine->step, started);
    if (done >= 0 && !sums_at_once(engine))
        done = sum_by_turns(engine);
    close_window(engine); /* whatever happened: nothing is read now */
    return done >= 0 && sums_at_once(engine) ? combine(engine, (np_range){0, engine->count}) : done;
}

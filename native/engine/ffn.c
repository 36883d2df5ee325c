/* Feed-forward of one layer: the blocks this participant takes, what is resident of them first. In a mixture each chosen expert has
 * blocks of its own, for the tokens that chose it: groups. Where memory holds several layers all groups of a layer are open at once, so that
 * nobody waits for one expert while another one is there; else one after the other. A dense layer is one group of all tokens.
 *
 *   a cluster    looked  ->  triggered (fired or not)  ->  done   its two parts may arrive at any time, in any order
 *   a block      claimed ->  pending, while some cluster of it is not done  ->  done: its rows of Down are added
 *
 * The promise of equal bits rests on three rules kept here, in triggers.c and in neurons.c: a gate or up value is one whole row product; the
 * neurons of a block add to the block's partial sum in index order; block sums meet in a fixed tree (np_sum_tree). When a cluster
 * arrives, and who computes a block, changes nothing. A token's experts are added to its residual stream one after the other, by number. */
#include <string.h>

#include "engine.h"

/* Whether the block sums of all tokens fit the partials at once, so that a block's rows of Down are added as soon as its values are
 * there. Otherwise all blocks' values come first, and sums are made for some tokens after the others. */
static int sums_at_once(const np_engine *engine)
{
    return engine->count <= engine->config.partial_tokens;
}

/* ---- groups ----------------------------------------------------------------------------------------------------- */
int np_may_open_layers(const np_engine *engine)
{
    const np_shape *s = &engine->shape;
    return s->experts > 1 && engine->config.pipeline && engine->config.window_blocks / s->experts >= s->blocks;
}

/* Publish what the cache must leave alone while this participant reads it: clusters of these experts of the layer in work. */
static void publish_window(np_engine *engine, np_range experts, np_range clusters)
{
    const uint64_t first = np_cluster_index(engine, engine->layer, experts.from, 0) + clusters.from;
    const uint64_t end = np_cluster_index(engine, engine->layer, experts.to - 1, 0) + clusters.to;
    np_long_store(engine->shared.window, first << 32 | end);
}

void np_close_window(np_engine *engine)
{
    np_long_store(engine->shared.window, 0);
    engine->window = (np_range){0, 0};
}

/* Of the group in work: nothing is known of these clusters. */
static void forget(np_engine *engine, np_range clusters)
{
    memset(engine->cluster_state + clusters.from, 0, clusters.to - clusters.from);
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++)
        engine->slot[NP_TRIGGER][cluster] = engine->slot[NP_VALUE][cluster] = NP_NO_PIECE;
}

/* From now on clusters, neurons and tokens are this group's. Where groups are not open together, nothing of another may be pending. Blocks
 * are taken in the order of groups, so one that is entered for the first time lies behind all that were. */
static void enter_group(np_engine *engine, const np_group *group)
{
    if (engine->group == group)
        return;
    if (!engine->layer_open)
        np_close_window(engine);
    const uint32_t clusters = engine->shape.clusters, number = engine->layer_open ? (uint32_t)(group - engine->groups) : 0;
    engine->group = group;
    engine->cluster_state = engine->states + (size_t)number * clusters;
    for (int part = 0; part < NP_PARTS; part++)
        engine->slot[part] = engine->found[part] + (size_t)number * clusters;
    engine->inputs = engine->config.outside ? NULL : np_engine_gather(engine, group, &engine->vectors, &engine->gathered);
    if (engine->layer_open && number >= engine->opened_groups) {
        forget(engine, (np_range){0, clusters});
        engine->opened_groups = number + 1;
    }
}

/* Keep the whole layer in place, if memory holds several, and the block sums of all groups at once. */
static void open_layer(np_engine *engine)
{
    engine->layer_open = np_may_open_layers(engine) && sums_at_once(engine);
    if (!engine->layer_open)
        return;
    publish_window(engine, (np_range){0, engine->shape.experts}, (np_range){0, engine->shape.clusters});
    engine->window = engine->blocks;
    engine->opened_groups = 0;
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */
/* The values of a block are there. Returns 1, or an error. */
static int finish(np_engine *engine, uint32_t block)
{
    const np_range clusters = np_clusters_of(engine, block, block + 1);
    engine->counters.neurons += (uint64_t)(clusters.to - clusters.from) * engine->shape.cluster_neurons * engine->group->count;
    const int added =
        sums_at_once(engine) ? np_add_downs(engine, block, (np_range){0, engine->group->count}, engine->group->first) : NP_OK;
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

/* A block of the group in work is not done. */
static void wait_for(np_engine *engine, uint32_t block)
{
    engine->pending[engine->pending_count++] = (uint32_t)(engine->group - engine->groups) * engine->shape.blocks + block;
}

/* Go on with the blocks that wait for clusters until `step` has done with all of them, sleeping between two passes. */
static int finish_pending(np_engine *engine, int (*step)(np_engine *, uint32_t))
{
    const uint32_t blocks = engine->shape.blocks;
    while (engine->pending_count) {
        const uint32_t seen = np_word_load(engine->shared.arrivals); /* before the pass: no arrival is slept through */
        uint32_t left = 0;
        for (uint32_t i = 0; i < engine->pending_count; i++) {
            enter_group(engine, engine->groups + engine->pending[i] / blocks);
            const int done = step(engine, engine->pending[i] % blocks);
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
uint32_t np_parts_ahead(const np_engine *engine, uint32_t layer, uint32_t tokens)
{
    const int whole = engine->config.bundle || tokens >= NP_DENSE_TOKENS || np_all_fire(engine, layer);
    return whole ? NP_REQUEST_TRIGGER | NP_REQUEST_VALUE : NP_REQUEST_TRIGGER;
}

/* Of a mixture all that the layer will want, by the experts that were chosen: each sharer asks for some of the groups. */
void np_ask_for_groups(np_engine *engine, uint32_t layer)
{
    if (!engine->config.prefetch || np_decides(engine) || engine->config.outside) /* outside: the reader of rows asks */
        return;
    for (uint32_t g = engine->sharer; g < engine->group_count; g += engine->sharers)
        np_ask_ahead(engine, layer, engine->groups[g].expert, engine->blocks, np_parts_ahead(engine, layer, engine->groups[g].count),
                     NP_REQUEST_PREFETCH);
}

/* Of a dense layer what the window after this one lacks. */
static void ask_for_next_window(np_engine *engine)
{
    const np_range own = engine->blocks;
    const uint32_t end = engine->window.to, wide = engine->config.window_blocks;
    const uint32_t layer = end < own.to ? engine->layer : engine->layer + 1, next = end < own.to ? end : own.from;
    if (layer < engine->shape.layers)
        np_ask_ahead(engine, layer, 0, (np_range){next, own.to - next < wide ? own.to : next + wide}, np_parts_ahead(engine, layer, engine->group->count),
                     NP_REQUEST_PREFETCH);
}

/* Publish the window of the group that holds `block`: what the cache must leave alone while this participant reads it. Whoever takes a
 * window's first block asks for what the next window lacks. */
static void open_window(np_engine *engine, uint32_t block)
{
    const np_range own = engine->blocks;
    const uint32_t wide = engine->config.window_blocks, first = own.from + (block - own.from) / wide * wide;
    const uint32_t end = own.to - first < wide ? own.to : first + wide;
    const np_range clusters = np_clusters_of(engine, first, end);
    const uint32_t expert = engine->group->expert;
    engine->window = (np_range){first, end};
    publish_window(engine, (np_range){expert, expert + 1}, clusters);
    forget(engine, clusters);
    if (engine->config.prefetch && !np_decides(engine) && engine->shape.experts == 1 && block == first)
        ask_for_next_window(engine);
}

/* ---- windows that others read ------------------------------------------------------------------------------------ */
static int block_there(np_engine *engine, uint32_t block)
{
    const int missing = np_find_clusters(engine, np_clusters_of(engine, block, block + 1));
    return missing < 0 ? missing : !missing;
}

int np_fetch_blocks(np_engine *engine, const np_group *group, np_range blocks)
{
    engine->pending_count = 0;
    enter_group(engine, group);
    if (blocks.from < engine->window.from || blocks.to > engine->window.to)
        open_window(engine, blocks.from);
    for (uint32_t block = blocks.from; block < blocks.to; block++) {
        const int there = block_there(engine, block);
        if (there < 0)
            return there;
        if (!there)
            wait_for(engine, block);
    }
    const int done = finish_pending(engine, block_there);
    return done < 0 ? done : 1;
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
            wait_for(engine, block);
    }
    return finish_pending(engine, again);
}

/* One part after the other, as engines without a pipeline do it: a window's triggers are all there before the first is computed, and
 * all participants have computed theirs before the value parts begin, which wait for each other likewise. For comparison. */
static int compute_matrices(np_engine *engine, const np_group *group)
{
    int done = NP_OK;
    enter_group(engine, group);
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
static void take_block(np_engine *engine)
{
    const uint32_t own = engine->blocks.to - engine->blocks.from;
    engine->block_piece = np_engine_claim_own(engine, NP_WORK_BLOCKS, engine->group_count * own);
}

/* The blocks that this participant takes of the groups before `end`. The first that is of a later group waits. */
static int compute_blocks(np_engine *engine, const np_group *end)
{
    const uint32_t own = engine->blocks.to - engine->blocks.from;
    int done = NP_OK;
    engine->pending_count = 0;
    for (; engine->block_piece != NP_NO_PIECE && engine->groups + engine->block_piece / own < end; take_block(engine)) {
        const uint32_t block = engine->blocks.from + engine->block_piece % own;
        enter_group(engine, engine->groups + engine->block_piece / own);
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
            wait_for(engine, block);
    }
    return finish_pending(engine, advance);
}

/* ---- sums --------------------------------------------------------------------------------------------------------- */
/* Add a row of block sums to a token's residual stream, in these columns. */
static void add_block_sums(np_engine *engine, uint32_t row, uint32_t token, np_range columns)
{
    const np_shape *s = &engine->shape;
    const float *bias = engine->fixed.layers[engine->layer].down_bias;
    for (uint32_t column = columns.from; column < columns.to; column += NP_PIECE_ROWS) {
        const uint32_t some = columns.to - column < NP_PIECE_ROWS ? columns.to - column : NP_PIECE_ROWS;
        const float *sums = engine->shared.partials + (size_t)row * s->blocks * s->width + column;
        np_sum_tree_on(sums, engine->held_blocks, s->blocks, s->width, some, engine->rows);
        if (bias)
            np_add(bias + column, some, engine->rows);
        np_scale(engine->rows, some, s->residual_scale);
        np_add(engine->rows, some, engine->shared.residual + (size_t)token * s->width + column);
    }
}

/* Add the sums of all blocks, and Down's bias, to the residual stream: of every token's pairs, where group is NULL; else of the group's
 * tokens [from, to), which lie in rows from 0 on. */
static int combine(np_engine *engine, const np_group *group, np_range tokens)
{
    const np_range own = np_engine_share(engine, engine->shape.width);
    const uint32_t each = engine->shape.experts_per_token;
    const int done = np_engine_barrier(engine);
    if (done < 0)
        return done;
    const uint64_t started = np_clock_ns();
    for (uint32_t t = tokens.from; t < tokens.to; t++) {
        if (group)
            add_block_sums(engine, t - tokens.from, engine->pair_token[group->first + t], own);
        for (uint32_t n = 0; !group && n < each; n++)
            add_block_sums(engine, engine->token_pairs[t * each + n], t, own);
    }
    np_trace_put(&engine->shared.trace, NP_SPAN_COMBINE, engine->layer, tokens.to - tokens.from, engine->step, started);
    return np_engine_barrier(engine);
}

/* Many tokens: block sums of some of a group's tokens, their combination, then those of the next. The window, a whole expert, stays open. */
static int sum_by_turns(np_engine *engine, const np_group *group)
{
    const uint32_t own = engine->blocks.to - engine->blocks.from, at_once = engine->config.partial_tokens;
    const uint32_t turns = (group->count + at_once - 1) / at_once;
    int done = np_engine_barrier(engine);
    enter_group(engine, group);
    if (engine->window.to == 0)
        open_window(engine, engine->blocks.from); /* this participant had no block */
    for (uint32_t turn = 0; turn < turns && done >= 0; turn++) {
        const uint32_t from = turn * at_once, end = engine->downs_done + (turn + 1) * own;
        const np_range tokens = {from, group->count - from < at_once ? group->count : from + at_once};
        for (; engine->down_piece < end && done >= 0; engine->down_piece = np_engine_claim_own(engine, NP_WORK_DOWNS, UINT32_MAX))
            done = np_add_downs(engine, engine->blocks.from + engine->down_piece % own, tokens, 0);
        if (done >= 0)
            done = combine(engine, group, tokens);
    }
    engine->downs_done += turns * own;
    return done;
}

static int compute_groups(np_engine *engine)
{
    const int at_once = sums_at_once(engine);
    int done = NP_OK;
    engine->group = NULL;
    engine->claimed[0] = engine->claimed[1] = 0;
    engine->downs_done = 0;
    open_layer(engine);
    if (engine->config.pipeline)
        take_block(engine);
    if (!at_once)
        engine->down_piece = np_engine_claim_own(engine, NP_WORK_DOWNS, UINT32_MAX);
    if (engine->layer_open)
        return compute_blocks(engine, engine->groups + engine->group_count);
    for (uint32_t g = 0; g < engine->group_count && done >= 0; g++) {
        const np_group *group = &engine->groups[g];
        done = engine->config.pipeline ? compute_blocks(engine, group + 1) : compute_matrices(engine, group);
        if (done >= 0 && !at_once)
            done = sum_by_turns(engine, &engine->groups[g]);
    }
    return done;
}

int np_feed_forward_begin(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    int done = NP_OK;
    engine->layer = layer;
    const np_norm *norm = &engine->fixed.layers[layer].ffn_norm;
    np_engine_prepare(engine, &engine->vectors, engine->shared.residual, engine->count, s->width, s->width, norm);
    if (np_engine_routes(engine, NP_READS_FEED_FORWARD))
        np_engine_route(engine, layer);
    if (np_predicts(engine, NP_READS_FEED_FORWARD) || np_predicts(engine, NP_READS_RESIDUAL)) {
        np_predict_ranks(engine, np_predicts(engine, NP_READS_RESIDUAL) ? NULL : norm);
        done = np_engine_barrier(engine);
        if (done >= 0)
            done = np_predict_scores(engine);
        if (done >= 0)
            done = np_engine_barrier(engine);
    }
    return done;
}

int np_feed_forward_end(np_engine *engine)
{
    return combine(engine, NULL, (np_range){0, engine->count});
}

int np_engine_feed_forward(np_engine *engine, uint32_t layer)
{
    int done = np_feed_forward_begin(engine, layer);
    const uint64_t started = np_clock_ns(), active = engine->counters.active;
    if (done >= 0)
        done = compute_groups(engine);
    np_trace_put(&engine->shared.trace, NP_SPAN_NEURONS, layer, (uint32_t)(engine->counters.active - active), engine->step, started);
    np_close_window(engine); /* whatever happened: nothing is read now */
    return done >= 0 && sums_at_once(engine) ? np_feed_forward_end(engine) : done;
}

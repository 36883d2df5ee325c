/* The feed-forward of one layer. A participant claims blocks and computes each as far as its clusters are resident;
 * blocks that wait for clusters are pending. In a mixture every chosen expert has blocks of its own, for the group of
 * tokens that chose it. If memory holds several layers, all groups of a layer are open at once, so that no participant
 * waits for one expert while another is resident; otherwise groups follow each other. A dense layer is one group of all
 * tokens.
 *
 *   a cluster    looked up  ->  triggered (fired or not)  ->  done     its parts may arrive at any time, in any order
 *   a block      claimed  ->  pending while a cluster is not done  ->  done: its down rows are added
 *
 * An expert whose down matrix has a row per output is one block. There participants claim pieces of its neurons instead
 * of blocks, meet, and claim pieces of its outputs (experts.c).
 *
 * Results have the same bits whatever the residency and the participants, by four rules kept here, in triggers.c and in
 * neurons.c: a gate or up value is the product of one whole row; the neurons of a block add to the block's partial sum
 * in index order; block sums are added in a fixed tree (np_sum_tree); a token's experts are added to its residual
 * stream in ascending order. */
#include "engine/feed_forward.h"

#include <string.h>

#include "engine/block_sums.h"
#include "engine/changes.h"
#include "engine/clusters.h"
#include "engine/experts.h"
#include "engine/neurons.h"
#include "engine/prediction.h"
#include "engine/prefetch.h"
#include "engine/routing.h"
#include "engine/triggers.h"
#include "engine/vectors.h"
#include "engine/work.h"

/* ---- groups ----------------------------------------------------------------------------------------------------- */
int np_opens_whole_layers(const np_engine *engine)
{
    const np_shape *s = &engine->shape;
    return s->experts > 1 && engine->config.pipeline && engine->config.window_blocks / s->experts >= s->blocks;
}

/* Publish the window: the cache evicts none of these experts' clusters of the current layer while this participant
 * reads them. */
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

/* Reset the state of these clusters of the current group. */
static void reset_clusters(np_engine *engine, np_range clusters)
{
    memset(engine->cluster_state + clusters.from, 0, clusters.to - clusters.from);
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++)
        engine->slot[NP_TRIGGER][cluster] = engine->slot[NP_VALUE][cluster] = NP_NONE;
}

/* Make this the current group. If groups are not open together, no block of another group may be pending. Blocks are
 * claimed in the order of groups, so a group that is entered for the first time comes after all groups entered
 * before. */
static void enter_group(np_engine *engine, const np_group *group)
{
    if (engine->group == group)
        return;
    if (!engine->is_layer_open)
        np_close_window(engine);
    const uint32_t clusters = engine->shape.clusters, number = engine->is_layer_open ? (uint32_t)(group - engine->groups) : 0;
    engine->group = group;
    engine->cluster_state = engine->states + (size_t)number * clusters;
    for (int part = 0; part < NP_PARTS; part++)
        engine->slot[part] = engine->slot_tables[part] + (size_t)number * clusters;
    const int is_routed = group->expert < engine->fixed.layers[engine->layer].routed_experts;
    const np_vectors *inputs = engine->shape.branch_norms && is_routed ? &engine->routed : &engine->vectors;
    engine->inputs = engine->config.external_products ? NULL : np_gather_vectors(engine, group, inputs, &engine->gathered);
    if (engine->is_layer_open && number >= engine->opened_groups) {
        reset_clusters(engine, (np_range){0, clusters});
        engine->opened_groups = number + 1;
    }
}

/* Open the window over the whole layer, if memory holds several layers and `partials` the block sums of all groups. */
static void open_layer(np_engine *engine)
{
    engine->is_layer_open = np_opens_whole_layers(engine) && np_fit_all_sums(engine);
    if (!engine->is_layer_open)
        return;
    publish_window(engine, (np_range){0, engine->fixed.layers[engine->layer].experts}, (np_range){0, engine->shape.clusters});
    engine->window = engine->blocks;
    engine->opened_groups = 0;
    np_prefetch_next_window(engine, engine->window.from);
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */
/* A block's values are computed: add its down rows. Returns 1, or an error. */
static int finish_block(np_engine *engine, uint32_t block)
{
    const np_range clusters = np_block_clusters(engine, block, block + 1);
    engine->counters.neurons += (uint64_t)(clusters.to - clusters.from) * engine->shape.cluster_neurons * engine->group->count;
    const int added =
        np_fit_all_sums(engine) ? np_add_down_rows(engine, block, (np_range){0, engine->group->count}, engine->group->first) : NP_OK;
    return added < 0 ? added : 1;
}

/* Compute a block as far as its clusters are resident. Returns 1 if it is done, 0 if clusters are absent, or an
 * error. */
static int advance_block(np_engine *engine, uint32_t block)
{
    const np_range clusters = np_block_clusters(engine, block, block + 1);
    const int triggers = np_look_up_triggers(engine, clusters);
    if (triggers < 0)
        return triggers;
    np_compute_triggers(engine, clusters);
    const int values = np_look_up_values(engine, clusters);
    if (values < 0)
        return values;
    np_compute_values(engine, clusters);
    return triggers || values ? 0 : finish_block(engine, block);
}

/* Compute a piece of the current group's work: a block, or some neurons of an expert with down by output. */
static int advance_piece(np_engine *engine, uint32_t piece)
{
    return engine->shape.down_by_output ? np_compute_neuron_piece(engine, piece) : advance_block(engine, piece);
}

/* Make a piece of the current group pending. */
static void add_pending(np_engine *engine, uint32_t piece)
{
    engine->pending[engine->pending_count++] = (uint32_t)(engine->group - engine->groups) * engine->pieces + piece;
}

/* Call `step` for the pending pieces until it returns 1 for each, sleeping between passes until clusters arrive. */
static int finish_pending(np_engine *engine, int (*step)(np_engine *, uint32_t))
{
    const uint32_t pieces = engine->pieces;
    while (engine->pending_count) {
        const uint32_t arrivals = np_word_load(engine->shared.arrivals); /* read before the pass, so that no arrival is missed */
        uint32_t left = 0;
        for (uint32_t i = 0; i < engine->pending_count; i++) {
            enter_group(engine, engine->groups + engine->pending[i] / pieces);
            const int done = step(engine, engine->pending[i] % pieces);
            if (done < 0)
                return done;
            if (!done)
                engine->pending[left++] = engine->pending[i];
        }
        engine->pending_count = left;
        if (!left)
            break;
        const uint64_t before = np_clock_ns();
        const int woken = np_word_wait(engine->shared.arrivals, arrivals, engine->shared.epoch, engine->epoch, engine->config.spin_us, 0);
        engine->counters.flash_ns += np_clock_ns() - before;
        np_trace_put(&engine->shared.trace, NP_SPAN_FLASH, engine->layer, left, engine->step, before);
        if (woken < 0)
            return woken;
    }
    return NP_OK;
}

/* ---- windows ---------------------------------------------------------------------------------------------------- */
/* Open the current group's window that contains `block`, which this participant claimed. */
static void open_window(np_engine *engine, uint32_t block)
{
    const np_range blocks = engine->blocks;
    const uint32_t width = engine->config.window_blocks, first = blocks.from + (block - blocks.from) / width * width;
    const uint32_t end = blocks.to - first < width ? blocks.to : first + width;
    const np_range clusters = np_block_clusters(engine, first, end);
    const uint32_t expert = engine->group->expert;
    engine->window = (np_range){first, end};
    publish_window(engine, (np_range){expert, expert + 1}, clusters);
    reset_clusters(engine, clusters);
    np_prefetch_next_window(engine, block);
}

/* ---- windows of the row reader ------------------------------------------------------------------------------------ */
static int is_block_present(np_engine *engine, uint32_t block)
{
    const int absent_count = np_look_up_both_parts(engine, np_block_clusters(engine, block, block + 1));
    return absent_count < 0 ? absent_count : !absent_count;
}

int np_fetch_blocks(np_engine *engine, const np_group *group, np_range blocks)
{
    engine->pending_count = 0;
    enter_group(engine, group);
    if (blocks.from < engine->window.from || blocks.to > engine->window.to)
        open_window(engine, blocks.from);
    for (uint32_t block = blocks.from; block < blocks.to; block++) {
        const int is_present = is_block_present(engine, block);
        if (is_present < 0)
            return is_present;
        if (!is_present)
            add_pending(engine, block);
    }
    const int done = finish_pending(engine, is_block_present);
    return done < 0 ? done : 1;
}

/* ---- without a pipeline ------------------------------------------------------------------------------------------ */
static int are_triggers_present(np_engine *engine, uint32_t block)
{
    const int absent_count = np_look_up_triggers(engine, np_block_clusters(engine, block, block + 1));
    return absent_count < 0 ? absent_count : !absent_count;
}

static int are_values_present(np_engine *engine, uint32_t block)
{
    const int absent_count = np_look_up_values(engine, np_block_clusters(engine, block, block + 1));
    return absent_count < 0 ? absent_count : !absent_count;
}

static int compute_triggers(np_engine *engine, uint32_t block)
{
    np_compute_triggers(engine, np_block_clusters(engine, block, block + 1));
    return are_values_present(engine, block);
}

static int compute_values(np_engine *engine, uint32_t block)
{
    np_compute_values(engine, np_block_clusters(engine, block, block + 1));
    return finish_block(engine, block);
}

/* Call `first` for this participant's blocks of the window, then `again` for the pending ones until they are done. */
static int for_own_blocks(np_engine *engine, int (*first)(np_engine *, uint32_t), int (*again)(np_engine *, uint32_t))
{
    engine->pending_count = 0;
    for (uint32_t block = engine->window.from; block < engine->window.to; block++) {
        if ((block - engine->blocks.from) % engine->sharers != engine->sharer)
            continue;
        const int done = first(engine, block);
        if (done < 0)
            return done;
        if (!done)
            add_pending(engine, block);
    }
    return finish_pending(engine, again);
}

/* The comparison mode without a pipeline: all triggers of a window must be present before the first is computed, and
 * all participants have computed theirs before value parts are looked up; likewise for these. */
static int compute_matrices(np_engine *engine, const np_group *group)
{
    int done = NP_OK;
    enter_group(engine, group);
    for (uint32_t block = engine->blocks.from; block < engine->blocks.to && done >= 0; block = engine->window.to) {
        open_window(engine, block);
        done = for_own_blocks(engine, are_triggers_present, are_triggers_present);
        if (done >= 0)
            done = np_meet(engine);
        if (done >= 0)
            done = for_own_blocks(engine, compute_triggers, are_values_present);
        if (done >= 0)
            done = np_meet(engine);
        if (done >= 0)
            done = for_own_blocks(engine, compute_values, NULL);
    }
    return done;
}

/* ---- the pipeline ------------------------------------------------------------------------------------------------- */
/* The pieces of each group that this participant shares. */
static np_range group_pieces(const np_engine *engine)
{
    const np_range blocks = engine->blocks;
    return engine->shape.down_by_output && blocks.from < blocks.to ? (np_range){0, engine->pieces} : blocks;
}

static void claim_piece(np_engine *engine)
{
    const np_range pieces = group_pieces(engine);
    engine->piece = np_claim_shared_blocks(engine, NP_WORK_BLOCKS, engine->group_count * (pieces.to - pieces.from));
}

/* Compute the pieces that this participant claims of the groups before `end`. The first claimed piece of a later group
 * is left in engine->piece. */
static int compute_pieces(np_engine *engine, const np_group *end)
{
    const np_range pieces = group_pieces(engine);
    const uint32_t count = pieces.to - pieces.from;
    int done = NP_OK;
    engine->pending_count = 0;
    for (; engine->piece != NP_NONE && engine->groups + engine->piece / count < end; claim_piece(engine)) {
        const uint32_t piece = pieces.from + engine->piece % count, block = engine->shape.down_by_output ? 0 : piece;
        enter_group(engine, engine->groups + engine->piece / count);
        if (block < engine->window.from || block >= engine->window.to) {
            done = finish_pending(engine, advance_piece);
            if (done < 0)
                return done;
            open_window(engine, block);
        }
        done = advance_piece(engine, piece);
        if (done < 0)
            return done;
        if (!done)
            add_pending(engine, piece);
    }
    return finish_pending(engine, advance_piece);
}

/* ---- down rows in pieces ------------------------------------------------------------------------------------------- */
/* Claim and compute the down rows of the group's tokens [from, to), into rows of `partials` from first_row on. */
static int compute_down_pieces(np_engine *engine, const np_group *group, np_range tokens, uint32_t first_row)
{
    const np_shape *s = &engine->shape;
    const np_range pieces = s->down_by_output && engine->blocks.from < engine->blocks.to ? (np_range){0, np_output_pieces(s)} : engine->blocks;
    const uint32_t done_before = engine->down_pieces_done, end = done_before + pieces.to - pieces.from;
    int done = NP_OK;
    for (; engine->down_piece < end && done >= 0; engine->down_piece = np_claim_shared_blocks(engine, NP_WORK_DOWN_ROWS, UINT32_MAX)) {
        const uint32_t piece = pieces.from + engine->down_piece - done_before;
        enter_group(engine, group);
        done = s->down_by_output ? np_multiply_output_piece(engine, piece, tokens, first_row) : np_add_down_rows(engine, piece, tokens, first_row);
    }
    engine->down_pieces_done = end;
    return done;
}

/* With many tokens: compute and add the block sums of some of a group's tokens, then those of the next. The window, a
 * whole expert, stays open. */
static int sum_in_parts(np_engine *engine, const np_group *group)
{
    const uint32_t part_tokens = engine->config.partial_tokens, part_count = (group->count + part_tokens - 1) / part_tokens;
    int done = np_meet(engine);
    enter_group(engine, group);
    if (engine->window.to == 0)
        open_window(engine, engine->blocks.from); /* this participant claimed no block of the group */
    for (uint32_t part = 0; part < part_count && done >= 0; part++) {
        const uint32_t from = part * part_tokens;
        const np_range tokens = {from, group->count - from < part_tokens ? group->count : from + part_tokens};
        done = compute_down_pieces(engine, group, tokens, 0);
        if (done >= 0)
            done = np_add_sums(engine, group, tokens);
    }
    return done;
}

/* With down by output: compute the values of all groups that are open together, meet, and compute their outputs. Every
 * participant opens a group's window before the barrier, also without neurons of its own: the expert then stays for all. */
static int compute_experts(np_engine *engine)
{
    const uint32_t open_groups = engine->is_layer_open ? engine->group_count : 1;
    const int fits = np_fit_all_sums(engine);
    int done = NP_OK;
    engine->values_pair = NP_NONE;
    for (const np_group *first = engine->groups, *end; first < engine->groups + engine->group_count && done >= 0; first = end) {
        end = first + open_groups;
        if (!engine->is_layer_open) {
            enter_group(engine, first);
            open_window(engine, 0);
        }
        done = compute_pieces(engine, end);
        if (done >= 0 && !fits)
            done = sum_in_parts(engine, first);
        if (done >= 0 && fits)
            done = np_meet(engine);
        for (const np_group *group = first; group < end && fits && done >= 0; group++)
            done = compute_down_pieces(engine, group, (np_range){0, group->count}, group->first);
    }
    return done;
}

static int compute_groups(np_engine *engine)
{
    const int fits = np_fit_all_sums(engine), by_output = engine->shape.down_by_output;
    int done = NP_OK;
    engine->group = NULL;
    engine->claimed[0] = engine->claimed[1] = 0;
    engine->down_pieces_done = 0;
    open_layer(engine);
    if (engine->config.pipeline || by_output)
        claim_piece(engine);
    if (!fits || by_output)
        engine->down_piece = np_claim_shared_blocks(engine, NP_WORK_DOWN_ROWS, UINT32_MAX);
    if (by_output)
        return compute_experts(engine);
    if (engine->is_layer_open)
        return compute_pieces(engine, engine->groups + engine->group_count);
    for (uint32_t g = 0; g < engine->group_count && done >= 0; g++) {
        const np_group *group = &engine->groups[g];
        done = engine->config.pipeline ? compute_pieces(engine, group + 1) : compute_matrices(engine, group);
        if (done >= 0 && !fits)
            done = sum_in_parts(engine, &engine->groups[g]);
    }
    return done;
}

int np_begin_feed_forward(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    int done = NP_OK;
    engine->layer = layer;
    const np_norm *norm = np_input_norm(engine, &engine->fixed.layers[layer].ffn_norm);
    if (np_norms_outputs(engine))
        np_clear_own_changes(engine);
    engine->vectors.type = s->type;
    np_prepare_vectors(engine, &engine->vectors, engine->shared.residual, engine->count, s->width, s->width, norm);
    if (s->branch_norms)
        np_prepare_vectors(engine, &engine->routed, engine->shared.residual, engine->count, s->width, s->width,
                           &engine->fixed.layers[layer].routed_norm);
    if (np_router_reads(engine, NP_READS_FEED_FORWARD))
        done = np_route_and_prefetch(engine, layer);
    if (done >= 0 && (np_predictor_runs(engine, NP_READS_FEED_FORWARD) || np_predictor_runs(engine, NP_READS_RESIDUAL))) {
        np_predict_ranks(engine, np_predictor_runs(engine, NP_READS_RESIDUAL) ? NULL : norm);
        done = np_meet(engine);
        if (done >= 0)
            done = np_predict_scores(engine);
        if (done >= 0)
            done = np_meet(engine);
    }
    return done;
}

int np_end_feed_forward(np_engine *engine)
{
    return np_add_sums(engine, NULL, (np_range){0, engine->count});
}

int np_feed_forward(np_engine *engine, uint32_t layer)
{
    if (!engine->fixed.layers[layer].experts)
        return NP_OK;
    int done = np_begin_feed_forward(engine, layer);
    const uint64_t started = np_clock_ns(), active = engine->counters.active;
    if (done >= 0)
        done = compute_groups(engine);
    np_trace_put(&engine->shared.trace, NP_SPAN_NEURONS, layer, (uint32_t)(engine->counters.active - active), engine->step, started);
    np_close_window(engine); /* also after errors: nothing is read from here on */
    if (done >= 0 && np_fit_all_sums(engine))
        done = np_end_feed_forward(engine);
    if (done >= 0)
        np_forget_scan(engine);
    return done >= 0 && np_norms_outputs(engine) ? np_add_feed_forward_changes(engine, &engine->fixed.layers[layer]) : done;
}

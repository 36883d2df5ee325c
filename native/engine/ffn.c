/* Feed-forward of one layer, exact: gates first, then up and down of the neurons that fired.
 *
 * The promise of equal bits rests on three rules kept here: a gate or up value is one whole row product; the neurons of
 * a block add to the block's partial sum in index order; block sums meet in a fixed tree (np_sum_tree). When a cluster
 * arrives, and who computes a block, changes nothing.
 */
#include "engine.h"

#include <math.h>
#include <string.h>

static uint32_t clusters_per_block(const np_engine *engine)
{
    return engine->shape.block_neurons / engine->shape.cluster_neurons;
}

/* The clusters of a range of blocks; the last block of a layer may be short. */
static np_range clusters_of(const np_engine *engine, np_range blocks)
{
    const uint32_t per_block = clusters_per_block(engine), all = engine->shape.clusters;
    np_range range = {blocks.from * per_block, blocks.to * per_block};
    range.from = range.from < all ? range.from : all;
    range.to = range.to < all ? range.to : all;
    return range;
}

static uint32_t word_index(const np_engine *engine, uint32_t cluster)
{
    return engine->layer * engine->shape.clusters + cluster;
}

static uint8_t *state_of(np_engine *engine, uint32_t cluster)
{
    return &engine->cluster_state[cluster - engine->own_blocks.from * clusters_per_block(engine)];
}

static float *hidden_of(np_engine *engine, uint32_t token, uint32_t cluster)
{
    const size_t local = cluster - (size_t)engine->own_blocks.from * clusters_per_block(engine);
    return engine->hidden + token * engine->hidden_stride + local * engine->shape.cluster_neurons;
}

/* 1 when the part is present (its slot in *slot, good while the window is open), 0 when it is not, NP_E_DAMAGED when it failed. */
static int look_up(np_engine *engine, int part, uint32_t cluster, uint32_t *slot)
{
    uint32_t *word = (part ? engine->shared.rest_words : engine->shared.gate_words) + word_index(engine, cluster);
    const uint32_t value = np_word_look(word);
    switch (value & NP_WORD_STATE_MASK) {
    case NP_WORD_PRESENT:
        *slot = value & NP_WORD_SLOT_MASK;
        return 1;
    case NP_WORD_FAILED:
        engine->counters.damaged_word = word_index(engine, cluster);
        engine->counters.damaged_part = part;
        return NP_E_DAMAGED;
    default:
        return 0;
    }
}

int np_engine_ffn(np_engine *engine, uint32_t layer)
{
    if (layer >= engine->shape.layers)
        return NP_E_ARGUMENT;
    engine->layer = layer;
    np_engine_prepare(engine, engine->shared.residual, engine->shape.width, engine->shape.width, engine->fixed.layers[layer].ffn_norm);
    return NP_OK;
}

void np_engine_own_blocks(const np_engine *engine, uint32_t *first, uint32_t *end)
{
    *first = engine->own_blocks.from;
    *end = engine->own_blocks.to;
}

int np_engine_open(np_engine *engine, uint32_t first_block, uint32_t end_block, uint32_t *ids)
{
    if (first_block < engine->own_blocks.from || end_block > engine->own_blocks.to || first_block > end_block)
        return NP_E_ARGUMENT;
    engine->window = (np_range){first_block, end_block};
    const np_range clusters = clusters_of(engine, engine->window);
    const uint64_t window = (uint64_t)word_index(engine, clusters.from) << 32 | word_index(engine, clusters.to);
    np_long_store(engine->shared.gate_window, window);
    np_long_store(engine->shared.rest_window, window);
    if (clusters.from == clusters.to)
        return 0;
    memset(state_of(engine, clusters.from), 0, clusters.to - clusters.from);
    memset(engine->block_done + (first_block - engine->own_blocks.from), 0, end_block - first_block);
    int64_t failed;
    return (int)np_words_missing(engine->shared.gate_words, (uint32_t)(window >> 32), (uint32_t)window, ids, &failed);
}

int np_engine_absent(np_engine *engine, int part, uint32_t layer, uint32_t first_block, uint32_t end_block, uint32_t *ids)
{
    if (layer >= engine->shape.layers || first_block > end_block || end_block > engine->shape.blocks)
        return NP_E_ARGUMENT;
    const np_range clusters = clusters_of(engine, (np_range){first_block, end_block});
    const uint32_t base = layer * engine->shape.clusters;
    const uint32_t *words = part ? engine->shared.rest_words : engine->shared.gate_words;
    int absent = 0;
    for (uint32_t id = base + clusters.from; id < base + clusters.to; id++)
        if ((np_word_load(&words[id]) & NP_WORD_STATE_MASK) == NP_WORD_ABSENT)
            ids[absent++] = id;
    return absent;
}

/* Whether neuron's hidden value can be other than zero, from its gate alone. */
static int fires(int activation, float gate)
{
    return activation == NP_SILU ? gate != 0.0f : gate > 0.0f;
}

static float activate(int activation, float gate, float up)
{
    switch (activation) {
    case NP_RELU:
        return gate * up;
    case NP_DRELU:
        return up > 0.0f ? gate * up : 0.0f;
    case NP_RELU2:
        return gate * gate * up;
    default:
        return gate / (1.0f + expf(-gate)) * up;
    }
}

static void compute_gates(np_engine *engine, uint32_t cluster, uint32_t slot)
{
    const np_shape *s = &engine->shape;
    const uint8_t *gate = engine->shared.gate_slots + (size_t)slot * s->gate_part_bytes;
    uint8_t *state = state_of(engine, cluster);
    np_dot_rows(s->type, gate + s->gate_quants, gate + s->gate_scales, s->cluster_neurons, s->width, engine->activations,
                engine->activation_stride, engine->count, NULL, hidden_of(engine, 0, cluster), engine->hidden_stride);
    *state |= NP_CLUSTER_GATED;
    for (uint32_t t = 0; t < engine->count; t++) {
        const float *gates = hidden_of(engine, t, cluster);
        for (uint32_t i = 0; i < s->cluster_neurons; i++)
            if (fires(s->activation, gates[i])) {
                *state |= NP_CLUSTER_FIRED;
                engine->counters.neurons_fired++;
            }
    }
    engine->counters.neurons_total += (uint64_t)s->cluster_neurons * engine->count;
    engine->counters.gate_clusters++;
}

/* One pass over the window. Returns the number of clusters without gates, or an error. */
static int gates_pass(np_engine *engine)
{
    const np_range clusters = clusters_of(engine, engine->window);
    int pending = 0;
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++) {
        uint8_t *state = state_of(engine, cluster);
        uint32_t slot;
        if (*state & NP_CLUSTER_GATED)
            continue;
        const int there = look_up(engine, 0, cluster, &slot);
        if (there < 0)
            return there;
        if (there)
            compute_gates(engine, cluster, slot);
        else {
            pending++;
            if (!(*state & NP_CLUSTER_GATE_LATE)) {
                *state |= NP_CLUSTER_GATE_LATE;
                engine->counters.gate_missed++;
            }
        }
    }
    return pending;
}

/* Repeat `pass` until nothing is pending, sleeping on the arrivals word between two passes. */
static int until_done(np_engine *engine, int (*pass)(np_engine *), int wait)
{
    const uint64_t before = np_clock_ns();
    for (;;) {
        const uint32_t seen = np_word_load(engine->shared.arrivals); /* before the pass: no arrival is slept through */
        const int pending = pass(engine);
        if (pending <= 0 || !wait) {
            if (wait)
                engine->counters.wait_us += (np_clock_ns() - before) / 1000;
            return pending;
        }
        const int woken = np_word_wait(engine->shared.arrivals, seen, engine->shared.epoch, engine->epoch, engine->spin_us, 0);
        if (woken < 0)
            return woken;
    }
}

int np_engine_gates(np_engine *engine, int wait)
{
    return until_done(engine, gates_pass, wait);
}

int np_engine_rest_missing(np_engine *engine, uint32_t *ids)
{
    const np_range clusters = clusters_of(engine, engine->window);
    int missing = 0;
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++) {
        uint8_t *state = state_of(engine, cluster);
        if ((*state & (NP_CLUSTER_FIRED | NP_CLUSTER_ASKED)) != NP_CLUSTER_FIRED)
            continue;
        *state |= NP_CLUSTER_ASKED;
        engine->counters.rest_clusters++;
        const uint32_t value = np_word_look(engine->shared.rest_words + word_index(engine, cluster)) & NP_WORD_STATE_MASK;
        if (value == NP_WORD_ABSENT)
            ids[missing++] = word_index(engine, cluster);
        if (value == NP_WORD_ABSENT || value == NP_WORD_LOADING)
            engine->counters.rest_missed++;
    }
    return missing;
}

/* Up values of one cluster's fired neurons: gates in `hidden` become activations. */
static void compute_ups(np_engine *engine, uint32_t cluster, const uint8_t *rest, const uint8_t *scales)
{
    const np_shape *s = &engine->shape;
    const uint8_t *quants = rest + s->up_quants;
    const uint8_t *row_scales = scales + s->up_scales;
    for (uint32_t i = 0; i < s->cluster_neurons; i++, quants += engine->row_quant_bytes, row_scales += engine->row_scale_bytes)
        for (uint32_t t = 0; t < engine->count; t++) {
            float *value = hidden_of(engine, t, cluster) + i;
            if (!fires(s->activation, *value)) {
                *value = 0.0f;
                continue;
            }
            float up;
            np_dot_rows(s->type, quants, row_scales, 1, s->width, engine->activations + t * engine->activation_stride,
                        engine->activation_stride, 1, NULL, &up, 1);
            *value = activate(s->activation, *value, up);
        }
}

static void add_downs(np_engine *engine, uint32_t block, uint32_t cluster, const uint8_t *rest, const uint8_t *scales)
{
    const np_shape *s = &engine->shape;
    const uint8_t *quants = rest + s->down_quants;
    const uint8_t *row_scales = scales + s->down_scales;
    for (uint32_t i = 0; i < s->cluster_neurons; i++, quants += engine->row_quant_bytes, row_scales += engine->row_scale_bytes)
        for (uint32_t t = 0; t < engine->count; t++) {
            const float value = hidden_of(engine, t, cluster)[i];
            if (value != 0.0f)
                np_add_row(s->type, quants, row_scales, s->width, value,
                           engine->shared.partials + ((size_t)t * s->blocks + block) * s->width);
        }
}

/* 1 when every fired cluster of the block has its rest part (slots written), 0 when one is still to come, or an error. */
static int block_is_ready(np_engine *engine, np_range clusters, uint32_t *slots)
{
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++) {
        const uint8_t state = *state_of(engine, cluster);
        if (!(state & NP_CLUSTER_GATED))
            return 0;
        if (state & NP_CLUSTER_FIRED) {
            const int there = look_up(engine, 1, cluster, &slots[cluster - clusters.from]);
            if (there <= 0)
                return there;
        }
    }
    return 1;
}

static int compute_block(np_engine *engine, uint32_t block)
{
    const np_shape *s = &engine->shape;
    const np_range clusters = clusters_of(engine, (np_range){block, block + 1});
    uint32_t *slots = engine->block_slots;
    const int ready = block_is_ready(engine, clusters, slots);
    if (ready <= 0)
        return ready;
    for (uint32_t t = 0; t < engine->count; t++)
        memset(engine->shared.partials + ((size_t)t * s->blocks + block) * s->width, 0, s->width * sizeof(float));
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++) {
        if (!(*state_of(engine, cluster) & NP_CLUSTER_FIRED))
            continue;
        const uint8_t *rest = engine->shared.rest_slots + (size_t)slots[cluster - clusters.from] * s->rest_part_bytes;
        const uint8_t *scales = rest;
        if (s->scales_in_gate) {
            uint32_t slot;
            const int there = look_up(engine, 0, cluster, &slot); /* inside the window: still where its gates were read */
            if (there <= 0)
                return there;
            scales = engine->shared.gate_slots + (size_t)slot * s->gate_part_bytes;
        }
        compute_ups(engine, cluster, rest, scales);
        add_downs(engine, block, cluster, rest, scales);
    }
    engine->block_done[block - engine->own_blocks.from] = 1;
    return 1;
}

static int blocks_pass(np_engine *engine)
{
    int pending = 0;
    for (uint32_t block = engine->window.from; block < engine->window.to; block++) {
        if (engine->block_done[block - engine->own_blocks.from])
            continue;
        const int done = compute_block(engine, block);
        if (done < 0)
            return done;
        pending += !done;
    }
    return pending;
}

int np_engine_blocks(np_engine *engine, int wait)
{
    return until_done(engine, blocks_pass, wait);
}

void np_engine_close(np_engine *engine)
{
    np_long_store(engine->shared.gate_window, 0);
    np_long_store(engine->shared.rest_window, 0);
}

int np_engine_combine(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    int met = np_engine_meet(engine);
    if (met < 0)
        return met;
    const np_range own = np_engine_share(engine, s->width);
    for (uint32_t t = 0; t < engine->count && own.to > own.from; t++) {
        np_sum_tree(engine->shared.partials + (size_t)t * s->blocks * s->width + own.from, s->blocks, s->width, own.to - own.from, engine->rows);
        np_add(engine->rows, own.to - own.from, engine->shared.residual + (size_t)t * s->width + own.from);
    }
    return np_engine_meet(engine);
}

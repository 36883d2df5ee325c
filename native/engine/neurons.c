/* Values and down rows of fired neurons. Blocks are so small that with many tokens their rows stay in the processor's
 * cache. */
#include "engine/neurons.h"

#include "engine/clusters.h"
#include "engine/neuron_rows.h"
#include "engine/prediction.h"
#include "engine/reuse.h"
#include "engine/triggers.h"
#include "kernels/activate.h"

static float activate(const np_shape *s, float gate, float up)
{
    return np_activated(s->activation, s->activation_limit, gate, up);
}

/* ---- values and down -------------------------------------------------------------------------------------------- */
int np_look_up_values(np_engine *engine, np_range clusters)
{
    int absent_count = 0;
    uint32_t requests = 0;
    list_open(engine, clusters);
    for (uint32_t o = 0; o < engine->open_count; o++) {
        const uint32_t cluster = engine->open[o];
        uint8_t *state = &engine->cluster_state[cluster];
        if (!(*state & NP_CLUSTER_FIRED))
            continue;
        const int is_present = np_look_up(engine, NP_VALUE, cluster);
        if (is_present < 0)
            return is_present;
        if (!(*state & NP_CLUSTER_VALUE_REQUESTED)) {
            *state |= NP_CLUSTER_VALUE_REQUESTED;
            np_count_use(engine, NP_VALUE, cluster);
            engine->counters.clusters[NP_VALUE]++;
            engine->counters.missed[NP_VALUE] += !is_present;
            engine->counters.hinted_fired += (uint64_t)np_was_hinted(engine, cluster);
            if (!is_present) {
                const uint32_t absent = np_absent_parts(engine, engine->layer, engine->group->expert, cluster, NP_REQUEST_VALUE);
                if (absent)
                    engine->request_entries[requests++] = absent;
            }
        }
        absent_count += !is_present;
    }
    const int done = np_request_clusters(engine, engine->request_entries, requests);
    return done < 0 ? done : absent_count;
}

int np_look_up_both_parts(np_engine *engine, np_range clusters)
{
    const int triggers = np_look_up_triggers(engine, clusters);
    if (triggers < 0)
        return triggers;
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++)
        engine->cluster_state[cluster] |= NP_CLUSTER_FIRED | (engine->slot[NP_TRIGGER][cluster] == NP_NONE ? 0 : NP_CLUSTER_TRIGGERED);
    const int values = np_look_up_values(engine, clusters);
    return values < 0 ? values : triggers + values;
}

void np_neuron_row(const np_engine *engine, const np_matrix_place *matrix, uint32_t neuron, const void **quants, const void **scales)
{
    const uint32_t cluster = neuron / engine->shape.cluster_neurons;
    const size_t i = neuron % engine->shape.cluster_neurons;
    *quants = quants_of(engine, matrix, cluster) + i * np_row_quant_bytes(engine, matrix);
    *scales = scales_of(engine, matrix, cluster) + i * np_row_scale_bytes(engine, matrix);
}

float np_neuron_value(const np_engine *engine, float gate, float up)
{
    return fires(engine, gate) ? activate(&engine->shape, gate, up) : 0.0f;
}

/* The lot's tokens for which a neuron fired, as a token mask. */
static uint32_t fired_for(np_engine *engine, uint32_t neuron, token_lot lot)
{
    uint32_t fired = 0;
    for (uint32_t t = 0; t < lot.count; t++)
        fired |= (uint32_t)(*hidden_of(engine, lot.first + t, neuron) != 0.0f) << t;
    return fired;
}

/* List the up rows of fired neurons whose value parts are present; with `all` also those of neurons that fired for no
 * token of the lot. Their down rows, needed next, are fetched with them. */
static void list_ups(np_engine *engine, token_lot lot, int all)
{
    const np_shape *s = &engine->shape;
    const uint32_t n = s->cluster_neurons;
    const size_t quant_bytes = np_row_quant_bytes(engine, &s->up), scale_bytes = np_row_scale_bytes(engine, &s->up);
    const size_t down_bytes = np_row_quant_bytes(engine, &s->down);
    engine->list.count = 0;
    for (uint32_t o = 0; o < engine->open_count; o++) {
        const uint32_t cluster = engine->open[o];
        if (!(engine->cluster_state[cluster] & NP_CLUSTER_FIRED) || engine->slot[NP_VALUE][cluster] == NP_NONE)
            continue;
        const uint8_t *quants = quants_of(engine, &s->up, cluster), *scales = scales_of(engine, &s->up, cluster);
        const uint8_t *downs = quants_of(engine, &s->down, cluster);
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t tokens = fired_for(engine, cluster * n + i, lot);
            if (!tokens && !all)
                continue;
            engine->list.prefetch[engine->list.count] = downs + i * down_bytes;
            list_row(engine, quants + i * quant_bytes, scales + i * scale_bytes, cluster * n + i, tokens);
        }
    }
}

/* Turn the gates in `hidden` into values. */
static void multiply_by_ups(np_engine *engine, token_lot lot)
{
    const np_shape *s = &engine->shape;
    const np_fetch fetch = {.prefetch = engine->list.prefetch, .prefetch_bytes = np_row_quant_bytes(engine, &s->down)};
    const float *bias = np_bias_of(engine, engine->fixed.layers[engine->layer].up_bias, s->neurons);
    const int in_panel = engine->group->count >= NP_PANEL_TOKENS && np_all_neurons_fire(engine, engine->layer);
    list_ups(engine, lot, in_panel);
    if (!in_panel)
        dot_listed(engine, &s->up, lot, engine->group->count < NP_PANEL_TOKENS ? &fetch : NULL);
    else if (lot.first == 0)
        dot_panel(engine, &s->up);
    for (uint32_t r = 0; r < engine->list.count; r++)
        for (uint32_t tokens = engine->list.token_masks[r]; tokens;) {
            const uint32_t t = lot.first + pop_token(&tokens), neuron = engine->list.neurons[r];
            float up = product_of(engine, r, t);
            if (bias && neuron < s->neurons) /* padding has no bias */
                up += bias[neuron];
            store_value(engine, t, neuron, activate(s, *hidden_of(engine, t, neuron), up));
            engine->counters.up_rows++;
        }
}

void np_compute_values(np_engine *engine, np_range clusters)
{
    list_open(engine, clusters);
    for (uint32_t t = 0; engine->shape.gated && t < engine->group->count; t += LOT_TOKENS)
        multiply_by_ups(engine, lot_from(engine, t));
    for (uint32_t o = 0; o < engine->open_count; o++) {
        const uint32_t cluster = engine->open[o];
        if (engine->cluster_state[cluster] & NP_CLUSTER_FIRED && engine->slot[NP_VALUE][cluster] != NP_NONE)
            engine->cluster_state[cluster] |= NP_CLUSTER_DONE;
    }
}

/* Make sure that the slots of a fired cluster are known. The participant that adds down rows may not be the one that
 * computed the values and looked the cluster up. */
static int find_slots(np_engine *engine, uint32_t cluster)
{
    for (int part = 0; part < NP_PARTS; part++)
        if (engine->slot[part][cluster] == NP_NONE && np_look_up(engine, part, cluster) != 1)
            return NP_E_ARGUMENT; /* the cluster is in no open window */
    return NP_OK;
}

/* The index of the first value in [from, to) that is not zero, or `to`. */
static uint32_t next_active(const float *values, uint32_t from, uint32_t to)
{
    for (; from + 8 <= to; from += 8) {
        uint64_t bits[4];
        memcpy(bits, values + from, sizeof bits);
        if ((bits[0] | bits[1] | bits[2] | bits[3]) & 0x7fffffff7fffffffu) /* the sign bit is ignored: minus zero counts as zero */
            break;
    }
    while (from < to && values[from] == 0.0f)
        from++;
    return from;
}

/* List the down rows of the block's neurons that are active for token t, and their factors. */
static int list_downs(np_engine *engine, np_range clusters, uint32_t t)
{
    const np_shape *s = &engine->shape;
    const uint32_t n = s->cluster_neurons, end = clusters.to * n;
    const size_t quant_bytes = np_row_quant_bytes(engine, &s->down), scale_bytes = np_row_scale_bytes(engine, &s->down);
    const float weight = engine->pair_weight[engine->group->first + t], *values = hidden_of(engine, t, 0);
    engine->list.count = 0;
    for (uint32_t neuron = clusters.from * n; (neuron = next_active(values, neuron, end)) < end; neuron++) {
        const uint32_t cluster = neuron / n, i = neuron % n;
        const int done = find_slots(engine, cluster);
        if (done < 0)
            return done;
        engine->list.values[engine->list.count] = weight * values[neuron];
        list_row(engine, quants_of(engine, &s->down, cluster) + i * quant_bytes, scales_of(engine, &s->down, cluster) + i * scale_bytes,
                 neuron, 0);
    }
    return NP_OK;
}

/* True if token t has the listed rows and no others: then `factors` are its factors. */
static int has_listed_rows(np_engine *engine, np_range clusters, uint32_t t, float *factors)
{
    const uint32_t n = engine->shape.cluster_neurons, end = clusters.to * n;
    const float weight = engine->pair_weight[engine->group->first + t], *values = hidden_of(engine, t, 0);
    uint32_t neuron = clusters.from * n;
    for (uint32_t r = 0; r < engine->list.count; r++, neuron++) {
        neuron = next_active(values, neuron, end);
        if (neuron != engine->list.neurons[r])
            return 0;
        factors[r] = weight * values[neuron];
    }
    return next_active(values, neuron, end) == end;
}

/* Begin a block's sum: with zeros, or in a mixture's first block with the expert's bias times its weight. A dense
 * layer's bias is added to the sum of all blocks. */
static void begin_sum(const np_engine *engine, uint32_t block, uint32_t t, float *partial)
{
    const np_shape *s = &engine->shape;
    const float *bias = np_bias_of(engine, engine->fixed.layers[engine->layer].down_bias, s->width);
    memset(partial, 0, s->width * sizeof *partial);
    if (!bias || block || s->experts == 1)
        return;
    np_add(bias, s->width, partial);
    np_scale(partial, s->width, engine->pair_weight[engine->group->first + t]);
}

int np_add_down_rows(np_engine *engine, uint32_t block, np_range tokens, uint32_t first_row)
{
    const np_shape *s = &engine->shape;
    const np_range clusters = np_block_clusters(engine, block, block + 1);
    const size_t partial_stride = (size_t)s->blocks * s->width;
    for (uint32_t t = tokens.from, count; t < tokens.to; t += count) {
        float *partial = engine->shared.partials + (first_row + t - tokens.from) * partial_stride + (size_t)block * s->width;
        const int done = list_downs(engine, clusters, t);
        if (done < 0)
            return done;
        for (count = 1; count < NP_DOWN_TOKENS && t + count < tokens.to; count++)
            if (!has_listed_rows(engine, clusters, t + count, engine->list.values + (size_t)count * s->block_neurons))
                break;
        for (uint32_t i = 0; i < count; i++)
            begin_sum(engine, block, t + i, partial + i * partial_stride);
        np_add_rows_for_tokens(s->down.type, engine->list.quants, engine->list.scales, engine->list.values, s->block_neurons, engine->list.count,
                               count, s->width, partial, partial_stride);
        engine->counters.down_rows += (uint64_t)engine->list.count * count;
    }
    return NP_OK;
}

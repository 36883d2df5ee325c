/* Triggers: the gate products; in models without a gate the up products, which give the neurons' values at once. */
#include "engine/triggers.h"

#include "engine/clusters.h"
#include "engine/neuron_rows.h"
#include "engine/prediction.h"
#include "engine/reuse.h"
#include "kernels/exponential.h"

/* The value of a neuron without a gate that fired. */
static float activate_without_gate(int activation, float up)
{
    switch (activation) {
    case NP_RELU2:
        return up * up;
    case NP_GELU:
        return np_gelu(up);
    case NP_GELU_ERF:
        return np_gelu_erf(up);
    default:
        return up;
    }
}

/* ---- clusters ---------------------------------------------------------------------------------------------------- */
/* List the clusters that a deciding predictor names. At the first look-up: all values are zeroed and the clusters it
 * does not name done. */
static void list_predicted(np_engine *engine, np_range clusters)
{
    const uint32_t n = engine->shape.cluster_neurons;
    for (uint32_t t = 0; t < engine->group->count; t++)
        memset(hidden_of(engine, t, clusters.from * n), 0, (size_t)(clusters.to - clusters.from) * n * sizeof(float));
    memset(engine->cluster_state + clusters.from, NP_CLUSTER_LOOKED_UP | NP_CLUSTER_TRIGGERED | NP_CLUSTER_DONE, clusters.to - clusters.from);
    engine->open_count = np_list_predicted(engine, clusters, engine->open);
    for (uint32_t i = 0; i < engine->open_count; i++)
        engine->cluster_state[engine->open[i]] = 0;
}

static int were_looked_up(const np_engine *engine, np_range clusters)
{
    return clusters.from == clusters.to || engine->cluster_state[clusters.from] & NP_CLUSTER_LOOKED_UP;
}

/* ---- triggers --------------------------------------------------------------------------------------------------- */
static const np_matrix_place *trigger_of(const np_engine *engine)
{
    return engine->shape.gated ? &engine->shape.gate : &engine->shape.up;
}

/* List the trigger rows that are present and not computed yet, with the tokens that need them: the predicted ones, or
 * all if no predictor decides. */
static void list_triggers(np_engine *engine, token_lot lot)
{
    const np_matrix_place *trigger = trigger_of(engine);
    const uint32_t n = engine->shape.cluster_neurons, all = (1u << lot.count) - 1;
    const size_t quant_bytes = np_row_quant_bytes(engine, trigger), scale_bytes = np_row_scale_bytes(engine, trigger);
    const int decides = np_predictor_decides(engine);
    engine->list.count = 0;
    for (uint32_t o = 0; o < engine->open_count; o++) {
        const uint32_t cluster = engine->open[o];
        if (engine->cluster_state[cluster] & NP_CLUSTER_TRIGGERED || engine->slot[NP_TRIGGER][cluster] == NP_NONE)
            continue;
        const uint8_t *part = slot_of(engine, NP_TRIGGER, cluster), *quants = part + trigger->quants, *scales = part + trigger->scales;
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t tokens = decides ? np_predicted_tokens(engine, cluster * n + i, lot.first) & all : all;
            if (tokens)
                list_row(engine, quants + i * quant_bytes, scales + i * scale_bytes, cluster * n + i, tokens);
        }
    }
}

static void record_fired(np_engine *engine, uint32_t neuron)
{
    engine->cluster_state[neuron / engine->shape.cluster_neurons] |= NP_CLUSTER_FIRED;
    engine->counters.fired++;
    record(engine, neuron, NP_FIRED);
}

/* Store token t's gate product, or zero if the neuron does not fire. */
static void store_gate(np_engine *engine, uint32_t t, uint32_t neuron, float gate)
{
    const float *bias = np_bias_of(engine, engine->fixed.layers[engine->layer].gate_bias, engine->shape.neurons);
    if (bias && neuron < engine->shape.neurons) /* padding has no bias */
        gate += bias[neuron];
    if (!fires(engine, gate))
        gate = 0.0f;
    else
        record_fired(engine, neuron);
    *hidden_of(engine, t, neuron) = gate;
    engine->counters.gate_rows++;
}

/* Without a gate: store the value that the up product gives. */
static void store_up(np_engine *engine, uint32_t t, uint32_t neuron, float up)
{
    const float *bias = engine->fixed.layers[engine->layer].up_bias;
    if (bias && neuron < engine->shape.neurons) /* padding has no bias */
        up += bias[neuron];
    const int fired = fires(engine, up);
    store_value(engine, t, neuron, fired ? activate_without_gate(engine->shape.activation, up) : 0.0f);
    if (fired)
        record_fired(engine, neuron);
    engine->counters.up_rows++;
}

static void store_triggers(np_engine *engine, token_lot lot)
{
    void (*store)(np_engine *, uint32_t, uint32_t, float) = engine->shape.gated ? store_gate : store_up;
    for (uint32_t r = 0; r < engine->list.count; r++) {
        uint32_t tokens = engine->list.token_masks[r];
        engine->counters.predicted += (uint64_t)__builtin_popcount(tokens);
        record(engine, engine->list.neurons[r], NP_TRIGGERED);
        while (tokens) {
            const uint32_t t = lot.first + pop_token(&tokens);
            store(engine, t, engine->list.neurons[r], product_of(engine, r, t));
        }
    }
}

/* The bytes to fetch from a trigger's scales on: those of all rows of its neuron, if they lie close enough together.
 * Else 0. */
static size_t scale_bytes_of_neuron(const np_engine *engine)
{
    const np_shape *s = &engine->shape;
    const np_matrix_place *trigger = trigger_of(engine);
    const size_t scale_bytes = np_row_scale_bytes(engine, trigger), other_neurons = (s->cluster_neurons - 1) * scale_bytes;
    return s->cluster_neurons <= 2 && np_predictor_decides(engine) && scale_bytes ? s->slot_bytes[NP_TRIGGER] - trigger->scales - other_neurons : 0;
}

void np_compute_triggers(np_engine *engine, np_range clusters)
{
    const np_shape *s = &engine->shape;
    const int in_panel = !np_predictor_decides(engine) && engine->group->count >= NP_PANEL_TOKENS;
    const np_fetch fetch = {
        .row_bytes = s->cluster_neurons == 1 ? s->slot_bytes[NP_TRIGGER] : 0,
        .scale_bytes = scale_bytes_of_neuron(engine),
    };
    list_open(engine, clusters);
    for (token_lot lot = {0}; lot.first < engine->group->count; lot.first += lot.count) {
        lot = lot_from(engine, lot.first);
        list_triggers(engine, lot);
        if (!in_panel)
            dot_listed(engine, trigger_of(engine), lot, engine->group->count < NP_PANEL_TOKENS ? &fetch : NULL);
        else if (lot.first == 0)
            dot_panel(engine, trigger_of(engine));
        store_triggers(engine, lot);
    }
    for (uint32_t o = 0; o < engine->open_count; o++)
        if (engine->slot[NP_TRIGGER][engine->open[o]] != NP_NONE)
            engine->cluster_state[engine->open[o]] |= NP_CLUSTER_TRIGGERED;
}

int np_look_up_triggers(np_engine *engine, np_range clusters)
{
    const uint32_t parts = np_parts_ahead(engine, engine->layer, engine->group->count);
    int absent_count = 0;
    uint32_t requests = 0;
    if (np_predictor_decides(engine) && !were_looked_up(engine, clusters))
        list_predicted(engine, clusters);
    else
        list_open(engine, clusters);
    for (uint32_t o = 0; o < engine->open_count; o++) {
        const uint32_t cluster = engine->open[o];
        uint8_t *state = &engine->cluster_state[cluster];
        if (*state & NP_CLUSTER_TRIGGERED)
            continue;
        const int is_present = np_look_up(engine, NP_TRIGGER, cluster);
        if (is_present < 0)
            return is_present;
        if (!(*state & NP_CLUSTER_LOOKED_UP)) {
            np_count_use(engine, NP_TRIGGER, cluster);
            engine->counters.clusters[NP_TRIGGER]++;
            engine->counters.missed[NP_TRIGGER] += !is_present;
        }
        *state |= NP_CLUSTER_LOOKED_UP;
        if (is_present)
            continue;
        absent_count++;
        if (!(*state & NP_CLUSTER_TRIGGER_REQUESTED)) {
            *state |= NP_CLUSTER_TRIGGER_REQUESTED;
            const uint32_t absent = np_absent_parts(engine, engine->layer, engine->group->expert, cluster, parts);
            if (absent)
                engine->request_entries[requests++] = absent;
        }
    }
    const int done = np_request_clusters(engine, engine->request_entries, requests);
    return done < 0 ? done : absent_count;
}

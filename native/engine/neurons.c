/* Triggers, values and rows of Down of the clusters that are there, one token's rows at a time. The trigger is Gate's product; where
 * there is no gate it is Up's, and with it a neuron's value is known: only its row of Down is still wanted.
 *
 * For one token that is the whole work: its neurons' rows, wherever they lie, one behind the other. For many tokens a block's rows
 * stay in the processor's cache from one token to the next. */
#include "engine.h"

#include <math.h>
#include <string.h>

/* A neuron's value for the group's token t. */
static float *hidden_of(np_engine *engine, uint32_t t, uint32_t neuron)
{
    return engine->shared.hidden + (engine->group->first + t) * engine->layer_neurons + neuron;
}

static float silu(float gate)
{
    return gate / (1.0f + expf(-gate));
}

/* Whether a neuron takes part, from its trigger alone: whether its value can be other than zero, or, with SiLU, is not to count as such.
 * A gate that is no number takes part: it must show in the result. */
static int fires(const np_engine *engine, float trigger)
{
    if (engine->shape.activation != NP_SILU)
        return trigger > engine->shape.activation_threshold;
    const float silent_below = engine->fixed.layers[engine->layer].silent_below;
    return silent_below == 0.0f ? trigger != 0.0f : !(fabsf(silu(trigger)) < silent_below);
}

/* The value of a neuron without a gate that fired. */
static float activate_alone(int activation, float up)
{
    return activation == NP_RELU2 ? up * up : up;
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
        return silu(gate) * up;
    }
}

/* ---- rows of one token's neurons ------------------------------------------------------------------------------ */
static void list_row(np_engine *engine, const uint8_t *quants, const uint8_t *scales, uint32_t neuron, float value)
{
    np_row_list *list = &engine->list;
    list->quants[list->count] = quants;
    list->scales[list->count] = scales;
    list->neurons[list->count] = neuron;
    list->values[list->count++] = value;
}

/* Values of the listed rows. For many tokens the rows of a block are in the cache since the first of them: nothing to fetch. */
static void dot_listed(np_engine *engine, uint32_t t, const np_fetch *fetch)
{
    np_dot_scattered(engine->shape.type, engine->list.quants, engine->list.scales, engine->list.count, engine->shape.width,
                     engine->group->count == 1 ? fetch : NULL, engine->inputs->prepared + t * engine->inputs->stride, 0, 1,
                     engine->list.values, 0);
}

/* The first rows of a cluster in its slots. */
static const uint8_t *slot_of(const np_engine *engine, uint32_t part, uint32_t cluster)
{
    return engine->shared.slots[part] + (size_t)engine->slot[part][cluster] * engine->shape.slot_bytes[part];
}

static const uint8_t *quants_of(const np_engine *engine, const np_matrix_place *matrix, uint32_t cluster)
{
    return slot_of(engine, matrix->part, cluster) + matrix->quants;
}

static const uint8_t *scales_of(const np_engine *engine, const np_matrix_place *matrix, uint32_t cluster)
{
    return slot_of(engine, matrix->scales_part, cluster) + matrix->scales;
}

/* Where the value part seems to be, good for fetching only; the trigger part when it is not there. */
static const void *value_part_at_a_glance(const np_engine *engine, uint32_t cluster, const uint8_t *trigger_part)
{
    const uint32_t value = np_word_load(&engine->shared.entries[NP_VALUE][np_cluster_index(engine, engine->layer, engine->group->expert, cluster)]);
    if ((value & NP_ENTRY_STATE_MASK) != NP_ENTRY_PRESENT)
        return trigger_part;
    return engine->shared.slots[NP_VALUE] + (size_t)(value & NP_ENTRY_SLOT_MASK) * engine->shape.slot_bytes[NP_VALUE];
}

/* ---- triggers --------------------------------------------------------------------------------------------------- */
/* Trigger rows of the clusters that have a trigger slot and are not triggered yet, where token t is predicted to want them. */
static void list_triggers(np_engine *engine, np_range clusters, uint32_t t, int whole)
{
    const np_shape *s = &engine->shape;
    const np_matrix_place *trigger = s->gated ? &s->gate : &s->up;
    const uint32_t n = s->cluster_neurons;
    engine->list.count = 0;
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++) {
        if (engine->cluster_state[cluster] & NP_CLUSTER_TRIGGERED || engine->slot[NP_TRIGGER][cluster] == NP_NO_PIECE)
            continue;
        const uint8_t *part = slot_of(engine, NP_TRIGGER, cluster), *quants = part + trigger->quants, *scales = part + trigger->scales;
        engine->list.beside[engine->list.count] = whole ? value_part_at_a_glance(engine, cluster, part) : NULL;
        for (uint32_t i = 0; i < n; i++) {
            if (np_is_predicted(engine, cluster * n + i, t))
                list_row(engine, quants + (size_t)i * engine->row_quant_bytes, scales + (size_t)i * engine->row_scale_bytes,
                         cluster * n + i, 0.0f);
            else
                *hidden_of(engine, t, cluster * n + i) = 0.0f;
        }
    }
}

/* For who records what neurons do. */
static void note(np_engine *engine, uint32_t neuron, uint8_t what)
{
    if (engine->shared.activity) {
        const size_t ffn = engine->layer * engine->shape.experts + engine->group->expert;
        engine->shared.activity[ffn * engine->layer_neurons + neuron] |= what;
    }
}

/* A neuron's value for token t is known. */
static void take_value(np_engine *engine, uint32_t t, uint32_t neuron, float value)
{
    *hidden_of(engine, t, neuron) = value;
    if (value == 0.0f)
        return;
    engine->counters.active++;
    note(engine, neuron, NP_ACTIVE);
}

static void note_fired(np_engine *engine, uint32_t neuron)
{
    engine->cluster_state[neuron / engine->shape.cluster_neurons] |= NP_CLUSTER_FIRED;
    engine->counters.fired++;
    note(engine, neuron, NP_FIRED);
}

/* The listed neurons' gates of token t are known. */
static void take_gates(np_engine *engine, uint32_t t, const float *gates)
{
    for (uint32_t r = 0; r < engine->list.count; r++) {
        const uint32_t neuron = engine->list.neurons[r];
        const int fired = fires(engine, gates[r]);
        *hidden_of(engine, t, neuron) = fired ? gates[r] : 0.0f;
        if (fired)
            note_fired(engine, neuron);
    }
    engine->counters.gate_rows += engine->list.count;
}

/* The same without gates: their products with Up are known, and by them their values. */
static void take_ups(np_engine *engine, uint32_t t, const float *products)
{
    const int activation = engine->shape.activation;
    const float *bias = engine->fixed.layers[engine->layer].up_bias;
    for (uint32_t r = 0; r < engine->list.count; r++) {
        const uint32_t neuron = engine->list.neurons[r];
        const float up = bias && neuron < engine->shape.neurons ? products[r] + bias[neuron] : products[r]; /* padding has no bias */
        const int fired = fires(engine, up);
        take_value(engine, t, neuron, fired ? activate_alone(activation, up) : 0.0f);
        if (fired)
            note_fired(engine, neuron);
    }
    engine->counters.up_rows += engine->list.count;
}

static void take_triggers(np_engine *engine, uint32_t t, const float *products)
{
    if (engine->shape.gated)
        take_gates(engine, t, products);
    else
        take_ups(engine, t, products);
    engine->counters.predicted += engine->list.count;
    for (uint32_t r = 0; engine->shared.activity && r < engine->list.count; r++)
        note(engine, engine->list.neurons[r], NP_TRIGGERED);
}

void np_compute_triggers(np_engine *engine, np_range clusters)
{
    const np_shape *s = &engine->shape;
    const int own_slot = s->cluster_neurons == 1;
    if (!np_decides(engine) && engine->group->count > 1) { /* all tokens want all triggers */
        const np_fetch fetch = {own_slot ? s->slot_bytes[NP_TRIGGER] : 0, NULL, 0};
        list_triggers(engine, clusters, 0, 0);
        if (engine->group->count >= NP_PANEL_TOKENS)
            np_dot_panel(s->type, engine->list.quants, engine->list.scales, engine->list.count, s->width, engine->inputs->panel,
                         engine->group->count, NULL, engine->rows, engine->max_rows);
        else
            np_dot_scattered(s->type, engine->list.quants, engine->list.scales, engine->list.count, s->width, &fetch,
                             engine->inputs->prepared, engine->inputs->stride, engine->group->count, engine->rows, engine->max_rows);
        for (uint32_t t = 0; t < engine->group->count; t++)
            take_triggers(engine, t, engine->rows + t * engine->max_rows);
    } else {
        /* A neuron that was predicted will most likely fire: its value part comes along. */
        const int whole = own_slot && np_decides(engine);
        const np_fetch fetch = {own_slot ? s->slot_bytes[NP_TRIGGER] : 0, whole ? engine->list.beside : NULL, s->slot_bytes[NP_VALUE]};
        for (uint32_t t = 0; t < engine->group->count; t++) {
            list_triggers(engine, clusters, t, whole);
            dot_listed(engine, t, &fetch);
            take_triggers(engine, t, engine->list.values);
        }
    }
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++)
        if (engine->slot[NP_TRIGGER][cluster] != NP_NO_PIECE)
            engine->cluster_state[cluster] |= NP_CLUSTER_TRIGGERED;
}

/* Look the trigger parts of a block up. Returns how many are still to come, or an error. */
int np_find_triggers(np_engine *engine, np_range clusters)
{
    const int dense = engine->group->count >= NP_DENSE_TOKENS || np_all_fire(engine, engine->layer);
    const int whole = engine->config.bundle || dense;
    const uint32_t parts = whole ? NP_REQUEST_TRIGGER | NP_REQUEST_VALUE : NP_REQUEST_TRIGGER;
    int missing = 0;
    uint32_t asked = 0;
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++) {
        uint8_t *state = &engine->cluster_state[cluster];
        if (*state & NP_CLUSTER_TRIGGERED)
            continue;
        if (!(*state & NP_CLUSTER_LOOKED) && !np_cluster_is_predicted(engine, cluster)) {
            for (uint32_t t = 0; t < engine->group->count; t++)
                memset(hidden_of(engine, t, cluster * engine->shape.cluster_neurons), 0, engine->shape.cluster_neurons * sizeof(float));
            *state |= NP_CLUSTER_LOOKED | NP_CLUSTER_TRIGGERED | NP_CLUSTER_DONE;
            continue;
        }
        const int there = np_look_up(engine, NP_TRIGGER, cluster);
        if (there < 0)
            return there;
        if (!(*state & NP_CLUSTER_LOOKED)) {
            engine->counters.clusters[NP_TRIGGER]++;
            engine->counters.missed[NP_TRIGGER] += !there;
        }
        *state |= NP_CLUSTER_LOOKED;
        if (there)
            continue;
        missing++;
        if (!(*state & NP_CLUSTER_TRIGGER_ASKED)) {
            *state |= NP_CLUSTER_TRIGGER_ASKED;
            const uint32_t lacking = np_lacking(engine, engine->layer, engine->group->expert, cluster, parts);
            if (lacking)
                engine->asked[asked++] = lacking;
        }
    }
    const int done = np_ask(engine, engine->asked, asked);
    return done < 0 ? done : missing;
}

/* ---- values and down -------------------------------------------------------------------------------------------- */
/* Look up the value parts of clusters that fired. Returns how many are still to come, or an error. */
int np_find_values(np_engine *engine, np_range clusters)
{
    int missing = 0;
    uint32_t asked = 0;
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++) {
        uint8_t *state = &engine->cluster_state[cluster];
        if ((*state & (NP_CLUSTER_FIRED | NP_CLUSTER_DONE)) != NP_CLUSTER_FIRED)
            continue;
        const int there = np_look_up(engine, NP_VALUE, cluster);
        if (there < 0)
            return there;
        if (!(*state & NP_CLUSTER_VALUE_ASKED)) {
            *state |= NP_CLUSTER_VALUE_ASKED;
            engine->counters.clusters[NP_VALUE]++;
            engine->counters.missed[NP_VALUE] += !there;
            engine->counters.hinted_fired += (uint64_t)np_was_hinted(engine, cluster);
            if (!there) {
                const uint32_t lacking = np_lacking(engine, engine->layer, engine->group->expert, cluster, NP_REQUEST_VALUE);
                if (lacking)
                    engine->asked[asked++] = lacking;
            }
        }
        missing += !there;
    }
    const int done = np_ask(engine, engine->asked, asked);
    return done < 0 ? done : missing;
}

int np_find_clusters(np_engine *engine, np_range clusters)
{
    const int triggers = np_find_triggers(engine, clusters);
    if (triggers < 0)
        return triggers;
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++)
        engine->cluster_state[cluster] |= NP_CLUSTER_FIRED | (engine->slot[NP_TRIGGER][cluster] == NP_NO_PIECE ? 0 : NP_CLUSTER_TRIGGERED);
    const int values = np_find_values(engine, clusters);
    return values < 0 ? values : triggers + values;
}

void np_neuron_row(const np_engine *engine, const np_matrix_place *matrix, uint32_t neuron, const void **quants, const void **scales)
{
    const uint32_t cluster = neuron / engine->shape.cluster_neurons;
    const size_t i = neuron % engine->shape.cluster_neurons;
    *quants = quants_of(engine, matrix, cluster) + i * engine->row_quant_bytes;
    *scales = scales_of(engine, matrix, cluster) + i * engine->row_scale_bytes;
}

float np_neuron_value(const np_engine *engine, float gate, float up)
{
    return fires(engine, gate) ? activate(engine->shape.activation, gate, up) : 0.0f;
}

/* Gates in `hidden` become values, where the value part is there. */
static void multiply_by_ups(np_engine *engine, np_range clusters)
{
    const np_shape *s = &engine->shape;
    const uint32_t n = s->cluster_neurons;
    const np_fetch fetch = {n == 1 ? s->slot_bytes[NP_VALUE] : 0, NULL, 0}; /* the row of Down lies behind that of Up */
    for (uint32_t t = 0; t < engine->group->count; t++) {
        engine->list.count = 0;
        for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++) {
            if ((engine->cluster_state[cluster] & (NP_CLUSTER_FIRED | NP_CLUSTER_DONE)) != NP_CLUSTER_FIRED ||
                engine->slot[NP_VALUE][cluster] == NP_NO_PIECE)
                continue;
            const uint8_t *quants = quants_of(engine, &s->up, cluster), *scales = scales_of(engine, &s->up, cluster);
            for (uint32_t i = 0; i < n; i++)
                if (*hidden_of(engine, t, cluster * n + i) != 0.0f)
                    list_row(engine, quants + (size_t)i * engine->row_quant_bytes, scales + (size_t)i * engine->row_scale_bytes,
                             cluster * n + i, 0.0f);
        }
        dot_listed(engine, t, &fetch);
        for (uint32_t r = 0; r < engine->list.count; r++) {
            const uint32_t neuron = engine->list.neurons[r];
            const float gate = *hidden_of(engine, t, neuron);
            take_value(engine, t, neuron, activate(s->activation, gate, engine->list.values[r]));
        }
        engine->counters.up_rows += engine->list.count;
    }
}

/* Values of the fired neurons whose value part is there. */
void np_compute_values(np_engine *engine, np_range clusters)
{
    if (engine->shape.gated)
        multiply_by_ups(engine, clusters);
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++)
        if (engine->cluster_state[cluster] & NP_CLUSTER_FIRED && engine->slot[NP_VALUE][cluster] != NP_NO_PIECE)
            engine->cluster_state[cluster] |= NP_CLUSTER_DONE;
}

/* Where a cluster that fired is. Whoever computed its values found it; another participant, adding its rows of Down, looks for itself. */
static int find_again(np_engine *engine, uint32_t cluster)
{
    for (int part = 0; part < NP_PARTS; part++)
        if (engine->slot[part][cluster] == NP_NO_PIECE && np_look_up(engine, part, cluster) != 1)
            return NP_E_ARGUMENT; /* not inside a window */
    return NP_OK;
}

int np_add_downs(np_engine *engine, uint32_t block, np_range tokens, uint32_t first_row)
{
    const np_shape *s = &engine->shape;
    const np_range clusters = np_clusters_of(engine, block, block + 1);
    const uint32_t n = s->cluster_neurons;
    for (uint32_t t = tokens.from; t < tokens.to; t++) {
        float *partial = engine->shared.partials + ((size_t)(first_row + t - tokens.from) * s->blocks + block) * s->width;
        const float share = engine->pair_weight[engine->group->first + t];
        engine->list.count = 0;
        for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++)
            for (uint32_t i = 0; i < n; i++) {
                const float value = *hidden_of(engine, t, cluster * n + i);
                if (value == 0.0f)
                    continue;
                const int found = find_again(engine, cluster);
                if (found < 0)
                    return found;
                list_row(engine, quants_of(engine, &s->down, cluster) + (size_t)i * engine->row_quant_bytes,
                         scales_of(engine, &s->down, cluster) + (size_t)i * engine->row_scale_bytes, cluster * n + i, share * value);
            }
        memset(partial, 0, s->width * sizeof *partial);
        np_add_rows(s->type, engine->list.quants, engine->list.scales, engine->list.values, engine->list.count, s->width, partial);
        engine->counters.down_rows += engine->list.count;
    }
    return NP_OK;
}

/* Triggers of the clusters that are there: Gate's products; where there is no gate Up's, and with it a neuron's value is known. */
#include "neurons.h"

/* The value of a neuron without a gate that fired. */
static float activate_alone(int activation, float up)
{
    return activation == NP_RELU2 ? up * up : up;
}

/* ---- clusters ---------------------------------------------------------------------------------------------------- */
/* List those of a block that a predictor, which decides, names. At the first look: the others are done, and no neuron has a value yet. */
static void list_predicted(np_engine *engine, np_range clusters)
{
    const uint32_t n = engine->shape.cluster_neurons;
    for (uint32_t t = 0; t < engine->group->count; t++)
        memset(hidden_of(engine, t, clusters.from * n), 0, (size_t)(clusters.to - clusters.from) * n * sizeof(float));
    memset(engine->cluster_state + clusters.from, NP_CLUSTER_LOOKED | NP_CLUSTER_TRIGGERED | NP_CLUSTER_DONE, clusters.to - clusters.from);
    engine->open_count = np_list_predicted(engine, clusters, engine->open);
    for (uint32_t i = 0; i < engine->open_count; i++)
        engine->cluster_state[engine->open[i]] = 0;
}

static int was_looked_at(const np_engine *engine, np_range clusters)
{
    return clusters.from == clusters.to || engine->cluster_state[clusters.from] & NP_CLUSTER_LOOKED;
}

/* ---- triggers --------------------------------------------------------------------------------------------------- */
static const np_matrix_place *trigger_of(const np_engine *engine)
{
    return engine->shape.gated ? &engine->shape.gate : &engine->shape.up;
}

/* Trigger rows of the open clusters that have a trigger slot and are not triggered yet, where tokens of the lot want them: all tokens, where
 * no predictor decides. */
static void list_triggers(np_engine *engine, token_lot lot)
{
    const np_matrix_place *trigger = trigger_of(engine);
    const uint32_t n = engine->shape.cluster_neurons, all = (1u << lot.count) - 1;
    const int decides = np_decides(engine);
    engine->list.count = 0;
    for (uint32_t o = 0; o < engine->open_count; o++) {
        const uint32_t cluster = engine->open[o];
        if (engine->cluster_state[cluster] & NP_CLUSTER_TRIGGERED || engine->slot[NP_TRIGGER][cluster] == NP_NO_PIECE)
            continue;
        const uint8_t *part = slot_of(engine, NP_TRIGGER, cluster), *quants = part + trigger->quants, *scales = part + trigger->scales;
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t wanted = decides ? np_predicted_for(engine, cluster * n + i, lot.first) & all : all;
            if (wanted)
                list_row(engine, quants + i * np_quant_bytes_of(engine, trigger), scales + (size_t)i * engine->row_scale_bytes,
                         cluster * n + i, wanted);
        }
    }
}

static void note_fired(np_engine *engine, uint32_t neuron)
{
    engine->cluster_state[neuron / engine->shape.cluster_neurons] |= NP_CLUSTER_FIRED;
    engine->counters.fired++;
    note(engine, neuron, NP_FIRED);
}

/* Token t's product with Gate is known. */
static void take_gate(np_engine *engine, uint32_t t, uint32_t neuron, float gate)
{
    if (!fires(engine, gate))
        gate = 0.0f;
    else
        note_fired(engine, neuron);
    *hidden_of(engine, t, neuron) = gate;
    engine->counters.gate_rows++;
}

/* The same without gates: its product with Up is known, and by that its value. */
static void take_up(np_engine *engine, uint32_t t, uint32_t neuron, float up)
{
    const float *bias = engine->fixed.layers[engine->layer].up_bias;
    if (bias && neuron < engine->shape.neurons) /* padding has no bias */
        up += bias[neuron];
    const int fired = fires(engine, up);
    take_value(engine, t, neuron, fired ? activate_alone(engine->shape.activation, up) : 0.0f);
    if (fired)
        note_fired(engine, neuron);
    engine->counters.up_rows++;
}

static void take_triggers(np_engine *engine, token_lot lot)
{
    void (*take)(np_engine *, uint32_t, uint32_t, float) = engine->shape.gated ? take_gate : take_up;
    for (uint32_t r = 0; r < engine->list.count; r++) {
        uint32_t wanted = engine->list.wanted[r];
        engine->counters.predicted += (uint64_t)__builtin_popcount(wanted);
        note(engine, engine->list.neurons[r], NP_TRIGGERED);
        while (wanted) {
            const uint32_t t = lot.first + next_token(&wanted);
            take(engine, t, engine->list.neurons[r], product_of(engine, r, t));
        }
    }
}

/* From a trigger's scales on, those of all rows of its neuron, where these lie close enough to be fetched together. */
static size_t scale_bytes_of_neuron(const np_engine *engine)
{
    const np_shape *s = &engine->shape;
    const np_matrix_place *trigger = trigger_of(engine);
    const size_t others = (s->cluster_neurons - 1) * (size_t)engine->row_scale_bytes;
    return s->cluster_neurons <= 2 && np_decides(engine) && engine->row_scale_bytes ? s->slot_bytes[NP_TRIGGER] - trigger->scales - others : 0;
}

/* All triggers of all tokens. */
static void dot_all(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    const np_row_list *list = &engine->list;
    np_dot_panel(s->trigger_type, list->quants, list->scales, list->count, s->width, engine->inputs->panel, engine->group->count, NULL, engine->rows,
                 engine->max_rows);
}

void np_compute_triggers(np_engine *engine, np_range clusters)
{
    const np_shape *s = &engine->shape;
    const int in_panel = !np_decides(engine) && engine->group->count >= NP_PANEL_TOKENS;
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
            dot_all(engine);
        take_triggers(engine, lot);
    }
    for (uint32_t o = 0; o < engine->open_count; o++)
        if (engine->slot[NP_TRIGGER][engine->open[o]] != NP_NO_PIECE)
            engine->cluster_state[engine->open[o]] |= NP_CLUSTER_TRIGGERED;
}

/* Look the trigger parts of a block up. Returns how many are still to come, or an error. */
int np_find_triggers(np_engine *engine, np_range clusters)
{
    const int dense = engine->group->count >= NP_DENSE_TOKENS || np_all_fire(engine, engine->layer);
    const int whole = engine->config.bundle || dense;
    const uint32_t parts = whole ? NP_REQUEST_TRIGGER | NP_REQUEST_VALUE : NP_REQUEST_TRIGGER;
    int missing = 0;
    uint32_t asked = 0;
    if (np_decides(engine) && !was_looked_at(engine, clusters))
        list_predicted(engine, clusters);
    else
        list_open(engine, clusters);
    for (uint32_t o = 0; o < engine->open_count; o++) {
        const uint32_t cluster = engine->open[o];
        uint8_t *state = &engine->cluster_state[cluster];
        if (*state & NP_CLUSTER_TRIGGERED)
            continue;
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

/* Values and rows of Down of the clusters that are there and fired. Many tokens find a block's rows in the processor's cache. */
#include "neurons.h"

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

/* ---- values and down -------------------------------------------------------------------------------------------- */
/* Look up the value parts of clusters that fired. Returns how many are still to come, or an error. */
int np_find_values(np_engine *engine, np_range clusters)
{
    int missing = 0;
    uint32_t asked = 0;
    list_open(engine, clusters);
    for (uint32_t o = 0; o < engine->open_count; o++) {
        const uint32_t cluster = engine->open[o];
        uint8_t *state = &engine->cluster_state[cluster];
        if (!(*state & NP_CLUSTER_FIRED))
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
    *quants = quants_of(engine, matrix, cluster) + i * np_quant_bytes_of(engine, matrix);
    *scales = scales_of(engine, matrix, cluster) + i * engine->row_scale_bytes;
}

float np_neuron_value(const np_engine *engine, float gate, float up)
{
    return fires(engine, gate) ? activate(engine->shape.activation, gate, up) : 0.0f;
}

/* For which of the lot's tokens a neuron's gate was let through. */
static uint32_t fired_for(np_engine *engine, uint32_t neuron, token_lot lot)
{
    uint32_t fired = 0;
    for (uint32_t t = 0; t < lot.count; t++)
        fired |= (uint32_t)(*hidden_of(engine, lot.first + t, neuron) != 0.0f) << t;
    return fired;
}

/* Rows of Up of the open clusters that fired and whose value part is there, and beside them those of Down. */
static void list_ups(np_engine *engine, token_lot lot)
{
    const np_shape *s = &engine->shape;
    const uint32_t n = s->cluster_neurons;
    engine->list.count = 0;
    for (uint32_t o = 0; o < engine->open_count; o++) {
        const uint32_t cluster = engine->open[o];
        if (!(engine->cluster_state[cluster] & NP_CLUSTER_FIRED) || engine->slot[NP_VALUE][cluster] == NP_NO_PIECE)
            continue;
        const uint8_t *quants = quants_of(engine, &s->up, cluster), *scales = scales_of(engine, &s->up, cluster);
        const uint8_t *downs = quants_of(engine, &s->down, cluster);
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t wanted = fired_for(engine, cluster * n + i, lot);
            if (!wanted)
                continue;
            engine->list.beside[engine->list.count] = downs + (size_t)i * engine->row_quant_bytes;
            list_row(engine, quants + (size_t)i * engine->row_quant_bytes, scales + (size_t)i * engine->row_scale_bytes, cluster * n + i,
                     wanted);
        }
    }
}

/* Gates in `hidden` become values. */
static void multiply_by_ups(np_engine *engine, token_lot lot)
{
    const np_shape *s = &engine->shape;
    const np_fetch fetch = {.beside = engine->list.beside, .beside_bytes = engine->row_quant_bytes};
    list_ups(engine, lot);
    dot_listed(engine, &s->up, lot, engine->group->count < NP_PANEL_TOKENS ? &fetch : NULL);
    for (uint32_t r = 0; r < engine->list.count; r++)
        for (uint32_t wanted = engine->list.wanted[r]; wanted;) {
            const uint32_t t = lot.first + next_token(&wanted), neuron = engine->list.neurons[r];
            take_value(engine, t, neuron, activate(s->activation, *hidden_of(engine, t, neuron), product_of(engine, r, t)));
            engine->counters.up_rows++;
        }
}

/* Values of the fired neurons whose value part is there. */
void np_compute_values(np_engine *engine, np_range clusters)
{
    list_open(engine, clusters);
    for (uint32_t t = 0; engine->shape.gated && t < engine->group->count; t += LOT_TOKENS)
        multiply_by_ups(engine, lot_from(engine, t));
    for (uint32_t o = 0; o < engine->open_count; o++) {
        const uint32_t cluster = engine->open[o];
        if (engine->cluster_state[cluster] & NP_CLUSTER_FIRED && engine->slot[NP_VALUE][cluster] != NP_NO_PIECE)
            engine->cluster_state[cluster] |= NP_CLUSTER_DONE;
    }
}

/* Where a cluster that fired is. Whoever computed its values found it; another participant, adding its rows of Down, looks for itself. */
static int find_again(np_engine *engine, uint32_t cluster)
{
    for (int part = 0; part < NP_PARTS; part++)
        if (engine->slot[part][cluster] == NP_NO_PIECE && np_look_up(engine, part, cluster) != 1)
            return NP_E_ARGUMENT; /* not inside a window */
    return NP_OK;
}

/* The first of these values that is not zero, or `to`. */
static uint32_t next_active(const float *values, uint32_t from, uint32_t to)
{
    for (; from + 8 <= to; from += 8) {
        uint64_t bits[4];
        memcpy(bits, values + from, sizeof bits);
        if ((bits[0] | bits[1] | bits[2] | bits[3]) & 0x7fffffff7fffffffu) /* minus zero is none either */
            break;
    }
    while (from < to && values[from] == 0.0f)
        from++;
    return from;
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
        const float *values = hidden_of(engine, t, 0);
        const uint32_t end = clusters.to * n;
        for (uint32_t neuron = clusters.from * n; (neuron = next_active(values, neuron, end)) < end; neuron++) {
            const uint32_t cluster = neuron / n, i = neuron % n;
            const int found = find_again(engine, cluster);
            if (found < 0)
                return found;
            engine->list.values[engine->list.count] = share * values[neuron];
            list_row(engine, quants_of(engine, &s->down, cluster) + (size_t)i * engine->row_quant_bytes,
                     scales_of(engine, &s->down, cluster) + (size_t)i * engine->row_scale_bytes, neuron, 0);
        }
        memset(partial, 0, s->width * sizeof *partial);
        np_add_rows(s->type, engine->list.quants, engine->list.scales, engine->list.values, engine->list.count, s->width, partial);
        engine->counters.down_rows += engine->list.count;
    }
    return NP_OK;
}

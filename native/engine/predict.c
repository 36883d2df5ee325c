/* Which neurons will fire, guessed from a low-rank image of the gates (and, for a gate on both sides, of the ups).
 *
 * A predictor reads attention's input of its own layer or of the one before, or the feed-forward's input. Reading early costs some
 * recall and gives flash the time of attention, or of a whole layer, to bring what is missing. */
#include "engine.h"

#include <string.h>

/* The layers whose predictors read here: at most this one and the next. Returns how many. */
static int readers(const np_engine *engine, np_reading here, uint32_t *targets)
{
    int count = 0;
    if (!engine->shape.predictor_rank)
        return 0;
    if (engine->fixed.layers[here.layer].predictor.reads == (here.feed_forward ? NP_READS_FEED_FORWARD : NP_READS_ATTENTION))
        targets[count++] = here.layer;
    if (!here.feed_forward && here.layer + 1 < engine->shape.layers &&
        engine->fixed.layers[here.layer + 1].predictor.reads == NP_READS_LAYER_BEFORE)
        targets[count++] = here.layer + 1;
    return count;
}

int np_predicts(const np_engine *engine, np_reading here)
{
    uint32_t targets[2];
    return readers(engine, here, targets) > 0;
}

/* The token's rank vector for a layer. */
static float *rank_of(const np_engine *engine, uint32_t layer, uint32_t t)
{
    return engine->shared.ranks + ((size_t)(layer % 2) * engine->place.max_tokens + t) * engine->shape.predictor_rank;
}

static uint8_t *predictions(const np_engine *engine, uint32_t layer, uint32_t neuron)
{
    return engine->shared.predicted + ((size_t)(layer % 2) * engine->layer_neurons + neuron) * engine->mask_bytes;
}

const uint8_t *np_predictions(const np_engine *engine, uint32_t layer, uint32_t neuron)
{
    return predictions(engine, layer, neuron);
}

void np_predict_ranks(np_engine *engine, np_reading here)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[here.layer];
    uint32_t targets[2];
    const int count = readers(engine, here, targets);
    if (!count)
        return;
    if (engine->predictor_input != engine->activations)
        np_engine_prepare(engine, s->predictor_type, engine->shared.residual, s->width, s->width,
                          here.feed_forward ? l->ffn_norm : l->attention_norm, engine->predictor_input);
    const int work = here.feed_forward ? NP_WORK_LATE_RANK : NP_WORK_RANK;
    const uint32_t pieces = (s->predictor_rank + NP_PIECE_ROWS - 1) / NP_PIECE_ROWS;
    const size_t quants = np_quant_bytes(s->predictor_type, s->width), scales = np_scale_bytes(s->predictor_type, s->width);
    for (uint32_t piece; (piece = np_engine_claim(engine, here.layer, work, pieces * (uint32_t)count)) != NP_NO_PIECE;) {
        const uint32_t target = targets[piece / pieces], row = piece % pieces * NP_PIECE_ROWS;
        const np_matrix *m = &engine->fixed.layers[target].predictor.input;
        const uint32_t left = s->predictor_rank - row, rows = left < NP_PIECE_ROWS ? left : NP_PIECE_ROWS;
        float *ranks = rank_of(engine, target, 0) + row;
        np_dot_rows(s->predictor_type, (const uint8_t *)m->quants + row * quants, (const uint8_t *)m->scales + row * scales,
                    rows, s->width, engine->predictor_input, engine->activation_stride, engine->count, NULL, ranks,
                    s->predictor_rank);
        for (uint32_t t = 0; s->predictor_relu && t < engine->count; t++)
            for (uint32_t r = 0; r < rows; r++)
                if (ranks[t * s->predictor_rank + r] < 0.0f)
                    ranks[t * s->predictor_rank + r] = 0.0f;
    }
}

/* One side's scores of a block into engine->rows, from column `at` on. */
static void score(np_engine *engine, const np_matrix *m, const float *bias, uint32_t first, uint32_t rows, uint32_t at)
{
    const np_shape *s = &engine->shape;
    const size_t quants = np_quant_bytes(s->predictor_type, s->predictor_rank);
    const size_t scales = np_scale_bytes(s->predictor_type, s->predictor_rank);
    np_dot_rows(s->predictor_type, (const uint8_t *)m->quants + first * quants, (const uint8_t *)m->scales + first * scales, rows,
                s->predictor_rank, engine->rank_activations, engine->rank_stride, engine->count, bias + first, engine->rows + at,
                engine->max_rows);
}

/* Who of a block is predicted. Padding beyond the layer's last neuron is not. */
static uint32_t predict_block(np_engine *engine, uint32_t layer, uint32_t block)
{
    const np_shape *s = &engine->shape;
    const np_predictor *p = &engine->fixed.layers[layer].predictor;
    const uint32_t first = block * s->block_neurons, left = s->neurons > first ? s->neurons - first : 0;
    const uint32_t rows = left < s->block_neurons ? left : s->block_neurons;
    uint32_t predicted = 0;
    memset(predictions(engine, layer, first), 0, s->block_neurons * engine->mask_bytes);
    score(engine, &p->gate, p->gate_bias, first, rows, 0);
    if (p->up.quants)
        score(engine, &p->up, p->up_bias, first, rows, s->block_neurons);
    for (uint32_t t = 0; t < engine->count; t++) {
        const float *gate = engine->rows + t * engine->max_rows, *up = p->up.quants ? gate + s->block_neurons : gate;
        uint8_t *mask = predictions(engine, layer, first) + t / 8;
        const uint8_t bit = (uint8_t)(1u << t % 8);
        for (uint32_t i = 0; i < rows; i++)
            if (gate[i] > 0.0f && up[i] > 0.0f) {
                mask[i * engine->mask_bytes] |= bit;
                predicted++;
            }
    }
    return predicted;
}

static int cluster_is_predicted(const np_engine *engine, uint32_t layer, uint32_t cluster)
{
    const uint8_t *mask = predictions(engine, layer, cluster * engine->shape.cluster_neurons);
    for (size_t i = 0; i < engine->shape.cluster_neurons * engine->mask_bytes; i++)
        if (mask[i])
            return 1;
    return 0;
}

/* Ask for what the predicted clusters of a block lack. For this layer the step is about to wait for them; for the next it is a guess. */
static int ask_for_predicted(np_engine *engine, uint32_t layer, uint32_t block)
{
    const np_range clusters = np_clusters_of(engine, block, block + 1);
    const uint32_t parts = engine->place.bundle ? NP_REQUEST_GATE | NP_REQUEST_REST : NP_REQUEST_GATE;
    uint32_t count = 0;
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++) {
        if (!cluster_is_predicted(engine, layer, cluster))
            continue;
        const uint32_t lacking = np_lacking(engine, layer, cluster, parts);
        engine->counters.foreseen++;
        if (lacking & NP_REQUEST_GATE) /* of a neuron whose gate is there, the gate decides whether the rest is read */
            engine->asked[count++] = lacking;
    }
    engine->counters.foreseen_missed += count;
    if (layer == engine->layer)
        return np_ask(engine, engine->asked, count);
    for (uint32_t i = 0; i < count; i++)
        engine->asked[i] |= NP_REQUEST_PREFETCH;
    np_requests_put(&engine->shared.requests, engine->asked, count);
    return NP_OK;
}

int np_predict_scores(np_engine *engine, np_reading here)
{
    const np_shape *s = &engine->shape;
    uint32_t targets[2], predicted = 0, prepared = UINT32_MAX;
    const int count = readers(engine, here, targets);
    if (!count)
        return NP_OK;
    const uint64_t started = np_clock_ns();
    const int work = here.feed_forward ? NP_WORK_LATE_SCORE : NP_WORK_SCORE;
    for (uint32_t piece; (piece = np_engine_claim(engine, here.layer, work, s->blocks * (uint32_t)count)) != NP_NO_PIECE;) {
        const uint32_t target = targets[piece / s->blocks], block = piece % s->blocks;
        if (target != prepared)
            for (uint32_t t = 0; t < engine->count; t++)
                np_activation_prepare(s->predictor_type, rank_of(engine, target, t), s->predictor_rank,
                                      engine->rank_activations + t * engine->rank_stride);
        prepared = target;
        predicted += predict_block(engine, target, block);
        const int asked = engine->place.prefetch ? ask_for_predicted(engine, target, block) : NP_OK;
        if (asked < 0)
            return asked;
    }
    np_trace_put(&engine->shared.trace, NP_SPAN_PREDICT, here.layer, predicted, engine->step, started);
    return NP_OK;
}

/* Predictors: which neurons will fire, from a low-rank approximation of the triggers (and of the up products, for
 * activations where their sign decides as well).
 *
 * A predictor reads the input of attention or that of the feed-forward; one from a third party may read the latter
 * before its norm. Reading early costs a little recall and gives flash the time of attention to read what is absent.
 * Ranks differ between predictors. */
#include "engine/prediction.h"

#include <string.h>

#include "engine/clusters.h"
#include "engine/routing.h"
#include "engine/vectors.h"
#include "engine/work.h"

/* With many tokens nearly every value part is needed, and requested without a hint. */
static int gives_hints(const np_engine *engine)
{
    return engine->config.hints && engine->config.prefetch && engine->count < NP_DENSE_TOKENS;
}

int np_predictor_runs(const np_engine *engine, int reads)
{
    return engine->shape.predictor_rank && engine->shape.predictor_reads == reads && (np_predictor_decides(engine) || gives_hints(engine));
}

int np_predictor_has_input(const np_shape *shape)
{
    return shape->predictor_rank && (shape->predictor_type != shape->type || shape->predictor_reads == NP_READS_RESIDUAL);
}

static const np_predictor *predictor_of(const np_engine *engine, const np_group *group)
{
    return &engine->fixed.layers[engine->layer].predictors[group->expert];
}

/* The predictions of a neuron of the current group. */
static uint8_t *predictions(const np_engine *engine, uint32_t neuron)
{
    const size_t group = (size_t)(engine->group - engine->groups);
    return engine->shared.predicted + (group * engine->layer_neurons + neuron) * engine->mask_bytes;
}

uint32_t np_predicted_tokens(const np_engine *engine, uint32_t neuron, uint32_t first)
{
    const uint8_t *mask = predictions(engine, neuron) + first / 8;
    return mask[0] | (uint32_t)(first / 8 + 1 < engine->mask_bytes ? mask[1] : 0) << 8;
}

static int is_predicted(const np_engine *engine, uint32_t cluster)
{
    const uint8_t *mask = predictions(engine, cluster * engine->shape.cluster_neurons);
    for (size_t i = 0; i < engine->shape.cluster_neurons * engine->mask_bytes; i++)
        if (mask[i])
            return 1;
    return 0;
}

uint32_t np_list_predicted(const np_engine *engine, np_range clusters, uint32_t *list)
{
    const size_t cluster_bytes = engine->shape.cluster_neurons * engine->mask_bytes, bytes = (clusters.to - clusters.from) * cluster_bytes;
    const uint8_t *mask = predictions(engine, clusters.from * engine->shape.cluster_neurons);
    uint32_t count = 0;
    for (size_t at = 0; at < bytes;) {
        const uint64_t word = np_eight_bytes(mask + at, bytes - at, 0);
        if (!word) {
            at += sizeof word;
            continue;
        }
        const size_t cluster = (at + (size_t)__builtin_ctzll(word) / 8) / cluster_bytes;
        list[count++] = clusters.from + (uint32_t)cluster;
        at = (cluster + 1) * cluster_bytes;
    }
    return count;
}

int np_was_hinted(const np_engine *engine, uint32_t cluster)
{
    return engine->shape.predictor_rank && gives_hints(engine) && is_predicted(engine, cluster);
}

void np_predict_ranks(np_engine *engine, const np_norm *norm)
{
    const np_shape *s = &engine->shape;
    np_vectors *all = np_predictor_has_input(s) ? &engine->predictor_input : &engine->vectors;
    if (all != &engine->vectors)
        np_prepare_vectors(engine, all, engine->shared.residual, engine->count, s->width, s->width, norm);
    const uint32_t pieces = (s->predictor_rank + NP_PIECE_ROWS - 1) / NP_PIECE_ROWS;
    np_vectors *gathered = all == &engine->vectors ? &engine->gathered : &engine->gathered_input;
    const np_vectors *x = NULL;
    engine->group = NULL;
    for (uint32_t piece; (piece = np_claim(engine, engine->layer, NP_WORK_RANK, engine->group_count * pieces)) != NP_NONE;) {
        const np_group *group = &engine->groups[piece / pieces];
        if (group != engine->group)
            x = np_gather_vectors(engine, group, all, gathered);
        engine->group = group;
        const np_predictor *p = predictor_of(engine, group);
        const uint32_t row = piece % pieces * NP_PIECE_ROWS, left = p->rank > row ? p->rank - row : 0;
        if (!left)
            continue; /* `pieces` counts those of the greatest rank */
        const uint32_t rows = left < NP_PIECE_ROWS ? left : NP_PIECE_ROWS;
        float *ranks = engine->shared.ranks + (size_t)group->first * s->predictor_rank + row;
        np_multiply_rows(engine, x, &p->input, row, rows, NULL, ranks, s->predictor_rank);
        for (uint32_t t = 0; s->predictor_relu && t < group->count; t++)
            for (uint32_t r = 0; r < rows; r++)
                if (ranks[t * s->predictor_rank + r] < 0.0f)
                    ranks[t * s->predictor_rank + r] = 0.0f;
    }
}

/* Make this the current group, and prepare its tokens' rank vectors. */
static void enter_group(np_engine *engine, const np_group *group)
{
    const uint32_t stride = engine->shape.predictor_rank;
    if (engine->group != group)
        np_prepare_vectors(engine, &engine->ranks, engine->shared.ranks + (size_t)group->first * stride, group->count, stride,
                          predictor_of(engine, group)->rank, NULL);
    engine->group = group;
}

/* Write the predictions of a block of the current group. Padding behind the last neuron is never predicted. Returns
 * their number. */
static uint32_t predict_block(np_engine *engine, uint32_t block)
{
    const np_shape *s = &engine->shape;
    const np_predictor *p = predictor_of(engine, engine->group);
    const uint32_t first = block * s->block_neurons, left = s->neurons > first ? s->neurons - first : 0;
    const uint32_t rows = left < s->block_neurons ? left : s->block_neurons;
    uint32_t predicted = 0;
    memset(predictions(engine, first), 0, s->block_neurons * engine->mask_bytes);
    const int has_up = p->sides[1].quants != NULL;
    for (int side = 0; side <= has_up; side++)
        np_multiply_rows(engine, &engine->ranks, &p->sides[side], first, rows, p->biases[side],
                      engine->rows + (size_t)side * s->block_neurons, engine->max_rows);
    for (uint32_t t = 0; t < engine->group->count; t++) {
        const float *trigger = engine->rows + t * engine->max_rows, *up = has_up ? trigger + s->block_neurons : trigger;
        uint8_t *mask = predictions(engine, first) + t / 8;
        const uint8_t bit = (uint8_t)(1u << t % 8);
        for (uint32_t i = 0; i < rows; i++)
            if (trigger[i] > 0.0f && up[i] > 0.0f) {
                mask[i * engine->mask_bytes] |= bit;
                predicted++;
            }
    }
    return predicted;
}

/* Append requests for the absent parts of a block's predicted clusters to engine->request_entries. Returns the new
 * count. */
static uint32_t request_predicted(np_engine *engine, uint32_t block, uint32_t count)
{
    const np_range clusters = np_block_clusters(engine, block, block + 1);
    const uint32_t parts = engine->config.bundle ? NP_REQUEST_TRIGGER | NP_REQUEST_VALUE : NP_REQUEST_TRIGGER;
    engine->open_count = np_list_predicted(engine, clusters, engine->open);
    for (uint32_t i = 0; i < engine->open_count; i++) {
        const uint32_t absent = np_absent_parts(engine, engine->layer, engine->group->expert, engine->open[i], parts);
        engine->counters.foreseen++;
        if (absent & NP_REQUEST_TRIGGER) { /* if the trigger part is present, its products decide whether the value part is read */
            engine->request_entries[count++] = absent;
            engine->counters.foreseen_missed++;
        }
    }
    return count;
}

/* The same for a predictor that gives hints: request absent value parts, and trigger parts with them. The prediction of
 * a cluster whose value part is present is cleared, so that np_was_hinted counts requested ones only. */
static uint32_t hint(np_engine *engine, uint32_t block, uint32_t count)
{
    const np_range clusters = np_block_clusters(engine, block, block + 1);
    const uint32_t parts = NP_REQUEST_TRIGGER | NP_REQUEST_VALUE, neurons = engine->shape.cluster_neurons;
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++) {
        if (!is_predicted(engine, cluster))
            continue;
        const uint32_t absent = np_absent_parts(engine, engine->layer, engine->group->expert, cluster, parts);
        if (absent & NP_REQUEST_VALUE) {
            engine->request_entries[count++] = absent | NP_REQUEST_PREFETCH;
            engine->counters.hinted++;
        } else {
            memset(predictions(engine, cluster * neurons), 0, neurons * engine->mask_bytes);
        }
    }
    return count;
}

int np_predict_scores(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    const uint64_t started = np_clock_ns();
    uint32_t predicted = 0, requests = 0;
    engine->group = NULL;
    for (uint32_t piece; (piece = np_claim(engine, engine->layer, NP_WORK_SCORE, engine->group_count * s->blocks)) != NP_NONE;) {
        const uint32_t block = piece % s->blocks;
        enter_group(engine, &engine->groups[piece / s->blocks]);
        predicted += predict_block(engine, block);
        if (block < engine->offloaded_blocks)
            continue;
        if (engine->config.hints)
            requests = hint(engine, block, requests);
        else if (engine->config.prefetch)
            requests = request_predicted(engine, block, requests);
    }
    /* All at once, so that the loader is woken once. Hints are dropped if the ring is full. */
    int done = NP_OK;
    if (engine->config.hints && requests)
        np_requests_put(&engine->shared.requests, engine->request_entries, requests);
    else
        done = np_request_clusters(engine, engine->request_entries, requests);
    np_trace_put(&engine->shared.trace, NP_SPAN_PREDICT, engine->layer, predicted, engine->step, started);
    return done;
}

/* Which neurons will fire, guessed from a low-rank image of the triggers (and, where the sign of Up behind a gate counts, of the ups).
 *
 * A predictor reads attention's input or the feed-forward's; one that was trained elsewhere reads the latter before its norm. Reading early
 * costs a little recall and gives flash the time of attention to bring what is missing. Each predictor has a rank of its own. */
#include "engine.h"

#include <string.h>

/* With many tokens nearly every value part is wanted, and asked for anyway. */
static int gives_hints(const np_engine *engine)
{
    return engine->config.hints && engine->config.prefetch && engine->count < NP_DENSE_TOKENS;
}

int np_predicts(const np_engine *engine, int reads)
{
    return engine->shape.predictor_rank && engine->shape.predictor_reads == reads && (np_decides(engine) || gives_hints(engine));
}

int np_predictor_has_input(const np_shape *shape)
{
    return shape->predictor_rank && (shape->predictor_type != shape->type || shape->predictor_reads == NP_READS_RESIDUAL);
}

static const np_predictor *predictor_of(const np_engine *engine, const np_group *group)
{
    return &engine->fixed.layers[engine->layer].predictors[group->expert];
}

/* Of a neuron of the group in work. */
static uint8_t *predictions(const np_engine *engine, uint32_t neuron)
{
    const size_t group = (size_t)(engine->group - engine->groups);
    return engine->shared.predicted + (group * engine->layer_neurons + neuron) * engine->mask_bytes;
}

uint32_t np_predicted_for(const np_engine *engine, uint32_t neuron, uint32_t first)
{
    const uint8_t *mask = predictions(engine, neuron) + first / 8;
    return mask[0] | (uint32_t)(first / 8 + 1 < engine->mask_bytes ? mask[1] : 0) << 8;
}

static int is_named(const np_engine *engine, uint32_t cluster)
{
    const uint8_t *mask = predictions(engine, cluster * engine->shape.cluster_neurons);
    for (size_t i = 0; i < engine->shape.cluster_neurons * engine->mask_bytes; i++)
        if (mask[i])
            return 1;
    return 0;
}

uint32_t np_list_predicted(const np_engine *engine, np_range clusters, uint32_t *list)
{
    const size_t each = engine->shape.cluster_neurons * engine->mask_bytes, bytes = (clusters.to - clusters.from) * each;
    const uint8_t *mask = predictions(engine, clusters.from * engine->shape.cluster_neurons);
    uint32_t count = 0;
    for (size_t at = 0; at < bytes;) {
        const uint64_t word = np_eight_bytes(mask + at, bytes - at, 0);
        if (!word) {
            at += sizeof word;
            continue;
        }
        const size_t cluster = (at + (size_t)__builtin_ctzll(word) / 8) / each;
        list[count++] = clusters.from + (uint32_t)cluster;
        at = (cluster + 1) * each;
    }
    return count;
}

int np_was_hinted(const np_engine *engine, uint32_t cluster)
{
    return engine->shape.predictor_rank && gives_hints(engine) && is_named(engine, cluster);
}

void np_predict_ranks(np_engine *engine, const np_norm *norm)
{
    const np_shape *s = &engine->shape;
    np_vectors *all = np_predictor_has_input(s) ? &engine->predictor_input : &engine->vectors;
    if (all != &engine->vectors)
        np_engine_prepare(engine, all, engine->shared.residual, engine->count, s->width, s->width, norm);
    const uint32_t pieces = (s->predictor_rank + NP_PIECE_ROWS - 1) / NP_PIECE_ROWS;
    np_vectors *gathered = all == &engine->vectors ? &engine->gathered : &engine->gathered_input;
    const np_vectors *x = NULL;
    engine->group = NULL;
    for (uint32_t piece; (piece = np_engine_claim(engine, engine->layer, NP_WORK_RANK, engine->group_count * pieces)) != NP_NO_PIECE;) {
        const np_group *group = &engine->groups[piece / pieces];
        if (group != engine->group)
            x = np_engine_gather(engine, group, all, gathered);
        engine->group = group;
        const np_predictor *p = predictor_of(engine, group);
        const uint32_t row = piece % pieces * NP_PIECE_ROWS, left = p->rank > row ? p->rank - row : 0;
        if (!left)
            continue; /* another expert's rank is greater */
        const uint32_t rows = left < NP_PIECE_ROWS ? left : NP_PIECE_ROWS;
        float *ranks = engine->shared.ranks + (size_t)group->first * s->predictor_rank + row;
        np_engine_dot(engine, x, &p->input, row, rows, NULL, ranks, s->predictor_rank);
        for (uint32_t t = 0; s->predictor_relu && t < group->count; t++)
            for (uint32_t r = 0; r < rows; r++)
                if (ranks[t * s->predictor_rank + r] < 0.0f)
                    ranks[t * s->predictor_rank + r] = 0.0f;
    }
}

/* From now on the group in work is this one; its tokens' rank vectors are prepared. */
static void enter_group(np_engine *engine, const np_group *group)
{
    const uint32_t stride = engine->shape.predictor_rank;
    if (engine->group != group)
        np_engine_prepare(engine, &engine->ranks, engine->shared.ranks + (size_t)group->first * stride, group->count, stride,
                          predictor_of(engine, group)->rank, NULL);
    engine->group = group;
}

/* Who of a block of the group in work is predicted. Padding beyond the last neuron is not. */
static uint32_t predict_block(np_engine *engine, uint32_t block)
{
    const np_shape *s = &engine->shape;
    const np_predictor *p = predictor_of(engine, engine->group);
    const uint32_t first = block * s->block_neurons, left = s->neurons > first ? s->neurons - first : 0;
    const uint32_t rows = left < s->block_neurons ? left : s->block_neurons;
    uint32_t predicted = 0;
    memset(predictions(engine, first), 0, s->block_neurons * engine->mask_bytes);
    const int both = p->sides[1].quants != NULL;
    for (int side = 0; side <= both; side++)
        np_engine_dot(engine, &engine->ranks, &p->sides[side], first, rows, p->biases[side],
                      engine->rows + (size_t)side * s->block_neurons, engine->max_rows);
    for (uint32_t t = 0; t < engine->group->count; t++) {
        const float *trigger = engine->rows + t * engine->max_rows, *up = both ? trigger + s->block_neurons : trigger;
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

/* What the predicted clusters of a block lack, added to the `count` requests in engine->asked. Returns how many there are then. */
static uint32_t foresee(np_engine *engine, uint32_t block, uint32_t count)
{
    const np_range clusters = np_clusters_of(engine, block, block + 1);
    const uint32_t parts = engine->config.bundle ? NP_REQUEST_TRIGGER | NP_REQUEST_VALUE : NP_REQUEST_TRIGGER;
    engine->open_count = np_list_predicted(engine, clusters, engine->open);
    for (uint32_t i = 0; i < engine->open_count; i++) {
        const uint32_t lacking = np_lacking(engine, engine->layer, engine->group->expert, engine->open[i], parts);
        engine->counters.foreseen++;
        if (lacking & NP_REQUEST_TRIGGER) { /* of a neuron whose trigger is there, that decides whether the value part is read */
            engine->asked[count++] = lacking;
            engine->counters.foreseen_missed++;
        }
    }
    return count;
}

/* The same where the predictor does not decide: the value parts that its named clusters lack, and their triggers with them. Whoever lacks
 * none is not named any more. */
static uint32_t hint(np_engine *engine, uint32_t block, uint32_t count)
{
    const np_range clusters = np_clusters_of(engine, block, block + 1);
    const uint32_t parts = NP_REQUEST_TRIGGER | NP_REQUEST_VALUE, neurons = engine->shape.cluster_neurons;
    for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++) {
        if (!is_named(engine, cluster))
            continue;
        const uint32_t lacking = np_lacking(engine, engine->layer, engine->group->expert, cluster, parts);
        if (lacking & NP_REQUEST_VALUE) {
            engine->asked[count++] = lacking | NP_REQUEST_PREFETCH;
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
    uint32_t predicted = 0, asked = 0;
    engine->group = NULL;
    for (uint32_t piece; (piece = np_engine_claim(engine, engine->layer, NP_WORK_SCORE, engine->group_count * s->blocks)) != NP_NO_PIECE;) {
        const uint32_t block = piece % s->blocks;
        enter_group(engine, &engine->groups[piece / s->blocks]);
        predicted += predict_block(engine, block);
        if (block < engine->held_blocks)
            continue;
        if (engine->config.hints)
            asked = hint(engine, block, asked);
        else if (engine->config.prefetch)
            asked = foresee(engine, block, asked);
    }
    /* All at once, so that the loader is woken once. A hint that finds no room is let go. */
    int done = NP_OK;
    if (engine->config.hints && asked)
        np_requests_put(&engine->shared.requests, engine->asked, asked);
    else
        done = np_ask(engine, engine->asked, asked);
    np_trace_put(&engine->shared.trace, NP_SPAN_PREDICT, engine->layer, predicted, engine->step, started);
    return done;
}

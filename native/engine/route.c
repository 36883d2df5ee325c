/* Routing: which experts compute a token, and with which share. Every participant routes all tokens by itself: the same bits, and no barrier.
 *
 * A router's values are products in float32, summed in a fixed order, so that a token's experts do not depend on who shares its batch.
 * The experts with the greatest values are chosen, the lower number of equals. */
#include "engine.h"

#include <math.h>
#include <string.h>

#include "kernels/exponential.h"

enum { NP_LANES = 16 };

/* A product of two vectors: sixteen running sums, added in pairs of halves. */
static float dot(const float *a, const float *b, size_t n)
{
    float lanes[NP_LANES] = {0};
    size_t i = 0;
    for (; i + NP_LANES <= n; i += NP_LANES)
        for (size_t lane = 0; lane < NP_LANES; lane++)
            lanes[lane] += a[i + lane] * b[i + lane];
    for (size_t lane = 0; i + lane < n; lane++)
        lanes[lane] += a[i + lane] * b[i + lane];
    for (size_t half = NP_LANES / 2; half; half /= 2)
        for (size_t lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

int np_engine_routes(const np_engine *engine, int reads)
{
    return engine->shape.experts > 1 && engine->shape.router_reads == reads;
}

/* ---- one token --------------------------------------------------------------------------------------------------- */
/* The numbers of the experts with the greatest values, ascending. Values that are no numbers are never the greatest; where all are, the
 * first experts are taken, and their shares are no numbers. */
static void choose(const np_shape *s, const float *values, uint32_t *chosen)
{
    for (uint32_t n = 0; n < s->experts_per_token; n++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t expert = 0; expert < s->experts; expert++) {
            int taken = 0;
            for (uint32_t i = 0; i < n; i++)
                taken |= chosen[i] == expert;
            if (!taken && (best == UINT32_MAX || values[expert] > values[best] || (isnan(values[best]) && !isnan(values[expert]))))
                best = expert;
        }
        chosen[n] = best;
    }
    for (uint32_t n = 1; n < s->experts_per_token; n++) {
        const uint32_t expert = chosen[n];
        uint32_t at = n;
        for (; at && chosen[at - 1] > expert; at--)
            chosen[at] = chosen[at - 1];
        chosen[at] = expert;
    }
}

static float sigmoid(float x)
{
    const float e = np_exponential(x < 0.0f ? x : -x);
    return x < 0.0f ? e / (1.0f + e) : 1.0f / (1.0f + e);
}

/* Each chosen expert's share of the sum. */
static void weigh(const np_shape *s, const float *values, const uint32_t *chosen, float *shares)
{
    float most = values[chosen[0]], sum = 0.0f;
    for (uint32_t n = 1; n < s->experts_per_token; n++)
        most = values[chosen[n]] > most ? values[chosen[n]] : most;
    for (uint32_t n = 0; n < s->experts_per_token; n++) {
        const float value = values[chosen[n]];
        shares[n] = isnan(value) ? value : s->router == NP_ROUTER_SIGMOID ? sigmoid(value) : np_exponential(value - most);
        sum += shares[n];
    }
    for (uint32_t n = 0; n < s->experts_per_token; n++)
        shares[n] /= sum;
}

/* ---- all tokens -------------------------------------------------------------------------------------------------- */
void np_engine_route_all(np_engine *engine)
{
    engine->group_count = 1;
    engine->groups[0] = (np_group){0, 0, engine->count};
    for (uint32_t t = 0; t < engine->count; t++) {
        engine->pair_token[t] = engine->token_pairs[t] = t;
        engine->pair_weight[t] = 1.0f;
    }
}

/* Choices, which lie in token_pairs as numbers of experts and in `shares`, become groups and pairs. */
static void group_tokens(np_engine *engine, const float *shares)
{
    const uint32_t each = engine->shape.experts_per_token;
    uint32_t *counts = engine->expert_counts;
    memset(counts, 0, engine->shape.experts * sizeof *counts);
    for (uint32_t i = 0; i < engine->count * each; i++)
        counts[engine->token_pairs[i]]++;
    engine->group_count = 0;
    for (uint32_t expert = 0, first = 0; expert < engine->shape.experts; expert++) {
        if (counts[expert])
            engine->groups[engine->group_count++] = (np_group){expert, first, counts[expert]};
        first += counts[expert];
        counts[expert] = first - counts[expert]; /* from now on: where its next pair goes */
    }
    for (uint32_t i = 0; i < engine->count * each; i++) {
        const uint32_t pair = counts[engine->token_pairs[i]]++;
        engine->pair_token[pair] = i / each;
        engine->pair_weight[pair] = shares[i];
        engine->token_pairs[i] = pair;
    }
}

void np_engine_choose(np_engine *engine, uint32_t layer, const float *x, uint32_t *chosen)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    if (s->router_reads == NP_READS_FEED_FORWARD) {
        np_engine_norm(engine, &l->ffn_norm, x, s->width, engine->vector);
        x = engine->vector;
    }
    for (uint32_t expert = 0; expert < s->experts; expert++)
        engine->expert_values[expert] = dot(l->router + (size_t)expert * s->width, x, s->width);
    choose(s, engine->expert_values, chosen);
}

void np_engine_route(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    for (uint32_t t = 0; t < engine->count; t++) {
        uint32_t *chosen = engine->token_pairs + t * s->experts_per_token;
        np_engine_choose(engine, layer, engine->shared.residual + (size_t)t * s->width, chosen);
        weigh(s, engine->expert_values, chosen, engine->shares + t * s->experts_per_token);
    }
    group_tokens(engine, engine->shares);
    np_engine_judge(engine, layer);
    np_ask_for_groups(engine, layer); /* before attention, where the router reads the layer's input */
}

/* ---- a group's vectors ------------------------------------------------------------------------------------------- */
const np_vectors *np_engine_gather(np_engine *engine, const np_group *group, const np_vectors *from, np_vectors *to)
{
    if (engine->shape.experts == 1)
        return from;
    const size_t bytes = np_activation_bytes(from->type, from->n); /* `to` is of this type, and as long vectors fit it as `from` */
    to->n = from->n;
    to->count = group->count;
    for (uint32_t t = 0; t < group->count; t++) {
        const uint32_t token = engine->pair_token[group->first + t];
        memcpy(to->prepared + t * to->stride, from->prepared + token * from->stride, bytes);
    }
    if (to->count >= NP_PANEL_TOKENS)
        np_panel_prepare(to->type, to->prepared, to->stride, to->count, to->n, to->panel);
    return to;
}

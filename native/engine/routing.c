/* Routing. Every participant routes all tokens itself: this gives the same bits everywhere and needs no barrier.
 *
 * A router's values are float32 products, summed in a fixed order, so that a token's experts do not depend on its
 * batch. The experts with the greatest values are chosen; of equal values, the lower number. */
#include "engine/routing.h"

#include <math.h>
#include <string.h>

#include "engine/vectors.h"
#include "kernels/exponential.h"

enum { NP_LANES = 16 };

/* The product of two vectors: sixteen running sums, added pairwise. */
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

int np_router_reads(const np_engine *engine, int reads)
{
    return engine->shape.experts > 1 && engine->shape.router_reads == reads;
}

/* ---- one token --------------------------------------------------------------------------------------------------- */
/* The experts with the greatest values, ascending. NaN is less than any number; if all values are NaN the first experts
 * are chosen, and their weights are NaN. */
static void choose(const np_shape *s, const float *values, uint32_t *chosen)
{
    for (uint32_t n = 0; n < s->experts_per_token; n++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t expert = 0; expert < s->experts; expert++) {
            int is_chosen = 0;
            for (uint32_t i = 0; i < n; i++)
                is_chosen |= chosen[i] == expert;
            if (!is_chosen && (best == UINT32_MAX || values[expert] > values[best] || (isnan(values[best]) && !isnan(values[expert]))))
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

/* The chosen experts' weights: they sum to 1. */
static void weigh(const np_shape *s, const float *values, const uint32_t *chosen, float *weights)
{
    float max_value = values[chosen[0]], sum = 0.0f;
    for (uint32_t n = 1; n < s->experts_per_token; n++)
        max_value = values[chosen[n]] > max_value ? values[chosen[n]] : max_value;
    for (uint32_t n = 0; n < s->experts_per_token; n++) {
        const float value = values[chosen[n]];
        weights[n] = isnan(value) ? value : s->router == NP_ROUTER_SIGMOID ? sigmoid(value) : np_exponential(value - max_value);
        sum += weights[n];
    }
    for (uint32_t n = 0; n < s->experts_per_token; n++)
        weights[n] /= sum;
}

/* ---- all tokens -------------------------------------------------------------------------------------------------- */
void np_route_dense(np_engine *engine)
{
    engine->group_count = 1;
    engine->groups[0] = (np_group){0, 0, engine->count};
    for (uint32_t t = 0; t < engine->count; t++) {
        engine->pair_token[t] = engine->token_pairs[t] = t;
        engine->pair_weight[t] = 1.0f;
    }
}

/* Turn choices (expert numbers in token_pairs, and their weights) into groups and pairs. */
static void group_tokens(np_engine *engine, const float *weights)
{
    const uint32_t per_token = engine->shape.experts_per_token;
    uint32_t *counts = engine->expert_counts;
    memset(counts, 0, engine->shape.experts * sizeof *counts);
    for (uint32_t i = 0; i < engine->count * per_token; i++)
        counts[engine->token_pairs[i]]++;
    engine->group_count = 0;
    for (uint32_t expert = 0, first = 0; expert < engine->shape.experts; expert++) {
        if (counts[expert])
            engine->groups[engine->group_count++] = (np_group){expert, first, counts[expert]};
        first += counts[expert];
        counts[expert] = first - counts[expert]; /* from here on the index of the expert's next pair */
    }
    for (uint32_t i = 0; i < engine->count * per_token; i++) {
        const uint32_t pair = counts[engine->token_pairs[i]]++;
        engine->pair_token[pair] = i / per_token;
        engine->pair_weight[pair] = weights[i];
        engine->token_pairs[i] = pair;
    }
}

void np_choose_experts(np_engine *engine, uint32_t layer, const float *x, uint32_t *chosen)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    if (s->router_reads == NP_READS_FEED_FORWARD) {
        np_norm_vector(engine, &l->ffn_norm, x, s->width, engine->vector);
        x = engine->vector;
    }
    for (uint32_t expert = 0; expert < s->experts; expert++)
        engine->expert_values[expert] = dot(l->router + (size_t)expert * s->width, x, s->width) + (l->router_bias ? l->router_bias[expert] : 0.0f);
    choose(s, engine->expert_values, chosen);
}

void np_route_tokens(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    for (uint32_t t = 0; t < engine->count; t++) {
        uint32_t *chosen = engine->token_pairs + t * s->experts_per_token;
        np_choose_experts(engine, layer, engine->shared.residual + (size_t)t * s->width, chosen);
        weigh(s, engine->expert_values, chosen, engine->expert_weights + t * s->experts_per_token);
    }
    group_tokens(engine, engine->expert_weights);
}

/* ---- a group's vectors ------------------------------------------------------------------------------------------- */
const np_vectors *np_gather_vectors(np_engine *engine, const np_group *group, const np_vectors *from, np_vectors *to)
{
    if (engine->shape.experts == 1)
        return from;
    const size_t bytes = np_activation_bytes(from->type, from->n); /* `to` was created with the same type and maximal length */
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

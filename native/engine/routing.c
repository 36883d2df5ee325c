/* Routing. Every participant routes all tokens itself: this gives the same bits everywhere and needs no barrier.
 *
 * A router's values are float32 products, summed in a fixed order, so that a token's experts do not depend on its
 * batch. The experts with the greatest values are chosen; of equal values, the lower number. With a bias or groups the
 * values that choose are scores plus bias. Experts that compute every token follow the chosen ones. */
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
/* True if `a` is greater than `b`. NaN is less than any number. */
static int is_greater(float a, float b)
{
    return a > b || (isnan(b) && !isnan(a));
}

/* The experts with the greatest values, ascending. If all values are NaN the first experts are chosen, and their weights
 * are NaN. */
static void choose(const float *values, uint32_t experts, uint32_t count, uint32_t *chosen)
{
    for (uint32_t n = 0; n < count; n++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t expert = 0; expert < experts; expert++) {
            int is_chosen = 0;
            for (uint32_t i = 0; i < n; i++)
                is_chosen |= chosen[i] == expert;
            if (!is_chosen && (best == UINT32_MAX || is_greater(values[expert], values[best])))
                best = expert;
        }
        chosen[n] = best;
    }
    for (uint32_t n = 1; n < count; n++) {
        const uint32_t expert = chosen[n];
        uint32_t at = n;
        for (; at && chosen[at - 1] > expert; at--)
            chosen[at] = chosen[at - 1];
        chosen[at] = expert;
    }
}

/* Set the values of all experts to -INFINITY but those of the groups with the greatest sum of two values,
 * or with the greatest value. */
static void keep_groups(const np_shape *s, float *values, uint32_t experts)
{
    const uint32_t size = experts / s->router_groups;
    for (uint32_t left = s->router_groups - s->groups_per_token; left; left--) {
        uint32_t worst = UINT32_MAX;
        float worst_sum = 0.0f;
        for (uint32_t group = s->router_groups; group--;) { /* of equal sums the last group goes */
            const float *of_group = values + (size_t)group * size;
            float best = of_group[0], second = -INFINITY;
            for (uint32_t i = 1; i < size; i++)
                if (is_greater(of_group[i], best)) {
                    second = best;
                    best = of_group[i];
                } else if (is_greater(of_group[i], second)) {
                    second = of_group[i];
                }
            second = s->groups_by_best ? 0.0f : second;
            if (best != -INFINITY && (worst == UINT32_MAX || is_greater(worst_sum, best + second))) {
                worst = group;
                worst_sum = best + second;
            }
        }
        for (uint32_t i = 0; worst != UINT32_MAX && i < size; i++)
            values[(size_t)worst * size + i] = -INFINITY;
    }
}

static float greatest(const float *values, uint32_t count)
{
    float max_value = values[0];
    for (uint32_t i = 1; i < count; i++)
        max_value = values[i] > max_value ? values[i] : max_value;
    return max_value;
}

/* The scores of all experts. Those of a softmax are not divided by their sum, which is returned; it is 1 otherwise. */
static float score(const np_shape *s, const float *values, uint32_t experts, float *scores)
{
    const float max_value = greatest(values, experts);
    float sum = 0.0f;
    for (uint32_t expert = 0; expert < experts; expert++) {
        const float value = values[expert];
        scores[expert] = isnan(value) ? value : s->router == NP_ROUTER_SIGMOID ? np_sigmoid(value) : np_exponential(value - max_value);
        sum += scores[expert];
    }
    return s->router == NP_ROUTER_SIGMOID ? 1.0f : sum;
}

/* The share of an expert among those whose values are near its own, without `skipped` (NP_NONE: with all). */
static float share_among_near(const np_shape *s, const float *values, uint32_t experts, uint32_t expert, uint32_t skipped)
{
    const float greatest_value = values[expert];
    float sum = 0.0f;
    for (uint32_t i = 0; i < experts; i++) {
        const float size = fabsf(values[i]), distance = (greatest_value - values[i]) / (size > greatest_value ? size : greatest_value);
        if (i != skipped && !(distance > 2.0f * s->router_jitter))
            sum += np_exponential(values[i] - greatest_value);
    }
    return 1.0f / sum;
}

/* The weights of sparsemixer's two experts. */
static void weigh_two(np_engine *engine, uint32_t experts, const uint32_t *chosen, float *weights)
{
    const float *values = engine->expert_values;
    const uint32_t first = is_greater(values[chosen[1]], values[chosen[0]]); /* of equal values the lower number */
    weights[first] = share_among_near(&engine->shape, values, experts, chosen[first], NP_NONE);
    weights[!first] = share_among_near(&engine->shape, values, experts, chosen[!first], chosen[first]);
}

/* The chosen experts' weights. Where they sum to 1, they are computed from the chosen experts' values alone. */
static void weigh(np_engine *engine, uint32_t experts, const uint32_t *chosen, float *weights)
{
    const np_shape *s = &engine->shape;
    const float *values = engine->expert_values;
    float max_value = values[chosen[0]], sum = 0.0f, all = 1.0f;
    if (s->router == NP_ROUTER_SPARSEMIXER) {
        weigh_two(engine, experts, chosen, weights);
        np_scale(weights, s->chosen_per_token, s->routed_scale);
        return;
    }
    for (uint32_t n = 1; n < s->chosen_per_token; n++)
        max_value = values[chosen[n]] > max_value ? values[chosen[n]] : max_value;
    if (!s->normalized_shares && s->router == NP_ROUTER_SOFTMAX) {
        max_value = greatest(values, experts);
        all = score(s, values, experts, engine->expert_scores);
    }
    for (uint32_t n = 0; n < s->chosen_per_token; n++) {
        const float value = values[chosen[n]];
        weights[n] = isnan(value) ? value : s->router == NP_ROUTER_SIGMOID ? np_sigmoid(value) : np_exponential(value - max_value);
        sum += weights[n];
    }
    for (uint32_t n = 0; n < s->chosen_per_token; n++)
        weights[n] /= s->normalized_shares ? sum : all;
    np_scale(weights, s->chosen_per_token, s->routed_scale);
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
static void group_tokens(np_engine *engine, uint32_t layer, const float *weights)
{
    const uint32_t per_token = np_active_experts(engine, layer), experts = engine->fixed.layers[layer].experts;
    uint32_t *counts = engine->expert_counts;
    memset(counts, 0, experts * sizeof *counts);
    for (uint32_t i = 0; i < engine->count * per_token; i++)
        counts[engine->token_pairs[i]]++;
    engine->group_count = 0;
    for (uint32_t expert = 0, first = 0; expert < experts; expert++) {
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

/* The input of a layer's router, from the residual stream x. */
static const float *router_input(np_engine *engine, uint32_t layer, const float *x)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    if (!l->router_norm && (s->router_reads != NP_READS_FEED_FORWARD || s->norms == NP_NORMS_AFTER))
        return x;
    if (l->router_norm)
        np_rms_norm(x, l->router_norm, s->width, s->norm_epsilon, engine->vector);
    else
        np_norm_vector(engine, &l->ffn_norm, x, s->width, engine->vector);
    return engine->vector;
}

/* Choose experts for this input of the router. */
static void choose_experts(np_engine *engine, const np_layer *l, const float *x, uint32_t *chosen)
{
    const np_shape *s = &engine->shape;
    const uint32_t experts = l->routed_experts;
    float *ranks = engine->expert_values;
    for (uint32_t expert = 0; expert < experts; expert++)
        engine->expert_values[expert] = dot(l->router + (size_t)expert * s->width, x, s->width) + (l->router_bias ? l->router_bias[expert] : 0.0f);
    if (l->choosing_bias || s->router_groups > 1) {
        ranks = engine->expert_scores;
        const float sum = score(s, engine->expert_values, experts, ranks);
        for (uint32_t expert = 0; expert < experts; expert++)
            ranks[expert] = ranks[expert] / sum + (l->choosing_bias ? l->choosing_bias[expert] : 0.0f);
        keep_groups(s, ranks, experts);
    }
    choose(ranks, experts, s->chosen_per_token, chosen);
}

void np_choose_experts(np_engine *engine, uint32_t layer, const float *x, uint32_t *chosen)
{
    choose_experts(engine, &engine->fixed.layers[layer], router_input(engine, layer, x), chosen);
}

void np_route_tokens(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const uint32_t routed = l->routed_experts, chosen = routed ? s->chosen_per_token : 0, per_token = np_active_experts(engine, layer);
    for (uint32_t t = 0; t < engine->count; t++) {
        uint32_t *experts = engine->token_pairs + t * per_token;
        float *weights = engine->expert_weights + t * per_token, share = 1.0f;
        if (routed) {
            const float *x = router_input(engine, layer, engine->shared.residual + (size_t)t * s->width);
            choose_experts(engine, l, x, experts);
            weigh(engine, routed, experts, weights);
            for (uint32_t n = 0; l->expert_scales && n < chosen; n++)
                weights[n] *= l->expert_scales[experts[n]];
            share = l->shared_gate ? np_sigmoid(dot(l->shared_gate, x, s->width)) : 1.0f;
        }
        for (uint32_t expert = routed, n = chosen; expert < l->experts; expert++, n++) {
            experts[n] = expert;
            weights[n] = share;
        }
    }
    group_tokens(engine, layer, engine->expert_weights);
}

/* ---- a group's vectors ------------------------------------------------------------------------------------------- */
const np_vectors *np_gather_vectors(np_engine *engine, const np_group *group, const np_vectors *from, np_vectors *to)
{
    if (group->count == engine->count)
        return from; /* all tokens, in order */
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

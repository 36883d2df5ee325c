/* Routing. Every participant chooses all tokens' experts itself, from the same bits. The values of large routers are
 * computed in pieces that participants claim; those of small ones by each, which needs no barrier.
 *
 * A router's values are float32 products, summed in a fixed order, so that a token's experts do not depend on its
 * batch. The experts with the greatest values are chosen; of equal values, the lower number. With a bias or groups the
 * values that choose are scores plus bias. Experts that compute every token follow the chosen ones. */
#include "engine/routing.h"

#include <math.h>
#include <string.h>

#include "engine/vectors.h"
#include "engine/work.h"
#include "kernels/exponential.h"

enum {
    PIECE_EXPERTS = 16, /* of a piece of router values: rows of 128 KiB at a width of 2048 */
    PIECE_TOKENS = 8,
    MIN_SHARED_WEIGHTS = 32768 /* products for which participants meet: some 5 us of one processor */
};

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
    uint32_t length = 0; /* of `chosen`, which is sorted from the greatest value on */
    for (uint32_t expert = 0; expert < experts; expert++) {
        uint32_t at = length < count ? length++ : count;
        if (at == count && !is_greater(values[expert], values[chosen[--at]]))
            continue;
        for (; at && is_greater(values[expert], values[chosen[at - 1]]); at--)
            chosen[at] = chosen[at - 1];
        chosen[at] = expert;
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

/* ---- groups ------------------------------------------------------------------------------------------------------ */
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

/* The values of some experts for this input of the router. */
static void compute_values(const np_engine *engine, const np_layer *l, np_range experts, const float *x, float *values)
{
    const size_t width = engine->shape.width;
    np_dot_floats(l->router + experts.from * width, experts.to - experts.from, width, x, values);
    for (uint32_t expert = experts.from; l->router_bias && expert < experts.to; expert++)
        values[expert - experts.from] += l->router_bias[expert];
}

/* Choose experts by engine->expert_values. */
static void choose_by_values(np_engine *engine, const np_layer *l, uint32_t *chosen)
{
    const np_shape *s = &engine->shape;
    const uint32_t experts = l->routed_experts;
    float *ranks = engine->expert_values;
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
    const np_layer *l = &engine->fixed.layers[layer];
    compute_values(engine, l, (np_range){0, l->routed_experts}, router_input(engine, layer, x), engine->expert_values);
    choose_by_values(engine, l, chosen);
}

/* ---- values that participants share ------------------------------------------------------------------------------ */
/* Values of a token's experts lie in the place of attention's output. It is not in use between the projection, or the
 * end of a layer, and the first barrier of the next attention. */
static float *shared_values(const np_engine *engine, uint32_t t)
{
    return engine->shared.attention + (size_t)t * engine->shape.heads_width;
}

/* True if a barrier costs less than what participants save by computing a part of the values each. */
static int are_values_shared(const np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const int is_free = s->router_reads == NP_READS_FEED_FORWARD ? !s->parallel : l->mixer == NP_MIXER_ATTENTION && !s->latent_width;
    return engine->participants > 1 && is_free && l->routed_experts <= s->heads_width &&
           (size_t)engine->count * l->routed_experts * s->width >= MIN_SHARED_WEIGHTS;
}

/* Compute the values of all tokens, in pieces: of some experts while tokens are few, else of some tokens. */
static int share_values(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const uint32_t routed = l->routed_experts, width = engine->count < PIECE_TOKENS ? PIECE_EXPERTS : routed;
    const uint32_t parts = (routed + width - 1) / width, pieces = parts * ((engine->count + PIECE_TOKENS - 1) / PIECE_TOKENS);
    for (uint32_t piece; (piece = np_claim(engine, layer, NP_WORK_ROUTE, pieces)) != NP_NONE;) {
        const uint32_t from = piece % parts * width, first = piece / parts * PIECE_TOKENS;
        const np_range experts = {from, routed - from < width ? routed : from + width};
        for (uint32_t t = first; t < engine->count && t < first + PIECE_TOKENS; t++)
            compute_values(engine, l, experts, router_input(engine, layer, engine->shared.residual + (size_t)t * s->width),
                           shared_values(engine, t) + from);
    }
    return np_meet(engine);
}

/* ---- all tokens -------------------------------------------------------------------------------------------------- */
/* Choose a token's experts and weigh them. Returns the share of the experts that compute every token. */
static float route_token(np_engine *engine, uint32_t layer, uint32_t t, const float *values, uint32_t *experts, float *weights)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const float *residual = engine->shared.residual + (size_t)t * s->width, *x = values && !l->shared_gate ? NULL : router_input(engine, layer, residual);
    float gate;
    if (values)
        memcpy(engine->expert_values, values, l->routed_experts * sizeof *values);
    else
        compute_values(engine, l, (np_range){0, l->routed_experts}, x, engine->expert_values);
    choose_by_values(engine, l, experts);
    weigh(engine, l->routed_experts, experts, weights);
    for (uint32_t n = 0; l->expert_scales && n < s->chosen_per_token; n++)
        weights[n] *= l->expert_scales[experts[n]];
    if (!l->shared_gate)
        return 1.0f;
    np_dot_floats(l->shared_gate, 1, s->width, x, &gate);
    return np_sigmoid(gate);
}

int np_route_tokens(np_engine *engine, uint32_t layer)
{
    const np_layer *l = &engine->fixed.layers[layer];
    const uint32_t routed = l->routed_experts, chosen = routed ? engine->shape.chosen_per_token : 0, per_token = np_active_experts(engine, layer);
    const int is_shared = routed && are_values_shared(engine, layer), done = is_shared ? share_values(engine, layer) : NP_OK;
    for (uint32_t t = 0; t < engine->count && done >= 0; t++) {
        uint32_t *experts = engine->token_pairs + t * per_token;
        float *weights = engine->expert_weights + t * per_token;
        const float share = routed ? route_token(engine, layer, t, is_shared ? shared_values(engine, t) : NULL, experts, weights) : 1.0f;
        for (uint32_t expert = routed, n = chosen; expert < l->experts; expert++, n++) {
            experts[n] = expert;
            weights[n] = share;
        }
    }
    if (done >= 0)
        group_tokens(engine, layer, engine->expert_weights);
    return done;
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

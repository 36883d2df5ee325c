#include "engine/config_check.h"

#include <math.h>

enum { NP_MAX_BLOCK_CLUSTERS = 65536, NP_MAX_EXPERTS = 4096 };

/* Return the field of the first condition that does not hold, or NULL. */
#define FIRST_ERROR(...)                                                  \
    do {                                                                  \
        const struct {                                                    \
            const char *field;                                            \
            int holds;                                                    \
        } conditions[] = {__VA_ARGS__};                                   \
        for (size_t i = 0; i < sizeof conditions / sizeof *conditions; i++) \
            if (!conditions[i].holds)                                     \
                return conditions[i].field;                               \
        return NULL;                                                      \
    } while (0)

static const char *invalid_size(const np_shape *s)
{
    FIRST_ERROR({"width", s->width && s->type != NP_Q3 && np_quant_bytes(s->type, s->width) > 0},
                {"trigger_type", s->trigger_type == s->type || (s->trigger_type == NP_Q3 && s->type == NP_Q4 && s->gated)},
                {"embedding_type", s->embedding_type == s->type || (s->embedding_type == NP_Q8 && s->type == NP_Q4)},
                {"neurons", s->neurons > 0}, {"layers", s->layers > 0},
                {"experts", s->experts > 0 && s->experts <= NP_MAX_EXPERTS && (s->experts == 1 || s->gated)},
                {"experts_per_token", s->experts_per_token > 0 && s->experts_per_token <= s->experts},
                {"router", s->router == NP_ROUTER_SOFTMAX || s->router == NP_ROUTER_SIGMOID},
                {"router_reads", s->router_reads == NP_READS_FEED_FORWARD || s->router_reads == NP_READS_LAYER},
                {"key_heads", s->key_heads > 0},
                {"head_width", s->head_width && (!s->rotary || s->head_width % 2 == 0)},
                {"query_heads", s->query_heads && s->key_heads && s->query_heads % s->key_heads == 0 &&
                                    np_quant_bytes(s->type, (size_t)s->query_heads * s->head_width) > 0},
                {"vocabulary", s->vocabulary > 0}, {"context_tokens", s->context_tokens > 0},
                {"norm", s->norm == NP_NORM_RMS || s->norm == NP_NORM_LAYER},
                {"activation", s->activation == NP_RELU || s->activation == NP_RELU2 ||
                                   (s->gated && (s->activation == NP_DRELU || s->activation == NP_SILU))},
                {"activation_threshold", s->activation == NP_RELU ? s->activation_threshold >= 0.0f && isfinite(s->activation_threshold)
                                                                 : s->activation_threshold == 0.0f},
                {"embedding_scale", s->embedding_scale > 0.0f && isfinite(s->embedding_scale)},
                {"logit_scale", s->logit_scale > 0.0f && isfinite(s->logit_scale)},
                {"attention_scale", s->attention_scale > 0.0f && isfinite(s->attention_scale)},
                {"residual_scale", s->residual_scale > 0.0f && isfinite(s->residual_scale)},
                {"predictor_reads", s->predictor_reads == NP_READS_FEED_FORWARD || s->predictor_reads == NP_READS_RESIDUAL ||
                                        (s->predictor_reads == NP_READS_ATTENTION && s->experts == 1)},
                {"predictor_rank", !s->predictor_rank || (s->predictor_type != NP_Q3 && np_quant_bytes(s->predictor_type, s->predictor_rank) > 0)});
}

static const char *invalid_layout(const np_shape *s)
{
    const uint64_t stored = (uint64_t)s->clusters * s->cluster_neurons;
    FIRST_ERROR({"cluster_neurons", s->cluster_neurons > 0},
                {"block_neurons", s->block_neurons && s->cluster_neurons && s->block_neurons % s->cluster_neurons == 0 &&
                                      s->block_neurons / s->cluster_neurons <= NP_MAX_BLOCK_CLUSTERS},
                {"blocks", stored <= (uint64_t)s->blocks * s->block_neurons},
                {"clusters", stored >= s->neurons && (uint64_t)s->layers * s->experts * s->clusters <= NP_REQUEST_CLUSTER_MASK + 1u});
}

/* True if a cluster's rows of row_bytes from `offset` on lie within a slot of `part`. */
static int fits(const np_shape *s, uint32_t part, uint32_t offset, size_t row_bytes)
{
    return part < NP_PARTS && offset + (uint64_t)s->cluster_neurons * row_bytes <= s->slot_bytes[part];
}

/* True if a matrix lies in this part and fits its slots. */
static int is_placed(const np_shape *s, const np_matrix_place *place, uint32_t part)
{
    const int type = part == NP_TRIGGER ? s->trigger_type : s->type;
    return place->part == part && (part == NP_VALUE || place->scales_part == NP_TRIGGER) &&
           fits(s, place->part, place->quants, np_quant_bytes(type, s->width)) &&
           fits(s, place->scales_part, place->scales, np_scale_bytes(type, s->width));
}

static const char *invalid_place(const np_shape *s)
{
    FIRST_ERROR({"gate", !s->gated || is_placed(s, &s->gate, NP_TRIGGER)}, {"up", is_placed(s, &s->up, s->gated ? NP_VALUE : NP_TRIGGER)},
                {"down", is_placed(s, &s->down, NP_VALUE)});
}

/* True if an external runtime can compute all of a layer's products. */
static int may_have_external_products(const np_engine_config *p, const np_shape *s)
{
    return s->gated && s->activation != NP_SILU && s->type != NP_F16 && (!s->predictor_rank || p->hints);
}

static const char *invalid_config(const np_engine_config *p, const np_shape *s)
{
    FIRST_ERROR({"sequences", p->sequences > 0}, {"max_tokens", p->max_tokens > 0}, {"logit_rows", p->logit_rows > 0},
                {"window_blocks", p->window_blocks > 0},
                {"external_products", !p->external_products || may_have_external_products(p, s)},
                {"product_blocks", !p->external_products || (p->product_blocks && p->product_blocks <= p->window_blocks)},
                {"offload_blocks", !p->offload_blocks || (!p->external_products && s->activation != NP_SILU && s->type != NP_F16 && p->partial_tokens >= p->max_tokens)},
                {"partial_tokens", p->external_products || (p->partial_tokens && (p->partial_tokens >= p->max_tokens || p->window_blocks >= s->blocks))});
}

static const char *invalid_layer(const np_shape *s, const np_fixed *fixed)
{
    for (uint32_t n = 0; s->activation == NP_SILU && n < s->layers; n++)
        if (!(fixed->layers[n].silent_below >= 0.0f && isfinite(fixed->layers[n].silent_below)))
            return "silent_below";
    return NULL;
}

const char *np_invalid_field(const np_shape *shape, const np_fixed *fixed, const np_shared *shared, const np_engine_config *config)
{
    const char *wrong = invalid_size(shape);
    if (!wrong)
        wrong = invalid_layout(shape);
    if (!wrong)
        wrong = invalid_place(shape);
    if (!wrong)
        wrong = invalid_config(config, shape);
    if (!wrong)
        wrong = invalid_layer(shape, fixed);
    if (!wrong && config->external_products && !(shared->inputs && shared->outputs))
        wrong = shared->inputs ? "outputs" : "inputs";
    if (!wrong && shape->predictor_rank && !(shared->ranks && shared->predicted))
        wrong = shared->ranks ? "predicted" : "ranks";
    return wrong;
}

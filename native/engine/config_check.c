#include "engine/config_check.h"

#include <math.h>

#include "engine/model_fields.h"
#include "engine/recurrent.h"

enum { NP_MAX_BLOCK_CLUSTERS = 65536 };

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

static double number_at(const void *structure, const np_field *field)
{
    const char *at = (const char *)structure + field->offset;
    switch (field->kind) {
    case NP_FIELD_FLOAT:
        return *(const float *)at;
    case NP_FIELD_INT32:
        return *(const int32_t *)at;
    default:
        return *(const uint32_t *)at;
    }
}

/* The first number that is out of its range, or NULL. Other checks are about several fields. Limits are compared as the field stores them. */
static const char *out_of_range(const np_shape *s)
{
    for (size_t i = 0; i < sizeof NP_SHAPE_FIELDS / sizeof *NP_SHAPE_FIELDS; i++) {
        const np_field *field = &NP_SHAPE_FIELDS[i];
        const double number = number_at(s, field);
        const int is_float = field->kind == NP_FIELD_FLOAT;
        const double minimum = is_float ? (float)field->minimum : field->minimum, maximum = is_float ? (float)field->maximum : field->maximum;
        if (!(number >= minimum && number <= maximum))
            return field->name;
    }
    return NULL;
}

/* True if a model with these fields may have latents. */
static int fits_latents(const np_shape *s)
{
    return np_quant_bytes(s->type, s->latent_width) > 0 && s->key_heads == 1 && s->rotary && !s->parallel && !s->head_norm && !s->joint_norm;
}

static const char *invalid_size(const np_shape *s)
{
    FIRST_ERROR({"width", s->type != NP_Q3 && np_quant_bytes(s->type, s->width) > 0},
                {"layers", s->layers > 0},
                {"experts_per_token", s->experts_per_token <= s->experts},
                {"chosen_per_token", s->chosen_per_token <= s->experts_per_token && (s->experts > 1 || !s->chosen_per_token)},
                {"groups_per_token", s->groups_per_token <= s->router_groups},
                {"norm_after_rotation", !s->norm_after_rotation || s->head_norm},
                {"joint_norm", !(s->joint_norm && s->head_norm)},
                {"router", s->router != NP_ROUTER_SPARSEMIXER || (s->chosen_per_token == 2 && s->normalized_shares && s->router_groups == 1)},
                {"router_jitter", s->router == NP_ROUTER_SPARSEMIXER || s->router_jitter == 0.0f},
                {"router_reads", s->router_reads == NP_READS_FEED_FORWARD || s->router_reads == NP_READS_LAYER},
                {"head_width", !s->rotary || s->latent_width || s->head_width % 2 == 0},
                {"latent_width", !s->latent_width || fits_latents(s)},
                {"rotary_width", s->latent_width ? s->rotary_width && s->rotary_width < s->head_width && s->rotary_width % 2 == 0 : !s->rotary_width},
                {"value_width", (s->latent_width > 0) == (s->value_width > 0)},
                {"query_rank", !s->query_rank || (s->latent_width && np_quant_bytes(s->type, s->query_rank) > 0)},
                {"query_heads", s->query_heads % s->key_heads == 0},
                {"branch_norms", !s->branch_norms || (s->norms == NP_NORMS_BOTH && s->experts > 1)},
                {"norms", s->norms == NP_NORMS_BEFORE || !s->parallel},
                {"activation", s->activation == NP_RELU || s->activation == NP_RELU2 || s->activation == NP_GELU || s->activation == NP_GELU_ERF ||
                                   (s->gated && (s->activation == NP_DRELU || np_is_smooth(s)))},
                {"activation_limit", (s->activation == NP_CLAMPED_SWIGLU) == (s->activation_limit > 0.0f)},
                {"query_growth_tokens", (s->query_growth > 0.0f) == (s->query_growth_tokens > 0)},
                {"activation_threshold", s->activation == NP_RELU || s->activation_threshold == 0.0f},
                {"predictor_reads", s->predictor_reads == NP_READS_FEED_FORWARD || s->predictor_reads == NP_READS_RESIDUAL ||
                                        (s->predictor_reads == NP_READS_ATTENTION && s->experts == 1)},
                {"predictor_rank", !s->predictor_rank || (s->predictor_type != NP_Q3 && np_quant_bytes(s->predictor_type, s->predictor_rank) > 0)});
}

/* True if the sizes of memories are all there or all 0. */
static int has_state_sizes(const np_shape *s)
{
    const int present = s->state_heads > 0;
    return (s->state_key_heads > 0) == present && (s->state_key_width > 0) == present && (s->state_value_width > 0) == present &&
           (!present || (s->state_heads % s->state_key_heads == 0 && np_quant_bytes(s->type, (size_t)s->state_heads * s->state_value_width) > 0));
}

static const char *invalid_state(const np_shape *s, const np_shared *shared, const np_engine_config *p)
{
    FIRST_ERROR({"state_heads", has_state_sizes(s)},
                {"gated_attention", !s->gated_attention || !(s->latent_width || p->external_products || p->offload_blocks)},
                {"state_slots", s->state_elements ? p->state_slots > 0 && shared->states : 1},
                {"external_products", !(s->state_elements && (p->external_products || p->offload_blocks))});
}

static const char *invalid_layout(const np_shape *s)
{
    const uint64_t stored = (uint64_t)s->clusters * s->cluster_neurons;
    FIRST_ERROR({"cluster_neurons", s->cluster_neurons > 0},
                {"block_neurons", s->block_neurons && s->cluster_neurons && s->block_neurons % s->cluster_neurons == 0 &&
                                      s->block_neurons / s->cluster_neurons <= NP_MAX_BLOCK_CLUSTERS},
                {"blocks", stored <= (uint64_t)s->blocks * s->block_neurons},
                {"clusters", stored >= s->neurons && s->clusters <= NP_REQUEST_CLUSTER_MASK + 1u});
}

/* True if `bytes` from `offset` on lie within a slot of `part`. */
static int fits(const np_shape *s, uint32_t part, uint32_t offset, uint64_t bytes)
{
    return part < NP_PARTS && offset + bytes <= s->slot_bytes[part];
}

/* True if a matrix of `rows` rows of n weights is of a quantized type or f16, lies in this part and fits its slots. */
static int is_placed(const np_shape *s, const np_matrix_place *place, uint32_t part, uint64_t rows, size_t n)
{
    const int type = place->type;
    return np_quant_bytes(type, n) && place->part == part && (part == NP_VALUE || place->scales_part == NP_TRIGGER) &&
           fits(s, place->part, place->quants, rows * np_quant_bytes(type, n)) &&
           fits(s, place->scales_part, place->scales, rows * np_scale_bytes(type, n));
}

/* True if a matrix with a row per neuron is placed in this part, and its rows are multiplied with the layers' inputs. */
static int has_neuron_rows(const np_shape *s, const np_matrix_place *place, uint32_t part)
{
    return is_placed(s, place, part, s->cluster_neurons, s->width) && np_reads_inputs_of(place->type, s->type);
}

static int is_down_placed(const np_shape *s)
{
    return s->down.type != NP_Q3 && (s->down_by_output ? is_placed(s, &s->down, NP_VALUE, s->width, s->neurons)
                                                       : is_placed(s, &s->down, NP_VALUE, s->cluster_neurons, s->width));
}

static const char *invalid_place(const np_shape *s)
{
    FIRST_ERROR({"gate", !s->gated || has_neuron_rows(s, &s->gate, NP_TRIGGER)},
                {"up", has_neuron_rows(s, &s->up, s->gated ? NP_VALUE : NP_TRIGGER)},
                {"down_by_output", !s->down_by_output || (s->gated && s->clusters == 1 && s->blocks == 1 && s->cluster_neurons == s->neurons)},
                {"down", is_down_placed(s)});
}

/* True if stages of a step may be computed by others: by an external runtime, or by an accelerator. */
static int may_be_offloaded(const np_shape *s)
{
    return s->norms == NP_NORMS_BEFORE && s->score_cap == 0.0f && s->logit_cap == 0.0f;
}

/* True if an external runtime can compute all of a layer's products. */
static int may_have_external_products(const np_engine_config *p, const np_shape *s)
{
    return s->gated && !np_is_smooth(s) && may_be_offloaded(s) && s->type != NP_F16 && (!s->predictor_rank || p->hints);
}

static const char *invalid_config(const np_engine_config *p, const np_shape *s)
{
    FIRST_ERROR({"sequences", p->sequences > 0}, {"max_tokens", p->max_tokens > 0}, {"logit_rows", p->logit_rows > 0},
                {"window_blocks", p->window_blocks > 0},
                {"latent_width", !s->latent_width || !(p->external_products || p->offload_blocks)},
                {"external_products", !p->external_products || may_have_external_products(p, s)},
                {"down_by_output", !s->down_by_output || !(p->external_products || p->offload_blocks || (s->predictor_rank && !p->hints))},
                {"product_blocks", !p->external_products || (p->product_blocks && p->product_blocks <= p->window_blocks)},
                {"offload_blocks", !p->offload_blocks || (!p->external_products && !np_is_smooth(s) && may_be_offloaded(s) && s->type != NP_F16 && p->partial_tokens >= p->max_tokens)},
                {"partial_tokens", p->external_products || (p->partial_tokens && (p->partial_tokens >= p->max_tokens || p->window_blocks >= s->blocks))});
}

/* True if a matrix is absent, or reads inputs that are prepared for `type`. */
static int fits_inputs(const np_matrix *m, int type)
{
    return !m->quants || np_reads_inputs_of(m->type, type);
}

/* True if a matrix of attention is absent or has a fitting type. With a smooth activation it may be any type in a quantized
 * model: no predictor, accelerator or neural processor reads attention's inputs then. */
static int fits_attention(const np_shape *s, const np_matrix *m, size_t n)
{
    const int may_differ = np_is_smooth(s) && s->type != NP_F16 && m->type != NP_F16 && m->type != NP_Q3;
    return fits_inputs(m, s->type) || (may_differ && np_quant_bytes(m->type, n) > 0);
}

/* The first matrix or norm of a layer with latents that is absent or does not fit, or NULL. */
static const char *invalid_latents(const np_shape *s, const np_layer *l)
{
    FIRST_ERROR({"latent_down", l->latent_down.quants && fits_attention(s, &l->latent_down, s->width)},
                {"query_down", !s->query_rank || (l->query_down.quants && fits_attention(s, &l->query_down, s->width))},
                {"query", l->query.quants && fits_attention(s, &l->query, s->query_rank ? s->query_rank : s->width)},
                {"key_up", l->key_up.quants && l->key_up.type != NP_Q3 && np_quant_bytes(l->key_up.type, s->latent_width)},
                {"value_up", l->value_up.quants && fits_attention(s, &l->value_up, s->latent_width)},
                {"latent_norm", l->latent_norm != NULL}, {"query_down_norm", !s->query_rank || l->query_down_norm},
                {"qkv_bias", !l->qkv_bias}, {"sinks", !l->sinks});
}

static const char *invalid_matrix(const np_shape *s, const np_fixed *fixed)
{
    for (uint32_t n = 0; n < s->layers; n++) {
        const np_layer *l = &fixed->layers[n];
        const char *wrong = s->latent_width && l->mixer == NP_MIXER_ATTENTION ? invalid_latents(s, l) : NULL;
        if (wrong)
            return wrong;
        if (!fits_attention(s, &l->qkv, s->width))
            return "qkv";
        if (!fits_attention(s, &l->attention_output, s->width))
            return "attention_output";
        for (uint32_t e = 0; s->predictor_rank && l->predictors && e < l->experts; e++)
            if (!fits_inputs(&l->predictors[e].input, s->predictor_type) || !fits_inputs(&l->predictors[e].sides[0], s->predictor_type) ||
                !fits_inputs(&l->predictors[e].sides[1], s->predictor_type))
                return "predictors";
    }
    /* Inputs of the output matrix are prepared in the memory of the layers' inputs. */
    if (fixed->output.quants && (!np_quant_bytes(fixed->output.type, s->width) || fixed->output.type == NP_Q3 ||
                                 np_activation_bytes(fixed->output.type, s->width) > np_activation_bytes(s->type, s->width)))
        return "output";
    return fixed->embedding.quants && !np_quant_bytes(fixed->embedding.type, s->width) ? "embedding" : NULL;
}

/* The first matrix or vector of a recurrent layer that is absent or does not fit, or NULL. */
static const char *invalid_recurrent(const np_shape *s, const np_layer *l)
{
    const int has_memories = np_rates(s, l) > 0, is_mamba = l->mixer == NP_MIXER_MAMBA2, is_kda = l->mixer == NP_MIXER_KDA;
    FIRST_ERROR({"recurrent_input", l->recurrent_input.quants && fits_attention(s, &l->recurrent_input, s->width)},
                {"recurrent_output", l->recurrent_output.quants && fits_attention(s, &l->recurrent_output, np_gate_width(s, l))},
                {"recurrent_rates", !has_memories || (l->recurrent_rates.quants && fits_attention(s, &l->recurrent_rates, s->width))},
                {"convolution", l->convolution && s->convolution_tokens > 0}, {"decay", !has_memories || (l->decay && l->time_bias)},
                {"state_heads", !has_memories || s->state_heads > 0}, {"recurrent_norm", !has_memories || l->recurrent_norm},
                {"state_rank", !is_kda || np_quant_bytes(s->type, s->state_rank) > 0}, {"state_key_heads", !is_kda || s->state_key_heads == s->state_heads},
                {"recurrent_decays", !is_kda || (l->recurrent_decays.quants && fits_attention(s, &l->recurrent_decays, s->state_rank))},
                {"recurrent_gates", !is_kda || (l->recurrent_gates.quants && fits_attention(s, &l->recurrent_gates, s->state_rank))},
                {"skip", !is_mamba || l->skip},
                {"state_norm_groups", !is_mamba || (s->state_norm_groups && np_gate_width(s, l) % s->state_norm_groups == 0)});
}

/* Check the mixers, and that every layer's state lies behind that of the layer before. */
static const char *invalid_mixer(const np_shape *s, const np_fixed *fixed)
{
    uint64_t elements = 0;
    for (uint32_t n = 0; n < s->layers; n++) {
        const np_layer *l = &fixed->layers[n];
        if (l->mixer < NP_MIXER_ATTENTION || l->mixer > NP_MIXER_KDA || (l->mixer != NP_MIXER_ATTENTION && (s->parallel || s->norms != NP_NORMS_BEFORE)))
            return "mixer";
        const char *wrong = np_is_recurrent(l->mixer) ? invalid_recurrent(s, l) : NULL;
        if (wrong)
            return wrong;
        if (l->mixer == NP_MIXER_NONE && s->predictor_rank && s->predictor_reads == NP_READS_ATTENTION)
            return "predictor_reads";
        if (l->mixer != NP_MIXER_NONE && np_mixer_width(s, l) > s->heads_width)
            return "heads_width";
        if (l->state_before != elements)
            return "state_before";
        elements += np_state_elements(s, l);
    }
    return elements == s->state_elements ? NULL : "state_elements";
}

/* Check that every layer's experts are numbered after those of the layer before, and can be chosen as the shape says. */
static const char *invalid_experts(const np_shape *s, const np_fixed *fixed)
{
    uint64_t ffns = 0;
    for (uint32_t n = 0; n < s->layers; n++) {
        const np_layer *l = &fixed->layers[n];
        const uint32_t routed = l->routed_experts, always = l->experts - routed;
        if (l->first_ffn != ffns || (ffns += l->experts) * s->clusters > NP_REQUEST_CLUSTER_MASK + 1u)
            return "first_ffn";
        if ((!l->experts && (s->parallel || l->mixer == NP_MIXER_NONE)) || l->experts > s->experts || (s->experts == 1 && routed))
            return "experts";
        if (routed > l->experts || (routed && !s->chosen_per_token) || always + (routed ? s->chosen_per_token : 0) > s->experts_per_token)
            return "routed_experts";
        if (routed && (!l->router || routed % s->router_groups || (s->router_groups > 1 && routed == s->router_groups) ||
                       (uint64_t)s->groups_per_token * (routed / s->router_groups) < s->chosen_per_token))
            return l->router ? "router_groups" : "router";
    }
    return NULL;
}

/* The elements of a row of the KV cache in a layer with attention. */
static size_t cached_width(const np_shape *s, const np_layer *l)
{
    return s->latent_width ? np_cached_width(s) : l->head_width;
}

/* Check the sizes of every layer's heads. Runtimes and accelerators compute those of the shape only. */
static const char *invalid_heads(const np_shape *s, const np_fixed *fixed, const np_engine_config *p)
{
    for (uint32_t n = 0; n < s->layers; n++) {
        const np_layer *l = &fixed->layers[n];
        const int differs = l->key_heads != s->key_heads || l->head_width != s->head_width || l->value_from_key;
        if (!l->head_width || (s->rotary && !s->latent_width && l->head_width % 2))
            return "head_width";
        if (!l->key_heads || s->query_heads % l->key_heads || !np_quant_bytes(s->type, np_output_columns(s, l)))
            return "query_heads";
        if (l->mixer == NP_MIXER_ATTENTION && !np_kv_row_bytes(p->kv_type, cached_width(s, l)))
            return "kv_type";
        if ((differs && (s->latent_width || p->external_products || p->offload_blocks)) || (s->latent_width && s->value_norm))
            return differs ? "key_heads" : "value_norm";
    }
    return NULL;
}

/* Check that the norms and the table of rotary positions that a layer needs exist. */
static const char *invalid_norms(const np_shape *s, const np_fixed *fixed, const np_engine_config *p)
{
    for (uint32_t n = 0; n < s->layers; n++) {
        const np_layer *l = &fixed->layers[n];
        if (s->norms != NP_NORMS_BEFORE && !l->attention_output_norm.weight)
            return "attention_output_norm";
        if (s->norms != NP_NORMS_BEFORE && !l->ffn_output_norm.weight)
            return "ffn_output_norm";
        if (s->branch_norms && !(l->routed_norm.weight && l->routed_output_norm.weight && l->shared_output_norm.weight))
            return "branch_norms";
        if (l->scale && s->norms == NP_NORMS_BEFORE)
            return "scale";
        if (l->router_norm && s->router_reads != NP_READS_FEED_FORWARD)
            return "router_norm";
        if (l->expert_scales && (p->external_products || p->offload_blocks))
            return "expert_scales";
        if (l->local_positions && (!s->rotary || !fixed->local_inverse_frequency || p->external_products || p->offload_blocks))
            return "local_positions";
    }
    return NULL;
}

static const char *invalid_layer(const np_shape *s, const np_fixed *fixed, const np_engine_config *p)
{
    for (uint32_t n = 0; (p->external_products || p->offload_blocks) && n < s->layers; n++)
        if (fixed->layers[n].gate_bias)
            return "gate_bias"; /* runtimes and accelerators do not add it */
    for (uint32_t n = 0; np_is_smooth(s) && n < s->layers; n++) {
        const float silent_below = fixed->layers[n].silent_below;
        if (!(silent_below >= 0.0f && isfinite(silent_below)) || (silent_below > 0.0f && s->activation != NP_SILU))
            return "silent_below";
    }
    return NULL;
}

static const char *invalid_draft(const np_shape *s, const np_fixed *fixed, const np_shared *shared)
{
    if (!s->draft_layers)
        return NULL;
    if (s->draft_layers >= s->layers)
        return "draft_layers";
    const np_layer *l = &fixed->layers[np_text_layers(s)];
    FIRST_ERROR({"draft_layers", l->mixer == NP_MIXER_ATTENTION && l->experts && s->rotary && !s->latent_width},
                {"heads_width", s->heads_width >= 2 * (uint64_t)s->width},
                {"draft_input", l->draft_input.quants && fits_attention(s, &l->draft_input, 2 * (size_t)s->width)},
                {"draft_embedding_norm", l->draft_embedding_norm.weight != NULL}, {"draft_hidden_norm", l->draft_hidden_norm.weight != NULL},
                {"draft_output_norm", l->draft_output_norm.weight != NULL}, {"window_tokens", !l->window_tokens}, {"drafted", shared->drafted != NULL});
}

const char *np_invalid_field(const np_shape *shape, const np_fixed *fixed, const np_shared *shared, const np_engine_config *config)
{
    const char *wrong = out_of_range(shape);
    if (!wrong)
        wrong = invalid_size(shape);
    if (!wrong)
        wrong = invalid_layout(shape);
    if (!wrong)
        wrong = invalid_place(shape);
    if (!wrong)
        wrong = invalid_config(config, shape);
    if (!wrong)
        wrong = invalid_state(shape, shared, config);
    if (!wrong)
        wrong = fixed->layers ? invalid_experts(shape, fixed) : "layers";
    if (!wrong)
        wrong = invalid_draft(shape, fixed, shared);
    if (!wrong)
        wrong = invalid_mixer(shape, fixed);
    if (!wrong)
        wrong = invalid_heads(shape, fixed, config);
    if (!wrong)
        wrong = invalid_matrix(shape, fixed);
    if (!wrong)
        wrong = invalid_layer(shape, fixed, config);
    if (!wrong)
        wrong = invalid_norms(shape, fixed, config);
    if (!wrong && shape->norms != NP_NORMS_BEFORE && !shared->changes)
        wrong = "changes";
    if (!wrong && shared->reuse.gaps && !(shared->reuse.last_uses && shared->reuse.steps && shared->reuse.stride % 2))
        wrong = "reuse";
    if (!wrong && config->external_products && !(shared->inputs && shared->outputs))
        wrong = shared->inputs ? "outputs" : "inputs";
    if (!wrong && shape->predictor_rank && !(shared->ranks && shared->predicted))
        wrong = shared->ranks ? "predicted" : "ranks";
    return wrong;
}

/* Attention of one layer: three stages with a barrier after each. In parallel layers the feed-forward comes before the
 * last stage, the only one that changes the residual stream. A predictor that reads attention's input runs first, in a
 * short stage of its own, so that flash has the time of attention to read what it requests.
 *
 *   stage    piece of work                    writes
 *   rank     rows of the predictor's input    rank vectors
 *   qkv      a block's scores; a head of      predictions; queries, this position's keys and values
 *            q, k or v
 *   attend   (query heads of a key, token)    attention
 *   project  rows of the output matrix        residual, or changes, which one more stage norms and adds
 */
#include "engine/attention.h"

#include <math.h>
#include <string.h>

#include "engine/changes.h"
#include "engine/latent.h"
#include "engine/prediction.h"
#include "engine/recurrent.h"
#include "engine/vectors.h"
#include "engine/work.h"
#include "kernels/exponential.h"

/* The keys (which 0) or values (which 1) of one layer, sequence and key head: [context_tokens] rows of head_width. */
static uint8_t *kv_of(const np_engine *engine, uint32_t layer, uint32_t sequence, uint32_t key_head, uint32_t which)
{
    const np_layer *l = &engine->fixed.layers[layer];
    const size_t head = ((size_t)sequence * l->key_heads + key_head) * 2 + which;
    return np_layer_kv(engine, layer) + head * np_context_bytes(engine, l->head_width);
}

/* Store a token's key or value of one head. */
static void store(const np_engine *engine, uint32_t layer, uint32_t key_head, uint32_t which, uint32_t t, const float *vector)
{
    const size_t width = engine->fixed.layers[layer].head_width, row_bytes = np_kv_row_bytes(engine->config.kv_type, width);
    uint8_t *rows = kv_of(engine, layer, (uint32_t)engine->sequence[t], key_head, which);
    np_kv_store(engine->config.kv_type, vector, width, rows + (size_t)engine->position[t] * row_bytes);
}

static void rotate(const np_engine *engine, const np_layer *l, int32_t position, float *head)
{
    const np_shape *s = &engine->shape;
    const float *inverse_frequency = l->local_positions ? engine->fixed.local_inverse_frequency : engine->fixed.inverse_frequency;
    const size_t half = l->head_width / 2;
    np_rope(head, l->head_width, inverse_frequency, position);
    for (size_t j = 0; s->rotary_scale != 1.0f && j < half; j++)
        if (inverse_frequency[j] != 0.0f) {
            head[j] *= s->rotary_scale;
            head[j + half] *= s->rotary_scale;
        }
}

void np_grow_query(const np_engine *engine, uint32_t t, size_t width, float *query)
{
    const np_shape *s = &engine->shape;
    const uint32_t times = s->query_growth > 0.0f ? (uint32_t)engine->position[t] / s->query_growth_tokens : 0;
    if (times)
        np_scale(query, width, (float)(1.0 + s->query_growth * log(1.0 + times)));
}

/* Clip a normed head, if the model does. NaN stays NaN. */
static void clip(const np_shape *s, size_t width, float *head)
{
    const float limit = s->qkv_limit;
    for (size_t j = 0; limit > 0.0f && j < width; j++)
        head[j] = head[j] > limit ? limit : head[j] < -limit ? -limit : head[j];
}

/* Norm, clip and rotate a query or a key, if the model and the layer do. */
static void norm_and_rotate(const np_engine *engine, const np_layer *l, const float *norm, int32_t position, float *head)
{
    const np_shape *s = &engine->shape;
    if (s->head_norm && !s->norm_after_rotation)
        np_rms_norm(head, norm, l->head_width, s->norm_epsilon, head);
    clip(s, l->head_width, head);
    if (s->rotary && l->rotary)
        rotate(engine, l, position, head);
    if (s->norm_after_rotation)
        np_rms_norm(head, norm, l->head_width, s->norm_epsilon, head);
}

/* Where the keys of a token are kept until all of its heads are known: attention is written later. */
static float *raw_key(np_engine *engine, uint32_t t)
{
    return engine->shared.attention + (size_t)t * engine->shape.heads_width;
}

/* Norm all heads of queries together, and all heads of keys, then rotate them. Participants share the tokens. */
static void norm_jointly(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const size_t width = l->head_width;
    const np_range tokens = np_even_share(engine, engine->count);
    for (uint32_t t = tokens.from; t < tokens.to; t++) {
        float *query = engine->shared.queries + (size_t)t * s->heads_width, *key = raw_key(engine, t);
        np_rms_norm(query, l->query_norm, s->query_heads * width, s->norm_epsilon, query);
        np_rms_norm(key, l->key_norm, l->key_heads * width, s->norm_epsilon, key);
        for (uint32_t head = 0; head < s->query_heads; head++)
            norm_and_rotate(engine, l, NULL, engine->position[t], query + head * width);
        np_grow_query(engine, t, s->query_heads * width, query);
        for (uint32_t head = 0; head < l->key_heads; head++) {
            norm_and_rotate(engine, l, NULL, engine->position[t], key + head * width);
            store(engine, layer, head, 0, t, key + head * width);
        }
    }
}

/* Store a value, normed and clipped if the model does. It may be overwritten. */
static void store_value(np_engine *engine, uint32_t layer, uint32_t key_head, uint32_t t, float *value)
{
    const size_t width = engine->fixed.layers[layer].head_width;
    if (engine->shape.value_norm)
        np_rms_norm(value, NULL, width, engine->shape.norm_epsilon, value);
    clip(&engine->shape, width, value);
    store(engine, layer, key_head, 1, t, value);
}

static void store_head(np_engine *engine, uint32_t layer, uint32_t head, uint32_t t, float *values)
{
    const np_layer *l = &engine->fixed.layers[layer];
    const np_shape *s = &engine->shape;
    const size_t width = l->head_width;
    const uint32_t first_gate = s->query_heads + (l->value_from_key ? 1 : 2) * l->key_heads;
    float *queries = engine->shared.queries + (size_t)t * s->heads_width;
    if (l->value_from_key && head >= s->query_heads && head < first_gate) {
        memcpy(engine->vector, values, width * sizeof *values);
        store_value(engine, layer, head - s->query_heads, t, engine->vector);
    }
    if (head >= first_gate) { /* of attention's output */
        memcpy(queries + (s->query_heads + head - first_gate) * width, values, width * sizeof *values);
    } else if (head < s->query_heads) {
        float *query = queries + head * width;
        memcpy(query, values, width * sizeof *values);
        if (!s->joint_norm) {
            norm_and_rotate(engine, l, l->query_norm, engine->position[t], query);
            np_grow_query(engine, t, width, query);
        }
    } else if (head < s->query_heads + l->key_heads && s->joint_norm) {
        memcpy(raw_key(engine, t) + (head - s->query_heads) * width, values, width * sizeof *values);
    } else if (head < s->query_heads + l->key_heads) {
        norm_and_rotate(engine, l, l->key_norm, engine->position[t], values);
        store(engine, layer, head - s->query_heads, 0, t, values);
    } else {
        store_value(engine, layer, head - s->query_heads - l->key_heads, t, values);
    }
}

/* Compute rows of a matrix times each token's vector, plus bias, into engine->rows. Products of an external runtime
 * (without bias) or of an offload backend (with it) are copied from `outputs` instead. all_rows: the matrix's number of
 * rows. */
static void get_products(np_engine *engine, const np_matrix *matrix, uint32_t first_row, uint32_t rows, uint32_t all_rows, const float *bias)
{
    engine->counters.matrix_rows += (uint64_t)rows * engine->count;
    if (!engine->config.external_products && !engine->config.offload_blocks) {
        np_multiply_rows(engine, &engine->vectors, matrix, first_row, rows, bias, engine->rows, engine->max_rows);
        return;
    }
    for (uint32_t t = 0; t < engine->count; t++) {
        memcpy(engine->rows + t * engine->max_rows, engine->shared.outputs + (size_t)t * all_rows + first_row, rows * sizeof(float));
        if (bias && engine->config.external_products)
            np_add(bias + first_row, rows, engine->rows + t * engine->max_rows);
    }
}

static void compute_heads(np_engine *engine, uint32_t layer, np_range computed)
{
    const np_layer *l = &engine->fixed.layers[layer];
    const uint32_t width = l->head_width, heads = np_qkv_heads(&engine->shape, l);
    const uint64_t started = np_clock_ns();
    if (np_is_offloaded_elsewhere(engine, NP_OFFLOAD_QKV))
        return;
    for (uint32_t claimed; (claimed = np_claim(engine, layer, NP_WORK_QKV, computed.to - computed.from)) != NP_NONE;) {
        const uint32_t head = computed.from + claimed;
        get_products(engine, &l->qkv, head * width, width, heads * width, l->qkv_bias);
        for (uint32_t t = 0; t < engine->count; t++)
            store_head(engine, layer, head, t, engine->rows + t * engine->max_rows);
    }
    np_trace_put(&engine->shared.trace, NP_SPAN_QKV, layer, 0, engine->step, started);
}

/* Multiply outputs of heads by the sigmoid of their gates, which lie `distance` floats behind their queries. */
static void gate(np_engine *engine, size_t offset, size_t count, size_t distance)
{
    float *outputs = engine->shared.attention + offset;
    np_activate(NP_SIGMOID, 0.0f, engine->shared.queries + offset + distance, outputs, count, outputs);
}

uint32_t np_attended_tokens(const np_engine *engine)
{
    return engine->count < NP_DENSE_TOKENS ? 1 : NP_ATTEND_QUERIES;
}

uint32_t np_following_tokens(const np_engine *engine, uint32_t first, uint32_t end)
{
    uint32_t t = first + 1;
    while (t < end && engine->sequence[t] == engine->sequence[first] && engine->position[t] == engine->position[t - 1] + 1)
        t++;
    return t - first;
}

/* How many positions a token attends to, the latest; 0: all. The draft layer has no keys of position 0. */
static size_t window_of(const np_engine *engine, uint32_t layer, uint32_t t)
{
    return layer < np_text_layers(&engine->shape) ? engine->fixed.layers[layer].window_tokens : (size_t)engine->position[t];
}

/* Heads that share keys are one piece of work, so that the keys are read once; single heads where that would leave
 * participants idle. */
static void attend(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const size_t width = l->head_width;
    const uint32_t block = np_attended_tokens(engine), blocks = (engine->count + block - 1) / block;
    const uint32_t heads_per_key = s->query_heads / l->key_heads;
    const uint32_t heads = l->key_heads * blocks >= engine->participants ? heads_per_key : 1;
    const float factor = l->local_positions ? s->local_attention_scale : s->attention_scale;
    const float scale = factor / __builtin_sqrtf((float)l->head_width);
    const uint64_t started = np_clock_ns();
    const uint32_t pieces = s->query_heads / heads * blocks;
    for (uint32_t piece; (piece = np_claim(engine, layer, NP_WORK_ATTEND, pieces)) != NP_NONE;) {
        const uint32_t head = piece / blocks * heads, first = piece % blocks * block;
        const uint32_t end = engine->count - first < block ? engine->count : first + block;
        for (uint32_t t = first, tokens; t < end; t += tokens) {
            const uint32_t sequence = (uint32_t)engine->sequence[t];
            const size_t offset = (size_t)t * s->heads_width + head * width;
            tokens = np_following_tokens(engine, t, end);
            np_attend(&(np_attend_job){
                .queries = engine->shared.queries + offset,
                .token_stride = s->heads_width,
                .heads = heads,
                .tokens = tokens,
                .keys = kv_of(engine, layer, sequence, head / heads_per_key, 0),
                .values = kv_of(engine, layer, sequence, head / heads_per_key, 1),
                .type = engine->config.kv_type,
                .positions = (size_t)engine->position[t] + 1,
                .window = window_of(engine, layer, t),
                .width = width,
                .scale = scale,
                .score_cap = s->score_cap,
                .sinks = l->sinks ? l->sinks + head : NULL,
                .scores = engine->scores,
                .out = engine->shared.attention + offset,
            });
        }
        for (uint32_t t = first; s->gated_attention && t < end; t++)
            gate(engine, (size_t)t * s->heads_width + head * width, heads * width, s->query_heads * width);
    }
    np_trace_put(&engine->shared.trace, NP_SPAN_ATTEND, layer, 0, engine->step, started);
}

static const np_matrix *output_matrix(const np_layer *l)
{
    return np_is_recurrent(l->mixer) ? &l->recurrent_output : &l->attention_output;
}

void np_begin_projection(np_engine *engine)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[engine->layer];
    const np_matrix *output = output_matrix(l);
    const float *inputs = s->latent_width ? engine->shared.queries : engine->shared.attention;
    const int is_recurrent = np_is_recurrent(l->mixer);
    engine->vectors.type = output->quants ? output->type : s->type;
    np_prepare_vectors(engine, &engine->vectors, is_recurrent ? np_recurrent_outputs(engine, l) : inputs, engine->count, s->heads_width,
                       is_recurrent ? np_gate_width(s, l) : np_output_columns(s, l), NULL);
}

int np_project(np_engine *engine, uint32_t layer)
{
    if (engine->fixed.layers[layer].mixer == NP_MIXER_NONE)
        return NP_OK;
    if (np_is_offloaded_elsewhere(engine, NP_OFFLOAD_ATTENTION_OUTPUT))
        return np_meet(engine);
    np_begin_projection(engine);
    return np_add_projection(engine, layer);
}

int np_add_projection(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const uint64_t started = np_clock_ns();
    const uint32_t pieces = (s->width + NP_PIECE_ROWS - 1) / NP_PIECE_ROWS;
    for (uint32_t piece; (piece = np_claim(engine, layer, NP_WORK_PROJECT, pieces)) != NP_NONE;) {
        const uint32_t row = piece * NP_PIECE_ROWS, rows = s->width - row < NP_PIECE_ROWS ? s->width - row : NP_PIECE_ROWS;
        get_products(engine, output_matrix(l), row, rows, s->width, l->attention_output_bias);
        for (uint32_t t = 0; t < engine->count; t++) {
            float *products = engine->rows + t * engine->max_rows;
            if (np_norms_outputs(engine))
                memcpy(np_changes_of(engine, t, 0) + row, products, rows * sizeof *products);
            else
                np_add_change(engine, t, 0, row, rows, products);
        }
    }
    np_trace_put(&engine->shared.trace, NP_SPAN_PROJECT, layer, 0, engine->step, started);
    const int done = np_meet(engine);
    return done >= 0 && np_norms_outputs(engine) ? np_add_attention_changes(engine, l) : done;
}

static int predict(np_engine *engine, const np_norm *norm)
{
    np_predict_ranks(engine, norm);
    const int met = np_meet(engine);
    return met < 0 ? met : np_predict_scores(engine);
}

static const np_norm *prepare_input(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_norm *norm = np_input_norm(engine, &engine->fixed.layers[layer].attention_norm);
    engine->layer = layer;
    const np_layer *l = &engine->fixed.layers[layer];
    const np_matrix *qkv = np_is_recurrent(l->mixer) ? &l->recurrent_input : s->latent_width ? &l->latent_down : &l->qkv;
    engine->vectors.type = qkv->quants ? qkv->type : s->type;
    np_prepare_vectors(engine, &engine->vectors, engine->shared.residual, engine->count, s->width, s->width, norm);
    return norm;
}

int np_begin_attention(np_engine *engine, uint32_t layer)
{
    const np_norm *norm = prepare_input(engine, layer);
    return np_predictor_runs(engine, NP_READS_ATTENTION) ? predict(engine, norm) : NP_OK;
}

int np_attention(np_engine *engine, uint32_t layer)
{
    const int32_t mixer = engine->fixed.layers[layer].mixer;
    if (mixer == NP_MIXER_NONE)
        return NP_OK;
    const int done = np_begin_attention(engine, layer);
    if (done < 0)
        return done;
    if (np_is_recurrent(mixer))
        return np_mix_states(engine, layer);
    return engine->shape.latent_width ? np_attend_latents(engine, layer) : np_attend_heads(engine, layer);
}

/* Compute these heads of queries, keys, values and gates, and store keys and values. */
static int store_heads(np_engine *engine, uint32_t layer, np_range heads)
{
    compute_heads(engine, layer, heads);
    const int done = np_meet(engine);
    if (done < 0 || !engine->shape.joint_norm)
        return done;
    norm_jointly(engine, layer);
    return np_meet(engine);
}

int np_store_keys_and_values(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    prepare_input(engine, layer);
    return store_heads(engine, layer, (np_range){s->joint_norm ? 0 : s->query_heads, s->query_heads + (l->value_from_key ? 1 : 2) * l->key_heads});
}

int np_attend_heads(np_engine *engine, uint32_t layer)
{
    const int done = store_heads(engine, layer, (np_range){0, np_qkv_heads(&engine->shape, &engine->fixed.layers[layer])});
    if (done < 0)
        return done;
    attend(engine, layer);
    return np_meet(engine);
}

/* Attention of one layer: three phases with a meeting after each.
 *
 *   phase    unit of sharing              writes
 *   qkv      one head of q, k or v        queries; this position's keys and values
 *   attend   one (query head, token)      attention
 *   project  one row of the output matrix residual
 */
#include "engine.h"

/* The keys (which 0) or values (which 1) of one layer, sequence and key head: [context_tokens][head_width]. */
static uint16_t *kv_of(const np_engine *engine, uint32_t layer, uint32_t sequence, uint32_t key_head, uint32_t which)
{
    const np_shape *s = &engine->shape;
    const size_t head = (((size_t)layer * engine->sequences + sequence) * s->key_heads + key_head) * 2 + which;
    return engine->shared.kv + head * s->context_tokens * s->head_width;
}

static void place_head(np_engine *engine, uint32_t layer, uint32_t head, uint32_t t, float *values)
{
    const np_shape *s = &engine->shape;
    const size_t position = (size_t)engine->position[t], width = s->head_width;
    const uint32_t sequence = (uint32_t)engine->sequence[t];
    if (head < s->query_heads) {
        float *query = engine->shared.queries + ((size_t)t * s->query_heads + head) * width;
        for (size_t j = 0; j < width; j++)
            query[j] = values[j];
        np_rope(query, width, engine->fixed.inverse_frequency, engine->position[t]);
    } else if (head < s->query_heads + s->key_heads) {
        np_rope(values, width, engine->fixed.inverse_frequency, engine->position[t]);
        np_f32_to_f16(values, width, kv_of(engine, layer, sequence, head - s->query_heads, 0) + position * width);
    } else {
        const uint32_t key_head = head - s->query_heads - s->key_heads;
        np_f32_to_f16(values, width, kv_of(engine, layer, sequence, key_head, 1) + position * width);
    }
}

static void compute_heads(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const size_t width = s->head_width;
    const np_range own = np_engine_share(engine, s->query_heads + 2 * s->key_heads);
    np_engine_prepare(engine, engine->shared.residual, s->width, s->width, l->attention_norm);
    for (uint32_t head = own.from; head < own.to; head++) {
        const size_t row = head * width;
        np_dot_rows(s->type, (const uint8_t *)l->qkv.quants + row * engine->row_quant_bytes,
                    (const uint8_t *)l->qkv.scales + row * engine->row_scale_bytes, width, s->width, engine->activations,
                    engine->activation_stride, engine->count, l->qkv_bias ? l->qkv_bias + row : NULL, engine->rows, engine->max_rows);
        for (uint32_t t = 0; t < engine->count; t++)
            place_head(engine, layer, head, t, engine->rows + t * engine->max_rows);
    }
}

static void attend(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const size_t width = s->head_width;
    const uint32_t group = s->query_heads / s->key_heads;
    const float scale = 1.0f / __builtin_sqrtf((float)s->head_width);
    const np_range own = np_engine_share(engine, s->query_heads * engine->count);
    for (uint32_t unit = own.from; unit < own.to; unit++) {
        const uint32_t head = unit / engine->count, t = unit % engine->count;
        const uint32_t sequence = (uint32_t)engine->sequence[t], positions = (uint32_t)engine->position[t] + 1;
        const uint32_t first = s->window_tokens && positions > s->window_tokens ? positions - s->window_tokens : 0;
        const size_t at = ((size_t)t * s->query_heads + head) * width;
        np_attend(engine->shared.queries + at, kv_of(engine, layer, sequence, head / group, 0) + first * width,
                  kv_of(engine, layer, sequence, head / group, 1) + first * width, positions - first, width, scale,
                  engine->scores, engine->shared.attention + at);
    }
}

static void project(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_matrix *m = &engine->fixed.layers[layer].attention_output;
    const size_t columns = (size_t)s->query_heads * s->head_width;
    const np_range own = np_engine_share(engine, s->width);
    np_engine_prepare(engine, engine->shared.attention, columns, columns, NULL);
    np_dot_rows(s->type, (const uint8_t *)m->quants + own.from * np_quant_bytes(s->type, columns),
                (const uint8_t *)m->scales + own.from * np_scale_bytes(s->type, columns), own.to - own.from, columns,
                engine->activations, engine->activation_stride, engine->count, NULL, engine->rows, engine->max_rows);
    for (uint32_t t = 0; t < engine->count; t++)
        np_add(engine->rows + t * engine->max_rows, own.to - own.from, engine->shared.residual + (size_t)t * s->width + own.from);
}

int np_engine_attention(np_engine *engine, uint32_t layer)
{
    if (layer >= engine->shape.layers)
        return NP_E_ARGUMENT;
    compute_heads(engine, layer);
    int met = np_engine_meet(engine);
    if (met < 0)
        return met;
    attend(engine, layer);
    met = np_engine_meet(engine);
    if (met < 0)
        return met;
    project(engine, layer);
    return np_engine_meet(engine);
}

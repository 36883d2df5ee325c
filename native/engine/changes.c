#include "engine/changes.h"

#include "engine/vectors.h"
#include "engine/work.h"

float *np_changes_of(const np_engine *engine, uint32_t token, uint32_t branch)
{
    const size_t branches = engine->shape.branch_norms ? 2 : 1;
    return engine->shared.changes + (branches * token + branch) * engine->shape.width;
}

void np_add_change(np_engine *engine, uint32_t token, uint32_t branch, uint32_t column, uint32_t count, float *values)
{
    float *to = np_norms_outputs(engine) ? np_changes_of(engine, token, branch) : engine->shared.residual + (size_t)token * engine->shape.width;
    if (!np_norms_outputs(engine)) /* otherwise the scale comes after the norm */
        np_scale(values, count, engine->shape.residual_scale);
    np_add(values, count, to + column);
}

void np_clear_own_changes(np_engine *engine)
{
    const np_range columns = np_even_share(engine, engine->shape.width);
    for (uint32_t t = 0; t < engine->count; t++)
        for (uint32_t branch = 0; branch <= (engine->shape.branch_norms != 0); branch++)
            memset(np_changes_of(engine, t, branch) + columns.from, 0, (columns.to - columns.from) * sizeof(float));
}

/* Norm a token's changes and add them to its residual stream. */
static void add_normed(np_engine *engine, const np_norm *norm, uint32_t t)
{
    const size_t width = engine->shape.width;
    np_norm_vector(engine, norm, np_changes_of(engine, t, 0), width, engine->vector);
    np_scale(engine->vector, width, engine->shape.residual_scale);
    np_add(engine->vector, width, engine->shared.residual + t * width);
}

int np_add_attention_changes(np_engine *engine, const np_layer *l)
{
    const np_range tokens = np_even_share(engine, engine->count);
    for (uint32_t t = tokens.from; t < tokens.to; t++)
        add_normed(engine, &l->attention_output_norm, t);
    return np_meet(engine);
}

int np_add_feed_forward_changes(np_engine *engine, const np_layer *l)
{
    const size_t width = engine->shape.width;
    const np_range tokens = np_even_share(engine, engine->count);
    for (uint32_t t = tokens.from; t < tokens.to; t++) {
        float *changes = np_changes_of(engine, t, 0);
        if (engine->shape.branch_norms) {
            float *routed = np_changes_of(engine, t, 1);
            np_norm_vector(engine, &l->shared_output_norm, changes, width, changes);
            np_norm_vector(engine, &l->routed_output_norm, routed, width, routed);
            np_add(routed, width, changes);
        }
        add_normed(engine, &l->ffn_output_norm, t);
        np_scale(engine->shared.residual + t * width, width, l->scale ? *l->scale : 1.0f);
    }
    return np_meet(engine);
}

#include "engine/changes.h"

#include "engine/vectors.h"
#include "engine/work.h"

void np_add_change(np_engine *engine, uint32_t token, uint32_t column, uint32_t count, float *values)
{
    float *to = np_norms_outputs(engine) ? engine->shared.changes : engine->shared.residual;
    if (!np_norms_outputs(engine)) /* otherwise the scale comes after the norm */
        np_scale(values, count, engine->shape.residual_scale);
    np_add(values, count, to + (size_t)token * engine->shape.width + column);
}

void np_clear_own_changes(np_engine *engine)
{
    const np_range columns = np_even_share(engine, engine->shape.width);
    for (uint32_t t = 0; t < engine->count; t++)
        memset(engine->shared.changes + (size_t)t * engine->shape.width + columns.from, 0, (columns.to - columns.from) * sizeof(float));
}

int np_add_normed_changes(np_engine *engine, const np_norm *norm)
{
    const size_t width = engine->shape.width;
    const np_range tokens = np_even_share(engine, engine->count);
    for (uint32_t t = tokens.from; t < tokens.to; t++) {
        np_norm_vector(engine, norm, engine->shared.changes + t * width, width, engine->vector);
        np_scale(engine->vector, width, engine->shape.residual_scale);
        np_add(engine->vector, width, engine->shared.residual + t * width);
    }
    return np_meet(engine);
}

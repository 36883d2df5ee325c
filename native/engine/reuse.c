/* The number of a step is its time. A step that is sent again has the same number, so that its uses count once. Several
 * participants may use one cluster, so its word is exchanged atomically, and one of them counts. */
#include "engine/reuse.h"

enum { SINGLE_GAPS = 8, LOG_SINGLE_GAPS = 3, LOG_BUCKETS_PER_OCTAVE = 2 };

uint32_t np_reuse_bucket(uint32_t gap)
{
    if (gap < SINGLE_GAPS)
        return gap;
    const uint32_t octave = 31 - (uint32_t)__builtin_clz(gap);
    const uint32_t part = gap >> (octave - LOG_BUCKETS_PER_OCTAVE) & ((1u << LOG_BUCKETS_PER_OCTAVE) - 1);
    return SINGLE_GAPS + ((octave - LOG_SINGLE_GAPS) << LOG_BUCKETS_PER_OCTAVE) + part;
}

uint32_t np_odd_inverse(uint32_t odd)
{
    uint32_t inverse = odd; /* right in three bits; each round of Newton's method doubles that */
    for (int i = 0; i < 4; i++)
        inverse *= 2 - odd * inverse;
    return inverse;
}

void np_count_step(np_engine *engine)
{
    if (!engine->shared.reuse.gaps || !engine->is_counted || engine->participant || engine->step == engine->counted_step)
        return;
    engine->counted_step = engine->step;
    __atomic_fetch_add(engine->shared.reuse.steps, 1, __ATOMIC_RELAXED);
}

void np_count_sampled(np_engine *engine, int part, uint32_t number)
{
    const np_reuse *reuse = &engine->shared.reuse;
    const uint32_t now = (uint32_t)engine->step + 1;
    const uint32_t before = __atomic_exchange_n(&reuse->last_uses[(size_t)part * reuse->sampled + number], now, __ATOMIC_RELAXED);
    if (before == now || !engine->is_counted)
        return;
    const uint32_t bucket = before && before < now ? np_reuse_bucket(now - before) : 0; /* a new coordinator counts steps from 0 */
    __atomic_fetch_add(&reuse->gaps[(size_t)part * NP_REUSE_BUCKETS + bucket], 1, __ATOMIC_RELAXED);
}

/* Counts of how soon clusters are used again (np_reuse). */
#ifndef NP_REUSE_H
#define NP_REUSE_H
#include "engine/engine.h"

/* The number whose product with an odd number is 1, modulo 2^32. */
uint32_t np_odd_inverse(uint32_t odd);
/* Count a step, once among its participants and however often it is sent. */
void np_count_step(np_engine *engine);
/* Count a use of a sampled cluster, once a step. A step of several tokens is only remembered as the last use. */
void np_count_sampled(np_engine *engine, int part, uint32_t number);

/* Count a use of a cluster of the current group, if it is sampled. A multiple of the stride times the stride's inverse is
 * the quotient, and any other number gives more than all quotients. */
static inline void np_count_use(np_engine *engine, int part, uint32_t cluster)
{
    if (!engine->shared.reuse.gaps)
        return;
    const uint32_t number = np_cluster_index(engine, engine->layer, engine->group->expert, cluster) * engine->reuse_inverse;
    if (number < engine->shared.reuse.sampled)
        np_count_sampled(engine, part, number);
}

#endif

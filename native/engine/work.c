/* How participants divide a stage: pieces that they claim, even shares, barriers. */
#include "engine/work.h"

uint32_t np_engine_claims(uint32_t layers)
{
    return layers * NP_WORKS + 1;
}

/* Claim a piece of the work that depends on an offloaded matrix. The offload participant takes all of these pieces and
 * no others, so that nobody waits for a participant that waits for its device. */
static uint32_t claim_after_offload(np_engine *engine, int work, uint32_t pieces)
{
    np_offload_state *o = &engine->offload;
    const int dependent_work = o->matrix == NP_OFFLOAD_QKV ? NP_WORK_QKV : o->matrix == NP_OFFLOAD_ATTENTION_OUTPUT ? NP_WORK_PROJECT : NP_WORKS;
    return work == dependent_work && o->claimed < pieces ? o->claimed++ : NP_NONE;
}

uint32_t np_claim(np_engine *engine, uint32_t layer, int work, uint32_t pieces)
{
    if (engine->config.offload_blocks)
        return claim_after_offload(engine, work, pieces);
    /* Relaxed: barriers lie between this work and the writes that it reads, and between its writes and their
     * readers. */
    const uint32_t piece = __atomic_fetch_add(&engine->shared.claims[layer * NP_WORKS + (uint32_t)work], 1, __ATOMIC_RELAXED);
    return piece < pieces ? piece : NP_NONE;
}

uint32_t np_claim_shared_blocks(np_engine *engine, int work, uint32_t pieces)
{
    if (engine->sharers > 1)
        return np_claim(engine, engine->layer, work, pieces);
    uint32_t *next = &engine->claimed[work == NP_WORK_DOWN_ROWS];
    return *next < pieces ? (*next)++ : NP_NONE;
}

np_range np_even_share(const np_engine *engine, uint32_t n)
{
    const uint64_t participants = engine->participants, participant = engine->participant;
    return (np_range){(uint32_t)(n * participant / participants), (uint32_t)(n * (participant + 1) / participants)};
}

int np_meet(np_engine *engine)
{
    if (engine->participants == 1)
        return np_word_load(engine->shared.epoch) == engine->epoch ? 1 : NP_E_EPOCH;
    const uint64_t before = np_clock_ns();
    const int last = np_barrier_wait(engine->shared.barrier, engine->participants, engine->shared.epoch, engine->epoch,
                                     engine->config.spin_us, 0);
    engine->counters.barrier_ns += np_clock_ns() - before;
    np_trace_put(&engine->shared.trace, NP_SPAN_BARRIER, engine->layer, 0, engine->step, before);
    return last;
}

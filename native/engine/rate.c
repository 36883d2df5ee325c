/* How likely the model finds the tokens of a given text: logits of a few tokens at a time, read at once and overwritten by the next
 * ones', so that a text of any length needs no more room than a step of decode. */
#include "engine.h"

/* By the logits in this row, those after token `t`. */
static void rate(const np_engine *engine, uint32_t row, uint32_t t)
{
    const np_ratings *r = engine->ratings;
    const size_t vocabulary = engine->shape.vocabulary, place = (size_t)t * (1 + r->likely);
    const float *logits = engine->shared.logits + row * vocabulary;
    if (r->likely)
        np_greatest(logits, vocabulary, r->likely, r->ids + place + 1);
    np_log_probabilities(logits, vocabulary, r->ids + place, 1 + r->likely, r->logs + place);
}

int np_engine_rate(np_engine *engine)
{
    const np_ratings *r = engine->ratings;
    for (uint32_t first = 0; first < r->count; first += engine->logits_count) {
        const uint32_t left = r->count - first, room = engine->config.logit_rows;
        engine->logits_first = first;
        engine->logits_count = left < room ? left : room;
        const int done = np_engine_logits(engine);
        if (done < 0)
            return done;
        /* Nobody claims pieces of logits now: all are behind the barrier of this turn, and before that of the next. */
        if (!engine->participant)
            __atomic_store_n(&engine->shared.claims[engine->shape.layers * NP_WORKS], 0, __ATOMIC_RELAXED);
        for (uint32_t row = engine->participant; row < engine->logits_count; row += engine->participants)
            rate(engine, row, first + row);
        const int met = np_engine_barrier(engine);
        if (met < 0)
            return met;
    }
    return NP_OK;
}

/* Guessing a layer's experts before its attention.
 *
 * A router that reads what attention has added to names its experts when their weights are wanted. Its values for the stream as attention
 * finds it name most of them earlier. They are only a hint: nothing is computed from them, so they change no bit. They are asked for while
 * flash has nothing to do, and while earlier ones in the same layer were right often enough: a wrong one takes slots, and the time of
 * a read. Off unless asked for (hints): where it was measured it did not pay (tests/bench). */
#include <string.h>

#include "engine.h"

enum {
    MIN_GUESSES = 64,  /* before a layer's are judged */
    MAX_GUESSES = 2048, /* then older ones count half */
    TRIAL_STEPS = 32,  /* where guesses were wrong, one step in so many tries again */
};

static int is_promising(const np_engine *engine, uint32_t layer)
{
    const np_guesses *past = &engine->guesses[layer];
    return past->made < MIN_GUESSES || 2 * past->right >= past->made || engine->step % TRIAL_STEPS == 0;
}

/* Whether flash is idle and this participant asks for its blocks. With many tokens nearly every expert is wanted: nothing to guess. */
static int may_guess(const np_engine *engine, uint32_t layer)
{
    return engine->shape.experts > 1 && engine->shape.router_reads == NP_READS_FEED_FORWARD && !np_decides(engine) &&
           engine->config.hints && engine->config.prefetch && !engine->config.outside && engine->sharer == 0 && engine->count < NP_DENSE_TOKENS && engine->shared.in_flight &&
           np_word_load(engine->shared.in_flight) == 0 && is_promising(engine, layer);
}

void np_engine_guess(np_engine *engine, uint32_t layer)
{
    engine->guessed_layer = NP_NO_PIECE;
    if (!may_guess(engine, layer))
        return;
    const np_shape *s = &engine->shape;
    memset(engine->guessed, 0, s->experts);
    for (uint32_t t = 0; t < engine->count; t++) {
        uint32_t *chosen = engine->token_pairs; /* free until this layer is routed */
        np_engine_choose(engine, layer, engine->shared.residual + (size_t)t * s->width, chosen);
        for (uint32_t n = 0; n < s->experts_per_token; n++)
            engine->guessed[chosen[n]] = 1;
    }
    engine->guessed_layer = layer;
    for (uint32_t expert = 0; expert < s->experts; expert++)
        if (engine->guessed[expert])
            np_ask_ahead(engine, layer, expert, engine->blocks, np_parts_ahead(engine, layer, engine->count), NP_REQUEST_GUESS);
}

void np_engine_judge(np_engine *engine, uint32_t layer)
{
    if (engine->guessed_layer != layer)
        return;
    np_guesses *past = &engine->guesses[layer];
    uint32_t made = 0, right = 0;
    for (uint32_t expert = 0; expert < engine->shape.experts; expert++)
        made += engine->guessed[expert];
    for (uint32_t g = 0; g < engine->group_count; g++)
        right += engine->guessed[engine->groups[g].expert];
    engine->counters.guessed += made;
    engine->counters.guessed_right += right;
    past->made += made;
    past->right += right;
    if (past->made > MAX_GUESSES) {
        past->made /= 2;
        past->right /= 2;
    }
}

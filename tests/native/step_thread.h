/* A participant of a step in a thread of its own. */
#ifndef NP_TESTS_STEP_THREAD_H
#define NP_TESTS_STEP_THREAD_H
#include "neuronpipe.h"

#include <pthread.h>

typedef struct {
    np_engine *engine;
    np_step step;
    int done; /* of np_engine_step */
} worker;

static inline void *work(void *argument) {
    worker *w = argument;
    w->done = np_engine_step(w->engine, &w->step);
    return NULL;
}
#endif

/* The worker's side of a step channel with a replaceable engine, for tests. */
#ifndef NP_STEPS_STEP_CHANNEL_H
#define NP_STEPS_STEP_CHANNEL_H
#include "neuronpipe.h"

/* Compute a step as np_engine_step does, and write its counters if it succeeds. context: np_serve_channel's. */
typedef int np_compute_step(void *context, const np_step *step, np_engine_counters *counters);

/* As np_channel_serve. */
int np_serve_channel(np_compute_step *compute, void *context, const np_step_channels *channels, uint32_t number, uint32_t spin_us,
                     uint32_t idle_ms, uint32_t serve_ms, np_channel_progress *progress);

#endif

/* A lane for whoever computes: the engine, or a test. */
#ifndef NP_STEPS_LANE_H
#define NP_STEPS_LANE_H
#include "neuronpipe.h"

/* Compute a step, as np_engine_step, and say what was counted where it went well. */
typedef int np_lane_compute(void *who, const np_step *step, np_engine_counters *counters);

/* As np_lane_serve. */
int np_lane_serve_by(np_lane_compute *compute, void *who, const np_lanes *lanes, uint32_t lane, uint32_t spin_us, uint32_t idle_ms,
                     uint32_t serve_ms, np_lane_served *served);

#endif

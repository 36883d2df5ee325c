/* A step's begin and end, and its stages, for the drivers of a step: np_engine_step and those in offload/. */
#ifndef NP_STEP_H
#define NP_STEP_H
#include "engine/engine.h"

/* Copy and validate a step's arguments. Returns NP_OK or NP_E_ARGUMENT. */
int np_begin_step(np_engine *engine, const np_step *step);
/* After the last layer, or after an error (result < 0): compute logits and scores, record times. Returns how the step
 * ended. */
int np_end_step(np_engine *engine, int result);
/* The three stages of a layer in the model's order. */
typedef int np_stage(np_engine *engine, uint32_t layer);
enum { NP_STAGES = 3 };
np_stage *np_layer_stage(const np_engine *engine, uint32_t number);
/* Compute all stages of a layer. */
int np_compute_layer(np_engine *engine, uint32_t layer);

#endif

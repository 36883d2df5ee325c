/* Multi-head latent attention of one layer. */
#ifndef NP_LATENT_H
#define NP_LATENT_H
#include "engine/engine.h"

/* Compute latents, queries and attention from the prepared inputs of latent_down, without changing the residual stream.
 * The inputs of attention's output matrix are then in `queries`. */
int np_attend_latents(np_engine *engine, uint32_t layer);

#endif

/* Requests ahead of need, for dense models and on top of routing. */
#ifndef NP_PREFETCH_H
#define NP_PREFETCH_H
#include "engine/engine.h"

/* Route the tokens of a layer and prefetch the clusters of the chosen experts. Returns a value >= 0, or NP_E_EPOCH. */
int np_route_and_prefetch(np_engine *engine, uint32_t layer);
/* Before attention: route if the router reads the layer's input; otherwise prefetch likely experts speculatively.
 * Returns a value >= 0, or NP_E_EPOCH. */
int np_begin_layer(np_engine *engine, uint32_t layer);
/* Prefetch what a dense model needs after the open window, from the next layer on too. block: the one for which this
 * participant opened the window; the one that claimed the window's first block makes the requests, and participants
 * share those of slices. */
void np_prefetch_next_window(np_engine *engine, uint32_t block);

#endif

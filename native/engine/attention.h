/* Attention of one layer. */
#ifndef NP_ATTENTION_H
#define NP_ATTENTION_H
#include "engine/engine.h"

/* The first two stages, which leave the residual stream as it is; and the projection, which is added to it. */
int np_attention(np_engine *engine, uint32_t layer);
int np_project(np_engine *engine, uint32_t layer);
/* The same in halves, for an offload backend that computes the matrices in between: the inputs of a matrix (and, for
 * attention, the predictions), */
int np_begin_attention(np_engine *engine, uint32_t layer);
void np_begin_projection(np_engine *engine);
/* and what follows from its rows: heads and attention; the addition to the residual stream. */
int np_attend_heads(np_engine *engine, uint32_t layer);
int np_add_projection(np_engine *engine, uint32_t layer);

#endif

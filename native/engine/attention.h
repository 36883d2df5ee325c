/* Attention of one layer. */
#ifndef NP_ATTENTION_H
#define NP_ATTENTION_H
#include "engine/engine.h"

/* Tokens of a piece of attention: more than one in a prompt, since they read keys and values together. */
uint32_t np_attended_tokens(const np_engine *engine);
/* Number of tokens from `first` up to `end` that follow each other in one sequence. */
uint32_t np_following_tokens(const np_engine *engine, uint32_t first, uint32_t end);

/* Multiply a rotated query of token t by the factor of its position, if the model has one. */
void np_grow_query(const np_engine *engine, uint32_t t, size_t width, float *query);

/* Compute queries, keys, values and attention, without changing the residual stream; then add attention's output. */
int np_attention(np_engine *engine, uint32_t layer);
int np_project(np_engine *engine, uint32_t layer);
/* The halves of both, around a matrix that an offload backend computes. First its inputs and, for attention, the
 * predictions; */
int np_begin_attention(np_engine *engine, uint32_t layer);
void np_begin_projection(np_engine *engine);
/* then what depends on its rows: heads and attention; the addition to the residual stream. */
int np_attend_heads(np_engine *engine, uint32_t layer);
/* Compute the keys and values of the step's tokens in a layer without latents, and nothing else of it. */
int np_store_keys_and_values(np_engine *engine, uint32_t layer);
int np_add_projection(np_engine *engine, uint32_t layer);

#endif

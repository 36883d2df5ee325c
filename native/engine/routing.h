/* Routing: which experts compute which tokens, and with which weights. */
#ifndef NP_ROUTING_H
#define NP_ROUTING_H
#include "engine/engine.h"

/* True if the layers have routers that read this input (NP_READS_*). */
int np_router_reads(const np_engine *engine, int reads);
/* Choose every token's experts and group the tokens by expert. Returns a value >= 0, or NP_E_EPOCH. */
int np_route_tokens(np_engine *engine, uint32_t layer);
/* A dense model's only group: all tokens of the step. */
void np_route_dense(np_engine *engine);
/* The experts that a router chooses for the residual stream x, ascending. Their values are left in
 * engine->expert_values. */
void np_choose_experts(np_engine *engine, uint32_t layer, const float *x, uint32_t *chosen);
/* The prepared vectors of a group's tokens: `from` itself in a dense model, else a copy in `to`. */
const np_vectors *np_gather_vectors(np_engine *engine, const np_group *group, const np_vectors *from, np_vectors *to);

#endif

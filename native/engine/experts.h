/* Experts, or slices of a dense model, whose down matrix has a row per output. Such an expert is one cluster and one
 * block, and participants share its work: they claim pieces of its neurons and, after a barrier, pieces of its outputs. */
#ifndef NP_EXPERTS_H
#define NP_EXPERTS_H
#include "engine/engine.h"

/* The number of pieces of an expert's neurons, and of its outputs. */
uint32_t np_neuron_pieces(const np_shape *shape);
uint32_t np_output_pieces(const np_shape *shape);
/* Compute the values of one piece of the current group's neurons. Returns 1, 0 if the expert is absent, or an error. The
 * participant with piece 0 requests an absent expert. */
int np_compute_neuron_piece(np_engine *engine, uint32_t piece);
/* Multiply one piece of the outputs with all values of the group's tokens [from, to), times the pairs' weights, into
 * rows of `partials` from first_row on. All values must be computed, and the window must be open. */
int np_multiply_output_piece(np_engine *engine, uint32_t piece, np_range tokens, uint32_t first_row);

#endif

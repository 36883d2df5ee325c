/* Values and down rows of the clusters of one block. */
#ifndef NP_NEURONS_H
#define NP_NEURONS_H
#include "engine/engine.h"

/* Look up the value parts of clusters that fired, and request the absent ones. Returns the number still absent, or an
 * error. */
int np_look_up_values(np_engine *engine, np_range clusters);
/* Look up both parts of all clusters, and request the absent ones, for a caller that computes no triggers. Returns the
 * number still absent, or an error. */
int np_look_up_both_parts(np_engine *engine, np_range clusters);
/* Compute the values of fired neurons whose value parts are present. */
void np_compute_values(np_engine *engine, np_range clusters);
/* Write the block's partial sums of the group's tokens [from, to) into rows of `partials` from first_row on: the
 * neurons' down rows in index order, times value and the expert's weight. */
int np_add_down_rows(np_engine *engine, uint32_t block, np_range tokens, uint32_t first_row);
/* The address of a neuron's row of a matrix, in an open window whose clusters are present. */
void np_neuron_row(const np_engine *engine, const np_matrix_place *matrix, uint32_t neuron, const void **quants, const void **scales);
/* A neuron's value from its gate and up products. */
float np_neuron_value(const np_engine *engine, float gate, float up);

#endif

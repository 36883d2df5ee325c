/* Recurrent layers: mixers that carry a state from token to token. */
#ifndef NP_RECURRENT_H
#define NP_RECURRENT_H
#include "engine/engine.h"

/* Channels of the layer's convolution; rows of recurrent_input; elements of the gate, and of the output's input; rows of
 * recurrent_rates; elements of the state. */
uint32_t np_channels(const np_shape *s, const np_layer *l);
uint32_t np_recurrent_rows(const np_shape *s, const np_layer *l);
uint32_t np_gate_width(const np_shape *s, const np_layer *l);
uint32_t np_rates(const np_shape *s, const np_layer *l);
size_t np_state_elements(const np_shape *s, const np_layer *l);
/* A layer's part of the state in a slot, from this element on; NULL for NP_NONE. */
float *np_state_at(const np_engine *engine, const np_layer *l, uint32_t slot, size_t element);
/* The elements of a token that a layer's mixer needs in np_shared.queries. */
size_t np_mixer_width(const np_shape *s, const np_layer *l);
/* The elements of a token in engine->rows that np_mix_states needs. */
size_t np_state_rows(const np_shape *s);

/* Divide the step's tokens into runs of one sequence. Returns NP_OK, or NP_E_ARGUMENT if sequences are divided or states
 * do not fit. */
int np_find_runs(np_engine *engine, const np_step *step);
/* Compute a recurrent layer up to the input of its output matrix, which np_recurrent_outputs returns: [T][heads_width].
 * The layer's normed input is prepared. */
int np_mix_states(np_engine *engine, uint32_t layer);
float *np_recurrent_outputs(const np_engine *engine, const np_layer *l);

#endif

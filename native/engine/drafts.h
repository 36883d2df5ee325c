/* Tokens that the draft layer predicts. */
#ifndef NP_DRAFTS_H
#define NP_DRAFTS_H
#include "engine/engine.h"

/* How many of a step's last tokens are to be drafted: those that are NP_DRAFTED. */
uint32_t np_drafted_tokens(const np_step *step);
/* True if this engine can draft the tokens of a step: all but the first one, of one sequence, at consecutive positions
 * from 1 or later on. */
int np_drafts_fit(const np_engine *engine, const np_step *step);
/* Draft the step's last tokens before the other layers, and make them tokens of the step. */
int np_draft_tokens(np_engine *engine, const np_step *step);
/* True if the engine computes the draft layer's keys and values in each step. Those of accelerators do not. */
int np_keeps_draft_state(const np_engine *engine);
/* After the other layers and the logits, store the draft layer's state, and its keys and values of the step's tokens.
 * Changes the residual stream. */
int np_store_draft_state(np_engine *engine);

#endif

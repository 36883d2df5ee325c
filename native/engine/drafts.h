/* Tokens that the draft layer predicts. */
#ifndef NP_DRAFTS_H
#define NP_DRAFTS_H
#include "engine/engine.h"

/* How many of a step's last tokens are to be drafted. */
uint32_t np_drafted_tokens(const np_step *step);
/* True if the step's draft_count and draft_tokens fit it and this engine, and its drafted tokens are those of one sequence. */
int np_drafts_fit(const np_engine *engine, const np_step *step);
/* Draft the step's last tokens before the other layers, and make them tokens of the step. */
int np_draft_tokens(np_engine *engine, const np_step *step);
/* Compute the draft layer's keys and values of the step's first tokens, after the other layers and the logits. Changes the
 * residual stream. */
int np_fill_draft_cache(np_engine *engine, const np_step *step);

#endif

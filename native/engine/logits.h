/* The ends of the model: embeddings, logits, scored tokens. */
#ifndef NP_LOGITS_H
#define NP_LOGITS_H
#include "engine/engine.h"

int np_embed(np_engine *engine);
/* The embedding of one token, scaled, without its position. Returns NP_OK or NP_E_IO. */
int np_embed_token(np_engine *engine, int32_t token, float *out);
/* Prepare the inputs of the logits' matrix. */
void np_begin_logits(np_engine *engine);
/* Prepare these inputs, and compute the logits that the step asks for. */
int np_compute_logits(np_engine *engine);
/* Reset the claims of logits, so that others can be computed in the same step. Between the barrier after the last ones and
 * another barrier: no participant claims pieces of logits then. */
void np_reset_logits_claims(np_engine *engine);
/* Compute the log-probabilities that the step's token_scores asks for, some tokens at a time. */
int np_score_tokens(np_engine *engine);

#endif

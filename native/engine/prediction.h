/* Predictors: which neurons will fire. */
#ifndef NP_PREDICTION_H
#define NP_PREDICTION_H
#include "engine/engine.h"

/* True if the predictor runs at this place (NP_READS_*) in this step. */
int np_predictor_runs(const np_engine *engine, int reads);
/* True if the predictor's vectors differ from the neurons': in type, or because they are not normed. */
int np_predictor_has_input(const np_shape *shape);
/* Compute rank vectors; then, after a barrier, scores and predictions, and request what the predicted neurons need. */
void np_predict_ranks(np_engine *engine, const np_norm *norm);
int np_predict_scores(np_engine *engine);
/* Bit t: a predictor that decides names the neuron for token first + t of the group; 16 tokens. first: a multiple of
 * 8. */
uint32_t np_predicted_tokens(const np_engine *engine, uint32_t neuron, uint32_t first);
/* List the clusters of a range that are predicted for any token, ascending. Returns their number. */
uint32_t np_list_predicted(const np_engine *engine, np_range clusters, uint32_t *list);
/* True if the cluster's value part was requested because of a hint. */
int np_was_hinted(const np_engine *engine, uint32_t cluster);

#endif

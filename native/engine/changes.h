/* What attention and the feed-forward add to the residual stream. If its norm comes after, the whole vector must be known
 * before it is added: sums go to `changes` first, which is normed and added after a barrier. */
#ifndef NP_CHANGES_H
#define NP_CHANGES_H
#include "engine/engine.h"

/* True if outputs of attention and feed-forward are normed. */
static inline int np_norms_outputs(const np_engine *engine)
{
    return engine->shape.norms != NP_NORMS_BEFORE;
}

/* The norm before attention or feed-forward, or NULL if the model has none. */
static inline const np_norm *np_input_norm(const np_engine *engine, const np_norm *norm)
{
    return engine->shape.norms == NP_NORMS_AFTER ? NULL : norm;
}

/* The changes of a token. branch: with norms of branches 1 for the experts that a router chooses, otherwise 0 */
float *np_changes_of(const np_engine *engine, uint32_t token, uint32_t branch);
/* Add values, times the model's residual scale, to columns of a token's residual stream, or as they are to those of its
 * changes. The values may be overwritten. */
void np_add_change(np_engine *engine, uint32_t token, uint32_t branch, uint32_t column, uint32_t count, float *values);
/* Set the columns of `changes` that this participant adds block sums to, in every call of np_add_sums, to zero. */
void np_clear_own_changes(np_engine *engine);
/* Norm each token's changes and add them to its residual stream, and meet. All participants have met before. Behind the
 * feed-forward the residual stream is multiplied by the layer's scale as well. */
int np_add_attention_changes(np_engine *engine, const np_layer *l);
int np_add_feed_forward_changes(np_engine *engine, const np_layer *l);

#endif

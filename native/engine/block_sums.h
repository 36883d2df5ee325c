/* The sums of the down rows of each block, which are added to the residual stream in a fixed order. */
#ifndef NP_BLOCK_SUMS_H
#define NP_BLOCK_SUMS_H
#include "engine/engine.h"

/* True if the block sums of all tokens fit `partials` at once: then a block's down rows are added as soon as its values
 * are computed. Otherwise the values of all blocks come first, and sums are computed for some tokens at a time. */
int np_fit_all_sums(const np_engine *engine);
/* Meet, add the sums of all blocks, and the down matrix's bias, to the residual stream, and meet: of all pairs of these
 * tokens if group is NULL, else of the group's tokens [from, to), whose sums lie in rows from 0 on. */
int np_add_sums(np_engine *engine, const np_group *group, np_range tokens);

#endif

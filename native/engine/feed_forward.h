/* The feed-forward of one layer. */
#ifndef NP_FEED_FORWARD_H
#define NP_FEED_FORWARD_H
#include "engine/engine.h"

int np_feed_forward(np_engine *engine, uint32_t layer);
/* The halves of it, around blocks that an offload backend computes: inputs, routes and predictions; then the sum of all
 * blocks. For steps whose block sums fit `partials` at once. */
int np_begin_feed_forward(np_engine *engine, uint32_t layer);
int np_end_feed_forward(np_engine *engine);
/* Open the window of these blocks of a group, unless it is open, and wait until all their clusters are present: for a
 * caller that reads rows without computing neurons. Prefetches the next window. Returns 1, or an error. */
int np_fetch_blocks(np_engine *engine, const np_group *group, np_range blocks);
void np_close_window(np_engine *engine);
/* True if steps of few tokens keep a whole layer of a mixture in the window. */
int np_opens_whole_layers(const np_engine *engine);

#endif

/* How the participants of a step divide a stage's work, and meet. */
#ifndef NP_WORK_H
#define NP_WORK_H
#include "engine/engine.h"

/* Stages whose work is claimed in pieces. Each has one counter per layer; the logits have one of their own behind
 * these. */
enum { NP_WORK_QKV, NP_WORK_ATTEND, NP_WORK_PROJECT, NP_WORK_RANK, NP_WORK_SCORE, NP_WORK_ROUTE, NP_WORK_BLOCKS, NP_WORK_DOWN_ROWS, NP_WORKS };

/* Claim the next of `pieces` pieces; NP_NONE if none is left. */
uint32_t np_claim(np_engine *engine, uint32_t layer, int work, uint32_t pieces);
/* Claim a piece of NP_WORK_BLOCKS or NP_WORK_DOWN_ROWS of the current layer, of the blocks that this participant
 * computes. */
uint32_t np_claim_shared_blocks(np_engine *engine, int work, uint32_t pieces);
/* This participant's even share of n items, for work that is uniform and small. */
np_range np_even_share(const np_engine *engine, uint32_t n);
/* Wait until all participants are here. Returns NP_E_EPOCH when the epoch changed, else a value >= 0. */
int np_meet(np_engine *engine);

#endif

/* Residency of clusters, and requests for those that are absent. */
#ifndef NP_CLUSTERS_H
#define NP_CLUSTERS_H
#include "engine/engine.h"

/* The clusters of these blocks; the last block of a layer may be short. */
np_range np_block_clusters(const np_engine *engine, uint32_t first_block, uint32_t end_block);
/* Look up a part of a cluster of the current group. Returns 1 if it is present (its slot is in engine->slot, valid
 * while the window is open), 0 if not (the slot is NP_NONE), NP_E_DAMAGED if it could not be read. */
int np_look_up(np_engine *engine, int part, uint32_t cluster);
/* Let the layer's clusters be evicted first if a long chunk used most of it; each participant its share. Only after all of
 * them have met: nobody may still read a slot (proof in residency/clock.c). */
void np_forget_scan(np_engine *engine);
/* The request entry for the absent ones of these parts (NP_REQUEST_TRIGGER, NP_REQUEST_VALUE); 0 if none is absent. */
uint32_t np_absent_parts(np_engine *engine, uint32_t layer, uint32_t expert, uint32_t cluster, uint32_t parts);
/* Request clusters that the step waits for; blocks while the ring is full. Returns NP_OK or NP_E_EPOCH. */
int np_request_clusters(np_engine *engine, const uint32_t *entries, uint32_t count);
/* Request what later work will need (flag NP_REQUEST_PREFETCH) or may need (NP_REQUEST_SPECULATIVE); dropped if the
 * ring is full. */
void np_request_ahead(np_engine *engine, uint32_t layer, uint32_t expert, np_range blocks, uint32_t parts, uint32_t flag);
/* The parts to prefetch of a cluster whose triggers are all computed: value parts too if a cluster is read as a whole,
 * or if nearly every neuron fires. */
uint32_t np_parts_ahead(const np_engine *engine, uint32_t layer, uint32_t tokens);

#endif

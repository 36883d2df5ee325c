/* What all eviction rules need. Windows are as of np_clock_take. */
#ifndef NP_RESIDENCY_EVICTION_H
#define NP_RESIDENCY_EVICTION_H
#include "neuronpipe.h"

/* True if a window covers the cluster. */
int np_is_covered(const uint64_t *windows, size_t window_count, size_t id);
/* Empty a present entry's slot. C, P, S and E follow each other directly: a worker that looks up after C sets the bit
 * before it reads, and E fails; one that looked up before C has a read window that S sees. Returns 1 if the slot is
 * empty. */
int np_entry_vacate(uint32_t *word, size_t id, const uint64_t *windows, size_t window_count);
/* Evict scanned entries without uses before each window, the nearest first. A prompt reads layer after layer, so what it
 * has just read is what it needs last. Writes the freed slots and returns their number. uses: NULL, or uses of experts,
 * of which one may have had the weight of the last one. */
size_t np_scanned_take(uint32_t *words, size_t count, const np_uses *uses, const uint64_t *windows, size_t window_count, size_t max_slots,
                       uint32_t *slots);

#endif

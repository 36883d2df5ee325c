/* Queues of clusters that wait to be read. */
#ifndef NP_FLASH_QUEUES_H
#define NP_FLASH_QUEUES_H
#include "flash/loader_state.h"

/* True if these arguments of a request are in range. */
int np_loader_is_request(const np_loader *loader, int parts, const uint32_t *ids, size_t count, uint32_t flags);
/* Append to a queue. is_retry: the cluster's read failed, and it may use the reserve. Returns 0 if the queue is
 * full. */
int np_queue_append(np_queue *queue, uint32_t entry, int is_retry);
void np_queue_drop_first(np_queue *queue);
/* True if nothing has to be read for this residency entry: it is present, loading or failed. Sets NP_ENTRY_PINNED if
 * `flags` has it. */
int np_is_settled(uint32_t *entry, uint32_t flags);
/* The clusters that wait for a part. Of the warm-up only pinned ones count: the cache has to make room for them. */
uint32_t np_loader_count_waiting(const np_loader *loader, int part);

#endif

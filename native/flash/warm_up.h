/* The warm-up set: clusters to load while nothing more urgent waits. */
#ifndef NP_FLASH_WARM_UP_H
#define NP_FLASH_WARM_UP_H
#include "flash/loader_state.h"

int np_warm_up_is_on(const np_loader *loader);
/* The parts of a cluster in the set, as NP_REQUEST_TRIGGER and _VALUE. */
uint32_t np_warm_up_parts(const np_loader *loader, uint32_t id);
/* The next cluster in the order of the file, pinned ones before all others. Returns 0 if the set is empty. */
int np_warm_up_next(const np_loader *loader, uint32_t *id);
int np_warm_up_is_pinned(const np_loader *loader, int part, uint32_t id);
/* Remove a part that is being read or present. Returns 1 if it was in the set. */
int np_warm_up_remove(np_loader *loader, int part, uint32_t id);
/* Memory is full: remove all clusters of a part that are not pinned. */
void np_warm_up_give_up(np_loader *loader, int part);
/* Add the time since the last call to the counters while the set is not empty. */
void np_warm_up_count_time(np_loader *loader);
void np_warm_up_clear(np_loader *loader);

#endif

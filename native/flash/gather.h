/* From queues to reads. */
#ifndef NP_FLASH_GATHER_H
#define NP_FLASH_GATHER_H
#include "flash/loader_state.h"

/* Claim the clusters that can be read now and put them into reads: fills `batch`. Returns the number of reads. */
uint32_t np_loader_gather(np_loader *loader);

#endif

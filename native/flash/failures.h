/* Clusters that cannot be read. */
#ifndef NP_FLASH_FAILURES_H
#define NP_FLASH_FAILURES_H
#include "flash/loader_state.h"

/* Mark an entry as failed in the current epoch. */
void np_loader_fail(np_loader *loader, uint32_t *entry);
/* Make entries that failed in an earlier epoch absent, so that they can be requested again. */
void np_loader_retry_failed(np_loader *loader);

#endif

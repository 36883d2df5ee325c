/* The loader's side of the request rings. */
#ifndef NP_FLASH_DRAIN_H
#define NP_FLASH_DRAIN_H
#include "flash/loader_state.h"

/* Queue the entries of all rings. */
void np_loader_drain(np_loader *loader);
/* True if a ring has entries; sequentially consistent. */
int np_loader_has_requests(const np_loader *loader);

#endif

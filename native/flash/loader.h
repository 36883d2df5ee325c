/* A loader's reads in flight. */
#ifndef NP_FLASH_LOADER_H
#define NP_FLASH_LOADER_H
#include "flash/loader_state.h"

/* Wait for all reads in flight, publish their clusters and wake the workers. */
void np_loader_land_all(np_loader *loader);
/* Reads that are not published: in flight, or on their way from staging into slots. */
uint32_t np_loader_in_flight(const np_loader *loader);

#endif

/* Checking what a read brought, and bringing it into slots; of long reads beside the loader's thread. */
#ifndef NP_FLASH_FILL_H
#define NP_FLASH_FILL_H
#include <stdint.h>

#include "flash/loader.h"

/* Of each claim of a flight whether its bytes are what was written; where they are, bring them into its slot. Touches nothing else of
 * the loader, so that it may be done for several flights at once. */
void np_fill_slots(const np_loader *loader, np_flight *flight);

/* A thread for that. NULL where there is none; then it takes nothing, and holds nothing. The calls are the loader's thread's. */
np_filler *np_filler_start(np_loader *loader);
void np_filler_stop(np_filler *filler);
/* Offer it a read that has ended. Returns 1 if it will be filled there, and 0 if the caller had better: it is short, or that thread is
 * busy. */
int np_filler_take(np_filler *filler, uint32_t flight);
/* One that is filled, to be published. Returns 0 when there is none. */
int np_filler_next(np_filler *filler, uint32_t *flight);
/* How many it has taken that np_filler_next has not given back. */
uint32_t np_filler_held(const np_filler *filler);
/* Wait until np_filler_next has one, or nothing is held; at most so long, -1: for ever. */
void np_filler_wait(np_filler *filler, int timeout_ms);

#endif

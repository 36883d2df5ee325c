/* Verifying what a read brought and copying it into slots; long reads in a second thread. */
#ifndef NP_FLASH_FILL_H
#define NP_FLASH_FILL_H
#include "flash/loader_state.h"

/* Verify each claim of a flight, and copy valid ones into their slots. Several flights may be filled at once: of the
 * loader only the pages of slots change, which have a lock. */
void np_fill_slots(np_loader *loader, np_flight *flight);
/* The same for a long range of which only bytes before `end`, an offset in the file, have arrived: go on with claims from
 * where they were left. Those that are whole are valid, or their checksums are wrong. */
void np_fill_arrived(np_loader *loader, np_flight *flight, uint64_t end);

/* The second thread. A NULL filler accepts nothing. Only the loader's thread calls these functions. */
np_filler *np_filler_start(np_loader *loader);
void np_filler_stop(np_filler *filler);
/* Offer a read that has ended. Returns 0 if the caller should fill it itself: it is short, or the thread is busy. */
int np_filler_accept(np_filler *filler, uint32_t flight);
/* The next filled read, to be published. Returns 0 if there is none. */
int np_filler_next(np_filler *filler, uint32_t *flight);
/* The number of accepted reads that np_filler_next has not returned. */
uint32_t np_filler_pending(const np_filler *filler);
/* Wait until np_filler_next has a read, at most timeout_ms (-1: no limit). Returns at once if none is pending. */
void np_filler_wait(np_filler *filler, int timeout_ms);

#endif

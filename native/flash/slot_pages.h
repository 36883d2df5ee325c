/* Huge pages under the weight slots of one part. */
#ifndef NP_FLASH_SLOT_PAGES_H
#define NP_FLASH_SLOT_PAGES_H
#include "flash/loader_state.h"

/* Returns 0 if memory is short. */
int np_slot_pages_create(np_slot_pages *pages, const np_loader_part *config);
void np_slot_pages_destroy(np_slot_pages *pages);
/* The cache has granted a slot: memory up to its end may be used. Only the loader's thread. */
void np_slot_pages_grant(np_slot_pages *pages, const np_loader_part *config, uint32_t slot);
/* Before a slot is filled, from any thread: make the memory that it lies in one huge page, or several, if no thread has
 * tried it yet and all of it may be used. */
void np_slot_pages_prepare(np_slot_pages *pages, const np_loader_part *config, uint32_t slot);
/* Return the memory from first_slot on to the system; it may not be used before its slots are granted again. Only the
 * loader's thread. Returns NP_OK, or NP_E_IO if the system refuses. */
int np_slot_pages_trim(np_slot_pages *pages, const np_loader_part *config, uint32_t first_slot);
/* Map up to `bytes` more of the memory that may be used. Only the loader's thread. Returns 0 if all is mapped. */
int np_slot_pages_map(np_slot_pages *pages, const np_loader_part *config, size_t bytes);

#endif

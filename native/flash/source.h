/* Experts that are read in place, from files of another format. */
#ifndef NP_FLASH_SOURCE_H
#define NP_FLASH_SOURCE_H
#include "flash/loader_state.h"

/* True if the source's matrices fit the parts' slots, its files are the reader's, and a staging buffer holds
 * either part. */
int np_is_source_valid(const np_loader_reading *reading, const np_loader_part *parts, const np_reader *reader);
/* The staging bytes for these parts of a cluster. */
uint64_t np_source_read_bytes(const np_loader *loader, uint32_t entry);
/* Set the flight's reads, for these parts of a cluster. */
void np_plan_source_reads(const np_loader *loader, uint32_t entry, np_flight *flight);
/* Verify the flight's claims and convert their rows into the slots. Writes the flight, these slots and the checksums of
 * these clusters only, so that several flights may be filled at once. */
void np_fill_from_source(const np_loader *loader, np_flight *flight);

#endif

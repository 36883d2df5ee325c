/* The one waiting loop that barriers and words share. */
#ifndef NP_SYNC_WAIT_H
#define NP_SYNC_WAIT_H
#include <stdint.h>

/* Wait until *word != seen. `sleepers` (or NULL) counts, in shared memory, those who may have to be woken.
 * Returns NP_OK, NP_E_EPOCH or NP_E_TIMEOUT; the epoch is looked at first. */
int np_wait_changed(const uint32_t *word, uint32_t seen, uint32_t *sleepers, const uint32_t *epoch, uint32_t expected_epoch,
                    uint32_t spin_us, uint32_t timeout_ms);

#endif

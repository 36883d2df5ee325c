/* The waiting loop of barriers, words and step channels. */
#ifndef NP_SYNC_WAIT_H
#define NP_SYNC_WAIT_H
#include <stdint.h>

/* Wait until *word != old_value. sleepers: a count of sleepers in shared memory, or NULL. Returns NP_OK, NP_E_EPOCH or
 * NP_E_TIMEOUT; the epoch is checked first. */
int np_wait_changed(const uint32_t *word, uint32_t old_value, uint32_t *sleepers, const uint32_t *epoch, uint32_t expected_epoch,
                    uint32_t spin_us, uint32_t timeout_ms);

#endif

/* The worker's side of its request ring; drain.c has the loader's side.
 *
 * No doorbell is lost: the worker advances `tail` and then reads `asleep`; the loader sets `asleep` and then reads
 * every `tail`. All accesses are sequentially consistent, so at least one of the two sees the other. */
#include <unistd.h>

#include "neuronpipe.h"

uint32_t np_requests_put(const np_requests *requests, const uint32_t *entries, uint32_t count)
{
    const uint32_t tail = __atomic_load_n(requests->tail, __ATOMIC_RELAXED);
    const uint32_t used = tail - __atomic_load_n(requests->head, __ATOMIC_ACQUIRE);
    const uint32_t room = used < requests->capacity ? requests->capacity - used : 0;
    const uint32_t accepted = count < room ? count : room;
    for (uint32_t i = 0; i < accepted; i++)
        requests->entries[(tail + i) & (requests->capacity - 1)] = entries[i];
    if (!accepted)
        return 0;
    __atomic_store_n(requests->tail, tail + accepted, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(requests->asleep, __ATOMIC_SEQ_CST) && __atomic_exchange_n(requests->asleep, 0, __ATOMIC_SEQ_CST) &&
        requests->doorbell >= 0) {
        const ssize_t rung = write(requests->doorbell, "", 1); /* a full pipe wakes the loader just as well */
        (void)rung;
    }
    return accepted;
}

/* The barrier of a step's participants.
 *
 *   word      changed by                            ordering
 *   arrived   each participant; the last zeroes it  acquire-release: the last participant sees what the others wrote
 *   phase     the last participant                  sequentially consistent store: all participants see what the others wrote
 *   waiters   a participant going to sleep          sequentially consistent, like the last participant's load
 *
 * No wake-up is lost: a participant adds itself to `waiters` and then reads `phase`; the last participant changes
 * `phase` and then reads `waiters`. All are sequentially consistent, so at least one sees the other; and the futex
 * compares `phase` again. `arrived` is zeroed before `phase` changes, so a released participant that reaches the
 * barrier again counts from zero.
 *
 * A participant that leaves because of the epoch, or dies, stays counted in `arrived`: the barrier is not used again
 * before np_barrier_reset. A sleeper that died stays counted in `waiters`, which only causes needless wake-ups. */
#include "neuronpipe.h"
#include "sync/wait.h"

void np_barrier_reset(np_barrier *barrier)
{
    __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&barrier->waiters, 0, __ATOMIC_RELAXED);
    __atomic_add_fetch(&barrier->phase, 1, __ATOMIC_SEQ_CST);
}

int np_barrier_wait(np_barrier *barrier, uint32_t participants, const uint32_t *epoch, uint32_t expected_epoch, uint32_t spin_us,
                    uint32_t timeout_ms)
{
    if (participants == 0)
        return NP_E_ARGUMENT;
    if (__atomic_load_n(epoch, __ATOMIC_ACQUIRE) != expected_epoch)
        return NP_E_EPOCH; /* the barrier of an abandoned step may be in use by the next one */
    const uint32_t phase = __atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE); /* cannot change before this participant arrives */
    const uint32_t arrived = __atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL);
    if (arrived > participants)
        return NP_E_ARGUMENT;
    if (arrived < participants)
        return np_wait_changed(&barrier->phase, phase, &barrier->waiters, epoch, expected_epoch, spin_us, timeout_ms);
    __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&barrier->phase, phase + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&barrier->waiters, __ATOMIC_SEQ_CST))
        np_word_wake(&barrier->phase);
    return 1;
}

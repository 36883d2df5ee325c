/* Waiting on words in shared memory: a short spin, then a futex that several processes may sleep on. */
#include "sync/wait.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "neuronpipe.h"
#include "sync/clock.h"

/* A new epoch does not change the word that a sleeper's futex compares, so a wake-up between reading the epoch and the
 * system call is lost. Sleeping in slices bounds the delay. */
enum { SLICE_MS = 20 };
enum { SPINS_PER_CLOCK = 16 }; /* a pause takes up to 140 cycles, and reading the clock about as long */

static int epoch_changed(const uint32_t *epoch, uint32_t expected)
{
    return __atomic_load_n(epoch, __ATOMIC_ACQUIRE) != expected;
}

/* Sequentially consistent: after a sleeper has counted itself, this load and the waker's load of the count cannot both
 * miss. */
static int has_changed(const uint32_t *word, uint32_t old_value)
{
    return __atomic_load_n(word, __ATOMIC_SEQ_CST) != old_value;
}

/* May return early (changed word, signal, time-out, wake-up): the caller checks again. */
static void sleep_on(const uint32_t *word, uint32_t old_value, uint64_t limit_ns)
{
    const struct timespec limit = {(time_t)(limit_ns / 1000000000u), (long)(limit_ns % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT, old_value, &limit, NULL, 0);
}

int np_wait_changed(const uint32_t *word, uint32_t old_value, uint32_t *sleepers, const uint32_t *epoch, uint32_t expected_epoch,
                    uint32_t spin_us, uint32_t timeout_ms)
{
    if (epoch_changed(epoch, expected_epoch))
        return NP_E_EPOCH;
    if (has_changed(word, old_value))
        return NP_OK;
    const uint64_t start = np_clock_ns();
    const uint64_t end = timeout_ms ? start + timeout_ms * 1000000ull : UINT64_MAX;
    const uint64_t spin_end = start + spin_us * 1000ull;
    for (uint64_t now = start; now < spin_end && now < end; now = np_clock_ns())
        for (int spin = 0; spin < SPINS_PER_CLOCK; spin++) {
            if (epoch_changed(epoch, expected_epoch))
                return NP_E_EPOCH;
            if (has_changed(word, old_value))
                return NP_OK;
            np_pause();
        }
    if (sleepers)
        __atomic_add_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
    int result;
    for (;;) {
        if (epoch_changed(epoch, expected_epoch)) {
            result = NP_E_EPOCH;
            break;
        }
        if (has_changed(word, old_value)) {
            result = NP_OK;
            break;
        }
        const uint64_t now = np_clock_ns();
        if (now >= end) {
            result = NP_E_TIMEOUT;
            break;
        }
        const uint64_t slice = SLICE_MS * 1000000ull;
        sleep_on(word, old_value, end - now < slice ? end - now : slice);
    }
    if (sleepers)
        __atomic_sub_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
    return result;
}

int np_word_wait(const uint32_t *word, uint32_t old_value, const uint32_t *epoch, uint32_t expected_epoch, uint32_t spin_us,
                 uint32_t timeout_ms)
{
    return np_wait_changed(word, old_value, NULL, epoch, expected_epoch, spin_us, timeout_ms);
}

void np_word_wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

uint32_t np_epoch_advance(uint32_t *epoch, uint32_t **words, size_t count)
{
    const uint32_t now = __atomic_add_fetch(epoch, 1, __ATOMIC_SEQ_CST);
    for (size_t i = 0; i < count; i++)
        np_word_wake(words[i]);
    return now;
}

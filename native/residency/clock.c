/* CLOCK with usage counts, the replacement rule, and why a slot is never taken from under a worker.
 *
 * A worker that looks a word up sets its reference bit, once. The hand goes round: where it finds the bit, it turns it into a use, up to
 * NP_MAX_USES; where it does not, it takes one use away; a cluster without uses goes. Only the hand counts, so that looking
 * often costs a worker nothing.
 *
 *   worker                                        cache
 *   W  read window := [first, end)                C  clear the reference bit of a present word
 *   L  look: present and referenced, or           ...                  (one turn of the hand later, perhaps in a new process)
 *      R  present: set the reference bit          P  the word is present and unreferenced
 *   ...read the slot...                           S  no read window covers it
 *   Z  read window := another or none             E  present, unreferenced -> absent, if the word is still as in P
 *
 * All of these are sequentially consistent, so they have one order, and E replaces a word without the bit.
 *   Looked and found it referenced (L): the clearing C that E builds on comes after L, or L would not have seen the bit. So
 *     W < L < C < P < S: the cache sees the read window, or a later one.
 *   Set the bit (R): R comes after E and sees absent; or before it, and then a clearing C lies between them (E would fail
 *     otherwise): W < R < C < P < S again.
 * When S sees a later read window, Z has happened, and with it all reading of the slot: only then may the slot be written again.
 * No word ever turns absent and back, so that neither worker nor loader meets a state which does not last. */
#include "neuronpipe.h"

static int covered(const uint64_t *windows, size_t window_count, size_t id)
{
    for (size_t i = 0; i < window_count; i++) {
        const uint64_t window = __atomic_load_n(&windows[i], __ATOMIC_SEQ_CST);
        if (id >= window >> 32 && id < (window & 0xffffffffu))
            return 1;
    }
    return 0;
}

/* What the hand leaves of a present word: a use more for its reference bit, a use less without it, absent without either. */
static uint32_t passed(uint32_t value)
{
    const uint32_t uses = value / NP_ENTRY_USE & NP_MAX_USES;
    if (value & NP_ENTRY_REFERENCED)
        return (value & ~(uint32_t)NP_ENTRY_REFERENCED) + (uses < NP_MAX_USES ? NP_ENTRY_USE : 0);
    return uses ? value - NP_ENTRY_USE : NP_ENTRY_ABSENT;
}

void np_slots_mark(const uint32_t *words, size_t count, uint8_t *free, size_t slot_count)
{
    for (size_t id = 0; id < count; id++) {
        const uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST), slot = value & NP_ENTRY_SLOT_MASK;
        if ((value & NP_ENTRY_STATE_MASK) == NP_ENTRY_PRESENT && slot < slot_count)
            free[slot] = 0;
    }
}

/* One present word of a slot that is to be empty. C, P, S and E follow each other: a worker that looks after C must set the bit before
 * it reads, and then E fails; who looked before C has a read window that S sees. Returns whether the slot holds nothing now. */
static int vacate(uint32_t *word, size_t id, const uint64_t *windows, size_t window_count)
{
    uint32_t value = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    uint32_t bare = NP_ENTRY_PRESENT | (value & NP_ENTRY_SLOT_MASK);
    if (value != bare && !__atomic_compare_exchange_n(word, &value, bare, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return 0;
    if (covered(windows, window_count, id))
        return 0;
    return __atomic_compare_exchange_n(word, &bare, NP_ENTRY_ABSENT, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

size_t np_slots_vacate(uint32_t *words, size_t count, uint32_t first_slot, const uint64_t *windows, size_t window_count)
{
    size_t left = 0;
    for (size_t id = 0; id < count; id++) {
        const uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST);
        if ((value & NP_ENTRY_STATE_MASK) == NP_ENTRY_PRESENT && (value & NP_ENTRY_SLOT_MASK) >= first_slot)
            left += !vacate(&words[id], id, windows, window_count);
    }
    return left;
}

size_t np_clusters_evict(uint32_t *words, size_t count, const uint32_t *ids, size_t id_count, const uint64_t *windows, size_t window_count,
                         size_t want, uint32_t *slots)
{
    size_t taken = 0;
    for (size_t i = 0; i < id_count && taken < want; i++) {
        const size_t id = ids[i];
        if (id >= count)
            continue;
        const uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST);
        if ((value & (NP_ENTRY_STATE_MASK | NP_ENTRY_PINNED)) == NP_ENTRY_PRESENT && vacate(&words[id], id, windows, window_count))
            slots[taken++] = value & NP_ENTRY_SLOT_MASK;
    }
    return taken;
}

size_t np_clock_take(uint32_t *words, size_t count, size_t *hand, const uint64_t *windows, size_t window_count, size_t want,
                     uint32_t *slots)
{
    if (count == 0)
        return 0;
    size_t taken = 0, at = *hand % count, idle = 0; /* idle: words since one that may ever go */
    /* So many turns empty the most used word; workers that mark words again as fast as they are passed must not keep the cache here. */
    for (size_t visited = 0; visited < (NP_MAX_USES + 2) * count && taken < want && idle < count; visited++) {
        uint32_t value = __atomic_load_n(&words[at], __ATOMIC_SEQ_CST);
        idle++;
        if ((value & (NP_ENTRY_STATE_MASK | NP_ENTRY_PINNED)) == NP_ENTRY_PRESENT && !covered(windows, window_count, at)) {
            const uint32_t left = passed(value);
            idle = 0;
            /* A worker or the loader that is faster set a bit: the word's next turn. */
            if (__atomic_compare_exchange_n(&words[at], &value, left, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) && left == NP_ENTRY_ABSENT)
                slots[taken++] = value & NP_ENTRY_SLOT_MASK;
        }
        at = at + 1 == count ? 0 : at + 1;
    }
    *hand = at;
    return taken;
}

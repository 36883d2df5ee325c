/* What all eviction rules need, and a proof that no slot is evicted while a worker reads it. A look-up sets an entry's
 * reference bit, and a rule clears it some time before it evicts.
 *
 *   worker                                        cache
 *   W  read window := [first, end)                C  clear the reference bit of a present entry
 *   L  look up: present and referenced, or        ...          (with CLOCK a round of the hand later, possibly in a new process)
 *      R  present: set the reference bit          P  the entry is present and unreferenced
 *   ...read the slot...                           S  no read window covers it
 *   Z  read window := another one or none         E  present, unreferenced -> absent, if the entry is still as in P
 *
 * All of these are sequentially consistent, so they have one total order, and E replaces an entry without the bit.
 *   If L found the bit set, the clearing C before E comes after L, or L would not have seen the bit. So W < L < C < P < S: the cache sees
 *     the read window, or a later one.
 *   If R set the bit, R either comes after E, and sees an absent entry; or before E, and then a clearing C lies between them, because E would
 *     fail otherwise: again W < R < C < P < S.
 * A clearing by np_entry_forget takes the place of C: it also comes after L or before R. Between S and E it could undo R and let E
 * succeed under a reader, so a worker clears only after all workers of its step have read, and steps follow one another.
 * If S sees a later read window, Z has happened, and all reads of the slot before it: only then may the slot be written
 * again. No entry turns absent temporarily, so workers and the loader only see states that last. */
#include "residency/eviction.h"

enum { SCAN_ENTRIES = 4096, MAX_OTHERS = 256 }; /* so many entries before a window are looked at, and others than scanned ones */

int np_is_covered(const uint64_t *windows, size_t window_count, size_t id)
{
    for (size_t i = 0; i < window_count; i++) {
        const uint64_t window = __atomic_load_n(&windows[i], __ATOMIC_SEQ_CST);
        if (id >= window >> 32 && id < (window & 0xffffffffu))
            return 1;
    }
    return 0;
}

void np_slots_mark(const uint32_t *words, size_t count, uint8_t *free, size_t slot_count)
{
    for (size_t id = 0; id < count; id++) {
        const uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST), slot = value & NP_ENTRY_SLOT_MASK;
        if ((value & NP_ENTRY_STATE_MASK) == NP_ENTRY_PRESENT && slot < slot_count)
            free[slot] = 0;
    }
}

int np_entry_vacate(uint32_t *word, size_t id, const uint64_t *windows, size_t window_count)
{
    uint32_t value = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    uint32_t cleared = NP_ENTRY_PRESENT | (value & NP_ENTRY_SLOT_MASK);
    if (value != cleared && !__atomic_compare_exchange_n(word, &value, cleared, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return 0;
    if (np_is_covered(windows, window_count, id))
        return 0;
    return __atomic_compare_exchange_n(word, &cleared, NP_ENTRY_ABSENT, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

size_t np_slots_vacate(uint32_t *words, size_t count, uint32_t first_slot, const uint64_t *windows, size_t window_count)
{
    size_t remaining = 0;
    for (size_t id = 0; id < count; id++) {
        const uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST);
        if ((value & NP_ENTRY_STATE_MASK) == NP_ENTRY_PRESENT && (value & NP_ENTRY_SLOT_MASK) >= first_slot)
            remaining += !np_entry_vacate(&words[id], id, windows, window_count);
    }
    return remaining;
}

size_t np_clusters_evict(uint32_t *words, size_t count, const uint32_t *ids, size_t id_count, const uint64_t *windows, size_t window_count,
                         size_t max_slots, uint32_t *slots)
{
    size_t evicted = 0;
    for (size_t i = 0; i < id_count && evicted < max_slots; i++) {
        const size_t id = ids[i];
        if (id >= count)
            continue;
        const uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST);
        if ((value & (NP_ENTRY_STATE_MASK | NP_ENTRY_PINNED)) == NP_ENTRY_PRESENT && np_entry_vacate(&words[id], id, windows, window_count))
            slots[evicted++] = value & NP_ENTRY_SLOT_MASK;
    }
    return evicted;
}

size_t np_scanned_take(uint32_t *words, size_t count, const np_uses *uses, const uint64_t *windows, size_t window_count, size_t max_slots,
                       uint32_t *slots)
{
    const uint32_t bits = NP_ENTRY_STATE_MASK | NP_ENTRY_PINNED | NP_ENTRY_REFERENCED | NP_ENTRY_SCANNED | NP_MAX_USES * (uint32_t)NP_ENTRY_USE;
    size_t evicted = 0;
    for (size_t i = 0; i < window_count && evicted < max_slots; i++) {
        const uint64_t window = __atomic_load_n(&windows[i], __ATOMIC_SEQ_CST);
        size_t others = 0;
        for (size_t n = 1; window && n < count && n <= SCAN_ENTRIES && others < MAX_OTHERS && evicted < max_slots; n++) {
            const size_t id = ((window >> 32) + count - n) % count;
            uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST);
            if ((value & bits) != (NP_ENTRY_PRESENT | NP_ENTRY_SCANNED) || (uses && uses->sums[id / uses->clusters] > uses->weight) || np_is_covered(windows, window_count, id))
                others += (value & NP_ENTRY_STATE_MASK) != NP_ENTRY_ABSENT;
            else if (__atomic_compare_exchange_n(&words[id], &value, NP_ENTRY_ABSENT, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
                slots[evicted++] = value & NP_ENTRY_SLOT_MASK;
        }
    }
    return evicted;
}

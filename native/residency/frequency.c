/* LFU with ageing, for experts that are read whole: of recorded routes it misses up to 12 % less than CLOCK where
 * memory holds a tenth to a fifth of the experts. A use counts more than the one before, by a factor, which is the same as if
 * all counts decayed. Uses are collected from reference bits, at each eviction, of entries that no window covers: what a
 * long chunk of a prompt has just read is forgotten by then, and does not count. */
#include "residency/eviction.h"

enum { MAX_CANDIDATES = 32 }; /* of one pass over all entries */
static const double LARGEST_WEIGHT = 1e100;

static void collect(uint32_t *words, size_t count, double *uses, double *weight, double growth, const uint64_t *windows, size_t window_count)
{
    for (size_t id = 0; id < count; id++) {
        uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST);
        if ((value & (NP_ENTRY_STATE_MASK | NP_ENTRY_REFERENCED)) != (NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED) || np_is_covered(windows, window_count, id))
            continue;
        if (!__atomic_compare_exchange_n(&words[id], &value, value & ~(uint32_t)NP_ENTRY_REFERENCED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue; /* it counts the next time */
        *weight *= growth;
        uses[id] += *weight;
    }
    if (*weight <= LARGEST_WEIGHT)
        return;
    for (size_t id = 0; id < count; id++)
        uses[id] /= *weight;
    *weight = 1.0;
}

/* Find up to `most` entries that can be evicted, with the fewest uses, the fewest first; of equal ones those next after
 * `hand`. Returns their number. */
static size_t find_least_used(const uint32_t *words, size_t count, const double *uses, size_t hand, const uint64_t *windows, size_t window_count,
                              size_t most, size_t *ids)
{
    size_t found = 0;
    for (size_t n = 0, id = hand; n < count; n++, id = id + 1 == count ? 0 : id + 1) {
        const uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST);
        if ((value & (NP_ENTRY_STATE_MASK | NP_ENTRY_PINNED | NP_ENTRY_REFERENCED)) != NP_ENTRY_PRESENT || np_is_covered(windows, window_count, id))
            continue;
        if (found == most && uses[id] >= uses[ids[most - 1]])
            continue;
        size_t at = found < most ? found++ : most - 1;
        for (; at && uses[ids[at - 1]] > uses[id]; at--)
            ids[at] = ids[at - 1];
        ids[at] = id;
    }
    return found;
}

size_t np_least_used_take(uint32_t *words, size_t count, double *uses, double *weight, double growth, size_t *hand, const uint64_t *windows,
                          size_t window_count, size_t max_slots, uint32_t *slots)
{
    if (count == 0)
        return 0;
    collect(words, count, uses, weight, growth, windows, window_count);
    size_t evicted = np_scanned_take(words, count, uses, *weight, windows, window_count, max_slots, slots);
    for (size_t before = evicted + 1; evicted < max_slots && evicted != before;) {
        size_t ids[MAX_CANDIDATES];
        const size_t most = max_slots - evicted < MAX_CANDIDATES ? max_slots - evicted : MAX_CANDIDATES;
        const size_t found = find_least_used(words, count, uses, *hand % count, windows, window_count, most, ids);
        before = evicted;
        for (size_t i = 0; i < found; i++) {
            const uint32_t slot = __atomic_load_n(&words[ids[i]], __ATOMIC_SEQ_CST) & NP_ENTRY_SLOT_MASK; /* of an entry that only this process evicts */
            if (!np_entry_vacate(&words[ids[i]], ids[i], windows, window_count))
                continue;
            slots[evicted++] = slot;
            *hand = ids[i] + 1;
        }
    }
    return evicted;
}

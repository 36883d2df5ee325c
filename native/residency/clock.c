/* CLOCK with usage counts. A look-up sets an entry's reference bit. The hand circulates: it turns the bit into a use, up
 * to NP_MAX_USES; without the bit it removes a use; an entry without uses is evicted. Only the hand writes uses, so
 * frequent look-ups cost a worker nothing. */
#include "residency/eviction.h"

/* A present entry after the hand: the reference bit becomes a use; without it a use is removed; without either it is
 * absent. */
static uint32_t after_hand(uint32_t value)
{
    const uint32_t uses = value / NP_ENTRY_USE & NP_MAX_USES;
    value &= ~(uint32_t)NP_ENTRY_SCANNED;
    if (value & NP_ENTRY_REFERENCED)
        return (value & ~(uint32_t)NP_ENTRY_REFERENCED) + (uses < NP_MAX_USES ? NP_ENTRY_USE : 0);
    return uses ? value - NP_ENTRY_USE : NP_ENTRY_ABSENT;
}

size_t np_clock_take(uint32_t *words, size_t count, size_t *hand, const uint64_t *windows, size_t window_count, size_t max_slots,
                     uint32_t *slots)
{
    if (count == 0)
        return 0;
    size_t evicted = np_scanned_take(words, count, NULL, windows, window_count, max_slots, slots), at = *hand % count, idle = 0; /* idle: entries since the last one that can be evicted at all */
    /* So many rounds evict the most used entry. The limit matters if workers set bits as fast as the hand clears
     * them. */
    for (size_t visited = 0; visited < (NP_MAX_USES + 2) * count && evicted < max_slots && idle < count; visited++) {
        uint32_t value = __atomic_load_n(&words[at], __ATOMIC_SEQ_CST);
        idle++;
        if ((value & (NP_ENTRY_STATE_MASK | NP_ENTRY_PINNED)) == NP_ENTRY_PRESENT && !np_is_covered(windows, window_count, at)) {
            const uint32_t next = after_hand(value);
            idle = 0;
            /* If a worker or the loader set a bit meanwhile, the entry stays until the next round. */
            if (__atomic_compare_exchange_n(&words[at], &value, next, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) && next == NP_ENTRY_ABSENT)
                slots[evicted++] = value & NP_ENTRY_SLOT_MASK;
        }
        at = at + 1 == count ? 0 : at + 1;
    }
    *hand = at;
    return evicted;
}

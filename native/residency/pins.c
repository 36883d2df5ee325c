/* Pinning: bit 27 of present entries, set to what the plan says for the number of sequences in a step.
 *
 *   process  when                          how
 *   loader   with `present`, in a warm-up  part of its store: only the loader changes a loading entry
 *   loader   present, requested again      compare and set (flash/queues.c)
 *   cache    present (here)                compare and set
 *
 * All are sequentially consistent, and a compare and set that fails because a worker set the reference bit is repeated,
 * so that no bit is lost. Pinning neither frees nor fills a slot: unpinned clusters are evicted later by CLOCK
 * (clock.c), whose proof does not depend on bit 27. CLOCK runs in the process that calls this, so that no entry is
 * evicted and pinned at once. */
#include "neuronpipe.h"

/* Set or clear the pinned bit of a present entry. Returns the entry. */
static uint32_t set_pinned(uint32_t *word, uint32_t bit)
{
    uint32_t value = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    while ((value & NP_ENTRY_STATE_MASK) == NP_ENTRY_PRESENT && (value & NP_ENTRY_PINNED) != bit) {
        const uint32_t next = (value & ~(uint32_t)NP_ENTRY_PINNED) | bit;
        if (__atomic_compare_exchange_n(word, &value, next, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return next;
    }
    return value;
}

size_t np_pins_follow(uint32_t *words, size_t ffns, size_t clusters, const uint32_t *keep, const uint32_t *widest, uint32_t *absent,
                      size_t max_absent, size_t *pinned_in_excess)
{
    size_t absent_or_loading = 0, listed = 0;
    *pinned_in_excess = 0;
    for (size_t ffn = 0; ffn < ffns; ffn++) {
        const size_t end = widest[ffn] < clusters ? widest[ffn] : clusters;
        for (size_t cluster = 0; cluster < end; cluster++) {
            const size_t id = ffn * clusters + cluster;
            const int is_kept = cluster < keep[ffn];
            const uint32_t value = set_pinned(&words[id], is_kept ? NP_ENTRY_PINNED : 0), state = value & NP_ENTRY_STATE_MASK;
            if (!is_kept) {
                *pinned_in_excess += state == NP_ENTRY_LOADING && (value & NP_ENTRY_PINNED);
                continue;
            }
            absent_or_loading += state == NP_ENTRY_ABSENT || state == NP_ENTRY_LOADING;
            if (state == NP_ENTRY_ABSENT && listed < max_absent)
                absent[listed++] = (uint32_t)id;
        }
    }
    for (; listed < max_absent; listed++)
        absent[listed] = UINT32_MAX;
    return absent_or_loading;
}

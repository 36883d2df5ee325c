/* Which clusters stay: bit 27 of present words, brought to what the plan says for the texts of a step.
 *
 *   who      when                          how
 *   loader   with `present`, of a warm-up  part of its store: nobody else changes a word that is loading
 *   loader   present, asked for again      compare and set (flash/gather.c)
 *   cache    present (here)                compare and set
 *
 * All are sequentially consistent, and a compare and set that lost against a worker's reference bit is made again, so that no bit is
 * lost on any processor. Neither change frees or fills a slot: what is no longer pinned goes, later, by CLOCK's own rule (clock.c), whose
 * argument does not depend on bit 27; and CLOCK runs in the process that calls this, so that a word is never taken and pinned at once. */
#include "neuronpipe.h"

/* Give a present word the bit, or take it away. Returns what the word then is. */
static uint32_t bring(uint32_t *word, uint32_t bit)
{
    uint32_t value = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    while ((value & NP_ENTRY_STATE_MASK) == NP_ENTRY_PRESENT && (value & NP_ENTRY_PINNED) != bit) {
        const uint32_t wanted = (value & ~(uint32_t)NP_ENTRY_PINNED) | bit;
        if (__atomic_compare_exchange_n(word, &value, wanted, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return wanted;
    }
    return value;
}

size_t np_pins_follow(uint32_t *words, size_t ffns, size_t clusters, const uint32_t *keep, const uint32_t *widest, uint32_t *absent,
                      size_t most, size_t *others)
{
    size_t left = 0, noted = 0;
    *others = 0;
    for (size_t ffn = 0; ffn < ffns; ffn++) {
        const size_t end = widest[ffn] < clusters ? widest[ffn] : clusters;
        for (size_t cluster = 0; cluster < end; cluster++) {
            const size_t id = ffn * clusters + cluster;
            const int stays = cluster < keep[ffn];
            const uint32_t value = bring(&words[id], stays ? NP_ENTRY_PINNED : 0), state = value & NP_ENTRY_STATE_MASK;
            if (!stays) {
                *others += state == NP_ENTRY_LOADING && (value & NP_ENTRY_PINNED);
                continue;
            }
            left += state == NP_ENTRY_ABSENT || state == NP_ENTRY_LOADING;
            if (state == NP_ENTRY_ABSENT && noted < most)
                absent[noted++] = (uint32_t)id;
        }
    }
    for (; noted < most; noted++)
        absent[noted] = UINT32_MAX;
    return left;
}

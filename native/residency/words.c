/* What workers do to residency entries. */
#include "neuronpipe.h"

uint32_t np_entry_look(uint32_t *word)
{
    uint32_t value = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    /* Written only if the bit is not set, so that the cache lines of hot entries stay shared. If the cache process
     * changed the entry meanwhile, the exchange fails and loads the new value, which is returned. */
    while ((value & (NP_ENTRY_STATE_MASK | NP_ENTRY_REFERENCED)) == NP_ENTRY_PRESENT)
        if (__atomic_compare_exchange_n(word, &value, (value & ~(uint32_t)NP_ENTRY_SCANNED) | NP_ENTRY_REFERENCED, 0, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
            return (value & ~(uint32_t)NP_ENTRY_SCANNED) | NP_ENTRY_REFERENCED;
    return value;
}

void np_entry_forget(uint32_t *word)
{
    uint32_t value = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    /* If anybody changes the entry meanwhile, it is in use again, or gone. */
    const uint32_t scanned = (value & ~(uint32_t)NP_ENTRY_REFERENCED) | NP_ENTRY_SCANNED;
    if ((value & (NP_ENTRY_STATE_MASK | NP_ENTRY_REFERENCED)) == (NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED))
        __atomic_compare_exchange_n(word, &value, scanned, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

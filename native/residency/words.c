/* Look-ups of residency entries. */
#include "neuronpipe.h"

uint32_t np_entry_look(uint32_t *word)
{
    uint32_t value = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    /* Written only if the bit is not set, so that the cache lines of hot entries stay shared. If the cache process
     * changed the entry meanwhile, the exchange fails and loads the new value, which is returned. */
    while ((value & (NP_ENTRY_STATE_MASK | NP_ENTRY_REFERENCED)) == NP_ENTRY_PRESENT)
        if (__atomic_compare_exchange_n(word, &value, value | NP_ENTRY_REFERENCED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return value | NP_ENTRY_REFERENCED;
    return value;
}

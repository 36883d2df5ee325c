/* Looking clusters up in the residency entries. */
#include "neuronpipe.h"

uint32_t np_entry_look(uint32_t *word)
{
    uint32_t value = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    /* Written only when the bit is missing, so that words everybody uses stay shared in all caches. The result counts: when the
     * cache was faster, the failed exchange shows what it left. */
    while ((value & (NP_ENTRY_STATE_MASK | NP_ENTRY_REFERENCED)) == NP_ENTRY_PRESENT)
        if (__atomic_compare_exchange_n(word, &value, value | NP_ENTRY_REFERENCED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return value | NP_ENTRY_REFERENCED;
    return value;
}

/* Single words in shared memory; neuronpipe.h has the ordering of each. On Arm these are ldar, stlr and the like, on
 * x86-64 plain moves and locked instructions. */
#include "neuronpipe.h"

uint32_t np_word_load(const uint32_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

void np_word_store(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

uint32_t np_word_add(uint32_t *word, uint32_t value)
{
    return __atomic_add_fetch(word, value, __ATOMIC_ACQ_REL);
}

int np_word_swap(uint32_t *word, uint32_t from, uint32_t to)
{
    return __atomic_compare_exchange_n(word, &from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

void np_long_store(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    /* A sequentially consistent store alone does not order a later acquire load (ldapr may pass stlr on Arm), and a
     * worker looks up residency entries right after it has published its window. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

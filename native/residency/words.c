/* Looking clusters up in the residency words. */
#include "neuronpipe.h"

uint32_t np_word_look(uint32_t *word)
{
    uint32_t value = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    /* Written only when the bit is missing, so that words everybody uses stay shared in all caches. The result counts: when the
     * cache was faster, the failed exchange shows what it left. */
    while ((value & (NP_WORD_STATE_MASK | NP_WORD_REFERENCED)) == NP_WORD_PRESENT)
        if (__atomic_compare_exchange_n(word, &value, value | NP_WORD_REFERENCED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return value | NP_WORD_REFERENCED;
    return value;
}

size_t np_words_missing(uint32_t *words, uint32_t first, uint32_t end, uint32_t *ids, int64_t *failed)
{
    size_t absent = 0;
    *failed = -1;
    for (uint32_t id = first; id < end; id++)
        switch (np_word_look(&words[id]) & NP_WORD_STATE_MASK) {
        case NP_WORD_ABSENT:
            ids[absent++] = id;
            break;
        case NP_WORD_FAILED:
            if (*failed < 0)
                *failed = id;
            break;
        default:
            break;
        }
    return absent;
}

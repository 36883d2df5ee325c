/* Clusters that cannot be read, or are not what was written.
 *
 * A failed word carries the low bits of the epoch it failed in. Whoever meets it ends the step with an error, which begins another epoch,
 * and in that one the word becomes absent again: flash that answers again, or a file that was put right, is worth another read, and
 * one that is not costs as many reads as the first time.
 *
 * A worker may see failed turn absent only in an epoch after the word's, or it would wait for a cluster that it asked for and nobody
 * reads. So the epoch is looked at after the word was written: unchanged, everybody who starts in a later one finds the word failed.
 * Both are sequentially consistent. */
#include "flash/loader.h"

static uint32_t present_epoch(const np_loader *loader)
{
    return __atomic_load_n(loader->epoch, __ATOMIC_SEQ_CST) & NP_ENTRY_SLOT_MASK;
}

void np_loader_fail(np_loader *loader, uint32_t *word)
{
    uint32_t epoch = loader->epoch ? present_epoch(loader) : 0, written;
    do {
        written = epoch;
        __atomic_store_n(word, NP_ENTRY_FAILED | written, __ATOMIC_SEQ_CST);
        epoch = loader->epoch ? present_epoch(loader) : 0;
    } while (epoch != written);
    loader->has_failed = 1;
}

void np_loader_forgive(np_loader *loader)
{
    if (!loader->has_failed || !loader->epoch)
        return;
    const uint32_t epoch = present_epoch(loader);
    if (epoch == loader->forgiven)
        return;
    loader->forgiven = epoch;
    loader->has_failed = 0;
    for (int i = 0; i < NP_LOADER_PARTS; i++)
        for (uint32_t id = 0; id < loader->parts[i].config.cluster_count; id++) {
            uint32_t *word = &loader->parts[i].config.words[id];
            const uint32_t value = np_word_load(word);
            if ((value & NP_ENTRY_STATE_MASK) != NP_ENTRY_FAILED)
                continue;
            if ((value & NP_ENTRY_SLOT_MASK) == epoch)
                loader->has_failed = 1;
            else
                np_word_swap(word, value, NP_ENTRY_ABSENT);
        }
}

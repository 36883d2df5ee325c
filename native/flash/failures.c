/* Clusters that cannot be read, or whose checksum is wrong.
 *
 * A failed entry carries the low bits of its epoch. A worker that meets it ends the step with an error, which begins a
 * new epoch, and in that one the entry becomes absent again: the device may answer again or the file may have been
 * repaired. If not, it costs as many reads as the first time.
 *
 * An entry may turn from failed to absent only in an epoch after its own; otherwise a worker would wait for a cluster
 * that it requested and nobody reads. So the epoch is read again after the entry is written: if it has not changed, all
 * steps of later epochs find the entry failed. Both accesses are sequentially consistent. */
#include "flash/failures.h"

static uint32_t current_epoch(const np_loader *loader)
{
    return __atomic_load_n(loader->epoch, __ATOMIC_SEQ_CST) & NP_ENTRY_SLOT_MASK;
}

void np_loader_fail(np_loader *loader, uint32_t *entry)
{
    uint32_t epoch = loader->epoch ? current_epoch(loader) : 0, written;
    do {
        written = epoch;
        __atomic_store_n(entry, NP_ENTRY_FAILED | written, __ATOMIC_SEQ_CST);
        epoch = loader->epoch ? current_epoch(loader) : 0;
    } while (epoch != written);
    loader->has_failed = 1;
}

void np_loader_retry_failed(np_loader *loader)
{
    if (!loader->has_failed || !loader->epoch)
        return;
    const uint32_t epoch = current_epoch(loader);
    if (epoch == loader->retried_epoch)
        return;
    loader->retried_epoch = epoch;
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

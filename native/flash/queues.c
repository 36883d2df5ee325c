/* Queues of clusters that wait to be read: one per kind and priority. */
#include "flash/queues.h"

int np_queue_append(np_queue *queue, uint32_t entry, int is_retry)
{
    if (queue->count + (is_retry ? 0 : queue->reserve) >= queue->capacity)
        return 0;
    queue->entries[(queue->from + (uint64_t)queue->count++) % queue->capacity] = entry;
    return 1;
}

void np_queue_drop_first(np_queue *queue)
{
    queue->from = queue->from + 1 == queue->capacity ? 0 : queue->from + 1;
    queue->count--;
    queue->starved -= queue->starved > 0;
}

int np_is_settled(uint32_t *entry, uint32_t flags)
{
    uint32_t value = np_word_load(entry);
    for (;;) {
        const uint32_t state = value & NP_ENTRY_STATE_MASK;
        if (state == NP_ENTRY_ABSENT)
            return 0;
        if (state == NP_ENTRY_FAILED || (value & flags) == flags || np_word_swap(entry, value, value | flags))
            return 1;
        value = np_word_load(entry); /* the cache or a worker changed it meanwhile */
    }
}

int np_loader_is_request(const np_loader *loader, int parts, const uint32_t *ids, size_t count, uint32_t flags)
{
    if (parts <= 0 || (parts & ~(NP_REQUEST_TRIGGER | NP_REQUEST_VALUE)) || (flags & ~(uint32_t)NP_ENTRY_PINNED) || count > INT32_MAX)
        return 0;
    const uint32_t clusters = loader->parts[0].config.cluster_count;
    for (size_t i = 0; i < count; i++)
        if (ids[i] >= clusters)
            return 0;
    return 1;
}

int np_loader_request(np_loader *loader, int parts, const uint32_t *ids, size_t count, int priority, uint32_t flags)
{
    if (priority < 0 || priority >= NP_LOADER_PRIORITIES || !np_loader_is_request(loader, parts, ids, count, flags))
        return NP_E_ARGUMENT;
    const int kind = parts == NP_REQUEST_TRIGGER ? 0 : parts == NP_REQUEST_VALUE ? 1 : NP_QUEUE_BOTH;
    for (size_t i = 0; i < count; i++) {
        uint32_t absent = (uint32_t)parts;
        if (kind != 1 && np_is_settled(&loader->parts[0].config.words[ids[i]], flags))
            absent &= ~(uint32_t)NP_REQUEST_TRIGGER;
        if (kind != 0 && np_is_settled(&loader->parts[1].config.words[ids[i]], flags))
            absent &= ~(uint32_t)NP_REQUEST_VALUE;
        if (absent != (uint32_t)parts)
            loader->counters.already_there += absent || kind != NP_QUEUE_BOTH ? 1 : 2;
        if (absent && !np_queue_append(&loader->queues[kind][priority], ids[i] | absent | flags, 0))
            return (int)i;
    }
    return (int)count;
}

uint32_t np_loader_count_waiting(const np_loader *loader, int part)
{
    uint32_t waiting = loader->warm_up.pinned_counts[part];
    for (int priority = 0; priority < NP_LOADER_PRIORITIES; priority++)
        waiting += loader->queues[part][priority].count + loader->queues[NP_QUEUE_BOTH][priority].count;
    return waiting;
}

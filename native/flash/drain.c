/* The loader's side of the request rings. Every entry is validated: a worker that writes invalid data harms its own
 * requests only. */
#include "flash/drain.h"

#include <stdlib.h>

#include "flash/queues.h"

enum { ENTRY_BITS = NP_REQUEST_CLUSTER_MASK | NP_REQUEST_TRIGGER | NP_REQUEST_VALUE | NP_REQUEST_PREFETCH | NP_REQUEST_SPECULATIVE };

static int priority_of(uint32_t entry)
{
    return entry & NP_REQUEST_SPECULATIVE ? NP_FOR_SPECULATION : entry & NP_REQUEST_PREFETCH ? NP_FOR_PREFETCH : NP_FOR_DEMAND;
}

/* Speculative requests end when real ones arrive: those that were right are among these. */
static void drop_speculative(np_loader *loader)
{
    for (int kind = 0; kind < NP_LOADER_KINDS; kind++)
        loader->queues[kind][NP_FOR_SPECULATION].count = 0;
}

/* Queue one entry. Returns 0 if it is a demand whose queue is full: it stays in the ring. Other entries are dropped
 * then. */
static int queue_entry(np_loader *loader, uint32_t entry)
{
    const uint32_t id = entry & NP_REQUEST_CLUSTER_MASK, parts = entry & (NP_REQUEST_TRIGGER | NP_REQUEST_VALUE);
    const int priority = priority_of(entry);
    if ((entry & ~(uint32_t)ENTRY_BITS) || !parts || id >= loader->parts[0].config.cluster_count) {
        loader->counters.refused++;
        return 1;
    }
    if (priority != NP_FOR_SPECULATION)
        drop_speculative(loader);
    if ((priority == NP_FOR_DEMAND || loader->reading.prefetch_depth) && np_loader_request(loader, (int)parts, &id, 1, priority, 0) == 1)
        return 1;
    loader->counters.dropped += priority != NP_FOR_DEMAND;
    return priority != NP_FOR_DEMAND;
}

void np_loader_drain(np_loader *loader)
{
    for (uint32_t i = 0; i < loader->ring_count; i++) {
        np_ring *ring = &loader->rings[i];
        const np_requests *shared = &ring->shared;
        const uint32_t tail = __atomic_load_n(shared->tail, __ATOMIC_ACQUIRE), from = ring->head;
        if (tail == from)
            continue;
        if (tail - from > shared->capacity) {
            loader->counters.refused++;
            ring->head = tail;
        }
        while (ring->head != tail && queue_entry(loader, shared->entries[ring->head & (shared->capacity - 1)]))
            ring->head++;
        __atomic_store_n(shared->head, ring->head, __ATOMIC_RELEASE);
        if (tail - from >= shared->capacity && ring->head != from)
            np_word_wake(shared->head);
    }
}

int np_loader_has_requests(const np_loader *loader)
{
    for (uint32_t i = 0; i < loader->ring_count; i++)
        if (__atomic_load_n(loader->rings[i].shared.tail, __ATOMIC_SEQ_CST) != loader->rings[i].head)
            return 1;
    return 0;
}

int np_loader_attach(np_loader *loader, const np_requests *rings, uint32_t count, uint64_t *board,
                     const uint32_t *epoch, uint32_t *in_flight, const np_trace *trace)
{
    for (uint32_t i = 0; i < count; i++)
        if (!rings[i].tail || !rings[i].head || !rings[i].entries || !rings[i].asleep || rings[i].capacity == 0 ||
            (rings[i].capacity & (rings[i].capacity - 1)) != 0)
            return NP_E_ARGUMENT;
    np_ring *copies = calloc(count + (size_t)1, sizeof *copies);
    if (!copies)
        return NP_E_MEMORY;
    for (uint32_t i = 0; i < count; i++)
        copies[i] = (np_ring){.shared = rings[i], .head = np_word_load(rings[i].head)};
    free(loader->rings);
    loader->rings = copies;
    loader->ring_count = count;
    loader->board = board;
    loader->epoch = epoch;
    loader->in_flight = in_flight;
    loader->has_failed = 1; /* an earlier loader may have left failed entries */
    loader->trace = trace;
    return NP_OK;
}

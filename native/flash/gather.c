/* From queues to reads: which clusters are read next, and which of them together.
 *
 * Demands come first, then prefetches, speculative requests and warm-up. Requests that no worker waits for start a read
 * only while few are in flight, so that a demand never finds the device's queue full. Workers make requests in the
 * order of the file, so a cluster is compared with the read before it only: if the gap costs less than a read of its
 * own, the two become one. During warm-up, a read for a request also brings its neighbours that are in the warm-up set:
 * the file is divided into stretches that flash reads at full speed. */
#include "flash/gather.h"

#include "flash/queues.h"
#include "flash/source.h"
#include "flash/warm_up.h"

enum {
    MAX_RUN = 64,          /* clusters of one kind before the next kind is served */
    SPECULATIVE_READS = 8, /* in flight: so few cost little if they were wrong, and keep flash nearly as busy as many */
    BUSY_READS = 8,        /* no warm-up reads begin while so many ordinary ones are in flight */
    PARTS = NP_REQUEST_TRIGGER | NP_REQUEST_VALUE,
};

/* The batch under construction. */
typedef struct {
    uint32_t count;  /* reads in the batch */
    np_flight *open; /* the last one, while it may still grow */
} read_batch;

/* The byte range of the file with these parts of a cluster, and with the trigger bytes that value slots hold
 * (moved_bytes). */
static void range_of(const np_loader *loader, uint32_t entry, uint64_t *first, uint64_t *end)
{
    if (loader->reading.source) { /* reads of several places: only their bytes count */
        *first = 0;
        *end = np_source_read_bytes(loader, entry);
        return;
    }
    *first = UINT64_MAX;
    *end = 0;
    if (entry & NP_REQUEST_VALUE && loader->parts[NP_VALUE].config.moved_bytes)
        entry |= NP_REQUEST_TRIGGER;
    for (int part = 0; part < NP_LOADER_PARTS; part++) {
        if (!(entry & np_part_bit(part)))
            continue;
        const np_loader_part *config = &loader->parts[part].config;
        const uint64_t offset = config->base_offset + (entry & NP_REQUEST_CLUSTER_MASK) * config->stride_bytes + config->part_offset;
        *first = offset < *first ? offset : *first;
        *end = offset + config->part_bytes > *end ? offset + config->part_bytes : *end;
    }
}

/* True if the open read can be extended to these bytes. A cluster whose read failed is read alone, so that it fails no
 * neighbour again. */
static int can_extend(const np_loader *loader, const read_batch *batch, uint32_t entry, uint64_t first, uint64_t end)
{
    const np_flight *open = batch->open;
    if (!open || entry >> NP_QUEUED_FAILURES || loader->reading.source)
        return 0;
    const np_staging_pool *pool = &loader->pools[open->pool];
    return open->claim_count + NP_LOADER_PARTS <= pool->max_claims && first >= open->offset + open->bytes &&
           first - (open->offset + open->bytes) <= loader->reading.merge_gap_bytes && end - open->offset <= pool->read_bytes;
}

static np_staging_pool *pool_for(np_loader *loader, int purpose)
{
    return &loader->pools[purpose == NP_FOR_WARM_UP && loader->pools[NP_POOL_LONG].count ? NP_POOL_LONG : NP_POOL_ORDINARY];
}

/* Begin a read at this offset. Returns 0 if no further read may be in flight for this purpose. */
static int open_read(np_loader *loader, read_batch *batch, int purpose, uint64_t first)
{
    const np_staging_pool *ordinary = &loader->pools[NP_POOL_ORDINARY];
    const uint32_t max_reads[] = {ordinary->count, loader->reading.prefetch_depth, SPECULATIVE_READS, BUSY_READS};
    np_staging_pool *pool = pool_for(loader, purpose);
    if (!pool->free_count || ordinary->count - ordinary->free_count >= max_reads[purpose])
        return 0;
    const uint32_t index = pool->free[--pool->free_count];
    loader->batch[batch->count++] = index;
    batch->open = &loader->flights[index];
    batch->open->offset = first;
    batch->open->bytes = batch->open->gap_bytes = batch->open->claim_count = 0;
    return 1;
}

/* Claim a part of a cluster: give it a slot and mark it as loading. */
static void claim(np_loader *loader, int part, uint32_t entry, np_claim *out)
{
    np_part_state *state = &loader->parts[part];
    const uint32_t id = entry & NP_REQUEST_CLUSTER_MASK, slot = state->free[--state->free_count];
    const uint32_t pinned = np_warm_up_is_pinned(loader, part, id) ? NP_ENTRY_PINNED : 0;
    /* A plain store: nobody else changes an absent entry. The slot's number is stored for debugging only. */
    np_word_store(&state->config.words[id], NP_ENTRY_LOADING | (entry & NP_ENTRY_PINNED) | pinned | slot);
    *out = (np_claim){.id = id, .slot = slot, .part = (uint8_t)part, .failures = (uint8_t)(entry >> NP_QUEUED_FAILURES),
                      .warms_up = (uint8_t)np_warm_up_remove(loader, part, id)};
}

/* Put these parts of a cluster, for which slots are free, into the open read or a new one. Returns 0 if no read may
 * begin. */
static int put(np_loader *loader, read_batch *batch, uint32_t entry, int purpose)
{
    uint64_t first, end;
    range_of(loader, entry, &first, &end);
    if (!can_extend(loader, batch, entry, first, end) && !open_read(loader, batch, purpose, first))
        return 0;
    np_flight *open = batch->open;
    open->gap_bytes += open->bytes ? (uint32_t)(first - (open->offset + open->bytes)) : 0;
    open->bytes = (uint32_t)(end - open->offset);
    for (int part = 0; part < NP_LOADER_PARTS; part++)
        if (entry & np_part_bit(part))
            claim(loader, part, entry, &open->claims[open->claim_count++]);
    if (loader->reading.source)
        np_plan_source_reads(loader, entry, open);
    if (entry >> NP_QUEUED_FAILURES)
        batch->open = NULL;
    return 1;
}

/* True if a slot is free for requests that no worker waits for. */
static int has_spare_slot(const np_loader *loader, int part)
{
    return loader->parts[part].free_count > loader->parts[part].config.demand_slots;
}

/* The parts of a cluster that are in the warm-up set, absent, and have a free slot. */
static uint32_t warm_up_parts(np_loader *loader, uint32_t id)
{
    uint32_t parts = np_warm_up_parts(loader, id);
    for (int part = 0; part < NP_LOADER_PARTS; part++) {
        if (!(parts & np_part_bit(part)))
            continue;
        const uint32_t flags = np_warm_up_is_pinned(loader, part, id) ? NP_ENTRY_PINNED : 0;
        if (np_is_settled(&loader->parts[part].config.words[id], flags)) { /* should not happen, but the entries are in shared memory */
            loader->counters.warm_up_left_bytes -= loader->parts[part].config.part_bytes;
            np_warm_up_remove(loader, part, id);
            parts &= ~np_part_bit(part);
        } else if (!has_spare_slot(loader, part)) {
            parts &= ~np_part_bit(part);
        }
    }
    return parts;
}

/* The stretch of the file that contains a cluster: as many clusters as fit into one ordinary read. */
static uint32_t stretch_of(const np_loader *loader, uint32_t id, uint32_t *end)
{
    const uint64_t stride = loader->parts[0].config.stride_bytes, clusters = loader->parts[0].config.cluster_count;
    const uint32_t length = stride && loader->reading.most_read_bytes > stride ? (uint32_t)(loader->reading.most_read_bytes / stride) : 1;
    const uint32_t first = id / length * length;
    *end = first + (uint64_t)length < clusters ? first + length : (uint32_t)clusters;
    return first;
}

/* Read those of the clusters [id, end) that are in the warm-up set. Returns 0 if no read may begin. */
static int put_warm_up(np_loader *loader, read_batch *batch, uint32_t id, uint32_t end, int purpose)
{
    for (; np_warm_up_is_on(loader) && id < end; id++) {
        const uint32_t parts = warm_up_parts(loader, id);
        if (parts && !put(loader, batch, id | parts, purpose))
            return 0;
    }
    return 1;
}

/* Add a requested cluster's other part if it is in the warm-up set and one read can hold both. */
static uint32_t with_other_part(np_loader *loader, uint32_t entry)
{
    const uint32_t both = entry | warm_up_parts(loader, entry & NP_REQUEST_CLUSTER_MASK);
    uint64_t first, end;
    range_of(loader, both, &first, &end);
    return end - first <= loader->reading.most_read_bytes ? both : entry;
}

/* True if a pair must be queued again as two parts. lacking_slots: bit p is set if part p has no free slot. Two reads
 * of single parts are extended over the parts between them and so transfer most bytes twice; a pair therefore waits for
 * both slots as long as the cache can free some. If it cannot, block windows hold all of them, and the part that has a
 * slot must not wait for the other one. */
static int must_split(const np_loader *loader, uint32_t entry, int priority, int lacking_slots)
{
    uint64_t first, end;
    range_of(loader, entry, &first, &end);
    if (end - first > loader->reading.most_read_bytes)
        return 1;
    if ((entry & PARTS) != PARTS)
        return lacking_slots != 0;
    for (int part = 0; part < NP_LOADER_PARTS; part++)
        if (priority == NP_FOR_DEMAND && lacking_slots >> part & 1 && loader->parts[part].exhausted)
            return 1;
    return 0;
}

/* Put the first cluster of a queue into a read. Returns 0 if it, and the queue behind it, has to wait. */
static int read_first(np_loader *loader, read_batch *batch, int kind, int priority)
{
    np_queue *queue = &loader->queues[kind][priority];
    uint32_t *entry = &queue->entries[queue->from];
    const uint32_t id = *entry & NP_REQUEST_CLUSTER_MASK;
    int lacking_slots = 0;
    for (int part = 0; part < NP_LOADER_PARTS; part++) {
        if (!(*entry & np_part_bit(part)))
            continue;
        if (np_is_settled(&loader->parts[part].config.words[id], *entry & NP_ENTRY_PINNED)) {
            loader->counters.already_there++;
            *entry &= ~np_part_bit(part);
        } else if (priority ? !has_spare_slot(loader, part) : !loader->parts[part].free_count) {
            lacking_slots |= 1 << part;
        }
    }
    if (!(*entry & PARTS)) {
        np_queue_drop_first(queue);
        return 1;
    }
    if (kind == NP_QUEUE_BOTH && must_split(loader, *entry, priority, lacking_slots)) {
        for (int part = 0; part < NP_LOADER_PARTS; part++) {
            np_queue *single = &loader->queues[part][priority];
            if (!(*entry & np_part_bit(part)) || !np_queue_append(single, *entry & ~(PARTS ^ np_part_bit(part)), 0))
                continue;
            *entry &= ~np_part_bit(part);
            single->starved += queue->starved && single->starved + 1 == single->count; /* it was counted as starved while it was a pair */
        }
        if (*entry & PARTS)
            return 0;
        np_queue_drop_first(queue);
        return 1;
    }
    if (lacking_slots) {
        if (priority == 0) {
            loader->counters.waited_for_slot += queue->count - queue->starved;
            queue->starved = queue->count;
        }
        return 0;
    }
    if (*entry >> NP_QUEUED_FAILURES) {
        if (!put(loader, batch, *entry, priority))
            return 0;
        np_queue_drop_first(queue);
        return 1;
    }
    /* During warm-up read the whole stretch: left-over clusters would be scattered, and cost a read each later. */
    uint32_t stretch_end;
    const uint32_t stretch = stretch_of(loader, id, &stretch_end);
    if (!put_warm_up(loader, batch, stretch, id, priority) || !put(loader, batch, with_other_part(loader, *entry), priority))
        return 0;
    np_queue_drop_first(queue);
    if (np_warm_up_is_on(loader))
        loader->warm_up.next = id;
    put_warm_up(loader, batch, id + 1, stretch_end, priority);
    return 1;
}

/* Read clusters of the warm-up set as long as reads may begin. */
static void warm_up(np_loader *loader, read_batch *batch)
{
    uint32_t id;
    while (np_warm_up_next(loader, &id)) {
        uint32_t parts = warm_up_parts(loader, id), unread = np_warm_up_parts(loader, id) & ~parts;
        for (int part = 0; part < NP_LOADER_PARTS; part++)
            if (unread & np_part_bit(part) && !np_warm_up_is_pinned(loader, part, id))
                np_warm_up_give_up(loader, part);
        if (!parts) {
            if (np_warm_up_parts(loader, id))
                return; /* a pinned cluster waits for a slot */
            continue;
        }
        uint64_t first, end;
        range_of(loader, id | parts, &first, &end);
        if (end - first > pool_for(loader, NP_FOR_WARM_UP)->read_bytes)
            parts &= -parts; /* too long for one read: the trigger part first */
        if (!put(loader, batch, id | parts, NP_FOR_WARM_UP))
            return;
        loader->warm_up.next = id;
    }
}

uint32_t np_loader_gather(np_loader *loader)
{
    read_batch batch = {0};
    for (int priority = 0; priority < NP_LOADER_PRIORITIES; priority++)
        for (int progress = 1; progress;) {
            progress = 0;
            for (int kind = NP_LOADER_KINDS - 1; kind >= 0; kind--) /* pairs first: the parts of a split pair are queued in the kinds after it */
                for (int i = 0; i < MAX_RUN && loader->queues[kind][priority].count && read_first(loader, &batch, kind, priority); i++)
                    progress = 1;
        }
    warm_up(loader, &batch);
    return batch.count;
}

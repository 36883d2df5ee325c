/* From queues to reads: which clusters are read next, and which of them together.
 *
 * Demands come before prefetches, these before guesses, guesses before warm-up. What nobody waits for yet starts a read only while few are
 * in flight, so that a demand never finds the queue of the flash full. What is left of guesses when a worker asks in earnest is dropped. Workers ask in the order of the file, so a cluster is compared with the read
 * before it and with no other: when the gap between the two costs less than a read, they become one. While memory warms up, a read for
 * somebody also brings the neighbours that are to be loaded anyway: the file is cut into stretches at which flash is as fast as it gets. */
#include "flash/loader.h"

enum {
    MAX_RUN = 64,      /* clusters of one kind before the next kind has its turn */
    GUESSED_READS = 8, /* for guesses: so few cost little when they were wrong, and keep flash nearly as busy as many */
    BUSY_READS = 8,     /* with so many ordinary reads in flight, nothing is warmed up beside them */
    PARTS = NP_REQUEST_TRIGGER | NP_REQUEST_VALUE,
};

static const uint32_t part_bits[NP_LOADER_PARTS] = {NP_REQUEST_TRIGGER, NP_REQUEST_VALUE};

/* What the gathering has in hand. */
typedef struct {
    uint32_t count;    /* reads in the batch */
    np_flight *open;   /* the last of them, while it may still grow */
} gathering;

int np_loader_enqueue(np_queue *line, uint32_t entry, int retried)
{
    if (line->count + (retried ? 0 : line->reserve) >= line->capacity)
        return 0;
    line->entries[(line->from + (uint64_t)line->count++) % line->capacity] = entry;
    return 1;
}

static void drop_first(np_queue *line)
{
    line->from = line->from + 1 == line->capacity ? 0 : line->from + 1;
    line->count--;
    line->starved -= line->starved > 0;
}

int np_loader_settled(uint32_t *word, uint32_t flags)
{
    uint32_t value = np_word_load(word);
    for (;;) {
        const uint32_t state = value & NP_ENTRY_STATE_MASK;
        if (state == NP_ENTRY_ABSENT)
            return 0;
        if (state == NP_ENTRY_FAILED || (value & flags) == flags || np_word_swap(word, value, value | flags))
            return 1;
        value = np_word_load(word); /* the cache or a worker was faster */
    }
}

/* The bytes of the file that hold these parts of a cluster, and what their slots hold of another part. */
static void range_of(const np_loader *loader, uint32_t entry, uint64_t *first, uint64_t *end)
{
    *first = UINT64_MAX;
    *end = 0;
    if (entry & NP_REQUEST_VALUE && loader->parts[NP_VALUE].config.moved_bytes)
        entry |= NP_REQUEST_TRIGGER;
    for (int part = 0; part < NP_LOADER_PARTS; part++) {
        if (!(entry & part_bits[part]))
            continue;
        const np_loader_part *config = &loader->parts[part].config;
        const uint64_t offset = config->base_offset + (entry & NP_REQUEST_CLUSTER_MASK) * config->stride_bytes + config->part_offset;
        *first = offset < *first ? offset : *first;
        *end = offset + config->part_bytes > *end ? offset + config->part_bytes : *end;
    }
}

/* Whether the read in hand can bring these bytes, too. A cluster that failed is read alone: it may spoil its neighbours. */
static int grows(const np_loader *loader, const gathering *hand, uint32_t entry, uint64_t first, uint64_t end)
{
    const np_flight *open = hand->open;
    if (!open || entry >> NP_QUEUED_FAILURES)
        return 0;
    const np_staging_pool *pool = &loader->pools[open->pool];
    return open->claim_count + NP_LOADER_PARTS <= pool->claims_most && first >= open->offset + open->bytes &&
           first - (open->offset + open->bytes) <= loader->reading.merge_gap_bytes && end - open->offset <= pool->read_bytes;
}

static np_staging_pool *pool_for(np_loader *loader, int purpose)
{
    return &loader->pools[purpose == NP_FOR_WARM_UP && loader->pools[NP_POOL_LONG].count ? NP_POOL_LONG : NP_POOL_ORDINARY];
}

/* Begin a read from this place of the file on. Returns 0 when as many are in flight as may be for this purpose. */
static int open_read(np_loader *loader, gathering *hand, int purpose, uint64_t first)
{
    const np_staging_pool *ordinary = &loader->pools[NP_POOL_ORDINARY];
    const uint32_t most[] = {ordinary->count, loader->reading.prefetch_depth, GUESSED_READS, BUSY_READS};
    np_staging_pool *pool = pool_for(loader, purpose);
    if (!pool->free_count || ordinary->count - ordinary->free_count >= most[purpose])
        return 0;
    const uint32_t index = pool->free[--pool->free_count];
    loader->batch[hand->count++] = index;
    hand->open = &loader->flights[index];
    hand->open->offset = first;
    hand->open->bytes = hand->open->gap_bytes = hand->open->claim_count = 0;
    return 1;
}

/* Give a part of a cluster a slot, and its word to nobody else. */
static void claim(np_loader *loader, int part, uint32_t entry, np_claim *out)
{
    np_part_state *state = &loader->parts[part];
    const uint32_t id = entry & NP_REQUEST_CLUSTER_MASK, slot = state->free[--state->free_count];
    const uint32_t stays = np_warm_up_stays(loader, part, id) ? NP_ENTRY_PINNED : 0;
    /* Nobody else changes an absent word. The slot's number is for whoever looks into a stuck run. */
    np_word_store(&state->config.words[id], NP_ENTRY_LOADING | (entry & NP_ENTRY_PINNED) | stays | slot);
    *out = (np_claim){.id = id, .slot = slot, .part = (uint8_t)part, .failures = (uint8_t)(entry >> NP_QUEUED_FAILURES),
                      .warms_up = (uint8_t)np_warm_up_take(loader, part, id)};
}

/* Put these parts of a cluster, for which there are slots, into the read in hand or a new one. Returns 0 when no read may begin. */
static int put(np_loader *loader, gathering *hand, uint32_t entry, int purpose)
{
    uint64_t first, end;
    range_of(loader, entry, &first, &end);
    if (!grows(loader, hand, entry, first, end) && !open_read(loader, hand, purpose, first))
        return 0;
    np_flight *open = hand->open;
    open->gap_bytes += open->bytes ? (uint32_t)(first - (open->offset + open->bytes)) : 0;
    open->bytes = (uint32_t)(end - open->offset);
    for (int part = 0; part < NP_LOADER_PARTS; part++)
        if (entry & part_bits[part])
            claim(loader, part, entry, &open->claims[open->claim_count++]);
    if (entry >> NP_QUEUED_FAILURES)
        hand->open = NULL;
    return 1;
}

/* Whether there is a slot for something that nobody waits for. */
static int has_spare_slot(const np_loader *loader, int part)
{
    return loader->parts[part].free_count > loader->parts[part].config.demand_slots;
}

/* The parts of a cluster that are to be warmed up, are absent and find a slot. */
static uint32_t warmable(np_loader *loader, uint32_t id)
{
    uint32_t parts = np_warm_up_parts(loader, id);
    for (int part = 0; part < NP_LOADER_PARTS; part++) {
        if (!(parts & part_bits[part]))
            continue;
        const uint32_t flags = np_warm_up_stays(loader, part, id) ? NP_ENTRY_PINNED : 0;
        if (np_loader_settled(&loader->parts[part].config.words[id], flags)) { /* a memory that others write to is not trusted */
            loader->counters.warm_up_left_bytes -= loader->parts[part].config.part_bytes;
            np_warm_up_take(loader, part, id);
            parts &= ~part_bits[part];
        } else if (!has_spare_slot(loader, part)) {
            parts &= ~part_bits[part];
        }
    }
    return parts;
}

/* The clusters of one ordinary read that this one shares: the file is cut into such stretches. */
static uint32_t stretch_of(const np_loader *loader, uint32_t id, uint32_t *end)
{
    const uint64_t stride = loader->parts[0].config.stride_bytes, clusters = loader->parts[0].config.cluster_count;
    const uint32_t length = stride && loader->reading.most_read_bytes > stride ? (uint32_t)(loader->reading.most_read_bytes / stride) : 1;
    const uint32_t first = id / length * length;
    *end = first + (uint64_t)length < clusters ? first + length : (uint32_t)clusters;
    return first;
}

/* Read what of these clusters is to be warmed up. Returns 0 when no read may begin. */
static int put_warmable(np_loader *loader, gathering *hand, uint32_t id, uint32_t end, int purpose)
{
    for (; np_warm_up_is_on(loader) && id < end; id++) {
        const uint32_t parts = warmable(loader, id);
        if (parts && !put(loader, hand, id | parts, purpose))
            return 0;
    }
    return 1;
}

/* What a cluster that somebody wants brings along: its other part, if that is to be warmed up and one read holds both. */
static uint32_t with_other_part(np_loader *loader, uint32_t entry)
{
    const uint32_t both = entry | warmable(loader, entry & NP_REQUEST_CLUSTER_MASK);
    uint64_t first, end;
    range_of(loader, both, &first, &end);
    return end - first <= loader->reading.most_read_bytes ? both : entry;
}

/* Whether a pair is queued again as two parts. slots_lack: the parts without a free slot, as bits of their numbers. Neighbours of such parts
 * are joined over the parts between them, so that two reads bring the bytes of one twice. A pair therefore waits for both slots as long as
 * the cache can free some. When it cannot, block windows hold them all, and the part that has a slot must not wait for the other one. */
static int is_split(const np_loader *loader, uint32_t entry, int priority, int slots_lack)
{
    uint64_t first, end;
    range_of(loader, entry, &first, &end);
    if (end - first > loader->reading.most_read_bytes)
        return 1;
    if ((entry & PARTS) != PARTS)
        return slots_lack != 0;
    for (int part = 0; part < NP_LOADER_PARTS; part++)
        if (priority == NP_FOR_DEMAND && slots_lack >> part & 1 && loader->parts[part].exhausted)
            return 1;
    return 0;
}

/* Put the first cluster of this queue into a read. Returns 0 when it has to wait, and all behind it. */
static int take_first(np_loader *loader, gathering *hand, int kind, int priority)
{
    np_queue *line = &loader->queues[kind][priority];
    uint32_t *entry = &line->entries[line->from];
    const uint32_t id = *entry & NP_REQUEST_CLUSTER_MASK;
    int slots_lack = 0;
    for (int part = 0; part < NP_LOADER_PARTS; part++) {
        if (!(*entry & part_bits[part]))
            continue;
        if (np_loader_settled(&loader->parts[part].config.words[id], *entry & NP_ENTRY_PINNED)) {
            loader->counters.already_there++;
            *entry &= ~part_bits[part];
        } else if (priority ? !has_spare_slot(loader, part) : !loader->parts[part].free_count) {
            slots_lack |= 1 << part;
        }
    }
    if (!(*entry & PARTS)) {
        drop_first(line);
        return 1;
    }
    if (kind == NP_QUEUE_BOTH && is_split(loader, *entry, priority, slots_lack)) {
        for (int part = 0; part < NP_LOADER_PARTS; part++) {
            np_queue *alone = &loader->queues[part][priority];
            if (!(*entry & part_bits[part]) || !np_loader_enqueue(alone, *entry & ~(PARTS ^ part_bits[part]), 0))
                continue;
            *entry &= ~part_bits[part];
            alone->starved += line->starved && alone->starved + 1 == alone->count; /* it was counted as a pair */
        }
        if (*entry & PARTS)
            return 0;
        drop_first(line);
        return 1;
    }
    if (slots_lack) {
        if (priority == 0) {
            loader->counters.waited_for_slot += line->count - line->starved;
            line->starved = line->count;
        }
        return 0;
    }
    if (*entry >> NP_QUEUED_FAILURES) {
        if (!put(loader, hand, *entry, priority))
            return 0;
        drop_first(line);
        return 1;
    }
    /* While memory warms up, the whole stretch comes: what is left out would be scattered, and as many reads as clusters later. */
    uint32_t stretch_end;
    const uint32_t stretch = stretch_of(loader, id, &stretch_end);
    if (!put_warmable(loader, hand, stretch, id, priority) || !put(loader, hand, with_other_part(loader, *entry), priority))
        return 0;
    drop_first(line);
    if (np_warm_up_is_on(loader))
        loader->warm_up.next = id;
    put_warmable(loader, hand, id + 1, stretch_end, priority);
    return 1;
}

/* Read on with what is to be warmed up, as long as reads may begin. */
static void warm_up(np_loader *loader, gathering *hand)
{
    uint32_t id;
    while (np_warm_up_next(loader, &id)) {
        uint32_t parts = warmable(loader, id), left = np_warm_up_parts(loader, id) & ~parts;
        for (int part = 0; part < NP_LOADER_PARTS; part++)
            if (left & part_bits[part] && !np_warm_up_stays(loader, part, id))
                np_warm_up_give_up(loader, part);
        if (!parts) {
            if (np_warm_up_parts(loader, id))
                return; /* it will stay, and waits for a slot */
            continue;
        }
        uint64_t first, end;
        range_of(loader, id | parts, &first, &end);
        if (end - first > pool_for(loader, NP_FOR_WARM_UP)->read_bytes)
            parts &= -parts; /* both are more than a read: one after the other */
        if (!put(loader, hand, id | parts, NP_FOR_WARM_UP))
            return;
        loader->warm_up.next = id;
    }
}

uint32_t np_loader_gather(np_loader *loader)
{
    gathering hand = {0};
    for (int priority = 0; priority < NP_LOADER_PRIORITIES; priority++)
        for (int progress = 1; progress;) {
            progress = 0;
            for (int kind = NP_LOADER_KINDS - 1; kind >= 0; kind--) /* both, value, trigger: what splits a pair goes behind it */
                for (int i = 0; i < MAX_RUN && loader->queues[kind][priority].count && take_first(loader, &hand, kind, priority); i++)
                    progress = 1;
        }
    warm_up(loader, &hand);
    return hand.count;
}

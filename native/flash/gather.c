/* From queues to reads: which clusters are read next, and which of them together.
 *
 * Demands come before prefetches, prefetches before warm-up; a guess starts a read only while few are in flight, so that a demand never
 * finds the queue of the flash full of guesses. Workers ask in the order of the file, so a cluster is compared with the read
 * before it and with no other: when the gap between the two costs less than a read, they become one. */
#include "flash/loader.h"

enum {
    RUN_MOST = 64,      /* clusters of one kind before the next kind has its turn */
    WARM_UP_DEPTH = 8,  /* reads of warm-up in flight: they are large */
    PARTS = NP_REQUEST_GATE | NP_REQUEST_REST,
};

static const uint32_t part_bits[NP_LOADER_PARTS] = {NP_REQUEST_GATE, NP_REQUEST_REST};

/* What the gathering has in hand. */
typedef struct {
    uint32_t count;    /* reads in the batch */
    np_flight *open;   /* the last of them, while it may still grow */
    np_claim *claims;  /* of that one */
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
        const uint32_t state = value & NP_WORD_STATE_MASK;
        if (state == NP_WORD_ABSENT)
            return 0;
        if (state == NP_WORD_FAILED || (value & flags) == flags || np_word_swap(word, value, value | flags))
            return 1;
        value = np_word_load(word); /* the cache or a worker was faster */
    }
}

/* How many reads may be in flight for one of this priority to start. */
static uint32_t most_in_flight(const np_loader *loader, int priority)
{
    const uint32_t most[NP_LOADER_PRIORITIES] = {loader->depth, loader->reading.prefetch_depth, WARM_UP_DEPTH};
    return most[priority] < loader->depth ? most[priority] : loader->depth;
}

/* The bytes of the file that hold these parts of a cluster. */
static void range_of(const np_loader *loader, uint32_t entry, uint64_t *first, uint64_t *end)
{
    *first = UINT64_MAX;
    *end = 0;
    for (int part = 0; part < NP_LOADER_PARTS; part++) {
        if (!(entry & part_bits[part]))
            continue;
        const np_loader_part *facts = &loader->parts[part].facts;
        const uint64_t offset = facts->base_offset + (entry & NP_REQUEST_WORD_MASK) * facts->stride_bytes + facts->part_offset;
        *first = offset < *first ? offset : *first;
        *end = offset + facts->part_bytes > *end ? offset + facts->part_bytes : *end;
    }
}

/* Whether the read in hand can bring these bytes, too. A cluster that failed is read alone: it may spoil its neighbours. */
static int grows(const np_loader *loader, const gathering *hand, uint32_t entry, uint64_t first, uint64_t end)
{
    const np_flight *open = hand->open;
    return open && !(entry >> NP_QUEUED_FAILURES) && open->claim_count + NP_LOADER_PARTS <= loader->claims_most &&
           first >= open->offset + open->bytes && first - (open->offset + open->bytes) <= loader->reading.merge_gap_bytes &&
           end - open->offset <= loader->reading.most_read_bytes;
}

/* Give a part of a cluster a slot, and its word to nobody else. */
static void claim(np_loader *loader, int part, uint32_t entry, np_claim *out)
{
    np_part_state *state = &loader->parts[part];
    const uint32_t id = entry & NP_REQUEST_WORD_MASK, slot = state->free[--state->free_count];
    state->slot_states[slot] = NP_SLOT_FILLING;
    /* Nobody else changes an absent word. The slot's number is for whoever looks into a stuck run. */
    np_word_store(&state->facts.words[id], NP_WORD_LOADING | (entry & NP_WORD_PINNED) | slot);
    *out = (np_claim){.id = id, .slot = slot, .part = (uint8_t)part, .failures = (uint8_t)(entry >> NP_QUEUED_FAILURES)};
}

/* Put the first cluster of this queue into a read. Returns 0 when it has to wait, and all behind it. */
static int take_first(np_loader *loader, gathering *hand, int kind, int priority)
{
    np_queue *line = &loader->queues[kind][priority];
    uint32_t *entry = &line->entries[line->from];
    int slots_lack = 0;
    for (int part = 0; part < NP_LOADER_PARTS; part++) {
        if (!(*entry & part_bits[part]))
            continue;
        if (np_loader_settled(&loader->parts[part].facts.words[*entry & NP_REQUEST_WORD_MASK], *entry & NP_WORD_PINNED)) {
            loader->counters.already_there++;
            *entry &= ~part_bits[part];
        } else if (loader->parts[part].free_count <= (priority ? loader->parts[part].facts.demand_slots : 0)) {
            slots_lack |= 1 << part;
        }
    }
    if (!(*entry & PARTS)) {
        drop_first(line);
        return 1;
    }
    uint64_t first, end;
    range_of(loader, *entry, &first, &end);
    /* Neither part may wait for the other's slots: windows may hold them all. And both may be more than a read. */
    if (kind == NP_QUEUE_BOTH && (slots_lack || end - first > loader->reading.most_read_bytes)) {
        for (int part = 0; part < NP_LOADER_PARTS; part++)
            if ((*entry & part_bits[part]) && np_loader_enqueue(&loader->queues[part][priority], *entry & ~(PARTS ^ part_bits[part]), 0))
                *entry &= ~part_bits[part];
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
    if (!grows(loader, hand, *entry, first, end)) {
        if (loader->depth - loader->free_flight_count >= most_in_flight(loader, priority))
            return 0;
        const uint32_t index = loader->free_flights[--loader->free_flight_count];
        loader->batch[hand->count++] = index;
        hand->open = &loader->flights[index];
        hand->claims = &loader->claims[(size_t)index * loader->claims_most];
        *hand->open = (np_flight){.offset = first};
    }
    np_flight *open = hand->open;
    open->gap_bytes += (uint32_t)(first - (open->offset + open->bytes));
    open->bytes = (uint32_t)(end - open->offset);
    for (int part = 0; part < NP_LOADER_PARTS; part++)
        if (*entry & part_bits[part])
            claim(loader, part, *entry, &hand->claims[open->claim_count++]);
    if (*entry >> NP_QUEUED_FAILURES)
        hand->open = NULL;
    drop_first(line);
    return 1;
}

uint32_t np_loader_gather(np_loader *loader)
{
    gathering hand = {0};
    for (int priority = 0; priority < NP_LOADER_PRIORITIES; priority++)
        for (int progress = 1; progress;) {
            progress = 0;
            for (int kind = NP_LOADER_KINDS - 1; kind >= 0; kind--) /* both, rest, gate: what splits a pair goes behind it */
                for (int i = 0; i < RUN_MOST && loader->queues[kind][priority].count && take_first(loader, &hand, kind, priority); i++)
                    progress = 1;
        }
    return hand.count;
}

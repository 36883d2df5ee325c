/* The loader's core: takes cluster ids, claims their words, reads them into free slots, checks them, publishes them.
 *
 * A word is claimed when its read is submitted, not when it is asked for: a cluster that waits as a prefetch can be asked for again
 * as a demand and is then read at once; the older entry finds it there and is dropped.
 *
 *   what                                ordering
 *   absent -> loading (claim)           compare and set: an id asked for twice is read once
 *   bytes in the slot -> word           the reader's completion is an acquire, the word's store a release
 *   word -> arrivals                    release; a waiter reads arrivals (acquire) before it looks at words
 *   slot free -> slot written           the cache took it after no window covered it (residency/clock.c); its grant comes after */
#include <errno.h>
#include <stdlib.h>

#include "flash/reader.h"
#include "neuronpipe.h"

enum {
    PARTS = 2,
    PRIORITIES = 3,
    /* Completions of one turn: few, since the first one's waiter is woken after the last one's checksum. */
    TURN_MOST = 16,
};
enum { SLOT_ELSEWHERE = 0, SLOT_FREE, SLOT_FILLING }; /* elsewhere: holds a cluster, or the cache keeps it back */

typedef struct {
    uint32_t id, flags;
} queued;

typedef struct {
    queued *entries; /* ring of queue_capacity */
    uint32_t from, count;
} queue;

typedef struct {
    np_loader_part facts;
    queue queues[PRIORITIES];
    uint32_t *free; /* [slot_count] stack */
    uint32_t free_count;
    uint8_t *slot_states; /* [slot_count] */
} part_state;

typedef struct {
    uint64_t offset;
    uint32_t part, id, slot;
} flight;

struct np_loader {
    np_reader *reader;
    uint32_t *arrivals;
    uint32_t queue_capacity;
    part_state parts[PARTS];
    flight *flights;         /* [depth]; a read's tag is its index */
    uint32_t *free_flights;  /* [depth] stack */
    uint32_t free_flight_count;
    uint32_t *batch;         /* [depth] flights to submit, by offset */
    uint64_t *offsets, *tags; /* [depth] the batch as the reader wants it */
    uint32_t *bytes;
    void **targets;
    uint32_t unannounced;    /* clusters published or failed since `arrivals` was last advanced */
    np_loader_state counters;
};

static int acceptable(const np_loader_part *part, uint32_t alignment)
{
    const uint64_t places = part->base_offset | part->stride_bytes | part->part_offset | part->part_bytes | (uintptr_t)part->slots;
    return part->part_bytes > 0 && places % alignment == 0 && part->slot_count <= NP_WORD_SLOT_MASK + 1u &&
           (part->slots || !part->slot_count) && (!part->cluster_count || (part->words && part->checksums)) &&
           part->stride_bytes <= (uint64_t)INT64_MAX / 2 / (part->cluster_count + 1ull) &&
           part->base_offset < INT64_MAX / 4 && part->part_offset < INT64_MAX / 8;
}

static int part_create(part_state *part, const np_loader_part *facts, uint32_t queue_capacity)
{
    part->facts = *facts;
    part->free = calloc(facts->slot_count + 1u, sizeof *part->free);
    part->slot_states = calloc(facts->slot_count + 1u, sizeof *part->slot_states);
    int complete = part->free && part->slot_states;
    for (int i = 0; i < PRIORITIES; i++) {
        part->queues[i].entries = calloc(queue_capacity, sizeof(queued));
        complete = complete && part->queues[i].entries;
    }
    return complete;
}

np_loader *np_loader_create(np_reader *reader, const np_loader_part *parts, uint32_t *arrivals, uint32_t queue_capacity)
{
    for (int i = 0; i < PARTS; i++)
        if (!acceptable(&parts[i], reader->alignment))
            return NULL;
    np_loader *loader = queue_capacity ? calloc(1, sizeof *loader) : NULL;
    if (!loader)
        return NULL;
    const uint32_t depth = reader->depth;
    *loader = (np_loader){
        .reader = reader,
        .arrivals = arrivals,
        .queue_capacity = queue_capacity,
        .flights = calloc(depth, sizeof(flight)),
        .free_flights = calloc(depth, sizeof(uint32_t)),
        .free_flight_count = depth,
        .batch = calloc(depth, sizeof(uint32_t)),
        .offsets = calloc(depth, sizeof(uint64_t)),
        .tags = calloc(depth, sizeof(uint64_t)),
        .bytes = calloc(depth, sizeof(uint32_t)),
        .targets = calloc(depth, sizeof(void *)),
    };
    int complete = loader->flights && loader->free_flights && loader->batch && loader->offsets && loader->tags && loader->bytes &&
                   loader->targets;
    for (int i = 0; i < PARTS; i++)
        complete &= part_create(&loader->parts[i], &parts[i], queue_capacity);
    if (!complete) {
        np_loader_destroy(loader);
        return NULL;
    }
    for (uint32_t i = 0; i < depth; i++)
        loader->free_flights[i] = i;
    return loader;
}

/* A read has ended, with `result` bytes or -errno: publish the cluster, or mark it failed and take the slot back. */
static void land(np_loader *loader, uint32_t index, int32_t result)
{
    const flight *landed = &loader->flights[index];
    part_state *part = &loader->parts[landed->part];
    const np_loader_part *facts = &part->facts;
    const uint8_t *data = facts->slots + (size_t)landed->slot * facts->part_bytes;
    const int whole = result == (int32_t)facts->part_bytes;
    const int good = whole && np_crc32c(0, data, facts->part_bytes) == facts->checksums[landed->id];
    uint32_t *word = &facts->words[landed->id];
    loader->counters.reads++;
    loader->unannounced++;
    loader->free_flights[loader->free_flight_count++] = index;
    if (good) {
        loader->counters.bytes += facts->part_bytes;
        part->slot_states[landed->slot] = SLOT_ELSEWHERE;
        /* A plain store: while a word is loading, nobody but the loader changes more of it than the reference bit. */
        np_word_store(word, NP_WORD_PRESENT | NP_WORD_REFERENCED | landed->slot | (np_word_load(word) & NP_WORD_PINNED));
        return;
    }
    *(whole ? &loader->counters.checksum_failures : &loader->counters.io_errors) += 1;
    part->slot_states[landed->slot] = SLOT_FREE;
    part->free[part->free_count++] = landed->slot;
    np_word_store(word, NP_WORD_FAILED);
}

/* Waits for `least` reads and lands up to TURN_MOST. */
static void land_some(np_loader *loader, size_t least, int timeout_ms)
{
    np_completion done[TURN_MOST];
    const int count = np_reader_reap(loader->reader, done, least, TURN_MOST, timeout_ms);
    for (int i = 0; i < count; i++)
        land(loader, (uint32_t)done[i].tag, done[i].result);
}

/* Tell the workers of what landed since the last time. Returns how many. */
static int announce(np_loader *loader)
{
    const int landed = (int)loader->unannounced;
    if (landed) {
        loader->unannounced = 0;
        np_word_add(loader->arrivals, 1);
        np_word_wake(loader->arrivals);
    }
    return landed;
}

static void land_all(np_loader *loader)
{
    while (np_reader_in_flight(loader->reader))
        land_some(loader, 1, -1);
    announce(loader);
}

void np_loader_destroy(np_loader *loader)
{
    if (!loader)
        return;
    if (loader->flights && loader->free_flights) {
        land_all(loader);
    }
    for (int i = 0; i < PARTS; i++) {
        for (int priority = 0; priority < PRIORITIES; priority++)
            free(loader->parts[i].queues[priority].entries);
        free(loader->parts[i].free);
        free(loader->parts[i].slot_states);
    }
    free(loader->flights);
    free(loader->free_flights);
    free(loader->batch);
    free(loader->offsets);
    free(loader->tags);
    free(loader->bytes);
    free(loader->targets);
    free(loader);
}

int np_loader_grant(np_loader *loader, int part, const uint32_t *slots, size_t count)
{
    if (part < 0 || part >= PARTS)
        return NP_E_ARGUMENT;
    part_state *state = &loader->parts[part];
    const uint32_t before = state->free_count;
    for (size_t i = 0; i < count; i++) {
        if (slots[i] >= state->facts.slot_count || state->slot_states[slots[i]] != SLOT_ELSEWHERE) {
            while (state->free_count > before)
                state->slot_states[state->free[--state->free_count]] = SLOT_ELSEWHERE;
            return NP_E_ARGUMENT;
        }
        state->slot_states[slots[i]] = SLOT_FREE;
        state->free[state->free_count++] = slots[i];
    }
    return (int)count;
}

/* Whether nothing has to be read for this word: it is there, on its way or damaged. Pins it if that was asked. */
static int settled(uint32_t *word, uint32_t flags)
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

int np_loader_request(np_loader *loader, int part, const uint32_t *ids, size_t count, int priority, uint32_t flags)
{
    if (part < 0 || part >= PARTS || priority < 0 || priority >= PRIORITIES || (flags & ~(uint32_t)NP_WORD_PINNED) || count > INT32_MAX)
        return NP_E_ARGUMENT;
    const np_loader_part *facts = &loader->parts[part].facts;
    for (size_t i = 0; i < count; i++)
        if (ids[i] >= facts->cluster_count)
            return NP_E_ARGUMENT;
    queue *line = &loader->parts[part].queues[priority];
    for (size_t i = 0; i < count; i++) {
        if (settled(&facts->words[ids[i]], flags)) {
            loader->counters.already_there++;
            continue;
        }
        if (line->count == loader->queue_capacity)
            return (int)i;
        line->entries[(line->from + (uint64_t)line->count++) % loader->queue_capacity] = (queued){ids[i], flags};
    }
    return (int)count;
}

/* Claim an absent word for `slot`. Returns 0 when it is settled already. The word says which slot is being written: whoever finds it
 * loading after this process died knows which slot the kernel may be writing still. */
static int claim(uint32_t *word, uint32_t flags, uint32_t slot)
{
    while (!settled(word, flags)) {
        const uint32_t value = np_word_load(word);
        if ((value & NP_WORD_STATE_MASK) == NP_WORD_ABSENT && np_word_swap(word, value, NP_WORD_LOADING | flags | slot))
            return 1;
    }
    return 0;
}

/* Take the next cluster that must be read and has a slot: claim its word, prepare its flight. Returns 0 when there is none. */
static int take_next(np_loader *loader, uint32_t part, int priority, uint32_t *index)
{
    part_state *state = &loader->parts[part];
    queue *line = &state->queues[priority];
    while (line->count && state->free_count) {
        const queued next = line->entries[line->from];
        const uint32_t slot = state->free[state->free_count - 1];
        line->from = (line->from + 1) % loader->queue_capacity;
        line->count--;
        if (!claim(&state->facts.words[next.id], next.flags, slot)) {
            loader->counters.already_there++;
            continue;
        }
        state->free_count--;
        state->slot_states[slot] = SLOT_FILLING;
        *index = loader->free_flights[--loader->free_flight_count];
        loader->flights[*index] = (flight){
            .offset = state->facts.base_offset + next.id * state->facts.stride_bytes + state->facts.part_offset,
            .part = part,
            .id = next.id,
            .slot = slot,
        };
        return 1;
    }
    return 0;
}

/* Fill the batch: demands before prefetches before warm-up, the two parts by turns. Returns its length. */
static uint32_t gather(np_loader *loader)
{
    uint32_t count = 0;
    for (int priority = 0; priority < PRIORITIES; priority++)
        for (uint32_t part = 0, dry = 0; dry < PARTS && loader->free_flight_count; part = (part + 1) % PARTS) {
            uint32_t index;
            if (!take_next(loader, part, priority, &index)) {
                dry++;
                continue;
            }
            dry = 0;
            uint32_t place = count++; /* by offset; requests come mostly sorted, so this moves little */
            for (; place && loader->flights[loader->batch[place - 1]].offset > loader->flights[index].offset; place--)
                loader->batch[place] = loader->batch[place - 1];
            loader->batch[place] = index;
        }
    return count;
}

static void submit(np_loader *loader)
{
    const uint32_t count = gather(loader);
    for (uint32_t i = 0; i < count; i++) {
        const flight *ready = &loader->flights[loader->batch[i]];
        const np_loader_part *facts = &loader->parts[ready->part].facts;
        loader->offsets[i] = ready->offset;
        loader->tags[i] = loader->batch[i];
        loader->bytes[i] = facts->part_bytes;
        loader->targets[i] = facts->slots + (size_t)ready->slot * facts->part_bytes;
    }
    const int taken = np_reader_submit(loader->reader, loader->offsets, loader->bytes, loader->targets, loader->tags, count);
    for (uint32_t i = taken > 0 ? (uint32_t)taken : 0; i < count; i++) /* only when somebody else uses the reader, too */
        land(loader, loader->batch[i], -EBUSY);
}

int np_loader_turn(np_loader *loader, int timeout_ms)
{
    submit(loader);
    land_some(loader, !loader->unannounced && timeout_ms != 0, timeout_ms);
    const int ended = announce(loader);
    submit(loader); /* the flash stays busy while the caller looks for messages */
    return ended + announce(loader);
}

void np_loader_reset(np_loader *loader)
{
    land_all(loader);
    for (int i = 0; i < PARTS; i++) {
        part_state *part = &loader->parts[i];
        for (int priority = 0; priority < PRIORITIES; priority++)
            part->queues[priority].count = 0;
        while (part->free_count)
            part->slot_states[part->free[--part->free_count]] = SLOT_ELSEWHERE;
        for (uint32_t id = 0; id < part->facts.cluster_count; id++) {
            uint32_t *word = &part->facts.words[id];
            if ((np_word_load(word) & NP_WORD_STATE_MASK) == NP_WORD_LOADING) /* claimed by a loader that died */
                np_word_store(word, NP_WORD_ABSENT);
        }
    }
}

void np_loader_read_state(const np_loader *loader, np_loader_state *out)
{
    *out = loader->counters;
    for (int i = 0; i < PARTS; i++) {
        const part_state *part = &loader->parts[i];
        out->free_slots[i] = part->free_count;
        for (int priority = 0; priority < PRIORITIES; priority++)
            out->waiting[i] += part->queues[priority].count;
    }
    out->in_flight = np_reader_in_flight(loader->reader);
}

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

#include "flash/loader.h"
#include "flash/reader.h"

enum {
    TURN_MOST = 16,   /* completions of one turn: few, since the first one's waiter is woken after the last one's checksum */
    ERRORS_MOST = 3,  /* this many make a cluster failed, for the whole run; fewer may pass */
    DAMAGED_MOST = 2, /* a bit may have flipped on the way here, not only in the file */
};

/* Append to a queue. Returns 0 when it is full. */
static int enqueue(const np_loader *loader, np_queue *line, np_queued what)
{
    if (line->count == loader->queue_capacity)
        return 0;
    line->entries[(line->from + (uint64_t)line->count++) % loader->queue_capacity] = what;
    return 1;
}

/* A read has ended, with `result` bytes or -errno: publish the cluster; or take the slot back and ask for the cluster again, as a
 * demand, or mark it failed. */
static void land(np_loader *loader, uint32_t index, int32_t result)
{
    const np_flight *landed = &loader->flights[index];
    np_part_state *part = &loader->parts[landed->part];
    const np_loader_part *facts = &part->facts;
    const uint8_t *data = facts->slots + (size_t)landed->slot * facts->part_bytes;
    const int whole = result == (int32_t)facts->part_bytes;
    const int good = whole && np_crc32c(0, data, facts->part_bytes) == facts->checksums[landed->id];
    uint32_t *word = &facts->words[landed->id];
    loader->counters.reads++;
    loader->free_flights[loader->free_flight_count++] = index;
    if (good) {
        loader->unannounced++;
        loader->counters.bytes += facts->part_bytes;
        part->slot_states[landed->slot] = NP_SLOT_ELSEWHERE;
        /* A plain store: while a word is loading, nobody but the loader changes more of it than the reference bit. */
        np_word_store(word, NP_WORD_PRESENT | NP_WORD_REFERENCED | landed->slot | (np_word_load(word) & NP_WORD_PINNED));
        return;
    }
    *(whole ? &loader->counters.checksum_failures : &loader->counters.io_errors) += 1;
    part->slot_states[landed->slot] = NP_SLOT_FREE;
    part->free[part->free_count++] = landed->slot;
    const np_queued again = {landed->id, np_word_load(word) & NP_WORD_PINNED, landed->failures + 1};
    if (again.failures < (whole ? DAMAGED_MOST : ERRORS_MOST) && enqueue(loader, &part->queues[0], again)) {
        np_word_store(word, NP_WORD_ABSENT);
        return;
    }
    loader->unannounced++;
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

void np_loader_land_all(np_loader *loader)
{
    while (np_reader_in_flight(loader->reader))
        land_some(loader, 1, -1);
    announce(loader);
}

int np_loader_grant(np_loader *loader, int part, const uint32_t *slots, size_t count)
{
    if (part < 0 || part >= NP_LOADER_PARTS)
        return NP_E_ARGUMENT;
    np_part_state *state = &loader->parts[part];
    const uint32_t before = state->free_count;
    for (size_t i = 0; i < count; i++) {
        if (slots[i] >= state->facts.slot_count || state->slot_states[slots[i]] != NP_SLOT_ELSEWHERE) {
            while (state->free_count > before)
                state->slot_states[state->free[--state->free_count]] = NP_SLOT_ELSEWHERE;
            return NP_E_ARGUMENT;
        }
        state->slot_states[slots[i]] = NP_SLOT_FREE;
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
    if (part < 0 || part >= NP_LOADER_PARTS || priority < 0 || priority >= NP_LOADER_PRIORITIES ||
        (flags & ~(uint32_t)NP_WORD_PINNED) || count > INT32_MAX)
        return NP_E_ARGUMENT;
    const np_loader_part *facts = &loader->parts[part].facts;
    for (size_t i = 0; i < count; i++)
        if (ids[i] >= facts->cluster_count)
            return NP_E_ARGUMENT;
    np_queue *line = &loader->parts[part].queues[priority];
    for (size_t i = 0; i < count; i++) {
        if (settled(&facts->words[ids[i]], flags)) {
            loader->counters.already_there++;
            continue;
        }
        if (!enqueue(loader, line, (np_queued){.id = ids[i], .flags = flags}))
            return (int)i;
    }
    return (int)count;
}

/* Claim an absent word for `slot`. Returns 0 when it is settled already. The word names the slot for whoever
 * looks into a stuck run. */
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
    np_part_state *state = &loader->parts[part];
    np_queue *line = &state->queues[priority];
    while (line->count && state->free_count) {
        const np_queued next = line->entries[line->from];
        const uint32_t slot = state->free[state->free_count - 1];
        line->from = (line->from + 1) % loader->queue_capacity;
        line->count--;
        if (!claim(&state->facts.words[next.id], next.flags, slot)) {
            loader->counters.already_there++;
            continue;
        }
        state->free_count--;
        state->slot_states[slot] = NP_SLOT_FILLING;
        *index = loader->free_flights[--loader->free_flight_count];
        loader->flights[*index] = (np_flight){
            .offset = state->facts.base_offset + next.id * state->facts.stride_bytes + state->facts.part_offset,
            .part = part,
            .id = next.id,
            .slot = slot,
            .failures = next.failures,
        };
        return 1;
    }
    return 0;
}

/* Fill the batch: demands before prefetches before warm-up, the two parts by turns. Returns its length. */
static uint32_t gather(np_loader *loader)
{
    uint32_t count = 0;
    for (int priority = 0; priority < NP_LOADER_PRIORITIES; priority++)
        for (uint32_t part = 0, dry = 0; dry < NP_LOADER_PARTS && loader->free_flight_count; part = (part + 1) % NP_LOADER_PARTS) {
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
        const np_flight *ready = &loader->flights[loader->batch[i]];
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
    np_loader_drain(loader);
    submit(loader);
    land_some(loader, !loader->unannounced && timeout_ms != 0, timeout_ms);
    int ended = announce(loader);
    submit(loader); /* the flash stays busy while the caller looks for messages */
    ended += announce(loader);
    if (loader->board) {
        const np_loader_state *state = &loader->counters;
        const uint64_t shown[NP_LOADER_BOARD] = {state->reads,     state->bytes,   state->checksum_failures,
                                                 state->io_errors, state->refused, state->dropped};
        for (int i = 0; i < NP_LOADER_BOARD; i++)
            __atomic_store_n(&loader->board[i], shown[i], __ATOMIC_RELAXED);
    }
    return ended;
}

void np_loader_reset(np_loader *loader)
{
    np_loader_land_all(loader);
    for (int i = 0; i < NP_LOADER_PARTS; i++) {
        np_part_state *part = &loader->parts[i];
        for (int priority = 1; priority < NP_LOADER_PRIORITIES; priority++) /* 0: somebody waits for these, and asks but once */
            part->queues[priority].count = 0;
        while (part->free_count)
            part->slot_states[part->free[--part->free_count]] = NP_SLOT_ELSEWHERE;
    }
}

void np_loader_read_state(const np_loader *loader, np_loader_state *out)
{
    *out = loader->counters;
    for (int i = 0; i < NP_LOADER_PARTS; i++) {
        const np_part_state *part = &loader->parts[i];
        out->free_slots[i] = part->free_count;
        for (int priority = 0; priority < NP_LOADER_PRIORITIES; priority++)
            out->waiting[i] += part->queues[priority].count;
    }
    out->in_flight = np_reader_in_flight(loader->reader);
}

/* The loader's core: takes cluster ids, claims their words, reads them, checks them, copies them into free slots, publishes them.
 *
 * Reads land in staging buffers of this process: a slot need be neither aligned nor padded, and what the kernel still reads for a loader
 * that died harms nobody. A word is claimed when its read is submitted, not when it is asked for: a cluster that waits as a prefetch can be asked for again
 * as a demand and is then read at once; the older entry finds it there and is dropped.
 *
 *   what                                ordering
 *   absent -> loading (claim)           plain: nobody but the loader changes an absent word, so an id asked for twice is read once
 *   bytes in staging -> checksum, copy  the reader's completion is an acquire
 *   bytes in the slot -> word           the word's store is a release
 *   word -> arrivals                    release; a waiter reads arrivals (acquire) before it looks at words
 *   slot free -> slot written           the cache took it after no read window covered it (residency/clock.c); its grant comes after */
#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#include "flash/loader.h"
#include "flash/reader.h"

enum {
    MAX_ANNOUNCED = 16, /* reads that are announced together: few, since the first one's waiter is woken after the last one's checksum */
    MAX_ERRORS = 3,  /* this many make a cluster failed, for the epoch; fewer may pass */
    MAX_DAMAGED = 2, /* a bit may have flipped on the way here, not only in the file */
    MAX_RUN = 128,      /* parts that are brought into slots together */
    MIN_WRITTEN = 4,   /* as many of them are worth a system call */
};

/* Parts whose slots follow each other, on their way from staging to there. */
typedef struct {
    uint32_t count;
    const np_claim *claims[MAX_RUN];
    struct iovec parts[MAX_RUN]; /* of each the bytes that its slot holds */
} slot_run;

/* A part could not be had: take the slot back and ask for it again, as a demand, or mark it failed. */
static void land_failure(np_loader *loader, const np_claim *landed, int was_read)
{
    np_part_state *part = &loader->parts[landed->part];
    uint32_t *word = &part->config.words[landed->id];
    *(was_read ? &loader->counters.checksum_failures : &loader->counters.io_errors) += 1;
    part->free[part->free_count++] = landed->slot;
    const uint32_t failures = landed->failures + 1u, flags = np_word_load(word) & NP_ENTRY_PINNED;
    const uint32_t again = landed->id | (landed->part ? NP_REQUEST_VALUE : NP_REQUEST_TRIGGER) | flags | failures << NP_QUEUED_FAILURES;
    if (failures < (was_read ? MAX_DAMAGED : MAX_ERRORS) && np_loader_enqueue(&loader->queues[landed->part][0], again, 1)) {
        np_word_store(word, NP_ENTRY_ABSENT);
        return;
    }
    loader->unannounced++;
    np_loader_fail(loader, word);
}

/* Bring a run into its slots. A slot that is touched for the first time costs a page fault where it is mapped, twice as much
 * as the same bytes written to the file. */
static void fill_slots(const np_loader_part *config, const slot_run *run)
{
    const uint64_t place = (uint64_t)run->claims[0]->slot * config->slot_bytes;
    const size_t bytes = (size_t)run->count * config->slot_bytes;
    if (config->slots_file >= 0 && run->count >= MIN_WRITTEN &&
        pwritev(config->slots_file, run->parts, (int)run->count, (off_t)(config->slots_file_offset + place)) == (ssize_t)bytes)
        return;
    for (uint32_t i = 0; i < run->count; i++)
        memcpy(config->slots + place + (size_t)i * config->slot_bytes, run->parts[i].iov_base, config->slot_bytes);
}

/* Publish a run, and begin a new one. */
static void land_run(np_loader *loader, np_part_state *part, slot_run *run)
{
    if (run->count)
        fill_slots(&part->config, run);
    for (uint32_t i = 0; i < run->count; i++) {
        const np_claim *landed = run->claims[i];
        uint32_t *word = &part->config.words[landed->id];
        loader->unannounced++;
        np_set_drop(part->ours, landed->slot);
        /* Unreferenced: a guess that nobody looks at is the first to go. A plain store: nobody else changes a word that is loading. */
        np_word_store(word, NP_ENTRY_PRESENT | landed->slot | (np_word_load(word) & NP_ENTRY_PINNED));
    }
    run->count = 0;
}

/* One part of the clusters that a read brought, or failed to bring. */
static void land_part(np_loader *loader, const np_flight *flight, int number, int whole)
{
    np_part_state *part = &loader->parts[number];
    const np_loader_part *config = &part->config;
    slot_run run = {0};
    for (uint32_t i = 0; i < flight->claim_count; i++) {
        const np_claim *landed = &flight->claims[i];
        if (landed->part != number)
            continue;
        if (landed->warms_up)
            loader->counters.warm_up_left_bytes -= config->part_bytes;
        const uint64_t offset = config->base_offset + landed->id * config->stride_bytes + config->part_offset;
        uint8_t *data = whole ? flight->staged + (offset - flight->offset) : NULL;
        if (!data || np_crc32c(0, data, config->part_bytes) != config->checksums[(size_t)landed->id * config->checksum_stride]) {
            land_failure(loader, landed, whole);
            continue;
        }
        if (run.count == MAX_RUN || (run.count && run.claims[run.count - 1]->slot + 1 != landed->slot))
            land_run(loader, part, &run);
        run.parts[run.count] = (struct iovec){data, config->slot_bytes};
        run.claims[run.count++] = landed;
    }
    land_run(loader, part, &run);
}

/* A read has ended, with `result` bytes or -errno. */
static void land_flight(np_loader *loader, uint32_t index, int32_t result)
{
    const np_flight *flight = &loader->flights[index];
    np_staging_pool *pool = &loader->pools[flight->pool];
    const int whole = result == (int32_t)flight->bytes;
    loader->counters.reads++;
    if (whole) {
        loader->counters.bytes += flight->bytes;
        loader->counters.gap_bytes += flight->gap_bytes;
    }
    for (int number = 0; number < NP_LOADER_PARTS; number++)
        land_part(loader, flight, number, whole);
    pool->free[pool->free_count++] = index;
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

/* Wait for `least` reads, land all that are done, and tell the workers. Returns how many clusters were published or failed. */
static int land_some(np_loader *loader, size_t least, int timeout_ms)
{
    np_completion done[MAX_ANNOUNCED];
    int ended = 0, count;
    do {
        count = np_reader_reap(loader->reader, done, least, MAX_ANNOUNCED, timeout_ms);
        for (int i = 0; i < count; i++)
            land_flight(loader, (uint32_t)done[i].tag, done[i].result);
        ended += announce(loader);
        least = 0;
        timeout_ms = 0;
    } while (count == MAX_ANNOUNCED);
    return ended;
}

void np_loader_land_all(np_loader *loader)
{
    while (np_reader_in_flight(loader->reader))
        land_some(loader, 1, -1);
}

int np_loader_grant(np_loader *loader, int part, const uint32_t *slots, size_t count)
{
    if (part < 0 || part >= NP_LOADER_PARTS)
        return NP_E_ARGUMENT;
    np_part_state *state = &loader->parts[part];
    const uint32_t before = state->free_count;
    for (size_t i = count; i-- > 0;) { /* from the end: the first is used first, so that neighbours get slots in order */
        if (slots[i] >= state->config.slot_count || np_set_has(state->ours, slots[i])) {
            while (state->free_count > before)
                np_set_drop(state->ours, state->free[--state->free_count]);
            return NP_E_ARGUMENT;
        }
        np_set_add(state->ours, slots[i]);
        state->free[state->free_count++] = slots[i];
    }
    return (int)count;
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
        uint32_t missing = (uint32_t)parts;
        if (kind != 1 && np_loader_settled(&loader->parts[0].config.words[ids[i]], flags))
            missing &= ~(uint32_t)NP_REQUEST_TRIGGER;
        if (kind != 0 && np_loader_settled(&loader->parts[1].config.words[ids[i]], flags))
            missing &= ~(uint32_t)NP_REQUEST_VALUE;
        if (missing != (uint32_t)parts)
            loader->counters.already_there += missing || kind != NP_QUEUE_BOTH ? 1 : 2;
        if (missing && !np_loader_enqueue(&loader->queues[kind][priority], ids[i] | missing | flags, 0))
            return (int)i;
    }
    return (int)count;
}

static void submit(np_loader *loader)
{
    const uint32_t count = np_loader_gather(loader);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t index = loader->batch[i];
        loader->offsets[i] = loader->flights[index].offset;
        loader->tags[i] = index;
        loader->bytes[i] = loader->flights[index].bytes;
        loader->targets[i] = loader->flights[index].staged;
    }
    const int taken = np_reader_submit(loader->reader, loader->offsets, loader->bytes, loader->targets, loader->tags, count);
    for (uint32_t i = taken > 0 ? (uint32_t)taken : 0; i < count; i++) /* only when somebody else uses the reader, too */
        land_flight(loader, loader->batch[i], -EBUSY);
}

int np_loader_turn(np_loader *loader, int timeout_ms)
{
    np_loader_forgive(loader);
    int ended = land_some(loader, 0, 0); /* first, so that what they make room for is submitted by one call */
    np_loader_drain(loader);
    submit(loader);
    if (!ended && !loader->unannounced && timeout_ms != 0 && np_reader_in_flight(loader->reader)) {
        ended = land_some(loader, 1, timeout_ms);
        np_loader_drain(loader);
        submit(loader); /* the flash stays busy while the caller looks for messages */
    }
    ended += announce(loader);
    if (loader->in_flight)
        np_word_store(loader->in_flight, np_reader_in_flight(loader->reader));
    if (loader->board) {
        const np_loader_state *state = &loader->counters;
        const uint64_t shown[NP_LOADER_BOARD] = {state->reads,   state->bytes,   state->checksum_failures, state->io_errors,
                                                 state->refused, state->dropped, state->gap_bytes,         state->waited_for_slot,
                                                 state->warm_up_bytes, state->warm_up_left_bytes};
        for (int i = 0; i < NP_LOADER_BOARD; i++)
            __atomic_store_n(&loader->board[i], shown[i], __ATOMIC_RELAXED);
    }
    return ended;
}

void np_loader_reset(np_loader *loader)
{
    np_loader_land_all(loader);
    for (int kind = 0; kind < NP_LOADER_KINDS; kind++)
        for (int priority = 1; priority < NP_LOADER_PRIORITIES; priority++) /* 0: somebody waits for these, and asks but once */
            loader->queues[kind][priority].count = 0;
    np_warm_up_forget(loader);
    for (int i = 0; i < NP_LOADER_PARTS; i++) {
        np_part_state *part = &loader->parts[i];
        while (part->free_count)
            np_set_drop(part->ours, part->free[--part->free_count]);
    }
}

int np_loader_trim(np_loader *loader, int part, uint32_t first_slot)
{
    if (part < 0 || part >= NP_LOADER_PARTS)
        return NP_E_ARGUMENT;
    const np_loader_part *config = &loader->parts[part].config;
    for (uint32_t slot = first_slot; slot < config->slot_count; slot++)
        if (np_set_has(loader->parts[part].ours, slot))
            return NP_E_ARGUMENT;
    if (config->slots_file < 0 || first_slot >= config->slot_count)
        return NP_OK;
    const uint64_t before = (uint64_t)first_slot * config->slot_bytes, all = (uint64_t)config->slot_count * config->slot_bytes;
    return np_file_give_back(config->slots_file, config->slots_file_offset + before, all - before) == NP_OK ? NP_OK : NP_E_IO;
}

uint32_t np_loader_count_waiting(const np_loader *loader, int part)
{
    uint32_t waiting = loader->warm_up.pinned_count[part];
    for (int priority = 0; priority < NP_LOADER_PRIORITIES; priority++)
        waiting += loader->queues[part][priority].count + loader->queues[NP_QUEUE_BOTH][priority].count;
    return waiting;
}

void np_loader_read_state(const np_loader *loader, np_loader_state *out)
{
    *out = loader->counters;
    for (int i = 0; i < NP_LOADER_PARTS; i++) {
        out->free_slots[i] = loader->parts[i].free_count;
        out->waiting[i] = np_loader_count_waiting(loader, i);
    }
    out->in_flight = np_reader_in_flight(loader->reader);
}

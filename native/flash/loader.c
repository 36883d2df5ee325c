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

#include "flash/fill.h"
#include "flash/loader.h"
#include "flash/reader.h"

enum {
    MAX_ANNOUNCED = 16, /* reads that are announced together: few, since the first one's waiter is woken after the last one's checksum */
    MAX_LANDED_BYTES = 1 << 20, /* then it is time to look what else flash could read: half a millisecond of checksums and copies */
    MAX_FETCHED_BYTES = 8192,
    CACHE_LINE_BYTES = 64, /* of larger ones some are named twice */
    MAX_LANDINGS = 8, /* of so many bytes in a turn */
    MAX_ERRORS = 3,  /* this many make a cluster failed, for the epoch; fewer may pass */
    MAX_DAMAGED = 2, /* a bit may have flipped on the way here, not only in the file */
};

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

/* Tell of what a read brought, once it is in its slots; or failed to bring. */
static void publish(np_loader *loader, uint32_t index)
{
    const np_flight *flight = &loader->flights[index];
    np_staging_pool *pool = &loader->pools[flight->pool];
    for (uint32_t i = 0; i < flight->claim_count; i++) {
        const np_claim *landed = &flight->claims[i];
        np_part_state *part = &loader->parts[landed->part];
        if (landed->warms_up)
            loader->counters.warm_up_left_bytes -= part->config.part_bytes;
        if (!landed->is_right) {
            land_failure(loader, landed, flight->whole);
            continue;
        }
        uint32_t *word = &part->config.words[landed->id];
        loader->unannounced++;
        np_set_drop(part->ours, landed->slot);
        /* Unreferenced: a guess that nobody looks at is the first to go. A plain store: nobody else changes a word that is loading. */
        np_word_store(word, NP_ENTRY_PRESENT | landed->slot | (np_word_load(word) & NP_ENTRY_PINNED));
    }
    pool->free[pool->free_count++] = index;
}

/* A read has ended, with `result` bytes or -errno. */
static void land_flight(np_loader *loader, uint32_t index, int32_t result)
{
    np_flight *flight = &loader->flights[index];
    flight->whole = result == (int32_t)flight->bytes;
    loader->counters.reads++;
    if (flight->whole) {
        loader->counters.bytes += flight->bytes;
        loader->counters.gap_bytes += flight->gap_bytes;
    }
    if (np_filler_take(loader->filler, index))
        return;
    np_fill_slots(loader, flight);
    publish(loader, index);
}

/* Publish what the other thread has brought into slots. */
static void land_filled(np_loader *loader)
{
    uint32_t index;
    while (np_filler_next(loader->filler, &index))
        publish(loader, index);
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

/* Flash put these bytes into memory, or another core's cache. Have the first of them come nearer while another read lands: where reads are
 * short, waiting for them is most of what a checksum takes. */
static void fetch_staged(const np_loader *loader, const np_flight *flight)
{
    const uint32_t bytes = flight->bytes < MAX_FETCHED_BYTES ? flight->bytes : MAX_FETCHED_BYTES;
    for (uint32_t i = 0; i < flight->claim_count && i < NP_LOADER_PARTS; i++) {
        const np_claim *claim = &flight->claims[i];
        const np_loader_part *config = &loader->parts[claim->part].config;
        __builtin_prefetch(&config->checksums[(size_t)claim->id * config->checksum_stride]);
        __builtin_prefetch(&config->words[claim->id], 1);
    }
    for (uint32_t at = 0; at < bytes; at += CACHE_LINE_BYTES)
        __builtin_prefetch(flight->staged + at);
}

/* How many reads land before the workers hear of them. */
static size_t landing_at_once(const np_loader *loader)
{
    const np_staging_pool *longest = &loader->pools[NP_POOL_LONG];
    if (longest->free_count == longest->count)
        longest = &loader->pools[NP_POOL_ORDINARY];
    const uint32_t most = MAX_LANDED_BYTES / longest->read_bytes;
    return most < 1 ? 1 : most < MAX_ANNOUNCED ? most : MAX_ANNOUNCED;
}

/* Wait for `least` reads, land what is done, and tell the workers; adds to *ended how many clusters were published or failed. Returns 1
 * when there may be more: flash should have other reads to do meanwhile. */
static int land_some(np_loader *loader, size_t least, int timeout_ms, int *ended)
{
    const size_t most = landing_at_once(loader);
    const uint64_t bytes_before = loader->counters.bytes;
    np_completion done[MAX_ANNOUNCED];
    int count;
    do {
        land_filled(loader);
        count = np_reader_reap(loader->reader, done, least, most, timeout_ms);
        for (int i = 0; i < count; i++) {
            if (i + 1 < count)
                fetch_staged(loader, &loader->flights[done[i + 1].tag]);
            land_flight(loader, (uint32_t)done[i].tag, done[i].result);
        }
        *ended += announce(loader);
        least = 0;
        timeout_ms = 0;
    } while (count == (int)most && loader->counters.bytes - bytes_before < MAX_LANDED_BYTES);
    return count == (int)most;
}

void np_loader_land_all(np_loader *loader)
{
    int ended = 0;
    while (np_loader_in_flight(loader)) {
        land_some(loader, 1, -1, &ended);
        np_filler_wait(loader->filler, -1);
    }
}

uint32_t np_loader_in_flight(const np_loader *loader)
{
    return np_reader_in_flight(loader->reader) + np_filler_held(loader->filler);
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
    state->exhausted = count == 0;
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

/* Land what is done, and read what is asked for; again and again, but leave in time for the caller to look for messages. */
static int land_and_submit(np_loader *loader, size_t least, int timeout_ms)
{
    int ended = 0;
    for (int i = 0; i == 0 || (loader->has_more && (i < MAX_LANDINGS || !ended)); i++) {
        /* Landing comes first, so that what it makes room for is submitted by one call. */
        loader->has_more = land_some(loader, i ? 0 : least, i ? 0 : timeout_ms, &ended);
        np_loader_drain(loader);
        submit(loader);
    }
    return ended;
}

int np_loader_turn(np_loader *loader, int timeout_ms)
{
    np_loader_forgive(loader);
    int ended = land_and_submit(loader, 0, 0);
    if (!ended && !loader->unannounced && timeout_ms != 0 && np_loader_in_flight(loader)) {
        if (!np_reader_in_flight(loader->reader))
            np_filler_wait(loader->filler, timeout_ms);
        ended = land_and_submit(loader, 1, timeout_ms); /* the flash stays busy while the caller looks for messages */
    }
    ended += announce(loader);
    np_warm_up_count_time(loader);
    if (loader->in_flight)
        np_word_store(loader->in_flight, np_reader_in_flight(loader->reader));
    if (loader->board) {
        const np_loader_state *state = &loader->counters;
        const uint64_t shown[NP_LOADER_BOARD] = {state->reads,   state->bytes,   state->checksum_failures, state->io_errors,
                                                 state->refused, state->dropped, state->gap_bytes,         state->waited_for_slot,
                                                 state->warm_up_bytes, state->warm_up_left_bytes, state->warm_up_ns};
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
        part->exhausted = 0;
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
    out->in_flight = np_loader_in_flight(loader);
}

/* A turn of the loader: land completed reads, take requests, submit new reads.
 *
 * Reads go to staging buffers of this process. So slots need neither alignment nor padding, and reads that the kernel
 * finishes after the loader's death harm nothing. An entry is claimed when its read is submitted, not when it is
 * requested: a queued prefetch can be requested again as a demand, which is read at once; the older request is dropped
 * when its turn comes.
 *
 *   what                                ordering
 *   absent -> loading (claim)           plain: only the loader changes an absent entry, so a cluster requested twice is read once
 *   bytes in staging -> checksum, copy  the reader's completion is an acquire
 *   bytes in the slot -> entry          the entry's store is a release
 *   entry -> arrivals                   release; a waiter reads arrivals (acquire) before it looks up entries
 *   slot free -> slot written           the cache freed it while no read window covered it (residency/clock.c), and granted it after that */
#include "flash/loader.h"

#include <errno.h>

#include "flash/drain.h"
#include "flash/failures.h"
#include "flash/fill.h"
#include "flash/gather.h"
#include "flash/queues.h"
#include "flash/slot_pages.h"
#include "flash/warm_up.h"

enum {
    MAX_ANNOUNCED = 16, /* reads announced together: the first one's waiter is woken only after the last one's checksum */
    MAX_LANDED_BYTES = 1 << 20, /* between submissions: half a millisecond of checksums and copies, in which flash could run dry */
    MAX_FETCHED_BYTES = 8192,
    CACHE_LINE_BYTES = 64,
    MAX_LANDINGS = 8,         /* rounds of landing and submitting per turn */
    MAX_ERRORS = 3,           /* I/O errors of a cluster before it is failed for the epoch */
    MAX_WRONG_CHECKSUMS = 2,  /* more than one: a bit may have flipped in the transfer, not in the file */
};

/* A part was not read, or not intact: free its slot, and queue it again as a demand or mark it as failed. */
static void land_failure(np_loader *loader, const np_claim *landed, int was_read)
{
    np_part_state *part = &loader->parts[landed->part];
    uint32_t *word = &part->config.words[landed->id];
    *(was_read ? &loader->counters.checksum_failures : &loader->counters.io_errors) += 1;
    part->free[part->free_count++] = landed->slot;
    const uint32_t failures = landed->failures + 1u, flags = np_word_load(word) & NP_ENTRY_PINNED;
    const uint32_t retry = landed->id | (landed->part ? NP_REQUEST_VALUE : NP_REQUEST_TRIGGER) | flags | failures << NP_QUEUED_FAILURES;
    if (failures < (was_read ? MAX_WRONG_CHECKSUMS : MAX_ERRORS) && np_queue_append(&loader->queues[landed->part][0], retry, 1)) {
        np_word_store(word, NP_ENTRY_ABSENT);
        return;
    }
    loader->unannounced++;
    np_loader_fail(loader, word);
}

/* Publish a part that is in its slot, or handle its failure. */
static void publish_claim(np_loader *loader, const np_claim *landed, int was_read)
{
    np_part_state *part = &loader->parts[landed->part];
    if (landed->warms_up)
        loader->counters.warm_up_left_bytes -= part->config.part_bytes;
    if (!landed->is_valid) {
        land_failure(loader, landed, was_read);
        return;
    }
    uint32_t *word = &part->config.words[landed->id];
    loader->unannounced++;
    np_set_drop(part->granted, landed->slot);
    /* Unreferenced: a prefetched cluster that no worker looks up is evicted first. A plain store: only the loader
     * changes a loading entry. */
    np_word_store(word, NP_ENTRY_PRESENT | landed->slot | (np_word_load(word) & NP_ENTRY_PINNED));
}

/* Publish the clusters of a read that are in their slots, and handle those that failed. */
static void publish(np_loader *loader, uint32_t index)
{
    const np_flight *flight = &loader->flights[index];
    np_staging_pool *pool = &loader->pools[flight->pool];
    for (uint32_t i = 0; i < flight->claim_count; i++)
        publish_claim(loader, &flight->claims[i], flight->is_complete || flight->claims[i].is_valid);
    pool->free[pool->free_count++] = index;
}

/* The bytes of a piece of a long range. */
static uint32_t piece_bytes(const np_loader *loader, const np_flight *flight, uint32_t piece)
{
    const uint32_t left = flight->bytes - piece * loader->piece_bytes;
    return left < loader->piece_bytes ? left : loader->piece_bytes;
}

/* A piece of a long range has arrived: fill what can be filled. It is published as a whole: workers that wait for an expert
 * need both parts, and would only take the loader's core for a moment. */
static void land_piece(np_loader *loader, np_flight *flight, uint32_t piece)
{
    const uint32_t before = flight->next_piece;
    flight->arrived |= 1u << piece;
    while (flight->next_piece < flight->pieces && flight->arrived >> flight->next_piece & 1)
        flight->next_piece++;
    if (flight->next_piece == before)
        return;
    const uint32_t last = flight->next_piece - 1;
    np_fill_arrived(loader, flight, flight->offset + (uint64_t)last * loader->piece_bytes + piece_bytes(loader, flight, last));
}

/* Handle a completed read. result: bytes or -errno. The flight lands with its last read. */
static void land_read(np_loader *loader, uint64_t tag, int32_t result)
{
    const uint32_t index = (uint32_t)(tag / loader->flight_reads), number = (uint32_t)(tag % loader->flight_reads);
    np_flight *flight = &loader->flights[index];
    const uint32_t needed_bytes = loader->reading.source ? flight->reads[number].needed_bytes : piece_bytes(loader, flight, number);
    flight->is_complete &= result >= (int32_t)needed_bytes;
    const int is_long = flight->pieces > 1;
    if (is_long && flight->is_complete)
        land_piece(loader, flight, number);
    flight->unfinished--;
    loader->counters.reads += !is_long || !flight->unfinished; /* a long range counts once */
    if (flight->unfinished)
        return;
    if (flight->is_complete) {
        loader->counters.bytes += flight->bytes;
        loader->counters.gap_bytes += flight->gap_bytes;
    }
    if (!is_long) {
        if (np_filler_accept(loader->filler, index))
            return;
        np_fill_slots(loader, flight);
    }
    publish(loader, index);
}

/* Publish the reads that the filler thread has copied into slots. */
static void publish_filled(np_loader *loader)
{
    uint32_t index;
    while (np_filler_next(loader->filler, &index))
        publish(loader, index);
}

/* Wake the workers if clusters were published or failed since the last call. Returns their number. */
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

/* Fetch a read's first bytes into the processor's cache while another read lands. DMA left them in memory or in another
 * core's cache; with short reads, waiting for them is most of a checksum's time. */
static void prefetch_staged(const np_loader *loader, const np_flight *flight)
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

/* How many reads land before the workers are woken. */
static size_t landing_batch(const np_loader *loader)
{
    const np_staging_pool *longest = &loader->pools[NP_POOL_LONG];
    if (longest->free_count == longest->count)
        longest = &loader->pools[NP_POOL_ORDINARY];
    const uint32_t reads = MAX_LANDED_BYTES / (loader->piece_bytes < longest->read_bytes ? loader->piece_bytes : longest->read_bytes);
    return reads < 1 ? 1 : reads < MAX_ANNOUNCED ? reads : MAX_ANNOUNCED;
}

/* Wait for min_reads reads, land completed ones and wake the workers. Adds the number of published or failed clusters
 * to *ended. Returns 1 if more reads may be completed: the caller should submit new ones first. */
static int land_some(np_loader *loader, size_t min_reads, int timeout_ms, int *ended)
{
    const size_t max_reads = landing_batch(loader);
    const uint64_t bytes_before = loader->counters.bytes;
    np_completion done[MAX_ANNOUNCED];
    int count;
    do {
        publish_filled(loader);
        count = np_reader_reap(loader->reader, done, min_reads, max_reads, timeout_ms);
        for (int i = 0; i < count; i++) {
            if (i + 1 < count && loader->flight_reads == 1)
                prefetch_staged(loader, &loader->flights[done[i + 1].tag]);
            land_read(loader, done[i].tag, done[i].result);
        }
        *ended += announce(loader);
        min_reads = 0;
        timeout_ms = 0;
    } while (count == (int)max_reads && loader->counters.bytes - bytes_before < MAX_LANDED_BYTES);
    return count == (int)max_reads;
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
    return np_reader_in_flight(loader->reader) + np_filler_pending(loader->filler);
}

int np_loader_grant(np_loader *loader, int part, const uint32_t *slots, size_t count)
{
    if (part < 0 || part >= NP_LOADER_PARTS)
        return NP_E_ARGUMENT;
    np_part_state *state = &loader->parts[part];
    const uint32_t before = state->free_count;
    for (size_t i = count; i-- > 0;) { /* from the end, since `free` is a stack: neighbouring clusters get neighbouring slots */
        if (slots[i] >= state->config.slot_count || np_set_has(state->granted, slots[i])) {
            while (state->free_count > before)
                np_set_drop(state->granted, state->free[--state->free_count]);
            return NP_E_ARGUMENT;
        }
        np_set_add(state->granted, slots[i]);
        state->free[state->free_count++] = slots[i];
    }
    for (size_t i = 0; i < count; i++)
        np_slot_pages_grant(&state->pages, &state->config, slots[i]);
    state->exhausted = count == 0;
    return (int)count;
}

/* Append a read to those to submit. */
static void add_read(np_loader *loader, uint32_t *count, uint32_t index, uint32_t number, uint64_t offset, uint32_t bytes, uint32_t staged)
{
    loader->offsets[*count] = offset;
    loader->tags[*count] = (uint64_t)index * loader->flight_reads + number;
    loader->bytes[*count] = bytes;
    loader->targets[*count] = loader->flights[index].staged + staged;
    loader->flights[index].unfinished++;
    *count += 1;
}

static void submit(np_loader *loader)
{
    const uint32_t flights = np_loader_gather(loader);
    uint32_t count = 0;
    for (uint32_t i = 0; i < flights; i++) {
        const uint32_t index = loader->batch[i];
        np_flight *flight = &loader->flights[index];
        flight->unfinished = 0;
        flight->is_complete = 1;
        flight->next_piece = flight->arrived = 0;
        flight->pieces = (flight->bytes - 1) / loader->piece_bytes + 1;
        for (uint32_t p = 0, from = 0; !loader->reading.source && p < flight->pieces; p++, from += loader->piece_bytes)
            add_read(loader, &count, index, p, flight->offset + from, piece_bytes(loader, flight, p), from);
        for (uint32_t r = 0; loader->reading.source && r < NP_SOURCE_READS; r++)
            if (flight->reads[r].bytes)
                add_read(loader, &count, index, r, flight->reads[r].offset, flight->reads[r].bytes, flight->reads[r].staged);
    }
    const int accepted = np_reader_submit(loader->reader, loader->offsets, loader->bytes, loader->targets, loader->tags, count);
    for (uint32_t i = accepted > 0 ? (uint32_t)accepted : 0; i < count; i++) /* only if the reader has another user */
        land_read(loader, loader->tags[i], -EBUSY);
}

/* Alternate landing and submitting, but return often enough for the caller to handle messages. */
static int land_and_submit(np_loader *loader, size_t min_reads, int timeout_ms)
{
    int ended = 0;
    for (int i = 0; i == 0 || (loader->has_more && (i < MAX_LANDINGS || !ended)); i++) {
        /* Landing comes first: one submission then fills the room that it makes. */
        loader->has_more = land_some(loader, i ? 0 : min_reads, i ? 0 : timeout_ms, &ended);
        np_loader_drain(loader);
        submit(loader);
    }
    return ended;
}

int np_loader_turn(np_loader *loader, int timeout_ms)
{
    np_loader_retry_failed(loader);
    int ended = land_and_submit(loader, 0, 0);
    if (!ended && !loader->unannounced && timeout_ms != 0 && np_loader_in_flight(loader)) {
        if (!np_reader_in_flight(loader->reader))
            np_filler_wait(loader->filler, timeout_ms);
        ended = land_and_submit(loader, 1, timeout_ms); /* submits again, so that flash is busy while the caller handles messages */
    }
    ended += announce(loader);
    np_warm_up_count_time(loader);
    if (loader->in_flight)
        np_word_store(loader->in_flight, np_reader_in_flight(loader->reader));
    if (loader->board) {
        const np_loader_state *state = &loader->counters;
        const uint64_t figures[NP_LOADER_BOARD] = {state->reads,   state->bytes,   state->checksum_failures, state->io_errors,
                                                 state->refused, state->dropped, state->gap_bytes,         state->waited_for_slot,
                                                 state->warm_up_bytes, state->warm_up_left_bytes, state->warm_up_ns};
        for (int i = 0; i < NP_LOADER_BOARD; i++)
            __atomic_store_n(&loader->board[i], figures[i], __ATOMIC_RELAXED);
    }
    return ended;
}

void np_loader_reset(np_loader *loader)
{
    np_loader_land_all(loader);
    for (int kind = 0; kind < NP_LOADER_KINDS; kind++)
        for (int priority = 1; priority < NP_LOADER_PRIORITIES; priority++) /* demands stay: workers wait for them and request them only once */
            loader->queues[kind][priority].count = 0;
    np_warm_up_clear(loader);
    for (int i = 0; i < NP_LOADER_PARTS; i++) {
        np_part_state *part = &loader->parts[i];
        part->exhausted = 0;
        while (part->free_count)
            np_set_drop(part->granted, part->free[--part->free_count]);
    }
}

int np_loader_trim(np_loader *loader, int part, uint32_t first_slot)
{
    if (part < 0 || part >= NP_LOADER_PARTS)
        return NP_E_ARGUMENT;
    const np_loader_part *config = &loader->parts[part].config;
    for (uint32_t slot = first_slot; slot < config->slot_count; slot++)
        if (np_set_has(loader->parts[part].granted, slot))
            return NP_E_ARGUMENT;
    if (config->slots_file < 0 || first_slot >= config->slot_count)
        return NP_OK;
    return np_slot_pages_trim(&loader->parts[part].pages, config, first_slot);
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

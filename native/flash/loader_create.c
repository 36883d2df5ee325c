/* A loader's beginning and end. */
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "flash/loader.h"
#include "flash/reader.h"

enum {
    /* How long a dead process's reads may go on: io_uring's are not cancelled by its death, nor does its parent's wait() cover them
     * (measured: still writing after wait() in 12 of 40 kills). Flash answers in milliseconds; this is long beyond that. */
    SETTLE_MS = 1000,
};

static int acceptable(const np_loader_part *part, uint32_t alignment)
{
    const uint64_t places = part->base_offset | part->stride_bytes | part->part_offset | part->part_bytes | (uintptr_t)part->slots;
    return part->part_bytes > 0 && part->part_bytes <= INT32_MAX && places % alignment == 0 &&
           part->slot_count <= NP_WORD_SLOT_MASK + 1u && (part->slots || !part->slot_count) &&
           (!part->cluster_count || (part->words && part->checksums)) &&
           part->stride_bytes <= (uint64_t)INT64_MAX / 2 / (part->cluster_count + 1ull) &&
           part->base_offset < INT64_MAX / 4 && part->part_offset < INT64_MAX / 8;
}

static int part_create(np_part_state *part, const np_loader_part *facts, uint32_t queue_capacity)
{
    part->facts = *facts;
    part->free = calloc(facts->slot_count + 1u, sizeof *part->free);
    part->slot_states = calloc(facts->slot_count + 1u, sizeof *part->slot_states);
    int complete = part->free && part->slot_states;
    for (int i = 0; i < NP_LOADER_PRIORITIES; i++) {
        part->queues[i].entries = calloc(queue_capacity, sizeof(np_queued));
        complete = complete && part->queues[i].entries;
    }
    return complete;
}

static uint32_t count_loading(const np_loader_part *part)
{
    uint32_t count = 0;
    for (uint32_t id = 0; id < part->cluster_count; id++)
        count += (np_word_load(&part->words[id]) & NP_WORD_STATE_MASK) == NP_WORD_LOADING;
    return count;
}

/* Words that are loading before this loader has read anything were claimed by one that died, whose reads may still write to slots
 * that are about to be given out again. Wait for the end of that, and only then forget the claims: a loader that dies while it
 * waits here leaves them to the next one. */
static void inherit(const np_loader_part *parts)
{
    if (count_loading(&parts[0]) + count_loading(&parts[1]) == 0)
        return;
    struct timespec rest = {SETTLE_MS / 1000, SETTLE_MS % 1000 * 1000000L};
    while (nanosleep(&rest, &rest) != 0 && errno == EINTR)
        continue;
    for (int i = 0; i < NP_LOADER_PARTS; i++)
        for (uint32_t id = 0; id < parts[i].cluster_count; id++) {
            const uint32_t value = np_word_load(&parts[i].words[id]);
            if ((value & NP_WORD_STATE_MASK) == NP_WORD_LOADING)
                np_word_swap(&parts[i].words[id], value, NP_WORD_ABSENT);
        }
}

np_loader *np_loader_create(np_reader *reader, const np_loader_part *parts, uint32_t *arrivals, uint32_t queue_capacity)
{
    for (int i = 0; i < NP_LOADER_PARTS; i++)
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
        .flights = calloc(depth, sizeof(np_flight)),
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
    for (int i = 0; i < NP_LOADER_PARTS; i++)
        complete &= part_create(&loader->parts[i], &parts[i], queue_capacity);
    if (!complete) {
        np_loader_destroy(loader);
        return NULL;
    }
    for (uint32_t i = 0; i < depth; i++)
        loader->free_flights[i] = i;
    inherit(parts);
    return loader;
}

void np_loader_destroy(np_loader *loader)
{
    if (!loader)
        return;
    if (loader->flights && loader->free_flights)
        np_loader_land_all(loader); /* the reads write into the slots */
    for (int i = 0; i < NP_LOADER_PARTS; i++) {
        for (int priority = 0; priority < NP_LOADER_PRIORITIES; priority++)
            free(loader->parts[i].queues[priority].entries);
        free(loader->parts[i].free);
        free(loader->parts[i].slot_states);
    }
    free(loader->rings);
    free(loader->flights);
    free(loader->free_flights);
    free(loader->batch);
    free(loader->offsets);
    free(loader->tags);
    free(loader->bytes);
    free(loader->targets);
    free(loader);
}


/* A loader's beginning and end. */
#include <stdlib.h>
#include <sys/mman.h>

#include "flash/loader.h"
#include "flash/reader.h"

enum { ASKED_MOST = 32768 }; /* demands, or guesses, that wait: more stay in the rings. Two layers of a 7B model */

static int is_part(const np_loader_part *part, uint32_t alignment)
{
    const uint64_t places = part->base_offset | part->stride_bytes | part->part_offset | part->part_bytes;
    return part->part_bytes > 0 && part->part_bytes <= INT32_MAX && places % alignment == 0 && part->slot_bytes > 0 &&
           part->slot_bytes <= part->part_bytes && part->slot_count <= NP_WORD_SLOT_MASK + 1u &&
           (part->slots || !part->slot_count) && (!part->cluster_count || (part->words && part->checksums)) &&
           part->cluster_count <= NP_REQUEST_WORD_MASK + 1u &&
           part->stride_bytes <= (uint64_t)INT64_MAX / 2 / (part->cluster_count + 1ull) &&
           part->base_offset < INT64_MAX / 4 && part->part_offset < INT64_MAX / 8;
}

/* Whether a staging buffer holds either part, and both parts are of the same clusters. */
static int is_reading(const np_loader_reading *reading, const np_loader_part *parts, uint32_t alignment)
{
    const uint32_t longer = parts[0].part_bytes > parts[1].part_bytes ? parts[0].part_bytes : parts[1].part_bytes;
    return reading->most_read_bytes >= longer && reading->most_read_bytes <= INT32_MAX && reading->most_read_bytes % alignment == 0 &&
           parts[0].cluster_count == parts[1].cluster_count && parts[0].stride_bytes == parts[1].stride_bytes;
}

static int create_queue(np_queue *line, uint32_t capacity, uint32_t reserve)
{
    *line = (np_queue){.entries = calloc(capacity + (size_t)reserve, sizeof(uint32_t)), .capacity = capacity + reserve, .reserve = reserve};
    return line->entries != NULL;
}

/* Queues for `capacity` clusters each, but for no more than ASKED_MOST that somebody asked for. */
static int create_queues(np_loader *loader, uint32_t capacity)
{
    const uint32_t asked = capacity < ASKED_MOST ? capacity : ASKED_MOST, in_flight = loader->depth * loader->claims_most;
    int complete = 1;
    for (int kind = 0; kind < NP_LOADER_KINDS; kind++) {
        complete &= create_queue(&loader->queues[kind][0], asked, in_flight);
        complete &= create_queue(&loader->queues[kind][1], asked, 0);
        complete &= create_queue(&loader->queues[kind][2], capacity, 0);
    }
    return complete;
}

static int create_part(np_part_state *part, const np_loader_part *facts)
{
    part->facts = *facts;
    part->free = calloc(facts->slot_count + 1u, sizeof *part->free);
    part->slot_states = calloc(facts->slot_count + 1u, sizeof *part->slot_states);
    return part->free && part->slot_states;
}

/* Staging buffers, in huge pages where there are some, and known to the reader. */
static int create_staging(np_loader *loader)
{
    const size_t bytes = (size_t)loader->depth * loader->reading.most_read_bytes;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return 0;
    loader->staging = memory;
    np_memory_advise_huge(memory, bytes);
    np_reader_register(loader->reader, memory, bytes);
    return 1;
}

static int create_flights(np_loader *loader)
{
    const uint32_t depth = loader->depth;
    loader->flights = calloc(depth, sizeof *loader->flights);
    loader->claims = calloc((size_t)depth * loader->claims_most, sizeof *loader->claims);
    loader->free_flights = calloc(depth, sizeof *loader->free_flights);
    loader->batch = calloc(depth, sizeof *loader->batch);
    loader->offsets = calloc(depth, sizeof *loader->offsets);
    loader->tags = calloc(depth, sizeof *loader->tags);
    loader->bytes = calloc(depth, sizeof *loader->bytes);
    loader->targets = calloc(depth, sizeof *loader->targets);
    if (!loader->free_flights)
        return 0;
    for (uint32_t i = 0; i < depth; i++)
        loader->free_flights[i] = depth - 1 - i; /* the lowest first: few reads at a time stay in few pages */
    loader->free_flight_count = depth;
    return loader->flights && loader->claims && loader->batch && loader->offsets && loader->tags && loader->bytes && loader->targets;
}

/* Words that are loading before this loader has read anything were claimed by one that died. Its reads went to its own memory. */
static void inherit(const np_loader_part *part)
{
    for (uint32_t id = 0; id < part->cluster_count; id++) {
        const uint32_t value = np_word_load(&part->words[id]);
        if ((value & NP_WORD_STATE_MASK) == NP_WORD_LOADING)
            np_word_swap(&part->words[id], value, NP_WORD_ABSENT);
    }
}

np_loader *np_loader_create(np_reader *reader, const np_loader_part *parts, const np_loader_reading *reading, uint32_t *arrivals,
                            uint32_t queue_capacity)
{
    for (int i = 0; i < NP_LOADER_PARTS; i++)
        if (!is_part(&parts[i], reader->alignment))
            return NULL;
    np_loader *loader = queue_capacity && is_reading(reading, parts, reader->alignment) ? calloc(1, sizeof *loader) : NULL;
    if (!loader)
        return NULL;
    const uint32_t least = parts[0].part_bytes < parts[1].part_bytes ? parts[0].part_bytes : parts[1].part_bytes;
    loader->reader = reader;
    loader->arrivals = arrivals;
    loader->reading = *reading;
    loader->depth = reader->depth;
    loader->claims_most = reading->most_read_bytes / least + NP_LOADER_PARTS;
    int complete = create_queues(loader, queue_capacity) & create_flights(loader) & create_staging(loader);
    for (int i = 0; i < NP_LOADER_PARTS; i++)
        complete &= create_part(&loader->parts[i], &parts[i]);
    if (!complete) {
        np_loader_destroy(loader);
        return NULL;
    }
    for (int i = 0; i < NP_LOADER_PARTS; i++)
        inherit(&parts[i]);
    return loader;
}

void np_loader_destroy(np_loader *loader)
{
    if (!loader)
        return;
    if (loader->flights && loader->free_flights && loader->claims)
        np_loader_land_all(loader); /* the reads write into staging */
    for (int kind = 0; kind < NP_LOADER_KINDS; kind++)
        for (int priority = 0; priority < NP_LOADER_PRIORITIES; priority++)
            free(loader->queues[kind][priority].entries);
    for (int i = 0; i < NP_LOADER_PARTS; i++) {
        free(loader->parts[i].free);
        free(loader->parts[i].slot_states);
    }
    if (loader->staging) {
        np_reader_register(loader->reader, NULL, 0);
        munmap(loader->staging, (size_t)loader->depth * loader->reading.most_read_bytes);
    }
    free(loader->rings);
    free(loader->flights);
    free(loader->claims);
    free(loader->free_flights);
    free(loader->batch);
    free(loader->offsets);
    free(loader->tags);
    free(loader->bytes);
    free(loader->targets);
    free(loader);
}

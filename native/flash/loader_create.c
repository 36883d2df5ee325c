/* Creating and destroying a loader. */
#include <stdlib.h>
#include <sys/mman.h>

#include "flash/fill.h"
#include "flash/loader.h"
#include "flash/reader.h"
#include "flash/slot_pages.h"
#include "flash/source.h"

enum {
    PAGE = 4096,
    MAX_PIECES = 16,
};

/* The number of pieces of the longest range. Only whole experts are that long: clusters that are joined, and those with
 * moved bytes, are filled together. */
static uint32_t count_pieces(const np_loader_reading *reading, const np_loader_part *parts)
{
    const uint32_t pieces = reading->most_read_bytes / NP_PIECE_BYTES;
    const int may_join = reading->warm_up_reads || reading->merge_gap_bytes || parts[NP_VALUE].moved_bytes;
    return may_join || pieces < 2 ? 1 : pieces < MAX_PIECES ? pieces : MAX_PIECES;
}

uint32_t np_loader_flight_reads(const np_loader_reading *reading, const np_loader_part *parts)
{
    return reading->source ? NP_SOURCE_READS : count_pieces(reading, parts);
}

enum { MAX_QUEUED = 32768 }; /* entries of one queue, two layers of a 7B model; further ones stay in the rings */

/* True if a part's slots and entries are valid, wherever its clusters are read from. */
static int has_valid_slots(const np_loader_part *part)
{
    return part->part_bytes > 0 && part->part_bytes <= INT32_MAX && part->slot_bytes > 0 && part->slot_count <= NP_ENTRY_SLOT_MASK + 1u &&
           (part->slots || !part->slot_count) && (part->words || !part->cluster_count) && part->cluster_count <= NP_REQUEST_CLUSTER_MASK + 1u;
}

/* True if the places of a part's clusters in the bundle file are valid. */
static int is_in_bundles(const np_loader_part *part, uint32_t alignment)
{
    const uint64_t places = part->base_offset | part->stride_bytes | part->part_offset | part->part_bytes;
    return places % alignment == 0 && part->moved_bytes < part->slot_bytes && part->slot_bytes - part->moved_bytes <= part->part_bytes &&
           (!part->cluster_count || (part->checksums && part->checksum_stride)) && part->stride_bytes <= (uint64_t)INT64_MAX / 2 / (part->cluster_count + 1ull) &&
           part->base_offset < INT64_MAX / 4 && part->part_offset < INT64_MAX / 8;
}

/* True if the bytes that value slots hold of the trigger part lie in it, and one read can bring both. */
static int are_moved_bytes_valid(const np_loader_reading *reading, const np_loader_part *parts)
{
    const np_loader_part *to = &parts[NP_VALUE], *from = &parts[NP_TRIGGER];
    if (from->moved_bytes || !to->moved_bytes)
        return !from->moved_bytes;
    return from->base_offset == to->base_offset && from->part_offset + from->part_bytes <= to->part_offset &&
           to->part_offset + to->part_bytes - from->part_offset <= reading->most_read_bytes &&
           (uint64_t)to->moved_from + to->moved_bytes <= from->part_bytes;
}

/* True if a staging buffer can hold either part, and both parts belong to the same clusters. */
static int are_read_sizes_valid(const np_loader_reading *reading, const np_loader_part *parts, const np_reader *reader)
{
    const uint32_t max_part_bytes = parts[0].part_bytes > parts[1].part_bytes ? parts[0].part_bytes : parts[1].part_bytes;
    if (reading->warm_up_reads && (reading->warm_up_reads >= reader->depth || reading->warm_up_read_bytes < reading->most_read_bytes ||
                                   reading->warm_up_read_bytes > INT32_MAX || reading->warm_up_read_bytes % reader->alignment != 0))
        return 0;
    if (reading->source)
        return reading->most_read_bytes <= INT32_MAX && reading->most_read_bytes % reader->alignment == 0 &&
               parts[0].cluster_count == parts[1].cluster_count && np_is_source_valid(reading, parts, reader);
    return reading->most_read_bytes >= max_part_bytes && reading->most_read_bytes <= INT32_MAX && reading->most_read_bytes % reader->alignment == 0 &&
           parts[0].cluster_count == parts[1].cluster_count && parts[0].stride_bytes == parts[1].stride_bytes &&
           are_moved_bytes_valid(reading, parts);
}

static int create_queue(np_queue *queue, uint32_t capacity, uint32_t reserve)
{
    *queue = (np_queue){.entries = calloc(capacity + (size_t)reserve, sizeof(uint32_t)), .capacity = capacity + reserve, .reserve = reserve};
    return queue->entries != NULL;
}

/* Create queues for `capacity` clusters each, at most MAX_QUEUED. */
static int create_queues(np_loader *loader, uint32_t capacity)
{
    const uint32_t entries = capacity < MAX_QUEUED ? capacity : MAX_QUEUED;
    uint32_t in_flight = 0;
    for (int i = 0; i < NP_LOADER_POOLS; i++)
        in_flight += loader->pools[i].count * loader->pools[i].max_claims;
    int complete = 1;
    for (int kind = 0; kind < NP_LOADER_KINDS; kind++) {
        complete &= create_queue(&loader->queues[kind][0], entries, in_flight);
        for (int priority = NP_FOR_PREFETCH; priority < NP_LOADER_PRIORITIES; priority++)
            complete &= create_queue(&loader->queues[kind][priority], entries, 0);
    }
    return complete;
}

static int create_warm_up(np_warm_up *warm, uint32_t clusters)
{
    int complete = 1;
    for (int part = 0; part < NP_LOADER_PARTS; part++) {
        warm->clusters[part] = calloc(clusters / 64 + 1u, sizeof(uint64_t));
        warm->pinned[part] = calloc(clusters / 64 + 1u, sizeof(uint64_t));
        complete &= warm->clusters[part] && warm->pinned[part];
    }
    return complete;
}

static int create_part(np_part_state *part, const np_loader_part *config)
{
    part->config = *config;
    part->free = calloc(config->slot_count + 1u, sizeof *part->free);
    part->granted = calloc(config->slot_count / 64 + 1u, sizeof *part->granted);
    return np_slot_pages_create(&part->pages, config) && part->free && part->granted;
}

/* Map the staging buffers, with huge pages if possible, and register those of ordinary reads with the reader. */
static int create_staging(np_loader *loader)
{
    const np_staging_pool *pools = loader->pools;
    const size_t ordinary_bytes = (size_t)pools[NP_POOL_ORDINARY].count * pools[NP_POOL_ORDINARY].read_bytes;
    loader->staging_bytes = ordinary_bytes + (size_t)pools[NP_POOL_LONG].count * pools[NP_POOL_LONG].read_bytes;
    void *memory = mmap(NULL, loader->staging_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return 0;
    loader->staging = memory;
    np_memory_advise_huge(memory, loader->staging_bytes);
    np_reader_register(loader->reader, memory, ordinary_bytes);
    return 1;
}

static void size_pools(np_loader *loader, uint32_t min_part_bytes)
{
    const np_loader_reading *reading = &loader->reading;
    loader->pools[NP_POOL_ORDINARY] = (np_staging_pool){.read_bytes = reading->most_read_bytes, .count = loader->depth - reading->warm_up_reads};
    loader->pools[NP_POOL_LONG] = (np_staging_pool){.read_bytes = reading->warm_up_read_bytes, .count = reading->warm_up_reads};
    for (int i = 0; i < NP_LOADER_POOLS; i++)
        loader->pools[i].max_claims = (reading->source ? 0 : loader->pools[i].read_bytes / min_part_bytes) + NP_LOADER_PARTS;
}

/* Assign each flight its buffer and its claims. */
static void assign_buffers(np_loader *loader)
{
    uint8_t *staged = loader->staging;
    np_claim *claims = loader->claims;
    uint32_t flight = 0;
    for (int number = 0; number < NP_LOADER_POOLS; number++) {
        np_staging_pool *pool = &loader->pools[number];
        pool->free = loader->free_flights + flight;
        for (uint32_t i = 0; i < pool->count; i++, flight++, staged += pool->read_bytes, claims += pool->max_claims) {
            loader->flights[flight] = (np_flight){.pool = (uint32_t)number, .staged = staged, .claims = claims};
            pool->free[pool->count - 1 - i] = flight; /* lowest on top: few concurrent reads touch few pages */
        }
        pool->free_count = pool->count;
    }
}

static int create_flights(np_loader *loader)
{
    const uint32_t depth = loader->depth;
    size_t claims = 0;
    for (int i = 0; i < NP_LOADER_POOLS; i++)
        claims += (size_t)loader->pools[i].count * loader->pools[i].max_claims;
    loader->flights = calloc(depth, sizeof *loader->flights);
    loader->claims = calloc(claims, sizeof *loader->claims);
    loader->free_flights = calloc(depth, sizeof *loader->free_flights);
    loader->batch = calloc(depth, sizeof *loader->batch);
    const uint32_t reads = loader->reader->depth;
    loader->offsets = calloc(reads, sizeof *loader->offsets);
    loader->tags = calloc(reads, sizeof *loader->tags);
    loader->bytes = calloc(reads, sizeof *loader->bytes);
    loader->targets = calloc(reads, sizeof *loader->targets);
    if (!create_staging(loader) || !loader->flights || !loader->claims || !loader->free_flights)
        return 0;
    assign_buffers(loader);
    return loader->batch && loader->offsets && loader->tags && loader->bytes && loader->targets;
}

/* Entries that are loading before this loader's first read were claimed by one that died. Its reads went to its own
 * memory. */
static void reset_loading(const np_loader_part *part)
{
    for (uint32_t id = 0; id < part->cluster_count; id++) {
        const uint32_t value = np_word_load(&part->words[id]);
        if ((value & NP_ENTRY_STATE_MASK) == NP_ENTRY_LOADING)
            np_word_swap(&part->words[id], value, NP_ENTRY_ABSENT);
    }
}

np_loader *np_loader_create(np_reader *reader, const np_loader_part *parts, const np_loader_reading *reading, uint32_t *arrivals,
                            uint32_t queue_capacity)
{
    for (int i = 0; i < NP_LOADER_PARTS; i++)
        if (!has_valid_slots(&parts[i]) || !(reading->source || is_in_bundles(&parts[i], reader->alignment)))
            return NULL;
    np_loader *loader = queue_capacity && are_read_sizes_valid(reading, parts, reader) ? calloc(1, sizeof *loader) : NULL;
    if (!loader)
        return NULL;
    const uint32_t min_part_bytes = parts[0].part_bytes < parts[1].part_bytes ? parts[0].part_bytes : parts[1].part_bytes;
    loader->reader = reader;
    loader->arrivals = arrivals;
    loader->reading = *reading;
    loader->flight_reads = np_loader_flight_reads(reading, parts);
    loader->piece_bytes = reading->source || loader->flight_reads == 1 ? INT32_MAX : (reading->most_read_bytes / loader->flight_reads + PAGE) / PAGE * PAGE;
    loader->depth = reader->depth / loader->flight_reads;
    size_pools(loader, min_part_bytes);
    int complete = create_queues(loader, queue_capacity) & create_flights(loader) & create_warm_up(&loader->warm_up, parts[0].cluster_count);
    for (int i = 0; i < NP_LOADER_PARTS; i++)
        complete &= create_part(&loader->parts[i], &parts[i]);
    if (!complete) {
        np_loader_destroy(loader);
        return NULL;
    }
    for (int i = 0; i < NP_LOADER_PARTS; i++)
        reset_loading(&parts[i]);
    if (reading->warm_up_reads || reading->source)
        loader->filler = np_filler_start(loader);
    return loader;
}

void np_loader_destroy(np_loader *loader)
{
    if (!loader)
        return;
    if (loader->flights && loader->free_flights && loader->claims)
        np_loader_land_all(loader); /* the kernel may still write into staging */
    np_filler_stop(loader->filler);
    for (int kind = 0; kind < NP_LOADER_KINDS; kind++)
        for (int priority = 0; priority < NP_LOADER_PRIORITIES; priority++)
            free(loader->queues[kind][priority].entries);
    for (int i = 0; i < NP_LOADER_PARTS; i++) {
        free(loader->warm_up.clusters[i]);
        free(loader->warm_up.pinned[i]);
        free(loader->parts[i].free);
        free(loader->parts[i].granted);
        np_slot_pages_destroy(&loader->parts[i].pages);
    }
    if (loader->staging) {
        np_reader_register(loader->reader, NULL, 0);
        munmap(loader->staging, loader->staging_bytes);
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

/* The loader's state. Each part of the loader has a header of its own with its functions; calls go in one direction:
 *
 *   serve.c        the loader's main loop between two messages
 *   loader.c       a turn: land reads, take requests, submit reads
 *   gather.c       which clusters are read next, and which together
 *   drain.c        requests from the workers' rings
 *   warm_up.c      clusters to load while nothing else waits
 *   queues.c       queues of requested clusters
 *   fill.c, failures.c    from staging into slots; clusters that cannot be read
 *   slot_pages.c   huge pages under slots
 *   source.c       experts that are read from files of another format */
#ifndef NP_FLASH_LOADER_STATE_H
#define NP_FLASH_LOADER_STATE_H
#include <pthread.h>
#include <stdint.h>

#include "neuronpipe.h"

enum { NP_LOADER_PARTS = 2, NP_LOADER_PRIORITIES = 3 };

/* What a read is for. All but the last are priorities of requests. */
enum { NP_FOR_DEMAND = 0, NP_FOR_PREFETCH = 1, NP_FOR_SPECULATION = 2, NP_FOR_WARM_UP = 3 };

/* The kinds of queues: clusters of one part, by the part's number, or both parts for one read. */
enum { NP_QUEUE_BOTH = 2, NP_LOADER_KINDS = 3 };

/* A queued cluster is 32 bits: its index, NP_REQUEST_TRIGGER and _VALUE, NP_ENTRY_PINNED, and from bit 28 on how many
 * of its reads failed. */
enum { NP_QUEUED_FAILURES = 28 };

typedef struct {
    uint32_t *entries; /* ring of [capacity] */
    uint32_t capacity, from, count;
    uint32_t reserve;  /* places for clusters whose read failed: the workers that wait for them do not request them again */
    uint32_t starved;  /* the oldest entries, already counted as having waited for a slot */
} np_queue;

/* The memory of a part's slots, as this process has mapped it. Sizes are counted from the first slot on. */
typedef struct {
    size_t huge_bytes;    /* size of a huge page, 0: none are made */
    uint8_t *tried;       /* for each huge page: 1 if it was made, or is being made, or could not be made */
    int is_refused;       /* the system makes no more of them */
    size_t granted_bytes; /* that may be used: to the end of the last slot that was granted since memory was returned */
    size_t mapped_bytes;  /* copying into them causes no page faults */
    int cannot_map;       /* the system maps nothing in advance */
    pthread_rwlock_t lock; /* exclusive: memory is returned; shared: huge pages are made */
} np_slot_pages;

typedef struct {
    np_loader_part config;
    uint32_t *free; /* [slot_count] stack */
    uint32_t free_count;
    int exhausted;  /* the last grant was empty: the cache can free no slot until windows close */
    uint64_t *granted; /* a bit per slot that is free or being filled; the cache owns the others */
    np_slot_pages pages;
} np_part_state;

/* Sets of clusters and of slots: one bit each, since a large model has millions. */
static inline int np_set_has(const uint64_t *set, uint32_t n)
{
    return (int)(set[n / 64] >> n % 64 & 1);
}

static inline void np_set_add(uint64_t *set, uint32_t n)
{
    set[n / 64] |= (uint64_t)1 << n % 64;
}

static inline void np_set_drop(uint64_t *set, uint32_t n)
{
    set[n / 64] &= ~((uint64_t)1 << n % 64);
}

/* One worker's request ring. The head in shared memory is for the worker; the loader trusts its own copy only. */
typedef struct {
    np_requests shared;
    uint32_t head;
} np_ring;

/* One part of one cluster, on its way into a slot. */
typedef struct {
    uint32_t id, slot;
    uint8_t part, failures;
    uint8_t warms_up; /* it was in the warm-up set */
    uint8_t is_valid; /* its checksum matches, and it is in its slot */
    uint32_t filled_bytes, checksum; /* of a part that arrives in pieces: those in its slot so far, and their checksum */
} np_claim;

/* Staging buffers of one size, each for one read at a time. */
typedef struct {
    uint32_t read_bytes, max_claims; /* of one read */
    uint32_t count;                  /* buffers */
    uint32_t *free;                  /* [count] stack of flights */
    uint32_t free_count;
} np_staging_pool;

/* Ordinary reads, and the long ones of the warm-up. */
enum { NP_POOL_ORDINARY = 0, NP_POOL_LONG = 1, NP_LOADER_POOLS = 2 };

/* A read of rows of one matrix of a source file: whole pages around them. */
typedef struct {
    uint64_t offset;
    uint32_t bytes;
    uint32_t skipped_bytes; /* before the rows */
    uint32_t needed_bytes;  /* up to the end of the rows */
    uint32_t staged;        /* place in the flight's buffer */
} np_source_read;

/* What is read together. From a bundle file it is one range: cluster parts in the order of the file, and gaps between
 * them; a long range is read in pieces, all at once, so that one is checked and copied while the next arrives. From
 * source files it is one cluster: a read for each piece of its parts. */
typedef struct {
    uint64_t offset;
    uint32_t bytes, gap_bytes, claim_count;
    uint32_t pool;
    int is_complete;  /* all of its bytes arrived */
    uint8_t *staged;  /* [pool.read_bytes] */
    np_claim *claims; /* [pool.max_claims] */
    np_source_read reads[NP_SOURCE_READS]; /* of source files; by matrix: gate, up, down. 0 bytes: not read */
    uint32_t unfinished;                   /* reads that are not completed */
    uint32_t pieces, next_piece, arrived;  /* of a long range: all, the first one that is not filled, a bit for each that arrived */
} np_flight;

typedef struct np_filler np_filler; /* fill.h */

/* Clusters to load while nothing more urgent waits: a bit each. A bit is cleared when the cluster is claimed for any
 * reason, so a cluster whose bit is set is absent. */
typedef struct {
    uint64_t *clusters[NP_LOADER_PARTS], *pinned[NP_LOADER_PARTS]; /* [cluster_count / 64, rounded up]; pinned is a subset */
    uint32_t cluster_counts[NP_LOADER_PARTS], pinned_counts[NP_LOADER_PARTS];
    uint64_t since_ns; /* np_clock_ns when time was counted last; 0: the set is empty */
    uint32_t next;     /* where the search goes on: reads follow the file, and a step that runs ahead */
} np_warm_up;

struct np_loader {
    np_reader *reader;
    uint32_t *arrivals;
    np_loader_reading reading;
    np_part_state parts[NP_LOADER_PARTS];
    np_queue queues[NP_LOADER_KINDS][NP_LOADER_PRIORITIES];
    np_warm_up warm_up;
    uint32_t depth;           /* flights: the buffers of all pools */
    uint32_t flight_reads;    /* the most reads of a flight */
    uint32_t piece_bytes;     /* of a long range; INT32_MAX if none is read in pieces */
    np_staging_pool pools[NP_LOADER_POOLS];
    uint8_t *staging;         /* the buffers of all pools, one after the other */
    size_t staging_bytes;
    np_flight *flights;       /* [depth]; a read's tag is its flight * flight_reads + its number */
    np_claim *claims;         /* of all flights */
    uint32_t *free_flights;   /* [depth] the stacks of all pools */
    uint32_t *batch;          /* [depth] flights to submit */
    uint64_t *offsets, *tags; /* [reader's depth] np_reader_submit's arguments for the batch, as are the next two */
    uint32_t *bytes;
    void **targets;
    np_filler *filler;        /* NULL: the loader's thread fills all slots itself */
    np_ring *rings;           /* [ring_count] */
    uint32_t ring_count;
    uint64_t *board;          /* [NP_LOADER_BOARD] or NULL */
    const uint32_t *epoch;    /* NULL: failed clusters stay failed */
    uint32_t *in_flight;      /* where workers see whether flash is idle; or NULL */
    uint32_t retried_epoch;   /* the epoch's low bits when failed entries were last reset */
    int has_failed;           /* there may be failed entries */
    int has_more;             /* reads may have ended that were not landed and will not be signalled again */
    const np_trace *trace;    /* or NULL */
    uint32_t unannounced;     /* clusters published or failed since `arrivals` last grew */
    np_loader_state counters; /* np_loader_read_state fills in the gauges */
};

/* The request bit of a part. */
static inline uint32_t np_part_bit(int part)
{
    return part == NP_TRIGGER ? NP_REQUEST_TRIGGER : NP_REQUEST_VALUE;
}

#endif

/* The loader's own state. */
#ifndef NP_FLASH_LOADER_H
#define NP_FLASH_LOADER_H
#include <stdint.h>

#include "neuronpipe.h"

enum { NP_LOADER_PARTS = 2, NP_LOADER_PRIORITIES = 3 };

/* What a read is for. All but the last are the priorities of requests. */
enum { NP_FOR_DEMAND = 0, NP_FOR_PREFETCH = 1, NP_FOR_GUESS = 2, NP_FOR_WARM_UP = 3 };

/* What waits in a queue: one part of its clusters, by the part's number, or both for one read. */
enum { NP_QUEUE_BOTH = 2, NP_LOADER_KINDS = 3 };

/* A queued cluster is 32 bits: its index, NP_REQUEST_TRIGGER and _VALUE, NP_ENTRY_PINNED, and from bit 28 on how many reads of it failed. */
enum { NP_QUEUED_FAILURES = 28 };

typedef struct {
    uint32_t *entries; /* ring of [capacity] */
    uint32_t capacity, from, count;
    uint32_t reserve;  /* places kept for clusters whose read failed: whoever waits for one does not ask again */
    uint32_t starved;  /* of the oldest entries: already counted as having waited for a slot */
} np_queue;

typedef struct {
    np_loader_part config;
    uint32_t *free; /* [slot_count] stack */
    uint32_t free_count;
    int exhausted;  /* the last grant was empty: the cache can free no slot until windows move on */
    uint64_t *ours; /* a bit for each slot that is free here or being filled; another one holds a cluster, or the cache keeps it */
    size_t mapped_bytes; /* of the slots, from the first on: copying into them costs no page faults */
} np_part_state;

/* Sets of clusters and of slots: a bit for each, since a large model has millions. */
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

/* One worker's requests. The ring's own head is for the worker; what the loader goes by is its own. */
typedef struct {
    np_requests shared;
    uint32_t head;
} np_ring;

/* One part of one cluster, on its way into a slot. */
typedef struct {
    uint32_t id, slot;
    uint8_t part, failures;
    uint8_t warms_up; /* it was one of those to warm up */
    uint8_t is_right; /* what came is what was written, and in its slot */
} np_claim;

/* Staging buffers of one size: one read at a time goes into each. */
typedef struct {
    uint32_t read_bytes, claims_most; /* of one read */
    uint32_t count;                   /* buffers */
    uint32_t *free;                   /* [count] stack of flights */
    uint32_t free_count;
} np_staging_pool;

/* Ordinary reads, and the long ones of warming up. */
enum { NP_POOL_ORDINARY = 0, NP_POOL_LONG = 1, NP_LOADER_POOLS = 2 };

/* One read: the parts it brings in the order of the file, and gaps between them. */
typedef struct {
    uint64_t offset;
    uint32_t bytes, gap_bytes, claim_count;
    uint32_t pool;
    int whole;        /* all of its bytes came */
    uint8_t *staged;  /* [pool.read_bytes] */
    np_claim *claims; /* [pool.claims_most] */
} np_flight;

typedef struct np_filler np_filler; /* fill.h */

/* Clusters to load while nothing more urgent waits: a bit for each. A bit is cleared when the cluster is claimed for any reason, so a
 * cluster whose bit is set is absent. */
typedef struct {
    uint64_t *wanted[NP_LOADER_PARTS], *pinned[NP_LOADER_PARTS]; /* [cluster_count / 64, rounded up]; pinned is a part of wanted */
    uint32_t wanted_count[NP_LOADER_PARTS], pinned_count[NP_LOADER_PARTS];
    uint64_t since_ns; /* something is left since then, by np_clock_ns; 0: nothing is */
    uint32_t next; /* the cluster from which the search goes on: reading follows the file, and a step that runs ahead */
} np_warm_up;

struct np_loader {
    np_reader *reader;
    uint32_t *arrivals;
    np_loader_reading reading;
    np_part_state parts[NP_LOADER_PARTS];
    np_queue queues[NP_LOADER_KINDS][NP_LOADER_PRIORITIES];
    np_warm_up warm_up;
    uint32_t depth;           /* flights: the buffers of all pools */
    np_staging_pool pools[NP_LOADER_POOLS];
    uint8_t *staging;         /* the buffers of all pools, one after the other */
    size_t staging_bytes;
    np_flight *flights;       /* [depth]; a read's tag is its index */
    np_claim *claims;         /* of all flights */
    uint32_t *free_flights;   /* [depth] the stacks of all pools */
    uint32_t *batch;          /* [depth] flights to submit */
    uint64_t *offsets, *tags; /* [depth] the batch as the reader wants it, like the next two */
    uint32_t *bytes;
    void **targets;
    np_filler *filler;        /* or NULL: this thread fills all slots itself */
    np_ring *rings;           /* [ring_count] */
    uint32_t ring_count;
    uint64_t *board;          /* [NP_LOADER_BOARD] or NULL */
    const uint32_t *epoch;    /* or NULL: then what failed stays failed */
    uint32_t *in_flight;      /* or NULL: where workers see whether flash is idle */
    uint32_t forgiven;        /* the epoch's low bits when failed words were last looked through */
    int has_failed;           /* there may be failed words */
    int has_more;             /* reads may have ended that did not land yet, and will not signal it again */
    const np_trace *trace;    /* or NULL */
    uint32_t unannounced;     /* clusters published or failed since `arrivals` was last advanced */
    np_loader_state counters; /* its gauges are filled in by np_loader_read_state */
};

/* Whether these arguments of a request can be meant. */
int np_loader_is_request(const np_loader *loader, int parts, const uint32_t *ids, size_t count, uint32_t flags);
/* Append to a queue; retried: for a cluster whose read failed. Returns 0 when there is no room. */
int np_loader_enqueue(np_queue *line, uint32_t entry, int retried);
/* Claim what can be read now, as reads: fills `batch`. Returns how many there are. */
uint32_t np_loader_gather(np_loader *loader);
/* Whether nothing has to be read for this word: it is there, on its way or damaged. Pins it if `flags` asks. */
int np_loader_settled(uint32_t *word, uint32_t flags);
/* Wait for everything in flight and tell the workers. */
void np_loader_land_all(np_loader *loader);
/* Reads that are not published: in flight, or on their way from staging into slots. */
uint32_t np_loader_in_flight(const np_loader *loader);
/* Clusters that wait for a part; of those to warm up the ones that will stay, for which room must be made. */
uint32_t np_loader_count_waiting(const np_loader *loader, int part);

/* Whether anything is to be warmed up. */
int np_warm_up_is_on(const np_loader *loader);
/* The parts of a cluster that are to be warmed up, as NP_REQUEST_TRIGGER and _VALUE. */
uint32_t np_warm_up_parts(const np_loader *loader, uint32_t id);
/* The next cluster to warm up, those that will stay before the others, in the order of the file. Returns 0 when there is none. */
int np_warm_up_next(const np_loader *loader, uint32_t *id);
/* Whether this one is to stay once it is there. */
int np_warm_up_stays(const np_loader *loader, int part, uint32_t id);
/* A part is warmed up no longer: it is being read, or there. Returns 1 if it was one to warm up. */
int np_warm_up_take(np_loader *loader, int part, uint32_t id);
/* Memory is full: of this part only what will stay is still warmed up. */
void np_warm_up_give_up(np_loader *loader, int part);
/* Count the time while something is left. */
void np_warm_up_count_time(np_loader *loader);
/* Nothing is to be warmed up. */
void np_warm_up_forget(np_loader *loader);

/* A cluster that cannot be had: its word says so, and in which epoch. */
void np_loader_fail(np_loader *loader, uint32_t *word);
/* What failed in an earlier epoch may be asked for again. */
void np_loader_forgive(np_loader *loader);

/* Queue what the rings hold. */
void np_loader_drain(np_loader *loader);
/* Whether a ring holds something; sequentially consistent. */
int np_loader_is_asked(const np_loader *loader);

#endif

/* The loader's own state. */
#ifndef NP_FLASH_LOADER_H
#define NP_FLASH_LOADER_H
#include <stdint.h>

#include "neuronpipe.h"

enum { NP_LOADER_PARTS = 2, NP_LOADER_PRIORITIES = 3 };

/* What waits in a queue: one part of its clusters, by the part's number, or both for one read. */
enum { NP_QUEUE_BOTH = 2, NP_LOADER_KINDS = 3 };

/* A slot is elsewhere when it holds a cluster or the cache keeps it. */
enum { NP_SLOT_ELSEWHERE = 0, NP_SLOT_FREE, NP_SLOT_FILLING };

/* A queued cluster is 32 bits: its word index, NP_REQUEST_GATE and _REST, NP_WORD_PINNED, and from bit 28 on how many reads of it failed. */
enum { NP_QUEUED_FAILURES = 28 };

typedef struct {
    uint32_t *entries; /* ring of [capacity] */
    uint32_t capacity, from, count;
    uint32_t reserve;  /* places kept for clusters whose read failed: whoever waits for one does not ask again */
    uint32_t starved;  /* of the oldest entries: already counted as having waited for a slot */
} np_queue;

typedef struct {
    np_loader_part facts;
    uint32_t *free; /* [slot_count] stack */
    uint32_t free_count;
    uint8_t *slot_states; /* [slot_count] NP_SLOT_* */
} np_part_state;

/* One worker's requests. The ring's own head is for the worker; what the loader goes by is its own. */
typedef struct {
    np_requests shared;
    uint32_t head;
} np_ring;

/* One part of one cluster, on its way into a slot. */
typedef struct {
    uint32_t id, slot;
    uint8_t part, failures;
} np_claim;

/* One read, into the staging buffer of the same number: the parts it brings in the order of the file, and gaps between them. */
typedef struct {
    uint64_t offset;
    uint32_t bytes, gap_bytes, claim_count;
} np_flight;

struct np_loader {
    np_reader *reader;
    uint32_t *arrivals;
    np_loader_reading reading;
    np_part_state parts[NP_LOADER_PARTS];
    np_queue queues[NP_LOADER_KINDS][NP_LOADER_PRIORITIES];
    uint32_t depth;
    uint8_t *staging;         /* [depth][reading.most_read_bytes] */
    np_flight *flights;       /* [depth]; a read's tag is its index */
    np_claim *claims;         /* [depth][claims_most] */
    uint32_t claims_most;     /* of one read */
    uint32_t *free_flights;   /* [depth] stack */
    uint32_t free_flight_count;
    uint32_t *batch;          /* [depth] flights to submit */
    uint64_t *offsets, *tags; /* [depth] the batch as the reader wants it, like the next two */
    uint32_t *bytes;
    void **targets;
    np_ring *rings;           /* [ring_count] */
    uint32_t ring_count;
    uint64_t *board;          /* [NP_LOADER_BOARD] or NULL */
    const uint32_t *epoch;    /* or NULL: then what failed stays failed */
    uint32_t forgiven;        /* the epoch's low bits when failed words were last looked through */
    int has_failed;           /* there may be failed words */
    const np_trace *trace;    /* or NULL */
    uint32_t unannounced;     /* clusters published or failed since `arrivals` was last advanced */
    np_loader_state counters; /* its gauges are filled in by np_loader_read_state */
};

/* Append to a queue; retried: for a cluster whose read failed. Returns 0 when there is no room. */
int np_loader_enqueue(np_queue *line, uint32_t entry, int retried);
/* Claim what can be read now, as reads: fills `batch`. Returns how many there are. */
uint32_t np_loader_gather(np_loader *loader);
/* Whether nothing has to be read for this word: it is there, on its way or damaged. Pins it if `flags` asks. */
int np_loader_settled(uint32_t *word, uint32_t flags);
/* Wait for everything in flight and tell the workers. */
void np_loader_land_all(np_loader *loader);
/* Clusters that wait for a part. */
uint32_t np_loader_count_waiting(const np_loader *loader, int part);

/* A cluster that cannot be had: its word says so, and in which epoch. */
void np_loader_fail(np_loader *loader, uint32_t *word);
/* What failed in an earlier epoch may be asked for again. */
void np_loader_forgive(np_loader *loader);

/* Queue what the rings hold. */
void np_loader_drain(np_loader *loader);
/* Whether a ring holds something; sequentially consistent. */
int np_loader_is_asked(const np_loader *loader);

#endif

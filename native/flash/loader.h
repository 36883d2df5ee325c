/* The loader's own state. */
#ifndef NP_FLASH_LOADER_H
#define NP_FLASH_LOADER_H
#include <stdint.h>

#include "neuronpipe.h"

enum { NP_LOADER_PARTS = 2, NP_LOADER_PRIORITIES = 3 };

/* A slot is elsewhere when it holds a cluster or the cache keeps it. */
enum { NP_SLOT_ELSEWHERE = 0, NP_SLOT_FREE, NP_SLOT_FILLING };

typedef struct {
    uint32_t id, flags;
    uint32_t failures; /* reads of it that failed before */
} np_queued;

typedef struct {
    np_queued *entries; /* ring of queue_capacity */
    uint32_t from, count;
} np_queue;

typedef struct {
    np_loader_part facts;
    np_queue queues[NP_LOADER_PRIORITIES];
    uint32_t *free; /* [slot_count] stack */
    uint32_t free_count;
    uint8_t *slot_states; /* [slot_count] NP_SLOT_* */
} np_part_state;

/* One worker's requests. The ring's own head is for the worker; what the loader goes by is its own. */
typedef struct {
    np_requests shared;
    uint32_t head;
} np_ring;

typedef struct {
    uint64_t offset;
    uint32_t part, id, slot;
    uint32_t failures; /* before this read */
} np_flight;

struct np_loader {
    np_reader *reader;
    uint32_t *arrivals;
    uint32_t queue_capacity;
    np_part_state parts[NP_LOADER_PARTS];
    np_flight *flights;       /* [depth]; a read's tag is its index */
    uint32_t *free_flights;   /* [depth] stack */
    uint32_t free_flight_count;
    uint32_t *batch;          /* [depth] flights to submit, by offset */
    uint64_t *offsets, *tags; /* [depth] the batch as the reader wants it, like the next two */
    uint32_t *bytes;
    void **targets;
    np_ring *rings;           /* [ring_count] */
    uint32_t ring_count;
    uint64_t *board;          /* [NP_LOADER_BOARD] or NULL */
    uint32_t unannounced;     /* clusters published or failed since `arrivals` was last advanced */
    np_loader_state counters; /* its gauges are filled in by np_loader_read_state */
};

/* Wait for everything in flight and tell the workers. */
void np_loader_land_all(np_loader *loader);

/* Queue what the rings hold. */
void np_loader_drain(np_loader *loader);
/* Whether a ring holds something; sequentially consistent. */
int np_loader_is_asked(const np_loader *loader);

#endif

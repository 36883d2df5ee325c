/* A queue of clusters that wait to be read, each at most once. */
#ifndef QUEUE_H
#define QUEUE_H

#include "client/run_context.h"

#include <stdint.h>
#include <stdlib.h>

typedef struct {
    uint32_t *clusters;
    uint8_t *queued;
    size_t size, from, count;
} queue;

/* Create a queue for cluster numbers below `size`. Ends the run if memory is short. */
static inline void queue_create(queue *q, size_t size)
{
    *q = (queue){.clusters = calloc(size, sizeof *q->clusters), .queued = calloc(size, 1), .size = size};
    if (!q->clusters || !q->queued)
        run_fail("loader", "out of memory");
}

static inline void queue_put(queue *q, uint32_t cluster)
{
    if (q->queued[cluster])
        return;
    q->queued[cluster] = 1;
    q->clusters[(q->from + q->count++) % q->size] = cluster;
}

static inline uint32_t queue_take(queue *q)
{
    const uint32_t cluster = q->clusters[q->from];
    q->from = (q->from + 1) % q->size;
    q->count--;
    q->queued[cluster] = 0;
    return cluster;
}

static inline void queue_empty(queue *q)
{
    while (q->count)
        queue_take(q);
}

#endif

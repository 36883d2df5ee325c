/* The reader's own state, and what an engine has to do for it. */
#ifndef NP_FLASH_READER_H
#define NP_FLASH_READER_H
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "neuronpipe.h"

/* One read that somebody asked for. The engine reads pieces of it; a short piece is followed by another one. */
typedef struct {
    uint64_t offset, tag;
    uint8_t *target;
    uint32_t bytes, done;
    struct iovec piece; /* what is left of it; must lie still while the kernel may look at it */
} np_request;

/* An engine has room for `depth` pieces at once, one per request, so that none of this can fail for want of room. */
typedef struct {
    const char *name;
    int (*open)(np_reader *reader); /* 0 or errno; then close is not called */
    void (*close)(np_reader *reader);
    void (*start)(np_reader *reader, uint32_t request); /* read requests[request].piece; may only be queued */
    void (*flush)(np_reader *reader);                   /* hand queued pieces over */
    int (*take)(np_reader *reader, uint32_t *request, int32_t *result); /* 1 and a finished piece, or 0 */
    void (*wait)(np_reader *reader, int timeout_ms);    /* until there may be a piece to take; may return early */
    void (*collect)(np_reader *reader, uint32_t least, uint32_t most_us); /* wait until so many pieces may be taken. NULL: it cannot */
    int (*watch)(np_reader *reader, int event);         /* from now on signal this eventfd; 0 or errno */
    int (*keep)(np_reader *reader);                     /* reader->memory is what reads go to; 1 if that helps. NULL: it never does */
} np_reader_engine_calls;

extern const np_reader_engine_calls np_engine_io_uring, np_engine_threads;

struct np_reader {
    const np_reader_engine_calls *calls;
    void *engine;         /* the engine's own state */
    int file, event;      /* event: -1 until asked for */
    int direct;
    uint8_t *memory;      /* what reads go to, if it was told: [memory_bytes] */
    size_t memory_bytes;
    uint32_t alignment;
    uint32_t depth, in_flight;
    np_request *requests; /* [depth] */
    uint32_t *free;       /* [depth] stack of unused requests */
};

/* Open for direct I/O if that works. Returns the descriptor or -errno; sets *direct and *alignment. */
int np_file_open(const char *path, int *direct, uint32_t *alignment);

#endif

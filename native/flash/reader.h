/* The reader's state, and the interface of its engines. */
#ifndef NP_FLASH_READER_H
#define NP_FLASH_READER_H
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "neuronpipe.h"

/* One read. The engine reads it in pieces: after a short one the remainder is read as the next. */
typedef struct {
    uint64_t offset, tag;
    uint8_t *target;
    uint32_t bytes, done;
    struct iovec piece; /* the remainder; must not change while the kernel may read it */
} np_request;

/* An engine has room for `depth` pieces, one per request, so that starting one cannot fail. */
typedef struct {
    const char *name;
    int (*open)(np_reader *reader); /* 0, or errno: then close is not called */
    void (*close)(np_reader *reader);
    void (*start)(np_reader *reader, uint32_t request); /* read requests[request].piece; may only queue it */
    void (*flush)(np_reader *reader);                   /* submit queued pieces */
    int (*take)(np_reader *reader, uint32_t *request, int32_t *result); /* returns 1 and a finished piece, or 0 */
    void (*wait)(np_reader *reader, int timeout_ms);    /* until a piece may be finished; may return early */
    void (*collect)(np_reader *reader, uint32_t min_count, uint32_t max_us); /* wait until so many pieces are finished. NULL: not supported */
    int (*watch)(np_reader *reader, int event);         /* signal this eventfd when pieces finish; 0 or errno */
    int (*register_memory)(np_reader *reader);          /* register reader->memory as target; 1 if reads get cheaper. NULL: not supported */
} np_reader_engine_calls;

extern const np_reader_engine_calls np_engine_io_uring, np_engine_threads;

struct np_reader {
    const np_reader_engine_calls *calls;
    void *engine;         /* the engine's own state */
    int *files;           /* [file_count] */
    uint32_t file_count;
    int event;            /* -1 before np_reader_event_fd */
    int direct;
    uint8_t *memory;      /* [memory_bytes] registered target memory, or NULL */
    size_t memory_bytes;
    uint32_t alignment;
    uint32_t depth, in_flight;
    np_request *requests; /* [depth] */
    uint32_t *free;       /* [depth] stack of unused requests */
};

/* The file of an offset, and the place in it. */
static inline uint32_t np_file_number(uint64_t offset)
{
    return (uint32_t)(offset >> NP_FILE_SHIFT);
}

static inline uint64_t np_place_in_file(uint64_t offset)
{
    return offset & (((uint64_t)1 << NP_FILE_SHIFT) - 1);
}

/* Packages align everything to this; a device that needs more is read through the page cache. */
enum { NP_MAX_ALIGNMENT = 4096 };

/* Open a file, for direct I/O if a trial read succeeds. Returns the descriptor or -errno; sets *direct and
 * *alignment. */
int np_file_open(const char *path, int *direct, uint32_t *alignment);

#endif

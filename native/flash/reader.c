/* The reader: bookkeeping of requests, common to all engines. */
#include "flash/reader.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "sync/clock.h"

enum { MAX_DEPTH = 4096 };

static int open_engine(np_reader *reader, const char *name)
{
    static const np_reader_engine_calls *const engines[] = {&np_engine_io_uring, &np_engine_threads}; /* best first */
    int error = EINVAL; /* an unknown name */
    for (size_t i = 0; i < sizeof engines / sizeof *engines; i++) {
        if (name && strcmp(name, engines[i]->name) != 0)
            continue;
        reader->calls = engines[i];
        error = engines[i]->open(reader);
        if (error == 0)
            break;
    }
    return error;
}

np_reader *np_reader_open(const char *path, const char *engine, uint32_t depth, int *error)
{
    if (depth == 0 || depth > MAX_DEPTH) {
        *error = EINVAL;
        return NULL;
    }
    np_reader *reader = calloc(1, sizeof *reader);
    np_request *requests = calloc(depth, sizeof *requests);
    uint32_t *unused = calloc(depth, sizeof *unused);
    int *files = calloc(NP_READER_FILES, sizeof *files);
    *error = ENOMEM;
    if (reader && requests && unused && files) {
        *reader = (np_reader){.files = files, .event = -1, .depth = depth, .requests = requests, .free = unused};
        for (uint32_t i = 0; i < depth; i++)
            unused[i] = depth - 1 - i;
        files[0] = np_file_open(path, &reader->direct, &reader->alignment);
        *error = files[0] < 0 ? -files[0] : 0;
        if (*error == 0) {
            reader->file_count = 1;
            *error = open_engine(reader, engine);
            if (*error == 0)
                return reader;
            close(files[0]);
        }
    }
    free(files);
    free(unused);
    free(requests);
    free(reader);
    return NULL;
}

int np_reader_add(np_reader *reader, const char *path)
{
    int direct;
    uint32_t alignment;
    if (reader->file_count == NP_READER_FILES)
        return -EMFILE;
    const int file = np_file_open(path, &direct, &alignment);
    if (file < 0)
        return file;
    reader->files[reader->file_count] = file;
    reader->direct &= direct;
    reader->alignment = alignment > reader->alignment ? alignment : reader->alignment;
    return (int)reader->file_count++;
}

void np_reader_close(np_reader *reader)
{
    if (!reader)
        return;
    np_completion discarded[16];
    while (reader->in_flight) /* the kernel may still write to their targets */
        np_reader_reap(reader, discarded, 1, 16, -1);
    reader->calls->close(reader);
    if (reader->event >= 0)
        close(reader->event);
    for (uint32_t i = 0; i < reader->file_count; i++)
        close(reader->files[i]);
    free(reader->files);
    free(reader->free);
    free(reader->requests);
    free(reader);
}

const char *np_reader_engine(const np_reader *reader) { return reader->calls->name; }
int np_reader_direct(const np_reader *reader) { return reader->direct; }
uint32_t np_reader_alignment(const np_reader *reader) { return reader->alignment; }
uint32_t np_reader_in_flight(const np_reader *reader) { return reader->in_flight; }

int np_reader_register(np_reader *reader, void *memory, size_t bytes)
{
    if (!reader->calls->register_memory)
        return 0;
    reader->memory = memory;
    reader->memory_bytes = bytes;
    return reader->calls->register_memory(reader);
}

static void start_remainder(np_reader *reader, uint32_t index)
{
    np_request *request = &reader->requests[index];
    request->piece = (struct iovec){request->target + request->done, request->bytes - request->done};
    reader->calls->start(reader, index);
}

static int is_acceptable(const np_reader *reader, uint64_t offset, uint32_t bytes, const void *target)
{
    return target && bytes > 0 && bytes <= INT_MAX && np_file_number(offset) < reader->file_count &&
           (offset | bytes | (uintptr_t)target) % reader->alignment == 0;
}

int np_reader_submit(np_reader *reader, const uint64_t *offsets, const uint32_t *bytes, void *const *targets, const uint64_t *tags,
                     size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!is_acceptable(reader, offsets[i], bytes[i], targets[i]))
            return NP_E_ARGUMENT;
    const uint32_t room = reader->depth - reader->in_flight;
    const uint32_t accepted = count < room ? (uint32_t)count : room;
    for (uint32_t i = 0; i < accepted; i++) {
        const uint32_t index = reader->free[reader->depth - ++reader->in_flight];
        reader->requests[index] = (np_request){.offset = offsets[i], .tag = tags[i], .target = targets[i], .bytes = bytes[i]};
        start_remainder(reader, index);
    }
    reader->calls->flush(reader);
    return (int)accepted;
}

/* Handle a finished piece. Returns 1 if its request is done, with the result in *out; 0 if another piece was
 * started. */
static int finish(np_reader *reader, uint32_t index, int32_t result, np_completion *out)
{
    np_request *request = &reader->requests[index];
    int is_at_end = 0;
    uint32_t arrived = request->done;
    if (result == -EINTR || result == -EAGAIN)
        result = 0;
    else if (result >= 0) {
        /* Direct I/O has to go on at an aligned offset. No progress means the end of the file. */
        const uint32_t before = request->done;
        request->done += (uint32_t)result;
        arrived = request->done;
        if (request->done < request->bytes)
            request->done -= request->done % reader->alignment;
        is_at_end = request->done == before;
        result = 0;
    }
    if (result == 0 && !is_at_end && request->done < request->bytes) {
        start_remainder(reader, index);
        return 0;
    }
    *out = (np_completion){.tag = request->tag, .result = result < 0 ? result : (int32_t)arrived};
    reader->free[reader->depth - reader->in_flight--] = index;
    return 1;
}

int np_reader_reap(np_reader *reader, np_completion *out, size_t min_count, size_t max_count, int timeout_ms)
{
    const uint64_t end = timeout_ms > 0 ? np_clock_ns() + (uint64_t)timeout_ms * 1000000u : 0;
    size_t count = 0;
    for (;;) {
        uint32_t index;
        int32_t result;
        while (count < max_count && reader->calls->take(reader, &index, &result))
            count += (size_t)finish(reader, index, result, &out[count]);
        reader->calls->flush(reader);
        if (count >= min_count || count == max_count || reader->in_flight == 0 || timeout_ms == 0)
            return (int)count;
        int wait_ms = -1;
        if (timeout_ms > 0) {
            const uint64_t now = np_clock_ns();
            if (now >= end)
                return (int)count;
            wait_ms = (int)((end - now + 999999u) / 1000000u);
        }
        reader->calls->wait(reader, wait_ms);
    }
}

int np_reader_event_fd(np_reader *reader)
{
    if (reader->event >= 0)
        return reader->event;
    const int event = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK); /* starts signalled: reads may be completed already */
    if (event < 0)
        return -errno;
    const int error = reader->calls->watch(reader, event);
    if (error) {
        close(event);
        return -error;
    }
    __atomic_store_n(&reader->event, event, __ATOMIC_RELEASE); /* the filler thread signals it as well (fill.c) */
    return event;
}

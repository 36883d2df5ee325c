/* From staging into slots. Half of the processor time of a byte of warm-up is the page fault of its slot, a fifth its
 * checksum. So long reads are filled by two threads: the filler thread, which may run on any core, and the loader's own
 * thread when the filler is busy. Only the loader's thread publishes, so residency entries have one writer.
 *
 *   what                                 ordering
 *   the flight and its claims -> filler  the lock, in np_filler_accept
 *   bytes in slots -> the entries        `filled_tail` is a release; np_filler_next acquires it, and then stores the entries (a release)
 *   filled -> a sleeping loader          the reader's event, on which every sleep of np_loader_serve waits */
#include "flash/fill.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include "flash/reader.h"
#include "flash/slot_pages.h"
#include "flash/source.h"
#include "process/thread.h"

enum {
    MAX_RUN = 128,                 /* parts written to neighbouring slots by one call */
    MIN_WRITTEN = 4,               /* parts that are worth a system call */
    MIN_ACCEPTED_BYTES = 128 << 10, /* a shorter read is filled before the filler thread has woken */
    COPIED_AT_ONCE = 4096,         /* bytes that stay in the first-level cache between their checksum and their copy */
    AHEAD_BYTES = 8192,            /* both sides are prefetched so far ahead: 6.0 instead of 3.2 GB/s (Xeon 6) */
    CACHE_LINE_BYTES = 64,
    MAX_WAITING = 2,               /* reads that wait for the filler; the loader's thread fills further ones itself */
};

/* Parts whose slots are neighbours. */
typedef struct {
    uint32_t count, first_slot, piece_count;
    struct iovec pieces[2 * MAX_RUN]; /* per slot: bytes of its own part, and moved bytes of the trigger part */
} slot_run;

/* Copy a run into its slots and empty it. The first touch of a mapped slot costs a page fault, twice as much as writing
 * the same bytes to the memory file. */
static void copy_run(const np_loader_part *config, slot_run *run)
{
    const uint32_t count = run->count, piece_count = run->piece_count;
    const uint64_t offset = (uint64_t)run->first_slot * config->slot_bytes;
    const size_t bytes = (size_t)count * config->slot_bytes;
    run->count = run->piece_count = 0;
    if (config->slots_file >= 0 && count >= MIN_WRITTEN &&
        pwritev(config->slots_file, run->pieces, (int)piece_count, (off_t)(config->slots_file_offset + offset)) == (ssize_t)bytes)
        return;
    uint8_t *to = config->slots + offset;
    for (uint32_t i = 0; i < piece_count; to += run->pieces[i++].iov_len)
        memcpy(to, run->pieces[i].iov_base, run->pieces[i].iov_len);
}

/* The staged bytes of a cluster's part, or NULL if their checksum is wrong. */
static uint8_t *verified_part(const np_loader *loader, const np_flight *flight, int number, uint32_t id)
{
    const np_loader_part *config = &loader->parts[number].config;
    uint8_t *data = flight->staged + (config->base_offset + id * config->stride_bytes + config->part_offset - flight->offset);
    return np_crc32c(0, data, config->part_bytes) == config->checksums[(size_t)id * config->checksum_stride] ? data : NULL;
}

static void add_piece(slot_run *run, void *data, size_t bytes)
{
    run->pieces[run->piece_count++] = (struct iovec){data, bytes};
}

/* Fill the slots of one part. */
static void fill_part(const np_loader *loader, np_flight *flight, int number)
{
    const np_loader_part *config = &loader->parts[number].config;
    slot_run run;
    run.count = run.piece_count = 0;
    for (uint32_t i = 0; i < flight->claim_count; i++) {
        np_claim *claim = &flight->claims[i];
        if (claim->part != number)
            continue;
        uint8_t *data = verified_part(loader, flight, number, claim->id);
        uint8_t *moved = data && config->moved_bytes ? verified_part(loader, flight, NP_TRIGGER, claim->id) : NULL;
        claim->is_valid = data && (moved || !config->moved_bytes);
        if (!claim->is_valid)
            continue;
        if (run.count == MAX_RUN || (run.count && run.first_slot + run.count != claim->slot))
            copy_run(config, &run);
        if (!run.count)
            run.first_slot = claim->slot;
        run.count++;
        add_piece(&run, data, config->slot_bytes - config->moved_bytes);
        if (moved)
            add_piece(&run, moved + config->moved_from, config->moved_bytes);
    }
    if (run.count)
        copy_run(config, &run);
}

static void prepare_slots(np_loader *loader, const np_flight *flight)
{
    for (uint32_t i = 0; i < flight->claim_count; i++) {
        np_part_state *part = &loader->parts[flight->claims[i].part];
        np_slot_pages_prepare(&part->pages, &part->config, flight->claims[i].slot);
    }
}

void np_fill_slots(np_loader *loader, np_flight *flight)
{
    prepare_slots(loader, flight);
    for (uint32_t i = 0; !flight->is_complete && i < flight->claim_count; i++)
        flight->claims[i].is_valid = 0;
    if (flight->is_complete && loader->reading.source)
        np_fill_from_source(loader, flight);
    for (int number = 0; flight->is_complete && !loader->reading.source && number < NP_LOADER_PARTS; number++)
        fill_part(loader, flight, number);
}

/* ---- long ranges ---------------------------------------------------------------------------------------------- */
/* Check and copy the bytes of a claim that have arrived. */
static void fill_claim(const np_loader_part *config, const np_flight *flight, np_claim *claim, uint64_t end)
{
    const uint64_t first = config->base_offset + claim->id * config->stride_bytes + config->part_offset;
    const uint8_t *part = flight->staged + (first - flight->offset);
    uint8_t *slot = config->slots + (size_t)claim->slot * config->slot_bytes;
    const uint32_t arrived = end <= first ? 0 : end - first < config->part_bytes ? (uint32_t)(end - first) : config->part_bytes;
    for (uint32_t at = claim->filled_bytes, bytes; at < arrived; at += bytes) {
        bytes = arrived - at < COPIED_AT_ONCE ? arrived - at : COPIED_AT_ONCE;
        for (uint32_t line = at + AHEAD_BYTES; line < at + AHEAD_BYTES + bytes && line < arrived; line += CACHE_LINE_BYTES) {
            __builtin_prefetch(part + line, 0, 2);
            __builtin_prefetch(slot + line, 0, 2);
        }
        claim->checksum = np_crc32c(claim->checksum, part + at, bytes);
        if (at < config->slot_bytes)
            memcpy(slot + at, part + at, config->slot_bytes - at < bytes ? config->slot_bytes - at : bytes);
        claim->filled_bytes = at + bytes;
    }
    claim->is_valid = arrived == config->part_bytes && claim->checksum == config->checksums[(size_t)claim->id * config->checksum_stride];
}

void np_fill_arrived(np_loader *loader, np_flight *flight, uint64_t end)
{
    prepare_slots(loader, flight);
    for (uint32_t i = 0; i < flight->claim_count; i++)
        fill_claim(&loader->parts[flight->claims[i].part].config, flight, &flight->claims[i], end);
}

/* ---- the second thread ------------------------------------------------------------------------------------------ */
/* Both rings have room for every flight. Only the loader's thread writes `accepted` and `returned`. */
struct np_filler {
    np_loader *loader;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    uint32_t *queued, *filled; /* rings of [capacity] flights */
    uint32_t capacity;
    uint32_t accepted, started; /* counts of `queued`, under the lock */
    uint32_t filled_tail;       /* count of `filled`: release */
    uint32_t returned;
    int stop;
};

/* The loader may be pinned to one core, where a second thread gains nothing: allow this one the cores of the parent
 * process. */
static void widen_affinity(void)
{
    cpu_set_t allowed;
    if (sched_getaffinity(getppid(), sizeof allowed, &allowed) == 0)
        sched_setaffinity(0, sizeof allowed, &allowed); /* if refused, it stays on the loader's core */
}

static void *run_thread(void *argument)
{
    np_filler *filler = argument;
    np_loader *loader = filler->loader;
    widen_affinity();
    pthread_mutex_lock(&filler->lock);
    for (;;) {
        while (!filler->stop && filler->started == filler->accepted)
            pthread_cond_wait(&filler->work, &filler->lock);
        if (filler->started == filler->accepted)
            break;
        const uint32_t index = filler->queued[filler->started++ % filler->capacity];
        pthread_mutex_unlock(&filler->lock);
        np_fill_slots(loader, &loader->flights[index]);
        pthread_mutex_lock(&filler->lock);
        filler->filled[filler->filled_tail % filler->capacity] = index;
        __atomic_store_n(&filler->filled_tail, filler->filled_tail + 1, __ATOMIC_RELEASE);
        pthread_cond_signal(&filler->done);
        const int event = __atomic_load_n(&loader->reader->event, __ATOMIC_ACQUIRE);
        if (event >= 0)
            eventfd_write(event, 1); /* fails only when the counter is full, which is readable as well */
    }
    pthread_mutex_unlock(&filler->lock);
    return NULL;
}

static void free_all(np_filler *filler)
{
    pthread_cond_destroy(&filler->work);
    pthread_cond_destroy(&filler->done);
    pthread_mutex_destroy(&filler->lock);
    free(filler->queued);
    free(filler->filled);
    free(filler);
}

np_filler *np_filler_start(np_loader *loader)
{
    np_filler *filler = calloc(1, sizeof *filler);
    if (!filler)
        return NULL;
    *filler = (np_filler){.loader = loader, .capacity = loader->depth};
    np_isa_name(); /* the trial of a matrix engine, at the first use of kernels, needs a larger stack than the thread's */
    filler->queued = calloc(loader->depth, sizeof *filler->queued);
    filler->filled = calloc(loader->depth, sizeof *filler->filled);
    pthread_mutex_init(&filler->lock, NULL);
    pthread_cond_init(&filler->work, NULL);
    np_condition_init(&filler->done);
    if (filler->queued && filler->filled && np_thread_start(&filler->thread, NP_MIN_STACK_BYTES, run_thread, filler) == 0)
        return filler;
    free_all(filler);
    return NULL;
}

void np_filler_stop(np_filler *filler)
{
    if (!filler)
        return;
    pthread_mutex_lock(&filler->lock);
    filler->stop = 1;
    pthread_cond_signal(&filler->work);
    pthread_mutex_unlock(&filler->lock);
    pthread_join(filler->thread, NULL);
    free_all(filler);
}

int np_filler_accept(np_filler *filler, uint32_t flight)
{
    if (!filler || !filler->loader->flights[flight].is_complete || filler->loader->flights[flight].bytes < MIN_ACCEPTED_BYTES)
        return 0;
    pthread_mutex_lock(&filler->lock);
    const int accepts = filler->accepted - filler->started < MAX_WAITING;
    if (accepts) {
        filler->queued[filler->accepted++ % filler->capacity] = flight;
        pthread_cond_signal(&filler->work);
    }
    pthread_mutex_unlock(&filler->lock);
    return accepts;
}

int np_filler_next(np_filler *filler, uint32_t *flight)
{
    if (!filler || filler->returned == __atomic_load_n(&filler->filled_tail, __ATOMIC_ACQUIRE))
        return 0;
    *flight = filler->filled[filler->returned++ % filler->capacity];
    return 1;
}

uint32_t np_filler_pending(const np_filler *filler)
{
    return filler ? filler->accepted - filler->returned : 0; /* the thread does not write these */
}

void np_filler_wait(np_filler *filler, int timeout_ms)
{
    if (!np_filler_pending(filler))
        return;
    pthread_mutex_lock(&filler->lock);
    int error = 0;
    while (error == 0 && filler->filled_tail == filler->returned)
        error = np_condition_wait(&filler->done, &filler->lock, timeout_ms);
    pthread_mutex_unlock(&filler->lock);
}

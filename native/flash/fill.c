/* From staging into slots: half of what a byte of warm-up costs the processor is the memory that its slot never had before, a fifth its
 * checksum. So long reads are filled by two threads: this one, which the system may put on any core, and the loader's own when this one
 * has enough to do. What it fills is published by the loader's thread alone, so entries have one writer as before.
 *
 *   what                               ordering
 *   the flight and its claims -> here  the lock, in np_filler_take
 *   bytes in slots -> the entries      `filled_tail` is a release; np_filler_next acquires it, and then stores the entries (a release)
 *   filled -> a sleeping loader        the reader's event, which every sleep of np_loader_serve looks at */
#include "flash/fill.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include "flash/reader.h"
#include "process/thread.h"

enum {
    MAX_RUN = 128,           /* parts that are brought into slots together */
    MIN_WRITTEN = 4,         /* as many of them are worth a system call */
    MIN_HANDED_BYTES = 128 << 10, /* a shorter read is filled before another thread has woken */
    MAX_WAITING = 2,         /* of more the loader's thread does the next itself */
};

/* Parts whose slots follow each other, on their way from staging to there. */
typedef struct {
    uint32_t count, first_slot, piece_count;
    struct iovec pieces[2 * MAX_RUN]; /* of each the bytes that its slot holds: of its part, and what was moved there */
} slot_run;

/* Bring a run into its slots, and begin a new one. A slot that is touched for the first time costs a page fault where it is mapped, twice
 * as much as the same bytes written to the file. */
static void bring(const np_loader_part *config, slot_run *run)
{
    const uint32_t count = run->count, piece_count = run->piece_count;
    const uint64_t place = (uint64_t)run->first_slot * config->slot_bytes;
    const size_t bytes = (size_t)count * config->slot_bytes;
    run->count = run->piece_count = 0;
    if (config->slots_file >= 0 && count >= MIN_WRITTEN &&
        pwritev(config->slots_file, run->pieces, (int)piece_count, (off_t)(config->slots_file_offset + place)) == (ssize_t)bytes)
        return;
    uint8_t *to = config->slots + place;
    for (uint32_t i = 0; i < piece_count; to += run->pieces[i++].iov_len)
        memcpy(to, run->pieces[i].iov_base, run->pieces[i].iov_len);
}

/* A cluster's part where its read has put it, or NULL when it is damaged. */
static uint8_t *sound_part(const np_loader *loader, const np_flight *flight, int number, uint32_t id)
{
    const np_loader_part *config = &loader->parts[number].config;
    uint8_t *data = flight->staged + (config->base_offset + id * config->stride_bytes + config->part_offset - flight->offset);
    return np_crc32c(0, data, config->part_bytes) == config->checksums[(size_t)id * config->checksum_stride] ? data : NULL;
}

static void add_piece(slot_run *run, void *data, size_t bytes)
{
    run->pieces[run->piece_count++] = (struct iovec){data, bytes};
}

/* One part of the clusters that a read brought. */
static void fill_part(const np_loader *loader, np_flight *flight, int number)
{
    const np_loader_part *config = &loader->parts[number].config;
    slot_run run;
    run.count = run.piece_count = 0;
    for (uint32_t i = 0; i < flight->claim_count; i++) {
        np_claim *claim = &flight->claims[i];
        if (claim->part != number)
            continue;
        uint8_t *data = sound_part(loader, flight, number, claim->id);
        uint8_t *moved = data && config->moved_bytes ? sound_part(loader, flight, NP_TRIGGER, claim->id) : NULL;
        claim->is_right = data && (moved || !config->moved_bytes);
        if (!claim->is_right)
            continue;
        if (run.count == MAX_RUN || (run.count && run.first_slot + run.count != claim->slot))
            bring(config, &run);
        if (!run.count)
            run.first_slot = claim->slot;
        run.count++;
        add_piece(&run, data, config->slot_bytes - config->moved_bytes);
        if (moved)
            add_piece(&run, moved + config->moved_from, config->moved_bytes);
    }
    if (run.count)
        bring(config, &run);
}

void np_fill_slots(const np_loader *loader, np_flight *flight)
{
    for (uint32_t i = 0; !flight->whole && i < flight->claim_count; i++)
        flight->claims[i].is_right = 0;
    for (int number = 0; flight->whole && number < NP_LOADER_PARTS; number++)
        fill_part(loader, flight, number);
}

/* Both rings have room for every flight. What the loader's thread alone uses: taken, given. */
struct np_filler {
    np_loader *loader;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    uint32_t *wanted, *filled; /* rings of [capacity] flights */
    uint32_t capacity;
    uint32_t taken, started;   /* counts of `wanted`, under the lock */
    uint32_t filled_tail;      /* count of `filled`: release */
    uint32_t given;
    int stop;
};

/* The process may be kept on one core, where a second thread gains nothing: this one may go where the process's parent may. */
static void go_anywhere(void)
{
    cpu_set_t allowed;
    if (sched_getaffinity(getppid(), sizeof allowed, &allowed) == 0)
        sched_setaffinity(0, sizeof allowed, &allowed); /* refused, it stays */
}

static void *run_thread(void *argument)
{
    np_filler *filler = argument;
    np_loader *loader = filler->loader;
    go_anywhere();
    pthread_mutex_lock(&filler->lock);
    for (;;) {
        while (!filler->stop && filler->started == filler->taken)
            pthread_cond_wait(&filler->work, &filler->lock);
        if (filler->started == filler->taken)
            break;
        const uint32_t index = filler->wanted[filler->started++ % filler->capacity];
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
    free(filler->wanted);
    free(filler->filled);
    free(filler);
}

np_filler *np_filler_start(np_loader *loader)
{
    np_filler *filler = calloc(1, sizeof *filler);
    if (!filler)
        return NULL;
    *filler = (np_filler){.loader = loader, .capacity = loader->depth};
    filler->wanted = calloc(loader->depth, sizeof *filler->wanted);
    filler->filled = calloc(loader->depth, sizeof *filler->filled);
    pthread_mutex_init(&filler->lock, NULL);
    pthread_cond_init(&filler->work, NULL);
    np_condition_init(&filler->done);
    if (filler->wanted && filler->filled && np_thread_start(&filler->thread, NP_LEAST_STACK_BYTES, run_thread, filler) == 0)
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

int np_filler_take(np_filler *filler, uint32_t flight)
{
    if (!filler || !filler->loader->flights[flight].whole || filler->loader->flights[flight].bytes < MIN_HANDED_BYTES)
        return 0;
    pthread_mutex_lock(&filler->lock);
    const int takes = filler->taken - filler->started < MAX_WAITING;
    if (takes) {
        filler->wanted[filler->taken++ % filler->capacity] = flight;
        pthread_cond_signal(&filler->work);
    }
    pthread_mutex_unlock(&filler->lock);
    return takes;
}

int np_filler_next(np_filler *filler, uint32_t *flight)
{
    if (!filler || filler->given == __atomic_load_n(&filler->filled_tail, __ATOMIC_ACQUIRE))
        return 0;
    *flight = filler->filled[filler->given++ % filler->capacity];
    return 1;
}

uint32_t np_filler_held(const np_filler *filler)
{
    return filler ? filler->taken - filler->given : 0; /* the thread does not write these */
}

void np_filler_wait(np_filler *filler, int timeout_ms)
{
    if (!np_filler_held(filler))
        return;
    pthread_mutex_lock(&filler->lock);
    int error = 0;
    while (error == 0 && filler->filled_tail == filler->given)
        error = np_condition_wait(&filler->done, &filler->lock, timeout_ms);
    pthread_mutex_unlock(&filler->lock);
}

/* The portable engine: a pool of threads that each do one pread at a time. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "flash/reader.h"
#include "process/thread.h"

enum { MAX_THREADS = 32 }; /* flash gains little from more reads at once */

typedef struct {
    uint32_t index;
    int32_t result;
} piece_result;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    pthread_t threads[MAX_THREADS];
    uint32_t thread_count, idle;
    uint32_t *queue, queue_from, queue_count; /* ring of [depth] requests */
    piece_result *results;                    /* ring of [depth] */
    uint32_t results_from, results_count;
    int stop, event; /* event: -1 before it is watched */
    np_reader *reader;
} pool_state;

static void *run_thread(void *argument)
{
    pool_state *state = argument;
    np_reader *reader = state->reader;
    pthread_mutex_lock(&state->lock);
    for (;;) {
        while (!state->stop && state->queue_count == 0) {
            state->idle++;
            pthread_cond_wait(&state->work, &state->lock);
            state->idle--;
        }
        if (state->stop)
            break;
        const uint32_t index = state->queue[state->queue_from];
        state->queue_from = (state->queue_from + 1) % reader->depth;
        state->queue_count--;
        pthread_mutex_unlock(&state->lock);

        const np_request *request = &reader->requests[index];
        const off_t offset = (off_t)(np_place_in_file(request->offset) + request->done);
        const ssize_t bytes = pread(reader->files[np_file_number(request->offset)], request->piece.iov_base, request->piece.iov_len, offset);
        const int32_t result = bytes < 0 ? -errno : (int32_t)bytes;

        pthread_mutex_lock(&state->lock);
        state->results[(state->results_from + state->results_count++) % reader->depth] = (piece_result){index, result};
        pthread_cond_signal(&state->done);
        if (state->event >= 0)
            eventfd_write(state->event, 1); /* fails only if the counter is full, which is readable as well */
    }
    pthread_mutex_unlock(&state->lock);
    return NULL;
}

static void pool_close(np_reader *reader)
{
    pool_state *state = reader->engine;
    pthread_mutex_lock(&state->lock);
    state->stop = 1;
    pthread_cond_broadcast(&state->work);
    pthread_mutex_unlock(&state->lock);
    for (uint32_t i = 0; i < state->thread_count; i++)
        pthread_join(state->threads[i], NULL);
    pthread_cond_destroy(&state->done);
    pthread_cond_destroy(&state->work);
    pthread_mutex_destroy(&state->lock);
    free(state->queue);
    free(state->results);
    free(state);
}

/* Start as many threads as possible; one is enough. */
static int start_threads(pool_state *state, uint32_t max_threads)
{
    int error = 0;
    while (error == 0 && state->thread_count < max_threads) {
        error = np_thread_start(&state->threads[state->thread_count], NP_MIN_STACK_BYTES, run_thread, state);
        state->thread_count += error == 0;
    }
    return state->thread_count ? 0 : error;
}

static int pool_open(np_reader *reader)
{
    pool_state *state = calloc(1, sizeof *state);
    uint32_t *queue = calloc(reader->depth, sizeof *queue);
    piece_result *results = calloc(reader->depth, sizeof *results);
    if (!state || !queue || !results) {
        free(state);
        free(queue);
        free(results);
        return ENOMEM;
    }
    *state = (pool_state){.queue = queue, .results = results, .event = -1, .reader = reader};
    pthread_mutex_init(&state->lock, NULL);
    pthread_cond_init(&state->work, NULL);
    np_condition_init(&state->done);
    reader->engine = state;
    const int error = start_threads(state, reader->depth < MAX_THREADS ? reader->depth : MAX_THREADS);
    if (error)
        pool_close(reader);
    return error;
}

static void pool_start(np_reader *reader, uint32_t index)
{
    pool_state *state = reader->engine;
    pthread_mutex_lock(&state->lock);
    state->queue[(state->queue_from + state->queue_count++) % reader->depth] = index;
    const int sleeper = state->idle > 0;
    pthread_mutex_unlock(&state->lock);
    if (sleeper)
        pthread_cond_signal(&state->work);
}

static void pool_flush(np_reader *reader)
{
    (void)reader; /* started pieces are in the threads' queue already */
}

static int pool_take(np_reader *reader, uint32_t *index, int32_t *result)
{
    pool_state *state = reader->engine;
    pthread_mutex_lock(&state->lock);
    const int has_result = state->results_count > 0;
    if (has_result) {
        *index = state->results[state->results_from].index;
        *result = state->results[state->results_from].result;
        state->results_from = (state->results_from + 1) % reader->depth;
        state->results_count--;
    }
    pthread_mutex_unlock(&state->lock);
    return has_result;
}

static void pool_wait(np_reader *reader, int timeout_ms)
{
    pool_state *state = reader->engine;
    pthread_mutex_lock(&state->lock);
    if (state->results_count == 0)
        np_condition_wait(&state->done, &state->lock, timeout_ms);
    pthread_mutex_unlock(&state->lock);
}

static int pool_watch(np_reader *reader, int event)
{
    pool_state *state = reader->engine;
    pthread_mutex_lock(&state->lock);
    state->event = event;
    pthread_mutex_unlock(&state->lock);
    return 0;
}

const np_reader_engine_calls np_engine_threads = {
    .name = "threads", .open = pool_open, .close = pool_close, .start = pool_start, .flush = pool_flush,
    .take = pool_take, .wait = pool_wait, .watch = pool_watch,
};

/* How fast threads read memory and do nothing else: dram KIND BUFFER_BYTES ROUNDS, one line per figure:
 * piece_bytes threads prefetch_pieces bytes_per_s. Piece 0 is one sequential pass; else pieces in ascending order, on average
 * every tenth. KIND says how the buffer is mapped: `huge` (anonymous, huge pages) or `memfd` (as segments are). */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t line_t __attribute__((vector_size(64)));
enum { LINE = 64, MAX_THREADS = 2, PASSES = 6, MEAN_GAP = 10, MAX_AHEAD = 4, TO_L2 = 2 };

/* For a width of 4096 in q4: a row with its scales, a neuron's trigger part, its value part, all of it. */
static const size_t piece_bytes[] = {0, 2304, 2816, 4096, 6912};
static const size_t prefetches[] = {0, 1, 2, MAX_AHEAD}; /* pieces ahead, read into the second-level cache; 0: none */

typedef struct {
    const char *from;
    size_t bytes, piece, ahead, read_bytes;
    uint32_t seed;
} job_t;

static volatile uint64_t sink;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void sequential(job_t *job) {
    line_t sums[4] = {{0}};
    for (size_t at = 0; at + sizeof sums <= job->bytes; at += sizeof sums)
        for (size_t k = 0; k < 4; k++) sums[k] ^= *(const line_t *)(job->from + at + k * LINE);
    sums[0] ^= sums[1] ^ sums[2] ^ sums[3];
    sink ^= sums[0][0];
    job->read_bytes = job->bytes;
}

static size_t gap(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return 1 + (*seed >> 16) % (2 * MEAN_GAP - 1);
}

static line_t read_piece(const char *piece, size_t bytes, line_t sum) {
    for (size_t i = 0; i < bytes; i += LINE) sum ^= *(const line_t *)(piece + i);
    return sum;
}

static line_t read_piece_prefetching(const char *piece, const char *later, size_t bytes, line_t sum) {
    for (size_t i = 0; i < bytes; i += LINE) {
        __builtin_prefetch(later + i, 0, TO_L2);
        sum ^= *(const line_t *)(piece + i);
    }
    return sum;
}

static void pieces(job_t *job) {
    size_t count = job->bytes / job->piece, ahead = job->ahead;
    line_t sum = {0};
    job->read_bytes = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        size_t at[MAX_AHEAD + 1]; /* the piece to read and those after it, as a ring */
        size_t next = gap(&job->seed) - 1, turn = 0;
        for (size_t k = 0; k <= ahead; k++, next += gap(&job->seed)) at[k] = next;
        for (; next < count; turn = turn == ahead ? 0 : turn + 1, next += gap(&job->seed)) {
            const char *piece = job->from + at[turn] * job->piece;
            const char *later = job->from + at[turn ? turn - 1 : ahead] * job->piece;
            sum = ahead ? read_piece_prefetching(piece, later, job->piece, sum) : read_piece(piece, job->piece, sum);
            at[turn] = next;
            job->read_bytes += job->piece;
        }
    }
    sink ^= sum[0];
}

static void *work(void *argument) {
    job_t *job = argument;
    (job->piece ? pieces : sequential)(job);
    return NULL;
}

/* Every thread reads its own half of the buffer, one thread only the first. */
static double bytes_per_s(const char *buffer, size_t bytes, size_t piece, size_t threads, size_t ahead, uint32_t seed) {
    job_t jobs[MAX_THREADS];
    pthread_t others[MAX_THREADS];
    size_t half = bytes / MAX_THREADS, total = 0;
    for (size_t k = 0; k < threads; k++)
        jobs[k] = (job_t){buffer + k * half, half, piece, ahead, 0, seed + (uint32_t)k};
    double start = now_s();
    for (size_t k = 1; k < threads; k++)
        if (pthread_create(&others[k], NULL, work, &jobs[k])) exit(1);
    work(&jobs[0]);
    for (size_t k = 1; k < threads; k++) pthread_join(others[k], NULL);
    double seconds = now_s() - start;
    for (size_t k = 0; k < threads; k++) total += jobs[k].read_bytes;
    return (double)total / seconds;
}

int main(int count, char **words) {
    if (count != 4) return 2;
    size_t bytes = strtoull(words[2], NULL, 10);
    int rounds = atoi(words[3]), file = -1;
    if (!strcmp(words[1], "memfd")) {
        file = memfd_create("dram", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, (off_t)bytes)) return 1;
    }
    char *buffer = mmap(NULL, bytes, PROT_READ | PROT_WRITE, file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, file, 0);
    if (buffer == MAP_FAILED) return 1;
    madvise(buffer, bytes, MADV_HUGEPAGE); /* what the kernel makes of it for a memfd is part of the figure */
    memset(buffer, 1, bytes);
    for (int round = 0; round < rounds; round++)
        for (size_t i = 0; i < sizeof piece_bytes / sizeof *piece_bytes; i++)
            for (size_t threads = 1; threads <= MAX_THREADS; threads++)
                for (size_t p = 0; p < (piece_bytes[i] ? sizeof prefetches / sizeof *prefetches : 1); p++)
                    printf("%zu %zu %zu %.0f\n", piece_bytes[i], threads, prefetches[p],
                           bytes_per_s(buffer, bytes, piece_bytes[i], threads, prefetches[p], (uint32_t)round));
    return 0;
}

/* Measure the loader's speed and processor time: bench_loader FILE [PATTERN DEPTH [ENGINE [SPIN_US [MAX_READ_BYTES
 * [GAP_BYTES [LONG_READS]]]]]]
 *
 * Divides FILE (random bytes, at most 2 GiB) into clusters of 4096 + 4096 bytes, with a slot each. Slots are touched
 * before, except for warm. PATTERN:
 *   bundle   both parts of clusters in random order, requested through a ring
 *   gate     trigger parts only
 *   warm     all clusters in the order of the file, as a warm-up, by LONG_READS (8) concurrent reads of 1 MiB
 * Prints MB/s, microseconds of processor time per read of the loader's thread and in total, and the number of reads.
 * Not a test. For comparison with fio: fio --name=x --filename=FILE --rw=randread --bs=8k --iodepth=32
 * --ioengine=io_uring --direct=1 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "neuronpipe.h"
#include "require.h"
#include "sync/clock.h"

enum { PART_BYTES = 4096, STRIDE = 2 * PART_BYTES, TRIGGER_SLOT_BYTES = 2816, CAPACITY = 16384 };

static uint32_t count, tail[16], head[16], entries[CAPACITY], asleep, arrivals, wanted;
static np_requests ring = {tail, head, entries, CAPACITY, &asleep, -1};

static double cpu_us(void)
{
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e6 + (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static void *ask(void *argument)
{
    uint32_t *order = malloc(count * sizeof *order);
    for (uint32_t i = 0; i < count; i++)
        order[i] = i;
    srand48(7);
    for (uint32_t i = count - 1; i > 0; i--) {
        const uint32_t j = (uint32_t)(lrand48() % (i + 1)), other = order[i];
        order[i] = order[j];
        order[j] = other;
    }
    for (uint32_t i = 0; i < wanted; i++) {
        const uint32_t entry = order[i] | *(uint32_t *)argument;
        while (!np_requests_put(&ring, &entry, 1))
            usleep(200);
    }
    free(order);
    return NULL;
}

int main(int arguments, char **argument)
{
    REQUIRE(arguments >= 2);
    const char *pattern = arguments > 2 ? argument[2] : "bundle", *engine = arguments > 4 ? argument[4] : "io_uring";
    const uint32_t depth = arguments > 3 ? (uint32_t)atoi(argument[3]) : 32, spin_us = arguments > 5 ? (uint32_t)atoi(argument[5]) : 0;
    const np_loader_reading reading = {
        .most_read_bytes = arguments > 6 ? (uint32_t)atoi(argument[6]) : 65536,
        .merge_gap_bytes = arguments > 7 ? (uint32_t)atoi(argument[7]) : 0,
        .prefetch_depth = depth,
        .warm_up_reads = arguments > 8 ? (uint32_t)atoi(argument[8]) : 8,
        .warm_up_read_bytes = 1 << 20,
    };
    int error = 0;
    np_reader *reader = np_reader_open(argument[1], engine, depth + reading.warm_up_reads, &error);
    REQUIRE(reader);
    struct stat status;
    REQUIRE(stat(argument[1], &status) == 0);
    count = (uint32_t)((status.st_size < 1l << 31 ? status.st_size : 1l << 31) / STRIDE);
    uint32_t *words = calloc(2 * (size_t)count, sizeof *words), *checksums = calloc(2 * (size_t)count, sizeof *checksums);
    uint32_t *ids = calloc(count, sizeof *ids);
    const int slots_file = memfd_create("slots", 0), touched = strcmp(pattern, "warm") != 0;
    REQUIRE(slots_file >= 0 && ftruncate(slots_file, (off_t)count * STRIDE) == 0);
    uint8_t *slots = mmap(NULL, (size_t)count * STRIDE, PROT_READ | PROT_WRITE, MAP_SHARED | (touched ? MAP_POPULATE : 0), slots_file, 0);
    REQUIRE(words && checksums && ids && slots != MAP_FAILED);
    FILE *file = fopen(argument[1], "rb");
    uint8_t cluster[STRIDE];
    for (uint32_t id = 0; id < count; id++) {
        ids[id] = id;
        REQUIRE(fread(cluster, STRIDE, 1, file) == 1);
        for (int part = 0; part < 2; part++)
            checksums[(size_t)part * count + id] = np_crc32c(0, cluster + part * PART_BYTES, PART_BYTES);
    }
    fclose(file);
    np_loader_part parts[2];
    for (int part = 0; part < 2; part++)
        parts[part] = (np_loader_part){
            .stride_bytes = STRIDE,
            .part_offset = (uint64_t)part * PART_BYTES,
            .part_bytes = PART_BYTES,
            .slot_bytes = part ? PART_BYTES : TRIGGER_SLOT_BYTES,
            .slot_count = count,
            .slots = slots + (size_t)part * count * PART_BYTES,
            .slots_file = slots_file,
            .slots_file_offset = (uint64_t)part * count * PART_BYTES,
            .words = words + (size_t)part * count,
            .cluster_count = count,
            .checksums = checksums + (size_t)part * count,
            .checksum_stride = 1,
        };
    np_loader *loader = np_loader_create(reader, parts, &reading, &arrivals, count);
    REQUIRE(loader && np_loader_attach(loader, &ring, 1, NULL, NULL, NULL, NULL) == NP_OK);
    for (int part = 0; part < 2; part++)
        REQUIRE(np_loader_grant(loader, part, ids, count) == (int)count);

    const int warm = strcmp(pattern, "warm") == 0;
    uint32_t bits = strcmp(pattern, "gate") == 0 ? NP_REQUEST_TRIGGER : NP_REQUEST_TRIGGER | NP_REQUEST_VALUE;
    wanted = warm ? count : count < 100000 ? count : 100000;
    pthread_t worker;
    if (warm)
        REQUIRE(np_loader_warm_up(loader, (int)bits, ids, count, 0) == NP_OK);
    else
        REQUIRE(pthread_create(&worker, NULL, ask, &bits) == 0);
    np_loader_state state;
    do { /* the clock starts with the first arrival: before it the worker shuffles */
        np_loader_turn(loader, 1);
        np_loader_read_state(loader, &state);
    } while (state.reads == 0);
    const uint64_t bytes_before = state.bytes, reads_before = state.reads;
    const double cpu_before = cpu_us();
    const uint64_t before = np_clock_ns();
    uint64_t end;
    do {
        REQUIRE(np_loader_serve(loader, NULL, 0, 2, spin_us) >= 0);
        end = np_clock_ns();
        np_loader_read_state(loader, &state);
    } while (state.in_flight || state.waiting[0] || state.bytes < (uint64_t)wanted * (bits == NP_REQUEST_TRIGGER ? PART_BYTES : STRIDE));
    const double cpu = cpu_us() - cpu_before, reads = (double)(state.reads - reads_before);
    printf("%s depth %u %s spin %u: %.0f MB/s, %.2f us of CPU per read, %.2f per 8 KiB, %.0f reads, %llu failures\n", pattern, depth,
           np_reader_engine(reader), spin_us, (double)(state.bytes - bytes_before) / (double)(end - before) * 1e3, cpu / reads,
           cpu / ((double)(state.bytes - bytes_before) / STRIDE), reads, (unsigned long long)(state.checksum_failures + state.io_errors));
    if (!warm)
        pthread_join(worker, NULL);
    np_loader_destroy(loader);
    np_reader_close(reader);
    return 0;
}

/* A small bundle file in two parts and a loader over it, for the tests of the loader. */
#ifndef NP_TESTS_BUNDLES_H
#define NP_TESTS_BUNDLES_H
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "neuronpipe.h"
#include "require.h"

/* A test may choose other sizes. */
#ifndef BUNDLE_TRIGGER_BYTES
#define BUNDLE_TRIGGER_BYTES 4096
#define BUNDLE_VALUE_BYTES 8192
#define BUNDLE_CLUSTERS 96
#define BUNDLE_SLOTS 40
#endif
#ifndef BUNDLE_SLOTS_FILE_OFFSET
#define BUNDLE_SLOTS_FILE_OFFSET 131072
#endif

enum {
    BASE = 4096,
    TRIGGER_BYTES = BUNDLE_TRIGGER_BYTES,
    VALUE_BYTES = BUNDLE_VALUE_BYTES,
    STRIDE = TRIGGER_BYTES + VALUE_BYTES,
    CLUSTERS = BUNDLE_CLUSTERS,
    SLOTS = BUNDLE_SLOTS,
    DEPTH = 8,
    QUEUE = 64,
    SLOTS_FILE_OFFSET = BUNDLE_SLOTS_FILE_OFFSET, /* of the second part, behind the first in a memory file */
};

static const uint32_t part_bytes[2] = {TRIGGER_BYTES, VALUE_BYTES};
static const uint32_t slot_bytes[2] = {TRIGGER_BYTES - 1280, VALUE_BYTES}; /* neither a multiple of a page nor aligned */
static const np_loader_reading apart = {.most_read_bytes = STRIDE, .prefetch_depth = DEPTH};
static char path[64];
static int file;
static uint8_t *file_bytes;
static uint32_t checksums[2][CLUSTERS], words[2][CLUSTERS], arrivals;
static uint8_t *slots[2];
static int slots_file = -1; /* see map_slots */

static inline const uint8_t *part_of_file(int part, uint32_t id)
{
    return file_bytes + BASE + (size_t)id * STRIDE + (part ? TRIGGER_BYTES : 0);
}

static inline void write_bundles(void)
{
    const size_t bytes = BASE + (size_t)CLUSTERS * STRIDE;
    const char *folder = getenv("TMPDIR");
    char name[4096];
    snprintf(name, sizeof name, "%s/bundles-XXXXXX", folder ? folder : "/tmp");
    file = mkstemp(name);
    REQUIRE(file >= 0);
    unlink(name);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    file_bytes = malloc(bytes);
    uint32_t random = 5;
    for (size_t i = 0; i < bytes; i++)
        file_bytes[i] = (uint8_t)((random = random * 1664525u + 1013904223u) >> 24);
    REQUIRE(pwrite(file, file_bytes, bytes, 0) == (ssize_t)bytes);
    REQUIRE(fsync(file) == 0);
    for (int part = 0; part < 2; part++) {
        slots[part] = aligned_alloc(64, (size_t)SLOTS * slot_bytes[part]);
        for (uint32_t id = 0; id < CLUSTERS; id++)
            checksums[part][id] = np_crc32c(0, part_of_file(part, id), part_bytes[part]);
    }
}

/* Map the slots of both parts from one memory file, as in a run. */
static inline void map_slots(void)
{
    slots_file = memfd_create("slots", 0);
    const size_t bytes = SLOTS_FILE_OFFSET + (size_t)SLOTS * slot_bytes[1];
    REQUIRE(slots_file >= 0 && ftruncate(slots_file, (off_t)bytes) == 0);
    uint8_t *memory = np_memory_map(slots_file, bytes, 1);
    REQUIRE(memory != NULL);
    for (int part = 0; part < 2; part++) {
        free(slots[part]);
        slots[part] = memory + (part ? SLOTS_FILE_OFFSET : 0);
    }
}

static inline void describe(np_loader_part *parts)
{
    for (int part = 0; part < 2; part++)
        parts[part] = (np_loader_part){
            .base_offset = BASE,
            .stride_bytes = STRIDE,
            .part_offset = part ? TRIGGER_BYTES : 0,
            .part_bytes = part_bytes[part],
            .slot_bytes = slot_bytes[part],
            .slot_count = SLOTS,
            .slots = slots[part],
            .slots_file = slots_file,
            .slots_file_offset = part ? SLOTS_FILE_OFFSET : 0,
            .words = words[part],
            .cluster_count = CLUSTERS,
            .checksums = checksums[part],
            .checksum_stride = 1,
        };
}

static np_reader *reader;

static inline np_loader *start_reading(const char *engine, const np_loader_reading *reading)
{
    int error = 0;
    memset(words, 0, sizeof words);
    reader = np_reader_open(path, engine, DEPTH, &error);
    REQUIRE(reader != NULL);
    np_loader_part parts[2];
    describe(parts);
    np_loader *loader = np_loader_create(reader, parts, reading, &arrivals, QUEUE);
    REQUIRE(loader != NULL);
    return loader;
}

/* Read every part by itself. */
static inline np_loader *start(const char *engine)
{
    return start_reading(engine, &apart);
}

static inline void stop(np_loader *loader)
{
    np_loader_destroy(loader);
    np_reader_close(reader);
}

static inline np_loader_state state_of(const np_loader *loader)
{
    np_loader_state state;
    np_loader_read_state(loader, &state);
    return state;
}

static inline void grant(np_loader *loader, int part, uint32_t first, uint32_t count)
{
    for (uint32_t slot = first; slot < first + count; slot++)
        REQUIRE_EQUAL(np_loader_grant(loader, part, &slot, 1), 1);
}

static inline int run_dry(np_loader *loader)
{
    int ended = 0;
    do
        ended += np_loader_turn(loader, 10000);
    while (state_of(loader).in_flight);
    return ended;
}

static inline void require_present(int part, uint32_t id)
{
    REQUIRE_EQUAL(words[part][id] & NP_ENTRY_STATE_MASK, NP_ENTRY_PRESENT);
    const uint32_t slot = words[part][id] & NP_ENTRY_SLOT_MASK;
    REQUIRE(slot < SLOTS);
    REQUIRE(memcmp(slots[part] + (size_t)slot * slot_bytes[part], part_of_file(part, id), slot_bytes[part]) == 0);
}

static inline void remove_bundles(void)
{
    for (int part = 0; part < 2 && slots_file < 0; part++)
        free(slots[part]);
    free(file_bytes);
    close(file);
}

#endif

/* Whole experts, which are read in pieces: a part is published when its last piece is there, and what is damaged or missing
 * fails alone. */
#define BUNDLE_TRIGGER_BYTES (333 * 4096)
#define BUNDLE_VALUE_BYTES (700 * 4096)
#define BUNDLE_CLUSTERS 4
#define BUNDLE_SLOTS 3
#include "bundles.h"

static const np_loader_reading whole = {.most_read_bytes = STRIDE, .prefetch_depth = DEPTH};
static const uint32_t both = NP_REQUEST_TRIGGER | NP_REQUEST_VALUE;

/* A loader with all slots granted. */
static np_loader *start_whole(const char *engine)
{
    np_loader *loader = start_reading(engine, &whole);
    grant(loader, 0, 0, SLOTS);
    grant(loader, 1, 0, SLOTS);
    return loader;
}

static void test_a_flight_has_several_reads(void)
{
    np_loader_part parts[2];
    describe(parts);
    REQUIRE_EQUAL(np_loader_flight_reads(&whole, parts), STRIDE >> 20);
    np_loader_reading joined = whole;
    joined.merge_gap_bytes = 4096;
    REQUIRE_EQUAL(np_loader_flight_reads(&joined, parts), 1);
}

static void test_every_byte_arrives(const char *engine)
{
    np_loader *loader = start_whole(engine);
    const uint32_t ids[] = {2, 0, 3};
    REQUIRE_EQUAL(np_loader_request(loader, (int)both, ids, 3, 0, 0), 3);
    REQUIRE_EQUAL(run_dry(loader), 6);
    for (int i = 0; i < 3; i++)
        for (int part = 0; part < 2; part++)
            require_present(part, ids[i]);
    const np_loader_state state = state_of(loader);
    REQUIRE(state.reads == 3 && state.bytes == 3 * STRIDE && state.free_slots[0] == 0 && state.free_slots[1] == 0);
    stop(loader);
}

static void test_a_single_part_is_read_in_pieces_too(const char *engine)
{
    np_loader *loader = start_whole(engine);
    const uint32_t id = 1;
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_VALUE, &id, 1, 0, 0), 1);
    REQUIRE_EQUAL(run_dry(loader), 1);
    require_present(1, id);
    REQUIRE_EQUAL(words[0][id], NP_ENTRY_ABSENT);
    REQUIRE_EQUAL(state_of(loader).bytes, VALUE_BYTES);
    stop(loader);
}

static void test_damage_fails_one_part(const char *engine, int part)
{
    np_loader *loader = start_whole(engine);
    const uint32_t ids[] = {1, 2};
    checksums[part][1] ^= 1;
    REQUIRE_EQUAL(np_loader_request(loader, (int)both, ids, 2, 0, 0), 2);
    run_dry(loader);
    checksums[part][1] ^= 1;
    REQUIRE_EQUAL(words[part][1], NP_ENTRY_FAILED);
    require_present(!part, 1);
    require_present(0, 2);
    require_present(1, 2);
    const np_loader_state state = state_of(loader);
    REQUIRE(state.checksum_failures == 2 && state.io_errors == 0 && state.free_slots[part] == SLOTS - 1);
    stop(loader);
}

static void test_a_file_that_ends_within_the_value_part(const char *engine)
{
    const uint32_t id = CLUSTERS - 1;
    const off_t end = BASE + (off_t)id * STRIDE + TRIGGER_BYTES + (2 << 20);
    REQUIRE(ftruncate(file, end) == 0);
    np_loader *loader = start_whole(engine);
    REQUIRE_EQUAL(np_loader_request(loader, (int)both, &id, 1, 0, 0), 1);
    run_dry(loader);
    REQUIRE_EQUAL(words[1][id], NP_ENTRY_FAILED);
    const np_loader_state state = state_of(loader);
    REQUIRE(state.io_errors > 0 && state.checksum_failures == 0 && state.free_slots[1] == SLOTS);
    stop(loader);
    REQUIRE(pwrite(file, file_bytes + end, BASE + (size_t)CLUSTERS * STRIDE - (size_t)end, end) > 0);
}

int main(void)
{
    static const char *const engines[] = {"io_uring", "threads"};
    write_bundles();
    test_a_flight_has_several_reads();
    for (int i = 0; i < 2; i++) {
        int error = 0;
        np_reader *possible = np_reader_open(path, engines[i], DEPTH, &error);
        if (!possible && i == 0) {
            printf("  io_uring, which is not allowed here (%s): not tested\n", strerror(error));
            continue;
        }
        np_reader_close(possible);
        test_every_byte_arrives(engines[i]);
        test_a_single_part_is_read_in_pieces_too(engines[i]);
        for (int part = 0; part < 2; part++)
            test_damage_fails_one_part(engines[i], part);
        test_a_file_that_ends_within_the_value_part(engines[i]);
    }
    remove_bundles();
    printf("long reads: all passed\n");
    return 0;
}

/* Warm-up: all clusters arrive by long reads, pinned ones first, and a demand in between does not split the reads. */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>

#include "bundles.h"
#include "sync/clock.h"

enum { NEAR = 4, FAR = 16 }; /* clusters of an ordinary and of a long read */

static const np_loader_reading reading = {
    .most_read_bytes = NEAR * STRIDE, .prefetch_depth = DEPTH, .warm_up_reads = 2, .warm_up_read_bytes = FAR * STRIDE};
static const int both = NP_REQUEST_TRIGGER | NP_REQUEST_VALUE;

static void warm(np_loader *loader, int parts, uint32_t first, uint32_t count, uint32_t flags)
{
    for (uint32_t id = first; id < first + count; id++)
        REQUIRE_EQUAL(np_loader_warm_up(loader, parts, &id, 1, flags), NP_OK);
}

static np_loader *start_with_slots(const char *engine, uint32_t count)
{
    np_loader *loader = start_reading(engine, &reading);
    for (int part = 0; part < 2; part++)
        grant(loader, part, 0, count);
    return loader;
}

static void require_all(uint32_t first, uint32_t count)
{
    for (uint32_t id = first; id < first + count; id++)
        for (int part = 0; part < 2; part++)
            require_present(part, id);
}

static void test_warms_up_in_long_reads(const char *engine)
{
    np_loader *loader = start_with_slots(engine, SLOTS);
    warm(loader, both, 8, 32, NP_ENTRY_PINNED);
    np_loader_state state = state_of(loader);
    REQUIRE(state.warm_up_bytes == 32 * STRIDE && state.warm_up_left_bytes == 32 * STRIDE);
    REQUIRE_EQUAL(run_dry(loader), 64);
    require_all(8, 32);
    for (uint32_t id = 8; id < 40; id++)
        REQUIRE(words[0][id] & words[1][id] & NP_ENTRY_PINNED);
    state = state_of(loader);
    REQUIRE_EQUAL(state.reads, 2);
    REQUIRE(state.warm_up_bytes == 32 * STRIDE && state.warm_up_left_bytes == 0 && state.gap_bytes == 0);
    REQUIRE(state.warm_up_ns > 0 && state.warm_up_ns < 1000000000000u);
    usleep(2000);
    np_loader_turn(loader, 0);
    REQUIRE_EQUAL(state_of(loader).warm_up_ns, state.warm_up_ns); /* the warm-up is over */
    warm(loader, both, 8, 32, 0); /* present already */
    REQUIRE_EQUAL(state_of(loader).warm_up_left_bytes, 0);
    stop(loader);
}

static void test_what_stays_comes_first(void)
{
    np_loader *loader = start_with_slots("threads", SLOTS);
    warm(loader, both, 0, 12, 0);
    warm(loader, both, 50, 3, NP_ENTRY_PINNED);
    np_loader_turn(loader, 0);
    for (uint32_t id = 50; id < 53; id++)
        REQUIRE(words[0][id] != NP_ENTRY_ABSENT);
    run_dry(loader);
    require_all(0, 12);
    require_all(50, 3);
    REQUIRE_EQUAL(words[0][0] & NP_ENTRY_PINNED, 0);
    stop(loader);
}

static void test_a_demand_brings_the_neighbours_that_are_to_be_loaded(const char *engine)
{
    np_loader *loader = start_with_slots(engine, SLOTS);
    warm(loader, both, 0, 30, NP_ENTRY_PINNED);
    const uint32_t asked[] = {20, 21, 26};
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, asked, 3, 0, 0), 3);
    run_dry(loader);
    require_all(0, 30);
    const np_loader_state state = state_of(loader);
    REQUIRE_EQUAL(state.reads, 2 + 3); /* 20 to 23 and 24 to 27 with both parts; then 28 to 29, 0 to 15, 16 to 19 */
    REQUIRE_EQUAL(state.warm_up_left_bytes, 0);
    for (uint32_t id = 0; id < 30; id++)
        REQUIRE(words[0][id] & words[1][id] & NP_ENTRY_PINNED);
    stop(loader);
}

static void test_a_demand_outside_is_read_alone(void)
{
    np_loader *loader = start_with_slots("threads", SLOTS);
    warm(loader, both, 0, 4, 0);
    const uint32_t asked = 60;
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, &asked, 1, 0, 0), 1);
    run_dry(loader);
    require_present(0, 60);
    REQUIRE_EQUAL(words[1][60] | words[0][61], NP_ENTRY_ABSENT);
    REQUIRE_EQUAL(state_of(loader).bytes, TRIGGER_BYTES + 4 * STRIDE);
    stop(loader);
}

static void test_a_full_memory_ends_it_but_for_what_stays(void)
{
    np_loader *loader = start_with_slots("threads", 6);
    warm(loader, NP_REQUEST_TRIGGER, 0, 10, 0);
    warm(loader, NP_REQUEST_TRIGGER, 40, 2, NP_ENTRY_PINNED);
    REQUIRE_EQUAL(run_dry(loader), 6);
    require_present(0, 40);
    require_present(0, 41);
    np_loader_state state = state_of(loader);
    REQUIRE(state.waiting[0] == 0 && state.warm_up_left_bytes == 0 && state.warm_up_bytes == 6 * TRIGGER_BYTES);
    warm(loader, NP_REQUEST_TRIGGER, 70, 2, NP_ENTRY_PINNED); /* these wait for a slot, and the cache is told */
    REQUIRE_EQUAL(run_dry(loader), 0);
    REQUIRE_EQUAL(state_of(loader).waiting[0], 2);
    grant(loader, 0, 10, 2);
    REQUIRE_EQUAL(run_dry(loader), 2);
    require_present(0, 71);
    stop(loader);
}

static void test_a_reset_forgets_it(void)
{
    np_loader *loader = start_reading("threads", &reading);
    warm(loader, both, 0, 10, NP_ENTRY_PINNED);
    np_loader_reset(loader);
    const np_loader_state state = state_of(loader);
    REQUIRE(state.warm_up_bytes == 0 && state.warm_up_left_bytes == 0 && state.waiting[0] == 0);
    grant(loader, 0, 0, SLOTS);
    REQUIRE_EQUAL(run_dry(loader), 0);
    REQUIRE_EQUAL(words[0][0], NP_ENTRY_ABSENT);
    stop(loader);
}

static void test_damage_spoils_one_cluster(const char *engine)
{
    np_loader *loader = start_with_slots(engine, SLOTS);
    checksums[1][7] ^= 1;
    warm(loader, both, 0, 16, NP_ENTRY_PINNED);
    run_dry(loader);
    checksums[1][7] ^= 1;
    REQUIRE_EQUAL(words[1][7] & NP_ENTRY_STATE_MASK, NP_ENTRY_FAILED);
    require_present(0, 7);
    require_all(0, 7);
    require_all(8, 8);
    const np_loader_state state = state_of(loader);
    REQUIRE(state.checksum_failures == 2 && state.warm_up_left_bytes == 0);
    stop(loader);
}

/* An entry that is not absent must keep its slot. */
static void test_a_word_that_others_changed_is_passed_over(void)
{
    np_loader *loader = start_with_slots("threads", 20);
    warm(loader, NP_REQUEST_TRIGGER, 0, 4, NP_ENTRY_PINNED);
    words[0][2] = NP_ENTRY_PRESENT | 39;
    REQUIRE_EQUAL(run_dry(loader), 3);
    REQUIRE_EQUAL(words[0][2], NP_ENTRY_PRESENT | NP_ENTRY_PINNED | 39);
    const np_loader_state state = state_of(loader);
    REQUIRE(state.free_slots[0] == 17 && state.warm_up_left_bytes == 0);
    stop(loader);
}

static void test_parts_longer_than_a_read_together_come_one_after_the_other(void)
{
    const np_loader_reading narrow = {.most_read_bytes = VALUE_BYTES, .prefetch_depth = DEPTH};
    np_loader *loader = start_reading("threads", &narrow);
    for (int part = 0; part < 2; part++)
        grant(loader, part, 0, SLOTS);
    warm(loader, both, 0, 9, 0);
    run_dry(loader);
    require_all(0, 9);
    REQUIRE_EQUAL(state_of(loader).warm_up_left_bytes, 0);
    stop(loader);
}

static void test_long_reads_that_contradict_the_reader_are_refused(void)
{
    int error = 0;
    np_loader_part parts[2];
    reader = np_reader_open(path, "threads", DEPTH, &error);
    describe(parts);
    np_loader_reading wrong = reading;
    wrong.warm_up_reads = DEPTH; /* none is left for demands */
    REQUIRE(!np_loader_create(reader, parts, &wrong, &arrivals, QUEUE));
    wrong = reading;
    wrong.warm_up_read_bytes = reading.most_read_bytes - 4096;
    REQUIRE(!np_loader_create(reader, parts, &wrong, &arrivals, QUEUE));
    wrong.warm_up_read_bytes = reading.warm_up_read_bytes + 1;
    REQUIRE(!np_loader_create(reader, parts, &wrong, &arrivals, QUEUE) || np_reader_alignment(reader) == 1);
    np_reader_close(reader);
}

static int warmed_pipe[2];

/* An observer of the entries: tells the loader when all clusters are present, or after 20 seconds. */
static void *watch_words(void *argument)
{
    const uint64_t end = np_clock_ns() + 20000000000u;
    uint32_t there = 0;
    while (there < 64 && np_clock_ns() < end) {
        there = 0;
        for (uint32_t id = 8; id < 40; id++)
            for (int part = 0; part < 2; part++)
                there += (np_word_load(&words[part][id]) & NP_ENTRY_STATE_MASK) == NP_ENTRY_PRESENT;
        usleep(200);
    }
    *(uint32_t *)argument = there;
    REQUIRE_EQUAL(write(warmed_pipe[1], "", 1), 1);
    return NULL;
}

/* The filler thread fills the slots of long reads; the loader must not sleep while filled reads wait to be
 * published. */
static void test_a_sleeping_loader_hears_that_slots_are_filled(const char *engine)
{
    np_loader *loader = start_with_slots(engine, SLOTS);
    pthread_t watcher;
    uint32_t there = 0;
    REQUIRE(pipe(warmed_pipe) == 0);
    REQUIRE_EQUAL(np_loader_serve(loader, warmed_pipe, 1, 1, 0), 0); /* after a sleep the event is created and clear */
    warm(loader, both, 8, 32, NP_ENTRY_PINNED);
    REQUIRE(pthread_create(&watcher, NULL, watch_words, &there) == 0);
    const uint64_t began = np_clock_ns();
    struct pollfd told = {.fd = warmed_pipe[0], .events = POLLIN};
    while (poll(&told, 1, 0) == 0) /* it returns when slots run low, too */
        REQUIRE_EQUAL(np_loader_serve(loader, warmed_pipe, 1, 20000, 0), 1);
    REQUIRE(np_clock_ns() - began < 10000000000u);
    pthread_join(watcher, NULL);
    REQUIRE_EQUAL(there, 64);
    require_all(8, 32);
    REQUIRE_EQUAL(state_of(loader).in_flight, 0);
    close(warmed_pipe[0]);
    close(warmed_pipe[1]);
    stop(loader);
}

/* Slots being filled cannot be granted before they are published, and the loader waits for them. */
static void test_an_end_or_a_reset_waits_for_slots_that_are_being_filled(const char *engine)
{
    for (int round = 0; round < 50; round++) {
        np_loader *loader = start_with_slots(engine, SLOTS);
        warm(loader, both, 8, 32, 0);
        while (state_of(loader).reads < 1)
            np_loader_turn(loader, 0);
        if (round % 2) {
            np_loader_reset(loader);
            REQUIRE(state_of(loader).in_flight == 0 && state_of(loader).free_slots[0] == 0);
            for (uint32_t id = 0; id < CLUSTERS; id++)
                if (words[0][id] != NP_ENTRY_ABSENT)
                    require_present(0, id);
        }
        stop(loader);
    }
}

static void run_all(void)
{
    static const char *const engines[] = {"io_uring", "threads"};
    for (int i = 0; i < 2; i++) {
        int error = 0;
        np_reader *possible = np_reader_open(path, engines[i], DEPTH, &error);
        if (!possible && i == 0) {
            printf("  io_uring is not allowed here (%s): not tested\n", strerror(error));
            continue;
        }
        np_reader_close(possible);
        test_warms_up_in_long_reads(engines[i]);
        test_a_demand_brings_the_neighbours_that_are_to_be_loaded(engines[i]);
        test_damage_spoils_one_cluster(engines[i]);
        test_a_sleeping_loader_hears_that_slots_are_filled(engines[i]);
        test_an_end_or_a_reset_waits_for_slots_that_are_being_filled(engines[i]);
    }
    test_what_stays_comes_first();
    test_a_demand_outside_is_read_alone();
    test_a_full_memory_ends_it_but_for_what_stays();
    test_a_reset_forgets_it();
    test_a_word_that_others_changed_is_passed_over();
    test_parts_longer_than_a_read_together_come_one_after_the_other();
    test_long_reads_that_contradict_the_reader_are_refused();
}

static void test_a_memory_file_that_cannot_be_written_is_no_loss(void)
{
    const int right = slots_file;
    slots_file = open("/dev/null", O_RDONLY);
    test_warms_up_in_long_reads("threads");
    close(slots_file);
    slots_file = right;
}

int main(void)
{
    write_bundles();
    run_all();
    map_slots();
    run_all();
    test_a_memory_file_that_cannot_be_written_is_no_loss();
    remove_bundles();
    printf("warm-up: all passed\n");
    return 0;
}

/* Request rings: valid entries are loaded, invalid ones ignored; no demand is lost in a full ring, and no doorbell is
 * missed. */
#include <fcntl.h>
#include <pthread.h>

#include "bundles.h"
#include "sync/clock.h"

enum { PARTICIPANTS = 2, CAPACITY = 4, BOTH = NP_REQUEST_TRIGGER | NP_REQUEST_VALUE };

static uint32_t tails[PARTICIPANTS][16], heads[PARTICIPANTS][16], entries[PARTICIPANTS][CAPACITY], asleep, epoch;
static np_requests rings[PARTICIPANTS];
static uint64_t windows[PARTICIPANTS], board[NP_LOADER_BOARD];
static uint32_t in_flight;
static int doorbell[2];

static np_loader *start_with_rings(const char *engine)
{
    memset(tails, 0, sizeof tails);
    memset(heads, 0, sizeof heads);
    asleep = 0;
    for (int i = 0; i < PARTICIPANTS; i++)
        rings[i] = (np_requests){tails[i], heads[i], entries[i], CAPACITY, &asleep, doorbell[1]};
    np_requests seen[PARTICIPANTS];
    memcpy(seen, rings, sizeof rings);
    seen[0].doorbell = doorbell[0]; /* a pipe has two ends; a FIFO's descriptor is both */
    np_loader *loader = start(engine);
    REQUIRE_EQUAL(np_loader_attach(loader, seen, PARTICIPANTS, board, NULL, &in_flight, NULL), NP_OK);
    return loader;
}

static void put(int participant, uint32_t entry)
{
    REQUIRE_EQUAL(np_requests_put(&rings[participant], &entry, 1), 1);
}

static void test_both_parts_and_either(void)
{
    np_loader *loader = start_with_rings("threads");
    grant(loader, 0, 0, 8);
    grant(loader, 1, 0, 8);
    put(0, 5 | BOTH);
    put(0, 6 | NP_REQUEST_TRIGGER);
    put(1, 7 | NP_REQUEST_VALUE | NP_REQUEST_PREFETCH);
    REQUIRE_EQUAL(run_dry(loader), 4);
    require_present(0, 5);
    require_present(1, 5);
    require_present(0, 6);
    require_present(1, 7);
    REQUIRE_EQUAL(words[1][6] | words[0][7], NP_ENTRY_ABSENT);
    REQUIRE_EQUAL(heads[0][0], 2);
    REQUIRE_EQUAL(board[0], state_of(loader).reads);
    REQUIRE_EQUAL(in_flight, state_of(loader).in_flight);
    stop(loader);
}

static void turn_and_evict(np_loader *loader)
{
    static size_t hands[2];
    np_loader_turn(loader, 0);
    for (int part = 0; part < 2; part++) {
        uint32_t taken[2];
        const size_t count = np_clock_take(words[part], CLUSTERS, &hands[part], windows, PARTICIPANTS, 2, taken);
        REQUIRE_EQUAL(np_loader_grant(loader, part, taken, count), count);
    }
}

static void test_nonsense_is_dropped_alone(void)
{
    np_loader *loader = start_with_rings("threads");
    grant(loader, 0, 0, SLOTS);
    grant(loader, 1, 0, SLOTS);
    put(0, CLUSTERS | NP_REQUEST_TRIGGER);   /* the first invalid index */
    put(0, 3);                            /* no part */
    put(0, 3 | NP_REQUEST_TRIGGER | 1u << 31); /* an undefined bit */
    put(0, 3 | NP_REQUEST_TRIGGER);
    REQUIRE_EQUAL(run_dry(loader), 1);
    require_present(0, 3);
    REQUIRE_EQUAL(state_of(loader).refused, 3);
    tails[1][0] += CAPACITY + 1; /* more than a ring can hold */
    put(0, 4 | NP_REQUEST_TRIGGER);
    REQUIRE_EQUAL(run_dry(loader), 1);
    require_present(0, 4);
    REQUIRE_EQUAL(state_of(loader).refused, 4);
    put(1, 8 | NP_REQUEST_TRIGGER); /* the ring works again */
    REQUIRE_EQUAL(run_dry(loader), 1);

    uint32_t random = 77, legal = 0;
    for (int i = 0; i < 20000; i++) {
        random = random * 1664525u + 1013904223u;
        const uint32_t entry = i % 3 ? random : random & (0x0700003fu); /* a third of them may well be legal */
        legal += !(entry & ~0x7ffffffu) && (entry & BOTH) && (entry & NP_REQUEST_CLUSTER_MASK) < CLUSTERS;
        while (!np_requests_put(&rings[i & 1], &entry, 1))
            turn_and_evict(loader);
        turn_and_evict(loader);
    }
    while (heads[0][0] != tails[0][0] || heads[1][0] != tails[1][0])
        turn_and_evict(loader);
    REQUIRE(legal > 3000);
    REQUIRE_EQUAL(state_of(loader).refused, 4 + 20000 - legal);
    REQUIRE(state_of(loader).checksum_failures == 0 && state_of(loader).io_errors == 0);
    stop(loader);
}

static void test_a_demand_that_finds_its_queue_full_stays_in_the_ring_and_a_prefetch_goes(void)
{
    np_loader *loader = start_with_rings("threads");
    uint32_t ids[QUEUE];
    for (uint32_t i = 0; i < QUEUE; i++)
        ids[i] = i;
    for (int priority = 0; priority < 2; priority++)
        REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids, QUEUE, priority, 0), QUEUE);
    put(0, 80 | NP_REQUEST_TRIGGER | NP_REQUEST_PREFETCH);
    put(0, 81 | NP_REQUEST_TRIGGER);
    put(1, 82 | NP_REQUEST_VALUE); /* another queue, another ring */
    grant(loader, 1, 0, 1);
    REQUIRE_EQUAL(run_dry(loader), 1);
    require_present(1, 82);
    REQUIRE_EQUAL(state_of(loader).dropped, 1);
    REQUIRE_EQUAL(heads[0][0], 1);
    grant(loader, 0, 0, 2);
    REQUIRE_EQUAL(run_dry(loader), 2);
    np_loader_turn(loader, 0);
    REQUIRE_EQUAL(heads[0][0], 2);
    REQUIRE_EQUAL(words[0][80], NP_ENTRY_ABSENT);
    stop(loader);
}

static void test_a_guess_is_read_while_nothing_else_is_and_dropped_by_the_next_request(void)
{
    np_loader *loader = start_with_rings("threads");
    put(0, 80 | NP_REQUEST_TRIGGER | NP_REQUEST_SPECULATIVE);
    grant(loader, 0, 0, 4);
    REQUIRE_EQUAL(run_dry(loader), 1);
    require_present(0, 80);
    put(0, 81 | NP_REQUEST_TRIGGER | NP_REQUEST_SPECULATIVE);
    put(0, 82 | NP_REQUEST_TRIGGER | NP_REQUEST_PREFETCH); /* in the same turn: the speculative read has not begun */
    REQUIRE_EQUAL(run_dry(loader), 1);
    require_present(0, 82);
    REQUIRE_EQUAL(words[0][81], NP_ENTRY_ABSENT);
    stop(loader);
}

static void test_attaching_refuses_rings_that_cannot_be(void)
{
    np_loader *loader = start("threads");
    np_requests bad = rings[0];
    bad.capacity = 3;
    REQUIRE_EQUAL(np_loader_attach(loader, &bad, 1, NULL, NULL, NULL, NULL), NP_E_ARGUMENT);
    bad = rings[0];
    bad.tail = NULL;
    REQUIRE_EQUAL(np_loader_attach(loader, &bad, 1, NULL, NULL, NULL, NULL), NP_E_ARGUMENT);
    const int32_t many[9] = {0};
    REQUIRE_EQUAL(np_loader_serve(loader, many, 9, 0, 0), NP_E_ARGUMENT);
    stop(loader);
}

/* ---- workers, loader and cache together -------------------------------------------------------------------------------- */
/* Two workers make more requests than their rings hold, wait for arrivals and check every byte under their window,
 * while the main thread is loader and cache with fewer slots than clusters. */
static uint32_t workers_done;

static void put_all(int participant, const uint32_t *ids, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const uint32_t entry = ids[i] | NP_REQUEST_VALUE;
        for (;;) {
            const uint32_t head = np_word_load(rings[participant].head);
            if (np_requests_put(&rings[participant], &entry, 1))
                break;
            REQUIRE(np_word_wait(rings[participant].head, head, &epoch, 0, 0, 20000) == NP_OK);
        }
    }
}

static void *run_worker(void *argument)
{
    enum { STEPS = 300, SPAN = 6 };
    const int participant = (int)(intptr_t)argument;
    uint32_t random = 9 + (uint32_t)participant;
    for (int step = 0; step < STEPS; step++) {
        random = random * 1664525u + 1013904223u;
        const uint32_t first = (random >> 8) % (CLUSTERS - SPAN);
        np_long_store(&windows[participant], (uint64_t)first << 32 | (first + SPAN));
        uint32_t ids[SPAN];
        size_t absent = 0;
        for (uint32_t id = first; id < first + SPAN; id++) {
            const uint32_t state = np_entry_look(&words[1][id]) & NP_ENTRY_STATE_MASK;
            REQUIRE(state != NP_ENTRY_FAILED);
            if (state == NP_ENTRY_ABSENT)
                ids[absent++] = id;
        }
        put_all(participant, ids, absent);
        for (uint32_t id = first; id < first + SPAN; id++)
            for (;;) {
                const uint32_t seen = np_word_load(&arrivals), value = np_entry_look(&words[1][id]);
                if ((value & NP_ENTRY_STATE_MASK) == NP_ENTRY_PRESENT) {
                    const uint8_t *bytes = slots[1] + (size_t)(value & NP_ENTRY_SLOT_MASK) * VALUE_BYTES;
                    REQUIRE(memcmp(bytes, part_of_file(1, id), VALUE_BYTES) == 0);
                    break;
                }
                REQUIRE_EQUAL(np_word_wait(&arrivals, seen, &epoch, 0, 0, 20000), NP_OK);
            }
        np_long_store(&windows[participant], 0);
    }
    np_word_add(&workers_done, 1);
    return NULL;
}

static void test_workers_loader_and_cache_together(const char *engine, uint32_t spin_us)
{
    np_loader *loader = start_with_rings(engine);
    grant(loader, 1, 0, 20);
    np_word_store(&workers_done, 0);
    pthread_t workers[PARTICIPANTS];
    for (int i = 0; i < PARTICIPANTS; i++)
        REQUIRE(pthread_create(&workers[i], NULL, run_worker, (void *)(intptr_t)i) == 0);
    size_t hand = 0;
    while (np_word_load(&workers_done) < PARTICIPANTS) {
        REQUIRE(np_loader_serve(loader, NULL, 0, 1, spin_us) >= 0);
        if (state_of(loader).free_slots[1] < 8) {
            uint32_t taken[4];
            const size_t count = np_clock_take(words[1], CLUSTERS, &hand, windows, PARTICIPANTS, 4, taken);
            REQUIRE_EQUAL(np_loader_grant(loader, 1, taken, count), count);
        }
    }
    for (int i = 0; i < PARTICIPANTS; i++)
        pthread_join(workers[i], NULL);
    const np_loader_state state = state_of(loader);
    REQUIRE(state.reads > SLOTS && state.checksum_failures == 0 && state.io_errors == 0 && state.refused == 0);
    printf("  %s: %llu reads for %d windows\n", engine, (unsigned long long)state.reads, 300 * PARTICIPANTS);
    stop(loader);
}

/* The loader may sleep for a minute; each of these requests has to wake it. */
static void *run_slow_worker(void *argument)
{
    for (uint32_t id = 0; id < 30; id++) {
        const uint32_t entry = id | NP_REQUEST_TRIGGER;
        for (int i = 0; i < 200 && !__atomic_load_n(&asleep, __ATOMIC_SEQ_CST); i++)
            usleep(100); /* it usually sleeps by then, which cannot be checked */
        put(0, entry);
        for (;;) {
            const uint32_t seen = np_word_load(&arrivals);
            if ((np_entry_look(&words[0][id]) & NP_ENTRY_STATE_MASK) == NP_ENTRY_PRESENT)
                break;
            REQUIRE_EQUAL(np_word_wait(&arrivals, seen, &epoch, 0, 0, 20000), NP_OK);
        }
    }
    const ssize_t told = write(*(int *)argument, "", 1);
    REQUIRE_EQUAL(told, 1);
    return NULL;
}

static void test_every_request_wakes_a_sleeping_loader(const char *engine)
{
    np_loader *loader = start_with_rings(engine);
    int end[2];
    REQUIRE(pipe2(end, O_NONBLOCK) == 0);
    grant(loader, 0, 0, SLOTS);
    grant(loader, 1, 0, SLOTS);
    pthread_t worker;
    REQUIRE(pthread_create(&worker, NULL, run_slow_worker, &end[1]) == 0);
    const uint64_t before = np_clock_ns();
    char told;
    while (read(end[0], &told, 1) != 1)
        REQUIRE(np_loader_serve(loader, end, 1, 60000, 0) == 1); /* a quarter of the slots is used, or the test ends */
    REQUIRE(np_clock_ns() - before < 30000000000u);
    pthread_join(worker, NULL);
    REQUIRE_EQUAL(np_loader_serve(loader, end, 1, 5, 0), 0);
    close(end[0]);
    close(end[1]);
    stop(loader);
}

int main(void)
{
    static const char *const engines[] = {"io_uring", "threads"};
    write_bundles();
    REQUIRE(pipe2(doorbell, O_NONBLOCK) == 0);
    test_both_parts_and_either();
    test_nonsense_is_dropped_alone();
    test_a_demand_that_finds_its_queue_full_stays_in_the_ring_and_a_prefetch_goes();
    test_a_guess_is_read_while_nothing_else_is_and_dropped_by_the_next_request();
    test_attaching_refuses_rings_that_cannot_be();
    for (int i = 0; i < 2; i++) {
        int error = 0;
        np_reader *possible = np_reader_open(path, engines[i], DEPTH, &error);
        if (!possible && i == 0) {
            printf("  io_uring, which is not allowed here (%s): not tested\n", strerror(error));
            continue;
        }
        np_reader_close(possible);
        test_every_request_wakes_a_sleeping_loader(engines[i]);
        test_workers_loader_and_cache_together(engines[i], 0);
        test_workers_loader_and_cache_together(engines[i], 200);
    }
    remove_bundles();
    close(doorbell[0]);
    close(doorbell[1]);
    printf("requests: all passed\n");
    return 0;
}

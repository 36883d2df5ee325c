/* The loader over a small bundle file: clusters arrive intact, damaged ones are marked, none is read twice or lost. */
#include "bundles.h"

static void test_loads_what_is_asked(const char *engine)
{
    np_loader *loader = start(engine);
    grant(loader, 0, 0, SLOTS);
    grant(loader, 1, 0, SLOTS);
    uint32_t ids[20];
    for (uint32_t i = 0; i < 20; i++)
        ids[i] = i * 31 % CLUSTERS;
    const uint32_t arrivals_before = arrivals;
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids, 20, 0, 0), 20);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_VALUE, ids, 20, 1, NP_ENTRY_PINNED), 20);
    REQUIRE_EQUAL(run_dry(loader), 40);
    REQUIRE(arrivals != arrivals_before);
    for (int i = 0; i < 20; i++) {
        require_present(0, ids[i]);
        require_present(1, ids[i]);
        REQUIRE_EQUAL(words[0][ids[i]] & NP_ENTRY_PINNED, 0);
        REQUIRE_EQUAL(words[1][ids[i]] & (NP_ENTRY_PINNED | NP_ENTRY_REFERENCED), NP_ENTRY_PINNED); /* not looked up yet */
    }
    const np_loader_state state = state_of(loader);
    REQUIRE_EQUAL(state.reads, 40);
    REQUIRE_EQUAL(state.bytes, 20 * STRIDE);
    REQUIRE_EQUAL(state.free_slots[0], SLOTS - 20);
    REQUIRE_EQUAL(state.waiting[0] + state.waiting[1], 0);
    stop(loader);
}

static void test_nothing_is_read_twice(void)
{
    np_loader *loader = start("threads");
    grant(loader, 0, 0, SLOTS);
    const uint32_t ids[] = {3, 4, 3, 3};
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids, 4, 1, 0), 4);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids, 4, 0, 0), 4);
    REQUIRE_EQUAL(np_loader_warm_up(loader, NP_REQUEST_TRIGGER, ids, 4, 0), NP_OK);
    run_dry(loader);
    REQUIRE_EQUAL(state_of(loader).reads, 2);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids, 4, 0, NP_ENTRY_PINNED), 4); /* present: pinned, not read */
    REQUIRE_EQUAL(np_loader_turn(loader, 0), 0);
    REQUIRE_EQUAL(state_of(loader).already_there, 6 + 4);
    REQUIRE(words[0][3] & NP_ENTRY_PINNED && words[0][4] & NP_ENTRY_PINNED);
    require_present(0, 3);
    stop(loader);
}

static void test_waits_for_slots_and_takes_demands_first(void)
{
    np_loader *loader = start("threads");
    const uint32_t warm[] = {1, 2, 3}, prefetch[] = {11, 12}, demand[] = {21, 12};
    REQUIRE_EQUAL(np_loader_warm_up(loader, NP_REQUEST_TRIGGER, warm, 3, NP_ENTRY_PINNED), NP_OK);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, prefetch, 2, 1, 0), 2);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, demand, 2, 0, 0), 2);
    REQUIRE_EQUAL(np_loader_turn(loader, 10), 0); /* no slot, no read */
    REQUIRE_EQUAL(state_of(loader).waiting[0], 7);
    grant(loader, 0, 0, 2);
    REQUIRE_EQUAL(run_dry(loader), 2);
    require_present(0, 21);
    require_present(0, 12);
    REQUIRE_EQUAL(words[0][11] | words[0][1], NP_ENTRY_ABSENT);
    grant(loader, 0, 2, 1);
    REQUIRE_EQUAL(run_dry(loader), 1);
    require_present(0, 11);
    grant(loader, 0, 3, 9);
    REQUIRE_EQUAL(run_dry(loader), 3);
    require_present(0, 3);
    REQUIRE_EQUAL(state_of(loader).free_slots[0], 6);
    stop(loader);
}

static void test_full_queue_and_bad_arguments(void)
{
    np_loader *loader = start("threads");
    uint32_t ids[CLUSTERS];
    for (uint32_t i = 0; i < CLUSTERS; i++)
        ids[i] = i;
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids, CLUSTERS, 0, 0), QUEUE);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids + QUEUE, 5, 0, 0), 0);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids + QUEUE, 5, 1, 0), 5); /* a queue of its own */
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_VALUE, ids, 5, 0, 0), 5);
    const uint32_t outside[] = {0, CLUSTERS};
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, outside, 2, 1, 0), NP_E_ARGUMENT);
    REQUIRE_EQUAL(np_loader_warm_up(loader, NP_REQUEST_TRIGGER, outside, 2, 0), NP_E_ARGUMENT);
    REQUIRE_EQUAL(np_loader_warm_up(loader, 0, ids, 1, 0), NP_E_ARGUMENT);
    REQUIRE_EQUAL(np_loader_warm_up(loader, NP_REQUEST_TRIGGER, ids, 1, NP_ENTRY_PRESENT), NP_E_ARGUMENT);
    REQUIRE_EQUAL(np_loader_request(loader, 4, ids, 1, 0, 0), NP_E_ARGUMENT);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids, 1, 3, 0), NP_E_ARGUMENT);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids, 1, 0, NP_ENTRY_PRESENT), NP_E_ARGUMENT);
    REQUIRE_EQUAL(state_of(loader).waiting[0], QUEUE + 5);
    const uint32_t doubled[] = {7, 8, 7}, beyond[] = {1, SLOTS};
    REQUIRE_EQUAL(np_loader_grant(loader, 0, doubled, 3), NP_E_ARGUMENT);
    REQUIRE_EQUAL(np_loader_grant(loader, 0, beyond, 2), NP_E_ARGUMENT);
    REQUIRE_EQUAL(np_loader_grant(loader, -1, doubled, 1), NP_E_ARGUMENT);
    REQUIRE_EQUAL(state_of(loader).free_slots[0], 0); /* a refused grant adds no slot */
    grant(loader, 0, 7, 2);
    REQUIRE_EQUAL(np_loader_grant(loader, 0, doubled, 1), NP_E_ARGUMENT);
    np_loader_part parts[2];
    describe(parts);
    parts[1].part_bytes = 0;
    REQUIRE(!np_loader_create(reader, parts, &apart, &arrivals, QUEUE));
    describe(parts);
    parts[0].slot_bytes = parts[0].part_bytes + 1;
    REQUIRE(!np_loader_create(reader, parts, &apart, &arrivals, QUEUE));
    describe(parts);
    parts[0].stride_bytes = 1ull << 62;
    REQUIRE(!np_loader_create(reader, parts, &apart, &arrivals, QUEUE));
    stop(loader);
}

static void test_damage_is_marked_and_the_slot_returns(const char *engine)
{
    np_loader *loader = start(engine);
    grant(loader, 0, 0, 3);
    const uint32_t ids[] = {50, 51, 52};
    checksums[0][51] ^= 1;
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids, 3, 0, NP_ENTRY_PINNED), 3);
    REQUIRE_EQUAL(run_dry(loader), 3);
    checksums[0][51] ^= 1;
    REQUIRE_EQUAL(words[0][51], NP_ENTRY_FAILED);
    require_present(0, 50);
    require_present(0, 52);
    np_loader_state state = state_of(loader);
    REQUIRE(state.checksum_failures == 2 && state.io_errors == 0 && state.free_slots[0] == 1);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids + 1, 1, 0, NP_ENTRY_PINNED), 1); /* stays failed, is not read again */
    REQUIRE_EQUAL(run_dry(loader), 0);
    REQUIRE_EQUAL(words[0][51], NP_ENTRY_FAILED);
    stop(loader);
}

static void test_a_failure_is_forgiven_in_another_epoch(void)
{
    np_loader *loader = start("threads");
    uint32_t epoch = 7;
    words[1][60] = NP_ENTRY_FAILED | 6; /* left by an earlier loader */
    REQUIRE_EQUAL(np_loader_attach(loader, NULL, 0, NULL, &epoch, NULL, NULL), NP_OK);
    grant(loader, 0, 0, 1);
    const uint32_t id = 51;
    checksums[0][id] ^= 1;
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, &id, 1, 0, 0), 1);
    REQUIRE_EQUAL(run_dry(loader), 1);
    checksums[0][id] ^= 1;
    REQUIRE_EQUAL(words[0][id], NP_ENTRY_FAILED | 7);
    REQUIRE_EQUAL(words[1][60], NP_ENTRY_ABSENT);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, &id, 1, 0, 0), 1); /* a waiting worker must find it failed */
    REQUIRE_EQUAL(run_dry(loader), 0);
    REQUIRE_EQUAL(words[0][id], NP_ENTRY_FAILED | 7);
    epoch = 8;
    REQUIRE_EQUAL(np_loader_turn(loader, 0), 0);
    REQUIRE_EQUAL(words[0][id], NP_ENTRY_ABSENT);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, &id, 1, 0, 0), 1);
    REQUIRE_EQUAL(run_dry(loader), 1);
    require_present(0, id);
    stop(loader);
}

static void shorten_file(void)
{
    REQUIRE(ftruncate(file, BASE + (off_t)(CLUSTERS - 1) * STRIDE + 100) == 0);
}

static void restore_file(void)
{
    REQUIRE(pwrite(file, file_bytes + BASE + (size_t)(CLUSTERS - 1) * STRIDE, STRIDE, BASE + (off_t)(CLUSTERS - 1) * STRIDE) == STRIDE);
    REQUIRE(fsync(file) == 0);
}

static void test_short_file_is_an_io_error(const char *engine)
{
    np_loader *loader = start(engine);
    shorten_file();
    grant(loader, 1, 0, 2);
    const uint32_t ids[] = {CLUSTERS - 1, CLUSTERS - 2};
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_VALUE, ids, 2, 0, 0), 2);
    REQUIRE_EQUAL(run_dry(loader), 2);
    REQUIRE_EQUAL(words[1][CLUSTERS - 1], NP_ENTRY_FAILED);
    require_present(1, CLUSTERS - 2);
    REQUIRE(state_of(loader).io_errors == 3 && state_of(loader).free_slots[1] == 1);
    restore_file();
    stop(loader);
}

/* One turn lands the first failure and submits the second read, which may fail as well; the third read succeeds. */
static void test_trouble_that_passes_costs_another_read(const char *engine)
{
    np_loader *loader = start(engine);
    grant(loader, 0, 0, 1);
    grant(loader, 1, 0, 1);
    const uint32_t last = CLUSTERS - 1, flipped = 51, arrivals_before = arrivals;
    shorten_file();
    REQUIRE_EQUAL(np_loader_warm_up(loader, NP_REQUEST_VALUE, &last, 1, NP_ENTRY_PINNED), NP_OK);
    REQUIRE_EQUAL(np_loader_turn(loader, 10000), 0);
    restore_file();
    REQUIRE_EQUAL(run_dry(loader), 1);
    require_present(1, last);
    REQUIRE(words[1][last] & NP_ENTRY_PINNED);
    REQUIRE(state_of(loader).io_errors == 1 || state_of(loader).io_errors == 2);

    checksums[0][flipped] ^= 1;
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, &flipped, 1, 1, 0), 1);
    REQUIRE_EQUAL(np_loader_turn(loader, 10000), 0);
    checksums[0][flipped] ^= 1;
    REQUIRE_EQUAL(run_dry(loader), 1);
    require_present(0, flipped);
    REQUIRE_EQUAL(state_of(loader).checksum_failures, 1);
    REQUIRE_EQUAL(arrivals, arrivals_before + 2); /* a repeated read wakes no waiter */
    stop(loader);
}

static void test_reset_leaves_no_word_loading(const char *engine)
{
    np_loader *loader = start(engine);
    words[1][91] = NP_ENTRY_FAILED;
    words[1][92] = NP_ENTRY_PRESENT | 39;
    grant(loader, 0, 0, SLOTS);
    uint32_t ids[30];
    for (uint32_t i = 0; i < 30; i++)
        ids[i] = i;
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids, 30, 1, 0), 30);
    np_loader_turn(loader, 0); /* some are in flight now */
    np_loader_reset(loader);
    for (uint32_t id = 0; id < CLUSTERS; id++) {
        const uint32_t state = words[0][id] & NP_ENTRY_STATE_MASK;
        REQUIRE(state == NP_ENTRY_ABSENT || state == NP_ENTRY_PRESENT);
        if (state == NP_ENTRY_PRESENT)
            require_present(0, id);
    }
    REQUIRE_EQUAL(words[1][91], NP_ENTRY_FAILED);
    REQUIRE_EQUAL(words[1][92], NP_ENTRY_PRESENT | 39);
    const np_loader_state state = state_of(loader);
    REQUIRE_EQUAL(state.in_flight + state.free_slots[0] + state.waiting[0], 0);
    REQUIRE_EQUAL(np_loader_turn(loader, 1000), 0);
    uint32_t free_slot = 0; /* slots that no present entry names can be granted again */
    for (uint32_t id = 0; id < CLUSTERS; id++)
        if ((words[0][id] & NP_ENTRY_STATE_MASK) == NP_ENTRY_PRESENT && (words[0][id] & NP_ENTRY_SLOT_MASK) == free_slot) {
            free_slot++;
            id = UINT32_MAX;
        }
    grant(loader, 0, free_slot, 1);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, &(uint32_t){90}, 1, 0, 0), 1);
    REQUIRE_EQUAL(run_dry(loader), 1);
    require_present(0, 90);
    stop(loader);
}

static void test_reset_keeps_demands(void)
{
    np_loader *loader = start("threads");
    const uint32_t demands[] = {21, 22, 23}, prefetch = 31, warm = 41;
    REQUIRE_EQUAL(np_loader_warm_up(loader, NP_REQUEST_TRIGGER, &warm, 1, 0), NP_OK);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, &prefetch, 1, 1, 0), 1);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, demands, 3, 0, 0), 3);
    np_loader_reset(loader);
    REQUIRE_EQUAL(state_of(loader).waiting[0], 3);
    words[0][22] = NP_ENTRY_PRESENT | 30; /* settled meanwhile */
    grant(loader, 0, 0, 5);
    REQUIRE_EQUAL(run_dry(loader), 2);
    require_present(0, 21);
    require_present(0, 23);
    REQUIRE_EQUAL(words[0][22], NP_ENTRY_PRESENT | 30);
    REQUIRE_EQUAL(words[0][31] | words[0][41], NP_ENTRY_ABSENT);
    REQUIRE_EQUAL(state_of(loader).free_slots[0], 3);
    stop(loader);
}

/* Its reads went to its own memory: there is nothing to wait for. */
static void test_a_dead_loaders_claims_are_forgotten(void)
{
    np_loader *loader = start("threads");
    np_loader_part parts[2];
    describe(parts);
    words[0][90] = NP_ENTRY_LOADING | NP_ENTRY_PINNED | 5;
    words[1][91] = NP_ENTRY_LOADING | NP_ENTRY_REFERENCED;
    words[1][92] = NP_ENTRY_PRESENT | 39;
    np_loader *next = np_loader_create(reader, parts, &apart, &arrivals, QUEUE);
    REQUIRE(next);
    REQUIRE_EQUAL(words[0][90], NP_ENTRY_ABSENT);
    REQUIRE_EQUAL(words[1][91], NP_ENTRY_ABSENT);
    REQUIRE_EQUAL(words[1][92], NP_ENTRY_PRESENT | 39);
    np_loader_destroy(next);
    stop(loader);
}

static void test_both_parts_of_a_cluster_are_one_read(const char *engine)
{
    np_loader *loader = start(engine);
    grant(loader, 0, 0, SLOTS);
    grant(loader, 1, 0, 6);
    words[0][9] = NP_ENTRY_PRESENT | 39; /* only its other part is absent */
    const uint32_t ids[] = {5, 20, 9};
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE, ids, 3, 0, 0), 3);
    REQUIRE_EQUAL(run_dry(loader), 5);
    for (int part = 0; part < 2; part++) {
        require_present(part, 5);
        require_present(part, 20);
    }
    require_present(1, 9);
    np_loader_state state = state_of(loader);
    REQUIRE(state.reads == 3 && state.bytes == 2 * STRIDE + VALUE_BYTES && state.gap_bytes == 0 && state.already_there == 1);
    stop(loader);
}

/* Otherwise the parts of neighbours would need two reads, each covering most bytes of the other. */
static void test_pairs_wait_for_slots_of_both_parts_and_are_read_once(void)
{
    for (int priority = 0; priority < 2; priority++) {
        np_loader *loader = start_reading("threads", &(np_loader_reading){
            .most_read_bytes = 8 * STRIDE, .merge_gap_bytes = STRIDE, .prefetch_depth = DEPTH});
        grant(loader, 0, 0, 4);
        const uint32_t ids[] = {5, 6, 7, 8};
        REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE, ids, 4, priority, 0), 4);
        REQUIRE_EQUAL(run_dry(loader), 0);
        REQUIRE_EQUAL(state_of(loader).waited_for_slot, priority ? 0 : 4);
        grant(loader, 1, 0, 4);
        REQUIRE_EQUAL(run_dry(loader), 8);
        for (int part = 0; part < 2; part++)
            require_present(part, 8);
        const np_loader_state state = state_of(loader);
        REQUIRE(state.reads == 1 && state.bytes == 4 * STRIDE && state.gap_bytes == 0);
        stop(loader);
    }
}

static void test_a_pair_does_not_wait_for_a_slot_that_cannot_be_freed(void)
{
    np_loader *loader = start("threads");
    grant(loader, 0, 0, 4);
    const uint32_t ids[] = {5, 6};
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE, ids, 2, 0, 0), 2);
    REQUIRE_EQUAL(run_dry(loader), 0);
    REQUIRE_EQUAL(np_loader_grant(loader, 1, NULL, 0), 0); /* windows hold all slots of the other part */
    REQUIRE_EQUAL(run_dry(loader), 2);
    require_present(0, 5);
    require_present(0, 6);
    np_loader_state state = state_of(loader);
    REQUIRE(state.waiting[0] == 0 && state.waiting[1] == 2 && state.waited_for_slot == 2);
    grant(loader, 1, 0, 4);
    REQUIRE_EQUAL(run_dry(loader), 2);
    require_present(1, 5);
    state = state_of(loader);
    REQUIRE(state.waiting[1] == 0 && state.waited_for_slot == 2);
    stop(loader);
}

/* A loader whose value slots end with `moved` bytes of the trigger part, from byte 2304 on. */
static np_loader *start_moving(const char *engine, uint32_t moved, uint32_t most_read_bytes)
{
    int error = 0;
    memset(words, 0, sizeof words);
    reader = np_reader_open(path, engine, DEPTH, &error);
    REQUIRE(reader != NULL);
    np_loader_part parts[2];
    describe(parts);
    parts[1].moved_from = 2304;
    parts[1].moved_bytes = moved;
    const np_loader_reading reading = {.most_read_bytes = most_read_bytes, .prefetch_depth = DEPTH};
    return np_loader_create(reader, parts, &reading, &arrivals, QUEUE);
}

static void test_what_is_moved_comes_with_the_value_part(const char *engine)
{
    enum { MOVED = 512, OWN = VALUE_BYTES - MOVED }; /* the slots' size is unchanged: they omit the end of the part */
    np_loader *loader = start_moving(engine, MOVED, STRIDE);
    REQUIRE(loader != NULL);
    grant(loader, 0, 0, SLOTS);
    grant(loader, 1, 0, SLOTS);
    const uint32_t alone[] = {7, 8, 9, 10, 40}, both[] = {11, 50};
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_VALUE, alone, 5, 0, 0), 5);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE, both, 2, 0, 0), 2);
    REQUIRE_EQUAL(run_dry(loader), 9);
    for (int i = 0; i < 7; i++) {
        const uint32_t id = i < 5 ? alone[i] : both[i - 5];
        const uint8_t *slot = slots[1] + (size_t)(words[1][id] & NP_ENTRY_SLOT_MASK) * slot_bytes[1];
        REQUIRE_EQUAL(words[1][id] & NP_ENTRY_STATE_MASK, NP_ENTRY_PRESENT);
        REQUIRE(memcmp(slot, part_of_file(1, id), OWN) == 0);
        REQUIRE(memcmp(slot + OWN, part_of_file(0, id) + 2304, MOVED) == 0);
        if (i < 5)
            REQUIRE_EQUAL(words[0][id], NP_ENTRY_ABSENT); /* it was read, but not requested */
        else
            require_present(0, id);
    }
    REQUIRE(state_of(loader).bytes == 7 * STRIDE && state_of(loader).gap_bytes == 0);
    stop(loader);
}

static void test_what_is_moved_is_checked(const char *engine)
{
    np_loader *loader = start_moving(engine, 512, STRIDE);
    REQUIRE(loader != NULL);
    grant(loader, 1, 0, 2);
    const uint32_t ids[] = {50, 51};
    checksums[0][51] ^= 1; /* of the part that contains its scales */
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_VALUE, ids, 2, 0, 0), 2);
    REQUIRE_EQUAL(run_dry(loader), 2);
    checksums[0][51] ^= 1;
    REQUIRE_EQUAL(words[1][50] & NP_ENTRY_STATE_MASK, NP_ENTRY_PRESENT);
    REQUIRE_EQUAL(words[1][51], NP_ENTRY_FAILED);
    REQUIRE_EQUAL(state_of(loader).checksum_failures, 2);
    stop(loader);
}

static void test_what_is_moved_lies_in_the_trigger_part_and_fits_a_read(void)
{
    const uint32_t wrong[][2] = {{VALUE_BYTES, STRIDE}, {TRIGGER_BYTES - 2304 + 1, STRIDE}, {512, VALUE_BYTES}};
    for (int i = 0; i < 3; i++) {
        REQUIRE(!start_moving("threads", wrong[i][0], wrong[i][1]));
        np_reader_close(reader);
    }
    stop(start_moving("threads", TRIGGER_BYTES - 2304, STRIDE));
}

static void test_neighbours_are_read_together_over_gaps_that_are_cheaper_than_a_read(const char *engine)
{
    const np_loader_reading merging = {.most_read_bytes = 4 * STRIDE, .merge_gap_bytes = STRIDE, .prefetch_depth = DEPTH};
    np_loader *loader = start_reading(engine, &merging);
    grant(loader, 0, 0, SLOTS);
    grant(loader, 1, 0, SLOTS);
    const uint32_t near[] = {10, 11, 13}, far[] = {16, 30, 31, 32, 33, 34}, backwards[] = {51, 50};
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE, near, 3, 0, 0), 3);
    REQUIRE_EQUAL(run_dry(loader), 6);
    np_loader_state state = state_of(loader);
    REQUIRE(state.reads == 1 && state.bytes == 4 * STRIDE && state.gap_bytes == STRIDE);
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE, far, 6, 0, 0), 6);
    REQUIRE_EQUAL(run_dry(loader), 12);
    REQUIRE_EQUAL(state_of(loader).reads, 4); /* 16 | 30-33, as much as one read may be | 34 */
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, backwards, 2, 0, 0), 2);
    REQUIRE_EQUAL(run_dry(loader), 2);
    REQUIRE_EQUAL(state_of(loader).reads, 6);
    REQUIRE_EQUAL(state_of(loader).gap_bytes, STRIDE);
    for (uint32_t i = 0; i < 6; i++)
        for (int part = 0; part < 2; part++)
            require_present(part, far[i]);
    stop(loader);
}

/* An unreadable page fails its whole read; the other clusters of that read must still be loaded. */
static void test_neighbours_of_a_cluster_that_cannot_be_read_are_read_without_it(const char *engine)
{
    const np_loader_reading merging = {.most_read_bytes = 4 * STRIDE, .prefetch_depth = DEPTH};
    np_loader *loader = start_reading(engine, &merging);
    shorten_file();
    grant(loader, 1, 0, 4);
    grant(loader, 0, 0, 4);
    const uint32_t ids[] = {CLUSTERS - 3, CLUSTERS - 2, CLUSTERS - 1};
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE, ids, 3, 1, 0), 3);
    REQUIRE_EQUAL(run_dry(loader), 6);
    require_present(0, CLUSTERS - 3);
    require_present(1, CLUSTERS - 2);
    REQUIRE_EQUAL(words[0][CLUSTERS - 1], NP_ENTRY_FAILED);
    REQUIRE_EQUAL(words[1][CLUSTERS - 1], NP_ENTRY_FAILED);
    REQUIRE(state_of(loader).free_slots[0] == 2 && state_of(loader).free_slots[1] == 2);
    restore_file();
    stop(loader);
}

static void test_guesses_leave_room_in_the_flash_and_slots_for_demands(void)
{
    const np_loader_reading careful = {.most_read_bytes = STRIDE, .prefetch_depth = 2};
    np_loader *loader = start_reading("threads", &careful);
    np_loader_part parts[2];
    describe(parts);
    parts[0].demand_slots = 3;
    np_loader_destroy(loader);
    loader = np_loader_create(reader, parts, &careful, &arrivals, QUEUE);
    grant(loader, 0, 0, 8);
    uint32_t ids[8] = {1, 3, 5, 7, 9, 11, 13, 15};
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, ids, 8, 1, 0), 8);
    while (np_loader_turn(loader, 0) == 0)
        REQUIRE(state_of(loader).in_flight <= 2);
    run_dry(loader);
    REQUIRE(state_of(loader).free_slots[0] == 3 && state_of(loader).waiting[0] == 3 && state_of(loader).waited_for_slot == 0);
    const uint32_t demands[] = {40, 42, 44};
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER, demands, 3, 0, 0), 3);
    REQUIRE_EQUAL(run_dry(loader), 3);
    require_present(0, 44);
    stop(loader);
}

int main(void)
{
    static const char *const engines[] = {"io_uring", "threads"};
    write_bundles();
    for (int i = 0; i < 2; i++) {
        int error = 0;
        np_reader *possible = np_reader_open(path, engines[i], DEPTH, &error);
        if (!possible && i == 0) {
            printf("  io_uring, which is not allowed here (%s): not tested\n", strerror(error));
            continue;
        }
        np_reader_close(possible);
        test_loads_what_is_asked(engines[i]);
        test_damage_is_marked_and_the_slot_returns(engines[i]);
        test_short_file_is_an_io_error(engines[i]);
        test_trouble_that_passes_costs_another_read(engines[i]);
        test_reset_leaves_no_word_loading(engines[i]);
        test_both_parts_of_a_cluster_are_one_read(engines[i]);
        test_what_is_moved_comes_with_the_value_part(engines[i]);
        test_what_is_moved_is_checked(engines[i]);
        test_neighbours_are_read_together_over_gaps_that_are_cheaper_than_a_read(engines[i]);
        test_neighbours_of_a_cluster_that_cannot_be_read_are_read_without_it(engines[i]);
    }
    test_nothing_is_read_twice();
    test_a_failure_is_forgiven_in_another_epoch();
    test_reset_keeps_demands();
    test_a_dead_loaders_claims_are_forgotten();
    test_pairs_wait_for_slots_of_both_parts_and_are_read_once();
    test_a_pair_does_not_wait_for_a_slot_that_cannot_be_freed();
    test_guesses_leave_room_in_the_flash_and_slots_for_demands();
    test_waits_for_slots_and_takes_demands_first();
    test_full_queue_and_bad_arguments();
    test_what_is_moved_lies_in_the_trigger_part_and_fits_a_read();
    remove_bundles();
    printf("loader: all passed\n");
    return 0;
}

/* Residency entries: look-ups, CLOCK, and no slot is reused under a worker's window. */
#include <pthread.h>
#include <string.h>

#include "require.h"
#include "neuronpipe.h"
#include "sync/clock.h"

static void test_look_marks_present_words_only(void)
{
    uint32_t present = NP_ENTRY_PRESENT | 7, absent = NP_ENTRY_ABSENT, loading = NP_ENTRY_LOADING, failed = NP_ENTRY_FAILED;
    uint32_t evicted = NP_ENTRY_ABSENT | NP_ENTRY_REFERENCED;
    REQUIRE_EQUAL(np_entry_look(&present), NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED | 7);
    REQUIRE_EQUAL(present, NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED | 7);
    REQUIRE_EQUAL(np_entry_look(&absent), NP_ENTRY_ABSENT);
    REQUIRE_EQUAL(np_entry_look(&loading), NP_ENTRY_LOADING);
    REQUIRE_EQUAL(np_entry_look(&failed), NP_ENTRY_FAILED);
    REQUIRE_EQUAL(np_entry_look(&evicted), NP_ENTRY_ABSENT | NP_ENTRY_REFERENCED); /* other bits do not change the state */
    REQUIRE(absent == NP_ENTRY_ABSENT && loading == NP_ENTRY_LOADING && failed == NP_ENTRY_FAILED);
}

static void test_a_forgotten_entry_is_evicted_first(void)
{
    uint32_t words[] = {NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED | 10, NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED | 11,
                        NP_ENTRY_LOADING | NP_ENTRY_REFERENCED | 12, NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED | NP_ENTRY_USE | 13};
    for (size_t id = 1; id < 4; id++)
        np_entry_forget(&words[id]);
    REQUIRE_EQUAL(words[1], NP_ENTRY_PRESENT | NP_ENTRY_SCANNED | 11);
    REQUIRE_EQUAL(words[2], NP_ENTRY_LOADING | NP_ENTRY_REFERENCED | 12); /* the loader's */
    REQUIRE_EQUAL(words[3], NP_ENTRY_PRESENT | NP_ENTRY_SCANNED | NP_ENTRY_USE | 13); /* its uses are the cache's */
    uint32_t slots[4];
    size_t hand = 0;
    REQUIRE_EQUAL(np_clock_take(words, 4, &hand, NULL, 0, 1, slots), 1);
    REQUIRE_EQUAL(slots[0], 11);
}

static void test_clock_gives_a_second_chance(void)
{
    uint32_t words[] = {NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED | 10, NP_ENTRY_PRESENT | 11, NP_ENTRY_ABSENT,
                        NP_ENTRY_PRESENT | NP_ENTRY_PINNED | 13,     NP_ENTRY_LOADING,      NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED | 15};
    uint32_t slots[6];
    size_t hand = 0;
    REQUIRE_EQUAL(np_clock_take(words, 6, &hand, NULL, 0, 1, slots), 1);
    REQUIRE(slots[0] == 11 && hand == 2 && words[1] == NP_ENTRY_ABSENT);
    REQUIRE_EQUAL(words[0], NP_ENTRY_PRESENT | NP_ENTRY_USE | 10); /* found in use once */
    REQUIRE_EQUAL(np_clock_take(words, 6, &hand, NULL, 0, 6, slots), 2); /* pinned and loading entries stay */
    REQUIRE(slots[0] == 10 && slots[1] == 15);
    REQUIRE_EQUAL(words[3], NP_ENTRY_PRESENT | NP_ENTRY_PINNED | 13);
    REQUIRE_EQUAL(words[4], NP_ENTRY_LOADING);
    REQUIRE_EQUAL(np_clock_take(words, 6, &hand, NULL, 0, 6, slots), 0);
    REQUIRE_EQUAL(np_clock_take(words, 0, &hand, NULL, 0, 6, slots), 0);
    hand = 1000; /* a hand beyond the end of the array */
    REQUIRE_EQUAL(np_clock_take(words, 6, &hand, NULL, 0, 0, slots), 0);
    REQUIRE(hand < 6);
}

static uint32_t uses_of(uint32_t word)
{
    return word / NP_ENTRY_USE & NP_MAX_USES;
}

/* Both were looked up recently; one was in use in three earlier rounds. */
static void test_clock_keeps_what_was_used_often(void)
{
    uint32_t words[] = {NP_ENTRY_PRESENT | 3 * NP_ENTRY_USE | 10, NP_ENTRY_PRESENT | 11, NP_ENTRY_PRESENT | 12, NP_ENTRY_PRESENT | 13};
    uint32_t slots[2];
    size_t hand = 0;
    REQUIRE(np_entry_look(&words[0]) && np_entry_look(&words[1]));
    REQUIRE_EQUAL(np_clock_take(words, 4, &hand, NULL, 0, 2, slots), 2);
    REQUIRE(slots[0] == 12 && slots[1] == 13 && uses_of(words[0]) == 4 && uses_of(words[1]) == 1);
    REQUIRE_EQUAL(np_clock_take(words, 4, &hand, NULL, 0, 1, slots), 1);
    REQUIRE(slots[0] == 11 && words[1] == NP_ENTRY_ABSENT && uses_of(words[0]) == 2);
    REQUIRE_EQUAL(np_clock_take(words, 4, &hand, NULL, 0, 2, slots), 1); /* at last */
    REQUIRE(slots[0] == 10 && words[0] == NP_ENTRY_ABSENT);
}

static void test_uses_are_bounded_and_spare_the_other_bits(void)
{
    uint32_t words[] = {NP_ENTRY_PRESENT | NP_MAX_USES * NP_ENTRY_USE | 9, NP_ENTRY_PRESENT | 5}, slot;
    size_t hand = 0;
    REQUIRE_EQUAL(np_entry_look(&words[0]), NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED | NP_MAX_USES * (uint32_t)NP_ENTRY_USE | 9);
    REQUIRE_EQUAL(np_clock_take(words, 2, &hand, NULL, 0, 1, &slot), 1);
    REQUIRE_EQUAL(slot, 5);
    REQUIRE_EQUAL(words[0], NP_ENTRY_PRESENT | NP_MAX_USES * (uint32_t)NP_ENTRY_USE | 9);
}

static void test_clock_spares_windows(void)
{
    uint32_t words[8], slots[8];
    for (uint32_t i = 0; i < 8; i++)
        words[i] = NP_ENTRY_PRESENT | i;
    uint64_t windows[] = {0, (uint64_t)2 << 32 | 4, (uint64_t)7 << 32 | 8};
    size_t hand = 0;
    REQUIRE_EQUAL(np_clock_take(words, 8, &hand, windows, 3, 8, slots), 5);
    for (uint32_t i = 0; i < 8; i++)
        REQUIRE_EQUAL(words[i], i == 2 || i == 3 || i == 7 ? NP_ENTRY_PRESENT | i : (uint32_t)NP_ENTRY_ABSENT);
    np_long_store(&windows[1], 0);
    REQUIRE_EQUAL(np_clock_take(words, 8, &hand, windows, 3, 8, slots), 2);
}

static size_t take_least_used(uint32_t *words, size_t count, double *sums, double *weight, const uint64_t *windows, size_t window_count,
                              size_t max_slots, uint32_t *slots)
{
    static size_t hand;
    static uint8_t empty[64]; /* looked at again at each call */
    np_uses uses = {.clusters = 1, .sums = sums, .empty = empty, .weight = *weight, .growth = 1.19, .hand = hand}; /* a use counts half as much as one four uses later */
    const size_t taken = np_least_used_take(words, count, &uses, windows, window_count, max_slots, slots);
    *weight = uses.weight;
    hand = uses.hand;
    return taken;
}

static void test_the_least_used_goes_first_and_uses_age(void)
{
    uint32_t words[] = {NP_ENTRY_PRESENT | 10, NP_ENTRY_PRESENT | 11, NP_ENTRY_PRESENT | NP_ENTRY_PINNED | 12, NP_ENTRY_LOADING, NP_ENTRY_ABSENT}, slots[5];
    double uses[5] = {0}, weight = 1.0;
    for (int i = 0; i < 3; i++) {
        np_entry_look(&words[0]);
        REQUIRE_EQUAL(take_least_used(words, 5, uses, &weight, NULL, 0, 0, slots), 0); /* collects */
    }
    REQUIRE_EQUAL(words[0], NP_ENTRY_PRESENT | 10);
    REQUIRE(uses[0] > 3.0 && uses[1] == 0.0);
    np_entry_look(&words[1]);
    REQUIRE_EQUAL(take_least_used(words, 5, uses, &weight, NULL, 0, 1, slots), 1); /* three uses against the last one */
    REQUIRE(slots[0] == 11 && words[1] == NP_ENTRY_ABSENT && uses[1] > 1.0);
    words[1] = NP_ENTRY_PRESENT | 21; /* loaded again: earlier uses count */
    for (int i = 0; i < 6; i++) {
        np_entry_look(&words[1]);
        REQUIRE_EQUAL(take_least_used(words, 5, uses, &weight, NULL, 0, 0, slots), 0);
    }
    REQUIRE_EQUAL(take_least_used(words, 5, uses, &weight, NULL, 0, 5, slots), 2); /* pinned and loading entries stay */
    REQUIRE(slots[0] == 10 && slots[1] == 21);
    REQUIRE_EQUAL(take_least_used(words, 0, uses, &weight, NULL, 0, 5, slots), 0);
}

static void test_many_go_in_the_order_of_their_uses_and_equals_from_the_hand_on(void)
{
    enum { COUNT = 1500, EVICTED = 1100, KINDS = 40 };
    static uint32_t words[COUNT], slots[EVICTED];
    static double uses[COUNT];
    static uint8_t empty[COUNT];
    np_uses state = {.clusters = 1, .sums = uses, .empty = empty, .weight = 1.0, .growth = 1.19, .hand = 700};
    uint32_t random = 7;
    for (uint32_t i = 0; i < COUNT; i++) {
        words[i] = NP_ENTRY_PRESENT | i;
        uses[i] = (double)((random = random * 1664525u + 1013904223u) >> 16) / 65536 * KINDS;
        uses[i] = (uint32_t)uses[i];
    }
    REQUIRE_EQUAL(np_least_used_take(words, COUNT, &state, NULL, 0, EVICTED, slots), EVICTED);
    for (uint32_t i = 1; i < EVICTED; i++)
        REQUIRE(uses[slots[i - 1]] <= uses[slots[i]]);
    for (uint32_t i = 1; i < 30; i++) /* the first kind fits into one pass */
        REQUIRE(uses[slots[i]] > 0 || (slots[i - 1] + COUNT - 700) % COUNT < (slots[i] + COUNT - 700) % COUNT);
    for (uint32_t i = 0; i < COUNT; i++)
        REQUIRE(words[i] == NP_ENTRY_ABSENT || uses[i] >= uses[slots[EVICTED - 1]]);
}

/* Experts of four clusters. */
static void test_an_expert_goes_from_its_last_cluster_on_and_single_ones_are_found_later(void)
{
    enum { EXPERTS = 6, EACH = 4 };
    uint32_t words[EXPERTS * EACH], slots[EXPERTS * EACH];
    double sums[EXPERTS] = {0};
    uint8_t empty[EXPERTS] = {0};
    np_uses uses = {.clusters = EACH, .sums = sums, .empty = empty, .weight = 1.0, .growth = 1.19};
    for (uint32_t id = 0; id < EXPERTS * EACH; id++)
        words[id] = id / EACH == 3 ? NP_ENTRY_ABSENT : NP_ENTRY_PRESENT | id;
    for (uint32_t id = 0; id < 3 * EACH; id++)
        np_entry_look(&words[id]); /* experts 0, 1 and 2 are used, in this order */
    words[5 * EACH] |= NP_ENTRY_PINNED;
    REQUIRE_EQUAL(np_least_used_take(words, EXPERTS * EACH, &uses, NULL, 0, 2, slots), 2);
    REQUIRE(slots[0] == 4 * EACH + 3 && slots[1] == 4 * EACH + 2);
    REQUIRE(sums[0] > 0 && sums[1] > sums[0] && sums[2] > sums[1] && sums[4] == 0.0);
    const uint64_t window = (uint64_t)(2 * EACH) << 32 | 3 * EACH;
    REQUIRE_EQUAL(np_least_used_take(words, EXPERTS * EACH, &uses, &window, 1, 7, slots), 7);
    REQUIRE(slots[0] == 5 * EACH + 3 && slots[2] == 5 * EACH + 1 && slots[3] == 4 * EACH + 1 && slots[4] == 4 * EACH);
    REQUIRE(slots[5] == 3 && slots[6] == 2); /* of expert 0, whose clusters were referenced */
    REQUIRE(empty[3] && empty[4] && empty[5] && !empty[0]);
    REQUIRE_EQUAL(np_least_used_take(words, EXPERTS * EACH, &uses, &window, 1, 20, slots), 6); /* the rest of 0, and 1; not 2, nor a pinned one */
    words[3 * EACH + 2] = NP_ENTRY_PRESENT | 77; /* brought without a use, as by a warm-up */
    size_t taken = 0;
    for (int call = 0; call < 64 && !taken; call++)
        taken = np_least_used_take(words, EXPERTS * EACH, &uses, &window, 1, 20, slots);
    REQUIRE(taken == 1 && slots[0] == 77);
    for (uint32_t n = 0; n < EACH; n++) {
        words[4 * EACH + n] = NP_ENTRY_PRESENT | (90 + n);
        np_entry_look(&words[4 * EACH + n]); /* loaded again, and used */
    }
    REQUIRE_EQUAL(np_least_used_take(words, EXPERTS * EACH, &uses, &window, 1, 20, slots), 4);
}

static void test_uses_stay_finite(void)
{
    uint32_t words[] = {NP_ENTRY_PRESENT | 10, NP_ENTRY_PRESENT | 11}, slots[2];
    double uses[2] = {0}, weight = 1.0;
    for (int i = 0; i < 5000; i++) {
        np_entry_look(&words[i % 8 == 0]);
        take_least_used(words, 2, uses, &weight, NULL, 0, 0, slots);
        REQUIRE(uses[0] < 1e110 && weight < 1e110);
    }
    REQUIRE(uses[0] > uses[1] && uses[1] > 0.0);
}

static void test_the_rule_of_use_spares_windows_and_forgets_what_a_prompt_read(void)
{
    uint32_t words[8], slots[8];
    double uses[8] = {0}, weight = 1.0;
    for (uint32_t i = 0; i < 8; i++)
        words[i] = NP_ENTRY_PRESENT | i;
    const uint64_t windows[] = {0, (uint64_t)4 << 32 | 6};
    np_entry_look(&words[4]); /* the window's: its use is not collected yet */
    for (uint32_t i = 2; i < 4; i++) {
        np_entry_look(&words[i]);
        np_entry_forget(&words[i]);
    }
    uses[2] = 5.0; /* texts use it often */
    REQUIRE_EQUAL(take_least_used(words, 8, uses, &weight, windows, 2, 1, slots), 1);
    REQUIRE(slots[0] == 3 && uses[3] == 0.0 && uses[4] == 0.0);
    REQUIRE_EQUAL(take_least_used(words, 8, uses, &weight, windows, 2, 8, slots), 5);
    REQUIRE_EQUAL(slots[4], 2); /* the last one */
    REQUIRE_EQUAL(words[4], NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED | 4);
}

/* The race: readers against a thread that evicts slots and fills them at once with other clusters (cache and loader in
 * one, so that a slot evicted too early is overwritten too early). A slot contains its cluster's id in every
 * element. */
enum { CLUSTERS = 24, SLOTS = 12, SLOT_LONGS = 64, READERS = 2, WINDOW = 3, VACATED = 3, RACE_MS = 400, LONGEST_RACE_MS = 30000 };
static uint32_t race_words[CLUSTERS];
static uint64_t race_slots[SLOTS][SLOT_LONGS], race_windows[READERS];
static uint32_t race_over, race_reads[READERS];

static uint32_t random_next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void *race_reader(void *argument)
{
    const uint32_t self = (uint32_t)(uintptr_t)argument;
    uint32_t random = self + 1;
    while (!np_word_load(&race_over)) {
        const uint32_t first = random_next(&random) % (CLUSTERS - WINDOW);
        np_long_store(&race_windows[self], (uint64_t)first << 32 | (first + WINDOW));
        for (uint32_t id = first; id < first + WINDOW; id++) {
            const uint32_t value = np_entry_look(&race_words[id]);
            if ((value & NP_ENTRY_STATE_MASK) != NP_ENTRY_PRESENT)
                continue;
            for (uint32_t i = 0; i < SLOT_LONGS; i++)
                REQUIRE_EQUAL(__atomic_load_n(&race_slots[value & NP_ENTRY_SLOT_MASK][i], __ATOMIC_RELAXED), id);
            np_word_store(&race_reads[self], race_reads[self] + 1);
        }
        np_long_store(&race_windows[self], 0);
    }
    return NULL;
}

static void race_load(uint32_t slot, uint32_t *random)
{
    uint32_t id, value;
    do {
        id = random_next(random) % CLUSTERS;
        value = np_word_load(&race_words[id]);
    } while ((value & NP_ENTRY_STATE_MASK) != NP_ENTRY_ABSENT || !np_word_swap(&race_words[id], value, NP_ENTRY_LOADING));
    for (uint32_t i = 0; i < SLOT_LONGS; i++)
        __atomic_store_n(&race_slots[slot][i], id, __ATOMIC_RELAXED);
    np_word_store(&race_words[id], NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED | slot);
}

/* Whether every thread was run often enough. An emulator on a busy machine gives a thread few turns in RACE_MS. */
static int was_a_race(uint32_t loads)
{
    return np_word_load(&race_reads[0]) > 100 && np_word_load(&race_reads[1]) > 100 && loads > 1000;
}

static void race(int least_used)
{
    double uses[CLUSTERS] = {0}, weight = 1.0;
    memset(race_words, 0, sizeof race_words);
    memset(race_reads, 0, sizeof race_reads);
    np_word_store(&race_over, 0);
    pthread_t readers[READERS];
    uint32_t random = 77, loads = SLOTS;
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        race_load(slot, &random);
    for (uintptr_t i = 0; i < READERS; i++)
        REQUIRE(pthread_create(&readers[i], NULL, race_reader, (void *)i) == 0);
    size_t hand = 0;
    const uint64_t start = np_clock_ns(), end = start + RACE_MS * 1000000ull;
    const uint64_t latest_end = start + LONGEST_RACE_MS * 1000000ull;
    const uint32_t few = 1, many = SLOTS / 2;
    for (uint32_t turn = 0; np_clock_ns() < (was_a_race(loads) ? end : latest_end); turn++) {
        uint32_t slots[2], absent;
        size_t others;
        if (turn % 16 == 0) /* pins change in the middle of it */
            np_pins_follow(race_words, 1, CLUSTERS, turn % 32 ? &many : &few, &many, &absent, 1, &others);
        if (turn % 64 == 0) { /* and the last slots are vacated and filled again */
            while (np_slots_vacate(race_words, CLUSTERS, SLOTS - VACATED, race_windows, READERS))
                ;
            for (uint32_t slot = SLOTS - VACATED; slot < SLOTS; slot++)
                race_load(slot, &random);
        }
        const size_t taken = least_used ? take_least_used(race_words, CLUSTERS, uses, &weight, race_windows, READERS, 2, slots)
                                        : np_clock_take(race_words, CLUSTERS, &hand, race_windows, READERS, 2, slots);
        for (size_t i = 0; i < taken; i++)
            race_load(slots[i], &random);
        loads += (uint32_t)taken;
    }
    np_word_store(&race_over, 1);
    for (int i = 0; i < READERS; i++)
        pthread_join(readers[i], NULL);
    REQUIRE(was_a_race(loads));
    uint32_t seen[SLOTS] = {0}, present = 0;
    for (uint32_t id = 0; id < CLUSTERS; id++)
        if ((race_words[id] & NP_ENTRY_STATE_MASK) == NP_ENTRY_PRESENT) {
            REQUIRE_EQUAL(seen[race_words[id] & NP_ENTRY_SLOT_MASK]++, 0);
            present++;
        }
    REQUIRE_EQUAL(present, SLOTS); /* no slot was lost or doubled */
    printf("  race: %u reads, %u loads\n", race_reads[0] + race_reads[1], loads);
}

static void test_no_slot_changes_under_a_window(void)
{
    race(0);
    race(1);
}

/* Two feed-forwards of three clusters: of the first one stays, of the second two. */
static void test_pins_follow_what_is_to_stay(void)
{
    const uint32_t keep[] = {1, 2}, widest[] = {3, 2};
    uint32_t words[] = {NP_ENTRY_PRESENT | 10, NP_ENTRY_PRESENT | NP_ENTRY_PINNED | NP_ENTRY_REFERENCED | 11,
                        NP_ENTRY_LOADING | NP_ENTRY_PINNED | 12, NP_ENTRY_ABSENT | NP_ENTRY_PINNED, NP_ENTRY_LOADING | NP_ENTRY_PINNED | 13,
                        NP_ENTRY_PRESENT | NP_ENTRY_PINNED | 14};
    uint32_t absent[2];
    size_t others;
    REQUIRE_EQUAL(np_pins_follow(words, 2, 3, keep, widest, absent, 2, &others), 2);
    REQUIRE(absent[0] == 3 && absent[1] == UINT32_MAX && others == 1);
    REQUIRE_EQUAL(words[0], NP_ENTRY_PRESENT | NP_ENTRY_PINNED | 10);
    REQUIRE_EQUAL(words[1], NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED | 11); /* CLOCK's from now on, with what it was used */
    REQUIRE_EQUAL(words[2], NP_ENTRY_LOADING | NP_ENTRY_PINNED | 12);     /* the loader's until it is there */
    REQUIRE_EQUAL(words[3], NP_ENTRY_ABSENT | NP_ENTRY_PINNED);
    REQUIRE_EQUAL(words[5], NP_ENTRY_PRESENT | NP_ENTRY_PINNED | 14); /* beyond what any entry has */
    words[2] = NP_ENTRY_PRESENT | NP_ENTRY_PINNED | 12;
    words[3] = NP_ENTRY_PRESENT | 15;
    words[4] = NP_ENTRY_FAILED;
    REQUIRE_EQUAL(np_pins_follow(words, 2, 3, keep, widest, absent, 2, &others), 0); /* failed clusters are not waited for */
    REQUIRE(absent[0] == UINT32_MAX && others == 0 && words[2] == (NP_ENTRY_PRESENT | 12));
    REQUIRE_EQUAL(words[3], NP_ENTRY_PRESENT | NP_ENTRY_PINNED | 15);
}

/* Vacate slots 2 and above: clusters under a window stay until it closes, all others go at once, pinned and used ones
 * as well. */
static void test_slots_are_vacated_whatever_they_hold(void)
{
    uint32_t words[6] = {NP_ENTRY_PRESENT | 1, NP_ENTRY_PRESENT | 2 | NP_ENTRY_PINNED, NP_ENTRY_PRESENT | 3 | NP_ENTRY_REFERENCED,
                         NP_ENTRY_LOADING | 0, NP_ENTRY_FAILED | 5, NP_ENTRY_PRESENT | 4 | 3 * NP_ENTRY_USE};
    uint64_t window = (uint64_t)2 << 32 | 3;
    REQUIRE_EQUAL(np_slots_vacate(words, 6, 2, &window, 1), 1);
    REQUIRE_EQUAL(words[0], NP_ENTRY_PRESENT | 1);
    REQUIRE_EQUAL(words[1], NP_ENTRY_ABSENT);
    REQUIRE_EQUAL(words[2], NP_ENTRY_PRESENT | 3); /* unreferenced: the next look-up marks it */
    REQUIRE_EQUAL(words[3], NP_ENTRY_LOADING | 0);
    REQUIRE_EQUAL(words[4], NP_ENTRY_FAILED | 5);
    REQUIRE_EQUAL(words[5], NP_ENTRY_ABSENT);
    window = 0;
    REQUIRE_EQUAL(np_slots_vacate(words, 6, 2, &window, 1), 0);
    REQUIRE_EQUAL(words[2], NP_ENTRY_ABSENT);
    REQUIRE_EQUAL(np_slots_vacate(words, 6, 0, &window, 1), 0);
    REQUIRE_EQUAL(words[0], NP_ENTRY_ABSENT);
}

int main(void)
{
    test_pins_follow_what_is_to_stay();
    test_look_marks_present_words_only();
    test_a_forgotten_entry_is_evicted_first();
    test_clock_gives_a_second_chance();
    test_clock_keeps_what_was_used_often();
    test_uses_are_bounded_and_spare_the_other_bits();
    test_clock_spares_windows();
    test_the_least_used_goes_first_and_uses_age();
    test_many_go_in_the_order_of_their_uses_and_equals_from_the_hand_on();
    test_an_expert_goes_from_its_last_cluster_on_and_single_ones_are_found_later();
    test_uses_stay_finite();
    test_the_rule_of_use_spares_windows_and_forgets_what_a_prompt_read();
    test_slots_are_vacated_whatever_they_hold();
    test_no_slot_changes_under_a_window();
    printf("residency: all passed\n");
    return 0;
}

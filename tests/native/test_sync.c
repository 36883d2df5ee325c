/* Barriers and waits between processes: no wake-up is lost, and all waits can be abandoned. */
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "require.h"
#include "neuronpipe.h"
#include "sync/clock.h"

enum { MAX_PARTICIPANTS = 4 };

typedef struct {
    np_barrier barrier;
    uint32_t epoch, word, lasts, ready;
    uint32_t totals[MAX_PARTICIPANTS]; /* plain data that only the barrier orders */
} shared_state;

static shared_state *shared;

static void start_over(void)
{
    memset(shared, 0, sizeof *shared);
    np_barrier_reset(&shared->barrier);
}

static void join(const pid_t *children, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        int status = 0;
        REQUIRE(waitpid(children[i], &status, 0) == children[i]);
        REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

/* Every participant writes its number, meets, reads all numbers, meets. */
static void rounds_of(uint32_t participant, uint32_t participants, uint32_t rounds, uint32_t spin_us)
{
    for (uint32_t round = 1; round <= rounds; round++) {
        shared->totals[participant] = round;
        const int first = np_barrier_wait(&shared->barrier, participants, &shared->epoch, 0, spin_us, 10000);
        REQUIRE(first == 0 || first == 1);
        for (uint32_t other = 0; other < participants; other++)
            REQUIRE_EQUAL(shared->totals[other], round);
        if (first == 1)
            np_word_add(&shared->lasts, 1);
        const int second = np_barrier_wait(&shared->barrier, participants, &shared->epoch, 0, spin_us, 10000);
        REQUIRE(second == 0 || second == 1);
    }
}

static void test_participants_meet(uint32_t participants, uint32_t rounds, uint32_t spin_us)
{
    start_over();
    pid_t children[MAX_PARTICIPANTS];
    const uint64_t start = np_clock_ns();
    for (uint32_t participant = 0; participant < participants; participant++) {
        children[participant] = fork();
        REQUIRE(children[participant] >= 0);
        if (children[participant] == 0) {
            rounds_of(participant, participants, rounds, spin_us);
            _exit(0);
        }
    }
    join(children, participants);
    REQUIRE_EQUAL(np_word_load(&shared->lasts), rounds); /* exactly one participant is the last at each barrier */
    REQUIRE_EQUAL(shared->barrier.arrived, 0);
    REQUIRE_EQUAL(shared->barrier.waiters, 0);
    printf("  barrier: %u participants, spin %u us: %.2f us each\n", participants, spin_us, (double)(np_clock_ns() - start) / 2e3 / rounds);
}

static void test_epoch_abandons_a_barrier(uint32_t spin_us)
{
    start_over();
    pid_t children[2];
    for (int i = 0; i < 2; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            np_word_add(&shared->ready, 1);
            REQUIRE_EQUAL(np_barrier_wait(&shared->barrier, 3, &shared->epoch, 0, spin_us, 0), NP_E_EPOCH);
            REQUIRE_EQUAL(np_barrier_wait(&shared->barrier, 3, &shared->epoch, 0, spin_us, 0), NP_E_EPOCH);
            _exit(0);
        }
    }
    while (np_word_load(&shared->ready) < 2 || np_word_load(&shared->barrier.arrived) < 2)
        usleep(1000);
    usleep(30000);
    uint32_t *words[] = {&shared->barrier.phase, &shared->word};
    REQUIRE_EQUAL(np_epoch_advance(&shared->epoch, words, 2), 1);
    join(children, 2);
    REQUIRE_EQUAL(shared->barrier.arrived, 2); /* late participants of the old epoch touched nothing */

    np_barrier_reset(&shared->barrier); /* and after a reset it works again */
    REQUIRE_EQUAL(np_barrier_wait(&shared->barrier, 1, &shared->epoch, 1, 0, 100), 1);
}

/* The wake-up may fall between reading the epoch and the system call; the sleeper must leave nevertheless. */
static void test_epoch_without_a_wake_up_is_noticed(void)
{
    start_over();
    const pid_t child = fork();
    if (child == 0) {
        np_word_store(&shared->ready, 1);
        REQUIRE_EQUAL(np_word_wait(&shared->word, 0, &shared->epoch, 0, 0, 0), NP_E_EPOCH);
        _exit(0);
    }
    while (!np_word_load(&shared->ready))
        usleep(1000);
    usleep(5000);
    REQUIRE_EQUAL(np_epoch_advance(&shared->epoch, NULL, 0), 1);
    join(&child, 1);
}

static void test_word_wait_sees_the_change_and_the_data(uint32_t spin_us)
{
    enum { ROUNDS = 2000 };
    start_over();
    const pid_t child = fork();
    if (child == 0) {
        for (uint32_t round = 0; round < ROUNDS; round++) {
            REQUIRE_EQUAL(np_word_wait(&shared->word, round, &shared->epoch, 0, spin_us, 10000), NP_OK);
            REQUIRE_EQUAL(shared->totals[0], round + 1);
            np_word_store(&shared->ready, round + 1);
            np_word_wake(&shared->ready);
        }
        _exit(0);
    }
    for (uint32_t round = 0; round < ROUNDS; round++) {
        shared->totals[0] = round + 1;
        REQUIRE_EQUAL(np_word_add(&shared->word, 1), round + 1);
        np_word_wake(&shared->word);
        REQUIRE_EQUAL(np_word_wait(&shared->ready, round, &shared->epoch, 0, spin_us, 10000), NP_OK);
    }
    join(&child, 1);
}

static void test_time_limit(uint32_t spin_us)
{
    start_over();
    const uint64_t start = np_clock_ns();
    REQUIRE_EQUAL(np_word_wait(&shared->word, 0, &shared->epoch, 0, spin_us, 30), NP_E_TIMEOUT);
    REQUIRE(np_clock_ns() - start >= 30000000u);
    REQUIRE_EQUAL(np_barrier_wait(&shared->barrier, 2, &shared->epoch, 0, spin_us, 5), NP_E_TIMEOUT);
    REQUIRE_EQUAL(shared->barrier.waiters, 0);
}

static void test_misuse_is_refused(void)
{
    start_over();
    REQUIRE_EQUAL(np_barrier_wait(&shared->barrier, 0, &shared->epoch, 0, 0, 1), NP_E_ARGUMENT);
    REQUIRE_EQUAL(np_barrier_wait(&shared->barrier, 1, &shared->epoch, 7, 0, 1), NP_E_EPOCH);
    REQUIRE_EQUAL(np_barrier_wait(&shared->barrier, 3, &shared->epoch, 0, 0, 1), NP_E_TIMEOUT);
    REQUIRE_EQUAL(np_barrier_wait(&shared->barrier, 3, &shared->epoch, 0, 0, 1), NP_E_TIMEOUT);
    REQUIRE_EQUAL(np_barrier_wait(&shared->barrier, 2, &shared->epoch, 0, 0, 1), NP_E_ARGUMENT); /* a third of two */
}

static void test_word_operations(void)
{
    uint32_t word = 5;
    np_word_store(&word, 7);
    REQUIRE_EQUAL(np_word_load(&word), 7);
    REQUIRE_EQUAL(np_word_swap(&word, 6, 9), 0);
    REQUIRE_EQUAL(np_word_swap(&word, 7, 9), 1);
    REQUIRE_EQUAL(np_word_load(&word), 9);
    uint64_t window = 0;
    np_long_store(&window, 1ull << 40 | 3);
    REQUIRE(window == (1ull << 40 | 3));
    REQUIRE_EQUAL(sizeof(np_barrier), 64);
}

int main(void)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(shared != MAP_FAILED);
    setvbuf(stdout, NULL, _IONBF, 0); /* forked children must not print the parent's lines again */
    test_word_operations();
    for (uint32_t participants = 1; participants <= MAX_PARTICIPANTS; participants++) {
        test_participants_meet(participants, 2000, 0);
        test_participants_meet(participants, 2000, 20);
    }
    test_epoch_abandons_a_barrier(0);
    test_epoch_abandons_a_barrier(1000000);
    test_epoch_without_a_wake_up_is_noticed();
    test_word_wait_sees_the_change_and_the_data(0);
    test_word_wait_sees_the_change_and_the_data(50);
    test_time_limit(0);
    test_time_limit(1000000);
    test_misuse_is_refused();
    printf("sync: all passed\n");
    return 0;
}

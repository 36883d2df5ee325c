/* Steps sent and answered in shared memory: none is lost or computed twice, and all can be abandoned. */
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "neuronpipe.h"
#include "require.h"
#include "steps/step_channel.h"
#include "sync/clock.h"

enum { WORKERS = 3, TOKENS = 2, VOCABULARY = 96, PART = VOCABULARY / WORKERS, CLAIMS = 4, END = 5, ALL = (1 << WORKERS) - 1 };

typedef struct {
    uint8_t channels[4096];
    uint32_t finished[16], epoch[16], claims[CLAIMS];
    np_barrier barrier;
    float logits[TOKENS][VOCABULARY];
    uint32_t quit, stall, begun, idle[WORKERS]; /* stall: 1 + the number of a worker that waits until the epoch changes */
} shared_state;

static shared_state *shared;
static np_step_channels channels;
static np_step_pipeline *relay;
static int wake[2];
static int32_t scratch[3 * VOCABULARY];
static pid_t workers[WORKERS];

static int32_t expected_token(int32_t token, int32_t position)
{
    const int32_t next = (token * 7 + position * 3 + 1) % VOCABULARY;
    return next == END ? END + 1 : next;
}

/* Each worker writes a part of each token's logits: the greatest is that of the expected token. */
static int compute(void *who, const np_step *step, np_engine_counters *counters)
{
    const uint32_t own = *(const uint32_t *)who;
    __atomic_add_fetch(&shared->begun, 1, __ATOMIC_SEQ_CST);
    REQUIRE(__atomic_fetch_add(&shared->claims[0], 1, __ATOMIC_RELAXED) < step->participants); /* they were zeroed */
    while (__atomic_load_n(&shared->stall, __ATOMIC_SEQ_CST) == own + 1)
        if (np_word_load(shared->epoch) != step->epoch)
            return NP_E_EPOCH;
    for (uint32_t row = 0; row < step->count; row++) {
        const int32_t next = expected_token(step->tokens[row], step->positions[row]);
        for (int32_t i = (int32_t)own * PART; i < (int32_t)(own + 1) * PART; i++)
            shared->logits[row][i] = i == next ? 1.0f : -1.0f;
    }
    memset(counters, 0, sizeof *counters);
    counters->neurons = step->number;
    const int met = np_barrier_wait(&shared->barrier, step->participants, shared->epoch, step->epoch, 0, 10000);
    return met < 0 ? met : NP_OK;
}

static void work(uint32_t own)
{
    np_channel_progress served;
    while (!np_word_load(&shared->quit)) {
        const int done = np_serve_channel(compute, &own, &channels, own, own * 50, 5, 3, &served);
        REQUIRE(done == NP_OK || done == NP_E_TIMEOUT || done == NP_E_EPOCH);
        if (done == NP_E_TIMEOUT)
            np_word_add(&shared->idle[own], 1);
    }
}

static void start_worker(uint32_t own)
{
    workers[own] = fork();
    REQUIRE(workers[own] >= 0);
    if (workers[own] == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* after a failed check no child may stay behind with the output open */
        work(own);
        _exit(0);
    }
}

static void start(void)
{
    memset(shared, 0, sizeof *shared);
    channels = (np_step_channels){shared->channels, WORKERS, TOKENS, shared->finished};
    REQUIRE(WORKERS * np_channel_bytes(TOKENS) <= sizeof shared->channels);
    REQUIRE(pipe2(wake, O_NONBLOCK) == 0);
    const np_pipeline_config config = {.channels = channels,
                                    .epoch = shared->epoch,
                                    .barrier = &shared->barrier,
                                    .claims = shared->claims,
                                    .claim_count = CLAIMS,
                                    .logits = shared->logits[0],
                                    .vocabulary = VOCABULARY,
                                    .scratch = scratch,
                                    .wake = wake[1]};
    for (uint32_t i = 0; i < WORKERS; i++)
        start_worker(i);
    relay = np_pipeline_create(&config);
    REQUIRE(relay);
}

static void stop(void)
{
    np_word_store(&shared->quit, 1);
    for (uint32_t i = 0; i < WORKERS; i++) {
        int status = 0;
        REQUIRE(waitpid(workers[i], &status, 0) == workers[i]);
        REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    np_pipeline_destroy(relay);
    close(wake[0]);
    close(wake[1]);
}

/* Read the pipeline's notification from the pipe. */
static void hear(void)
{
    struct pollfd ready = {wake[0], POLLIN, 0};
    char notices[16];
    REQUIRE(poll(&ready, 1, 10000) == 1);
    REQUIRE(read(wake[0], notices, sizeof notices) > 0);
}

/* Send as soon as all workers listen. */
static void give(uint64_t number, const int32_t *positions, const int32_t *tokens)
{
    static const int32_t sequences[TOKENS] = {0, 1};
    np_step steps[WORKERS];
    for (uint32_t i = 0; i < WORKERS; i++)
        steps[i] = (np_step){.number = number,
                             .epoch = np_word_load(shared->epoch),
                             .participants = WORKERS,
                             .participant = i,
                             .sharers = WORKERS,
                             .sharer = i,
                             .count = TOKENS,
                             .sequences = sequences,
                             .positions = positions,
                             .tokens = tokens};
    int given;
    while ((given = np_pipeline_send(relay, ALL, steps)) == 0)
        usleep(200);
    REQUIRE_EQUAL(given, 1);
}

static const np_sampling greedy[TOKENS] = {{.top_p = 1.0f, .repetition_penalty = 1.0f}, {.top_p = 1.0f, .repetition_penalty = 1.0f}};
static const double uniforms[TOKENS];
static const int32_t ends[] = {END};

static int arm(uint64_t number, const int32_t *positions)
{
    const np_pipeline_next next = {number, TOKENS, greedy, uniforms, positions, NULL, NULL, ends, 1};
    return np_pipeline_arm(relay, &next);
}

static np_pipeline_result await(void)
{
    np_pipeline_result taken;
    char byte;
    for (;;) {
        struct pollfd ready = {wake[0], POLLIN, 0};
        REQUIRE(poll(&ready, 1, 10000) == 1);
        REQUIRE(read(wake[0], &byte, 1) == 1);
        np_pipeline_collect(relay, &taken);
        if (taken.all_answered)
            return taken;
    }
}

/* Long sequences; some steps are sent by the pipeline, some by the caller. */
static void test_texts(uint32_t count, uint32_t by_hand_every)
{
    int32_t tokens[TOKENS] = {1, 2}, positions[TOKENS] = {0, 10}, following[TOKENS];
    uint32_t passed = 0;
    start();
    give(1, positions, tokens);
    for (uint64_t number = 1; number <= count; number++) {
        for (int row = 0; row < TOKENS; row++)
            following[row] = positions[row] + 1;
        const int armed = number % by_hand_every != 0 && arm(number + 1, following) == NP_OK;
        const np_pipeline_result taken = await();
        REQUIRE_EQUAL(taken.channels, ALL);
        for (uint32_t i = 0; i < WORKERS; i++)
            REQUIRE_EQUAL(taken.counters[i].neurons, number); /* of this step, although the next one may be under way */
        REQUIRE(taken.sampled == armed && taken.next_sent <= armed);
        for (int row = 0; row < TOKENS; row++) {
            const int32_t next = expected_token(tokens[row], positions[row]);
            if (taken.sampled)
                REQUIRE_EQUAL(taken.tokens[row], next);
            tokens[row] = next;
            positions[row] = following[row];
        }
        passed += (uint32_t)taken.next_sent;
        if (!taken.next_sent)
            give(number + 1, positions, tokens);
        else
            REQUIRE(taken.done_ns <= taken.sampled_ns && taken.sampled_ns <= taken.next_sent_ns);
    }
    await();
    REQUIRE_EQUAL(shared->begun, WORKERS * (count + 1));
    REQUIRE(by_hand_every == 1 ? passed == 0 : passed > 0);
    stop();
}

/* A collected result stays valid while the next step is finished and sent. */
static void test_what_was_taken_stays(void)
{
    const int32_t positions[TOKENS] = {0, 0}, following[TOKENS] = {1, 1}, third[TOKENS] = {2, 2}, tokens[TOKENS] = {3, 4};
    start();
    shared->stall = 1;
    give(1, positions, tokens);
    REQUIRE_EQUAL(arm(2, following), NP_OK);
    np_word_store(&shared->stall, 0);
    const np_pipeline_result taken = await();
    REQUIRE(taken.next_sent);
    if (arm(3, third) == NP_OK) {
        struct pollfd ready = {wake[0], POLLIN, 0};
        REQUIRE(poll(&ready, 1, 10000) == 1);
    }
    REQUIRE_EQUAL(taken.tokens[0], expected_token(3, 0));
    REQUIRE_EQUAL(taken.counters[1].neurons, 1);
    stop();
}

static void test_an_end_token_passes_nothing_on(void)
{
    const int32_t positions[TOKENS] = {0, 0}, following[TOKENS] = {1, 1};
    int32_t tokens[TOKENS] = {0, 0};
    start();
    shared->stall = 1;
    give(1, positions, tokens);
    np_sampling how[TOKENS] = {greedy[0], greedy[1]};
    const int32_t biased[] = {END};
    const float biases[] = {100.0f};
    how[1].biased = biased, how[1].biases = biases, how[1].biased_count = 1;
    const np_pipeline_next next = {2, TOKENS, how, uniforms, following, NULL, NULL, ends, 1};
    REQUIRE_EQUAL(np_pipeline_arm(relay, &next), NP_OK);
    np_word_store(&shared->stall, 0);
    const np_pipeline_result taken = await();
    REQUIRE(taken.sampled && !taken.next_sent);
    REQUIRE_EQUAL(taken.tokens[0], expected_token(0, 0));
    REQUIRE_EQUAL(taken.tokens[1], END);
    REQUIRE_EQUAL(shared->begun, WORKERS);
    stop();
}

static void test_who_takes_first_is_not_run_ahead_of(void)
{
    const int32_t positions[TOKENS] = {0, 0}, following[TOKENS] = {1, 1}, tokens[TOKENS] = {3, 4};
    np_pipeline_result taken;
    start();
    shared->stall = 2;
    give(1, positions, tokens);
    REQUIRE_EQUAL(arm(2, following), NP_OK);
    np_pipeline_collect(relay, &taken);
    REQUIRE(!taken.all_answered && !(taken.channels & 2));
    np_word_store(&shared->stall, 0);
    taken = await();
    REQUIRE(!taken.sampled && !taken.next_sent);
    REQUIRE_EQUAL(shared->begun, WORKERS);
    stop();
}

static void test_a_new_epoch_ends_a_step(void)
{
    const int32_t positions[TOKENS] = {0, 0}, following[TOKENS] = {1, 1}, tokens[TOKENS] = {3, 4};
    np_pipeline_result taken;
    start();
    shared->stall = 3;
    give(1, positions, tokens);
    REQUIRE_EQUAL(arm(2, following), NP_OK);
    uint32_t *words[] = {&shared->barrier.phase};
    np_epoch_advance(shared->epoch, words, 1);
    hear();
    np_pipeline_collect(relay, &taken);
    REQUIRE(!taken.all_answered && !taken.sampled && !taken.next_sent);
    np_word_store(&shared->stall, 0);
    give(1, positions, tokens); /* again, when they have left */
    taken = await();
    REQUIRE(taken.all_answered && !taken.sampled);
    stop();
}

static void test_one_that_was_killed_holds_nobody_up(void)
{
    const int32_t positions[TOKENS] = {0, 0}, following[TOKENS] = {1, 1}, tokens[TOKENS] = {3, 4};
    np_pipeline_result taken;
    start();
    shared->stall = 1;
    give(1, positions, tokens);
    REQUIRE_EQUAL(arm(2, following), NP_OK);
    while (np_word_load(&shared->begun) < WORKERS)
        usleep(200);
    kill(workers[0], SIGKILL);
    REQUIRE(waitpid(workers[0], NULL, 0) == workers[0]);
    np_channel_clear(&channels, 0);
    uint32_t *words[] = {&shared->barrier.phase};
    np_epoch_advance(shared->epoch, words, 1);
    np_word_store(&shared->stall, 0);
    hear(); /* now: a later notification would end the wait for the next step too early */
    np_pipeline_collect(relay, &taken);
    REQUIRE(!taken.all_answered && !(taken.channels & 1) && !taken.next_sent); /* its missing answer does not count */
    start_worker(0);
    np_word_store(&shared->stall, 2); /* the step must not finish before the pipeline is armed */
    give(1, positions, tokens);
    REQUIRE_EQUAL(arm(2, following), NP_OK);
    np_word_store(&shared->stall, 0);
    taken = await();
    REQUIRE(taken.all_answered && taken.sampled);
    REQUIRE_EQUAL(taken.tokens[0], expected_token(3, 0));
    stop();
}

/* A listening worker is released at once for a message; a step that cannot be sent to all workers is sent to none. */
static void test_a_message_is_looked_for(void)
{
    uint32_t own = 1;
    np_channel_progress served;
    memset(shared, 0, sizeof *shared);
    channels = (np_step_channels){shared->channels, WORKERS, TOKENS, shared->finished};
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        const uint64_t began = np_clock_ns();
        REQUIRE_EQUAL(np_serve_channel(compute, &own, &channels, own, 0, 20000, 20000, &served), NP_E_TIMEOUT);
        REQUIRE(np_clock_ns() - began < 10000000000ull);
        REQUIRE_EQUAL(served.step, 0);
        _exit(0);
    }
    while (!np_channel_release(&channels, 1))
        usleep(200);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    REQUIRE(!np_channel_release(&channels, 1)); /* nobody listens */
    REQUIRE_EQUAL(np_serve_channel(compute, &own, &channels, own, 0, 1, 1, &served), NP_E_TIMEOUT);
    REQUIRE_EQUAL(np_serve_channel(compute, &own, &channels, WORKERS, 0, 1, 1, &served), NP_E_ARGUMENT);
}

static void test_steps_out_of_range_are_refused(void)
{
    const int32_t numbers[TOKENS + 1] = {0};
    np_step steps[WORKERS];
    start();
    for (uint32_t i = 0; i < WORKERS; i++)
        steps[i] = (np_step){.participants = WORKERS, .count = TOKENS + 1, .sequences = numbers, .positions = numbers, .tokens = numbers};
    REQUIRE_EQUAL(np_pipeline_send(relay, ALL, steps), NP_E_ARGUMENT);
    REQUIRE_EQUAL(np_pipeline_send(relay, 1 << WORKERS, steps), NP_E_ARGUMENT);
    REQUIRE_EQUAL(np_pipeline_send(relay, 0, steps), NP_E_ARGUMENT);
    REQUIRE_EQUAL(arm(1, numbers), NP_E_ARGUMENT); /* no step is under way */
    stop();
}

int main(void)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(shared != MAP_FAILED);
    test_texts(2000, 7);
    test_texts(200, 1);
    test_what_was_taken_stays();
    test_an_end_token_passes_nothing_on();
    test_who_takes_first_is_not_run_ahead_of();
    test_a_new_epoch_ends_a_step();
    test_one_that_was_killed_holds_nobody_up();
    test_a_message_is_looked_for();
    test_steps_out_of_range_are_refused();
    printf("all passed\n");
    return 0;
}

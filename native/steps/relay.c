/* The coordinator's side of lanes: a thread that waits until a step is finished, so that what lies between two steps of a text is a few native
 * calls. What it does was prepared while the step was computed, and what it did is read afterwards, while the next one is.
 *
 *   IDLE      nothing is under way here
 *   WATCHING  a step was given; `prepared` says whether it is known what comes then
 *   FINISHED  everybody has answered; `result` says what was done with it
 *
 * The lock guards all of that; the thread holds it while it samples and passes the next step on, so that who takes the lock to look finds either
 * nothing done or everything. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "neuronpipe.h"
#include "process/thread.h"
#include "sync/clock.h"
#include "sync/wait.h"

enum { STACK_BYTES = 256 << 10, LOOK_AGAIN_MS = 100, MAX_LANES = 64 };
typedef enum { IDLE, WATCHING, FINISHED } relay_state;

struct np_relay {
    np_relay_config config;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t given;
    int ending;
    relay_state state;
    uint64_t generation; /* of the step: the thread sees that another one is under way */
    uint64_t lanes;
    uint32_t epoch, count;
    int prepared;
    np_relay_next next;
    np_relay_taken result;
    int32_t *tokens;
    np_engine_counters *counters; /* by lane */
    int32_t *taken_tokens;        /* of the step before, while the thread is at the next one */
    np_engine_counters *taken_counters;
};

static np_lane *lane_at(const np_relay *relay, uint32_t lane)
{
    return np_lane_at(&relay->config.lanes, lane);
}

static int has(uint64_t lanes, uint32_t lane)
{
    return (int)(lanes >> lane & 1);
}

static uint64_t answered(const np_relay *relay, uint64_t lanes)
{
    uint64_t found = 0;
    for (uint32_t i = 0; i < relay->config.lanes.count; i++) {
        const np_lane *lane = lane_at(relay, i);
        if (has(lanes, i) && __atomic_load_n(&lane->answered, __ATOMIC_SEQ_CST) == __atomic_load_n(&lane->given, __ATOMIC_SEQ_CST))
            found |= 1ull << i;
    }
    return found;
}

static void copy_counters(np_relay *relay, uint64_t lanes)
{
    for (uint32_t i = 0; i < relay->config.lanes.count; i++)
        if (has(lanes, i))
            relay->counters[i] = lane_at(relay, i)->counters;
}

/* ---- giving --------------------------------------------------------------------------------------------------------- */
static int swap_state(np_lane *lane, uint32_t from, uint32_t to)
{
    return __atomic_compare_exchange_n(&lane->state, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* All of them or none: a step whose participants hear of it in two ways would have to be waited for in two ways. */
static int reserve(np_relay *relay, uint64_t lanes)
{
    uint32_t i = 0;
    while (i < relay->config.lanes.count && (!has(lanes, i) || swap_state(lane_at(relay, i), NP_LANE_LISTENING, NP_LANE_RESERVED)))
        i++;
    if (i == relay->config.lanes.count)
        return 1;
    while (i-- > 0)
        if (has(lanes, i))
            swap_state(lane_at(relay, i), NP_LANE_RESERVED, NP_LANE_LISTENING);
    return 0;
}

/* Who has it reserved writes the step first. Nobody computes now, so that barrier and claims are the coordinator's. */
static void reset(const np_relay *relay)
{
    np_barrier_reset(relay->config.barrier);
    memset(relay->config.claims, 0, relay->config.claim_count * sizeof *relay->config.claims);
}

static void hand_over(np_relay *relay, uint64_t lanes)
{
    for (uint32_t i = 0; i < relay->config.lanes.count; i++)
        if (has(lanes, i))
            __atomic_add_fetch(&lane_at(relay, i)->given, 1, __ATOMIC_SEQ_CST);
    for (uint32_t i = 0; i < relay->config.lanes.count; i++) {
        np_lane *lane = lane_at(relay, i);
        if (!has(lanes, i))
            continue;
        __atomic_store_n(&lane->state, NP_LANE_GIVEN, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&lane->sleepers, __ATOMIC_SEQ_CST))
            np_word_wake(&lane->state);
    }
}

static void write_step(np_relay *relay, uint64_t lanes, uint32_t i, const np_step *step)
{
    np_lane *lane = lane_at(relay, i);
    lane->number = step->number;
    lane->lanes = lanes;
    lane->epoch = step->epoch;
    lane->participants = step->participants;
    lane->participant = step->participant;
    lane->first_block = step->first_block;
    lane->end_block = step->end_block;
    lane->sharers = step->sharers;
    lane->sharer = step->sharer;
    lane->count = step->count;
    const int32_t *const numbers[] = {step->sequences, step->positions, step->tokens};
    for (int which = 0; which < 3; which++)
        memcpy(np_lane_numbers(&relay->config.lanes, i, which), numbers[which], step->count * sizeof(int32_t));
}

static int are_whole(const np_relay *relay, uint64_t lanes, const np_step *steps)
{
    const np_lanes *l = &relay->config.lanes;
    if (!lanes || (l->count < MAX_LANES && lanes >> l->count))
        return 0;
    for (int n = 0; n < __builtin_popcountll(lanes); n++)
        if (!steps[n].count || steps[n].count > l->tokens || steps[n].count != steps[0].count || steps[n].epoch != steps[0].epoch)
            return 0;
    return 1;
}

int np_relay_give(np_relay *relay, uint64_t lanes, const np_step *steps)
{
    if (!are_whole(relay, lanes, steps))
        return NP_E_ARGUMENT;
    if (!reserve(relay, lanes)) {
        for (uint32_t i = 0; i < relay->config.lanes.count; i++)
            if (has(lanes, i))
                np_lane_release(&relay->config.lanes, i);
        return 0;
    }
    reset(relay);
    for (uint32_t i = 0, n = 0; i < relay->config.lanes.count; i++)
        if (has(lanes, i))
            write_step(relay, lanes, i, &steps[n++]);
    pthread_mutex_lock(&relay->lock);
    relay->state = WATCHING;
    relay->generation++;
    relay->lanes = lanes;
    relay->epoch = steps[0].epoch;
    relay->count = steps[0].count;
    relay->prepared = 0;
    hand_over(relay, lanes);
    pthread_cond_signal(&relay->given);
    pthread_mutex_unlock(&relay->lock);
    return 1;
}

/* ---- passing on ----------------------------------------------------------------------------------------------------- */
static int ends(const np_relay_next *next, int32_t token)
{
    for (uint32_t i = 0; i < next->end_count; i++)
        if (next->ends[i] == token)
            return 1;
    return 0;
}

/* Sample every row, whatever becomes of the others. Returns whether all texts go on. */
static int sample(np_relay *relay)
{
    const np_relay_config *c = &relay->config;
    const np_relay_next *next = &relay->next;
    int go_on = 1;
    for (uint32_t row = 0; row < next->count; row++) {
        const float *logits = c->logits + (size_t)row * c->vocabulary;
        relay->tokens[row] = np_sample(logits, c->vocabulary, &next->how[row], next->uniforms[row], c->scratch);
        go_on &= relay->tokens[row] >= 0 && !ends(next, relay->tokens[row]);
    }
    relay->result.sampled = 1;
    relay->result.sampled_ns = np_clock_ns();
    return go_on;
}

static void pass_on(np_relay *relay)
{
    if (__atomic_load_n(relay->config.epoch, __ATOMIC_ACQUIRE) != relay->epoch || !reserve(relay, relay->lanes))
        return;
    reset(relay);
    for (uint32_t i = 0; i < relay->config.lanes.count; i++) {
        if (!has(relay->lanes, i))
            continue;
        lane_at(relay, i)->number = relay->next.number;
        memcpy(np_lane_numbers(&relay->config.lanes, i, 1), relay->next.positions, relay->count * sizeof(int32_t));
        memcpy(np_lane_numbers(&relay->config.lanes, i, 2), relay->tokens, relay->count * sizeof(int32_t));
    }
    hand_over(relay, relay->lanes);
    relay->result.passed = 1;
    relay->result.passed_ns = np_clock_ns();
}

/* With the lock: everybody has answered. Counters first, for the next step's will lie in their place. */
static void finish(np_relay *relay)
{
    copy_counters(relay, relay->lanes);
    relay->result = (np_relay_taken){.lanes = relay->lanes, .all = 1, .done_ns = np_clock_ns()};
    if (relay->prepared && sample(relay))
        pass_on(relay);
    relay->prepared = 0;
    relay->state = FINISHED;
}

/* Whether the step of this generation is finished; -1: another one is under way, or none, or somebody has to look. */
static int wait_for(np_relay *relay, uint64_t lanes, uint32_t epoch)
{
    uint32_t *finished = relay->config.lanes.finished;
    const uint32_t seen = np_word_load(finished);
    if (answered(relay, lanes) == lanes)
        return 1;
    const int why = np_wait_changed(finished, seen, finished + 1, relay->config.epoch, epoch, 0, LOOK_AGAIN_MS);
    return why == NP_E_EPOCH ? -1 : answered(relay, lanes) == lanes;
}

static void *run(void *argument)
{
    np_relay *relay = argument;
    pthread_mutex_lock(&relay->lock);
    while (!relay->ending) {
        if (relay->state != WATCHING) {
            pthread_cond_wait(&relay->given, &relay->lock);
            continue;
        }
        const uint64_t generation = relay->generation, lanes = relay->lanes;
        const uint32_t epoch = relay->epoch;
        pthread_mutex_unlock(&relay->lock);
        const int done = wait_for(relay, lanes, epoch);
        pthread_mutex_lock(&relay->lock);
        if (relay->ending || relay->state != WATCHING || relay->generation != generation || !done)
            continue;
        if (done > 0)
            finish(relay);
        else
            relay->state = IDLE; /* they leave: who answers here and who by a message is looked at by and by */
        pthread_mutex_unlock(&relay->lock); /* who is woken takes it */
        const ssize_t ignored = write(relay->config.wake, "", 1); /* a full pipe wakes as well */
        (void)ignored;
        pthread_mutex_lock(&relay->lock);
    }
    pthread_mutex_unlock(&relay->lock);
    return NULL;
}

int np_relay_arm(np_relay *relay, const np_relay_next *next)
{
    pthread_mutex_lock(&relay->lock);
    const int fits = relay->state == WATCHING && next->count == relay->count;
    if (fits) {
        relay->next = *next;
        relay->prepared = 1;
    }
    pthread_mutex_unlock(&relay->lock);
    return fits ? NP_OK : NP_E_ARGUMENT;
}

void np_relay_take(np_relay *relay, np_relay_taken *taken)
{
    pthread_mutex_lock(&relay->lock);
    relay->prepared = 0;
    if (relay->state == FINISHED) {
        *taken = relay->result;
        relay->state = taken->passed ? WATCHING : IDLE;
        relay->generation++;
        pthread_cond_signal(&relay->given);
    } else {
        const uint64_t lanes = answered(relay, relay->lanes);
        copy_counters(relay, lanes);
        *taken = (np_relay_taken){.lanes = lanes, .all = lanes == relay->lanes, .done_ns = np_clock_ns()};
        if (taken->all)
            relay->state = IDLE;
    }
    memcpy(relay->taken_tokens, relay->tokens, relay->config.lanes.tokens * sizeof *relay->tokens);
    memcpy(relay->taken_counters, relay->counters, relay->config.lanes.count * sizeof *relay->counters);
    taken->tokens = relay->taken_tokens;
    taken->counters = relay->taken_counters;
    pthread_mutex_unlock(&relay->lock);
}

/* ---- life ----------------------------------------------------------------------------------------------------------- */
static void release(np_relay *relay)
{
    pthread_cond_destroy(&relay->given);
    pthread_mutex_destroy(&relay->lock);
    free(relay->tokens);
    free(relay->taken_tokens);
    free(relay->counters);
    free(relay->taken_counters);
    free(relay);
}

np_relay *np_relay_create(const np_relay_config *config)
{
    const np_lanes *lanes = &config->lanes;
    if (!lanes->count || lanes->count > MAX_LANES || !lanes->tokens)
        return NULL;
    np_relay *relay = calloc(1, sizeof *relay);
    if (!relay)
        return NULL;
    relay->config = *config;
    relay->tokens = calloc(lanes->tokens, sizeof *relay->tokens);
    relay->taken_tokens = calloc(lanes->tokens, sizeof *relay->tokens);
    relay->counters = calloc(lanes->count, sizeof *relay->counters);
    relay->taken_counters = calloc(lanes->count, sizeof *relay->counters);
    pthread_mutex_init(&relay->lock, NULL);
    pthread_cond_init(&relay->given, NULL);
    if (relay->tokens && relay->taken_tokens && relay->counters && relay->taken_counters &&
        np_thread_start(&relay->thread, STACK_BYTES, run, relay) == 0)
        return relay;
    release(relay);
    return NULL;
}

void np_relay_destroy(np_relay *relay)
{
    if (!relay)
        return;
    pthread_mutex_lock(&relay->lock);
    relay->ending = 1;
    pthread_cond_signal(&relay->given);
    pthread_mutex_unlock(&relay->lock);
    pthread_join(relay->thread, NULL); /* it looks every LOOK_AGAIN_MS */
    release(relay);
}

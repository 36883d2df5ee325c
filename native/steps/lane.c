/* A decode worker's lane: the words through which it is given steps and answers them, without a message.
 *
 * What orders results before the coordinator's look at them: the worker writes logits, keys, values and counters, stores `answered`, and then
 * looks at `answered` of the others. All of these are sequentially consistent, so of two workers that answer at once the later one sees both
 * answers, and rings. A worker is LISTENING again before it has answered: whoever sees the answer may give the next step.
 *
 * No lost wake-up: a listener counts itself in `sleepers` and looks at `state`; the coordinator changes `state` and looks at `sleepers`. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "neuronpipe.h"
#include "steps/lane.h"
#include "sync/clock.h"
#include "sync/wait.h"

enum { SPINS_PER_YIELD = 16 };

static size_t lane_bytes(uint32_t tokens)
{
    return (sizeof(np_lane) + 3 * (size_t)tokens * sizeof(int32_t) + 63) & ~(size_t)63;
}

uint32_t np_lane_bytes(uint32_t tokens)
{
    return (uint32_t)lane_bytes(tokens);
}

np_lane *np_lane_at(const np_lanes *lanes, uint32_t lane)
{
    return (np_lane *)(lanes->memory + lane * lane_bytes(lanes->tokens));
}

int32_t *np_lane_numbers(const np_lanes *lanes, uint32_t lane, int which)
{
    return (int32_t *)(np_lane_at(lanes, lane) + 1) + (size_t)which * lanes->tokens;
}

static uint32_t state_of(const np_lane *lane)
{
    return __atomic_load_n(&lane->state, __ATOMIC_SEQ_CST);
}

static int swap_state(np_lane *lane, uint32_t from, uint32_t to)
{
    return __atomic_compare_exchange_n(&lane->state, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static int waits(const np_lane *lane)
{
    const uint32_t state = state_of(lane);
    return state == NP_LANE_LISTENING || state == NP_LANE_RESERVED;
}

/* Wait for a step. A core that is spun on is wanted by the coordinator, by whoever is told of the token, by the loader: they come first. */
static void listen(np_lane *lane, uint32_t spin_us, uint32_t idle_ms)
{
    static const uint32_t no_epoch = 0;
    const uint64_t start = np_clock_ns(), idle_end = start + idle_ms * 1000000ull;
    while (np_clock_ns() - start < spin_us * 1000ull) {
        for (int spin = 0; spin < SPINS_PER_YIELD; spin++) {
            if (!waits(lane))
                return;
            np_pause();
        }
        sched_yield();
    }
    for (uint64_t now = np_clock_ns(); waits(lane); now = np_clock_ns()) {
        const uint32_t seen = state_of(lane);
        if (seen == NP_LANE_LISTENING && now >= idle_end)
            return;
        if (seen == NP_LANE_LISTENING)
            np_wait_changed(&lane->state, seen, &lane->sleepers, &no_epoch, 0, 0, (uint32_t)((idle_end - now) / 1000000u) + 1);
        else
            sched_yield(); /* about to be given */
    }
}

static void ring_if_last(const np_lanes *lanes, uint64_t participants)
{
    for (uint32_t i = 0; i < lanes->count; i++) {
        const np_lane *other = np_lane_at(lanes, i);
        if (participants >> i & 1 &&
            __atomic_load_n(&other->answered, __ATOMIC_SEQ_CST) != __atomic_load_n(&other->given, __ATOMIC_SEQ_CST))
            return;
    }
    __atomic_add_fetch(&lanes->finished[0], 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&lanes->finished[1], __ATOMIC_SEQ_CST))
        np_word_wake(&lanes->finished[0]);
}

/* Who computes, and where. numbers: room for three arrays, so that nobody changes them after they were checked. */
typedef struct {
    np_lane_compute *compute;
    void *who;
    const np_lanes *lanes;
    uint32_t own;
    int32_t *numbers;
    np_lane_served *served;
} worker;

static int compute(const worker *w)
{
    np_lane *lane = np_lane_at(w->lanes, w->own);
    const uint32_t given = __atomic_load_n(&lane->given, __ATOMIC_SEQ_CST);
    const uint64_t participants = lane->lanes;
    const np_step step = {
        .number = lane->number,
        .epoch = lane->epoch,
        .participants = lane->participants,
        .participant = lane->participant,
        .first_block = lane->first_block,
        .end_block = lane->end_block,
        .sharers = lane->sharers,
        .sharer = lane->sharer,
        .count = lane->count,
        .sequences = w->numbers,
        .positions = w->numbers + w->lanes->tokens,
        .tokens = w->numbers + 2 * (size_t)w->lanes->tokens,
        .logits_count = lane->count,
    };
    w->served->step = step.number;
    w->served->epoch = step.epoch;
    if (step.count > w->lanes->tokens)
        return NP_E_ARGUMENT;
    memcpy(w->numbers, np_lane_numbers(w->lanes, w->own, 0), 3 * (size_t)w->lanes->tokens * sizeof *w->numbers);
    const int done = w->compute(w->who, &step, &lane->counters);
    if (done < 0)
        return done;
    w->served->computed++;
    __atomic_store_n(&lane->state, NP_LANE_LISTENING, __ATOMIC_SEQ_CST);
    __atomic_store_n(&lane->answered, given, __ATOMIC_SEQ_CST);
    ring_if_last(w->lanes, participants);
    return NP_OK;
}

static int serve(const worker *w, uint32_t spin_us, uint32_t idle_ms, uint32_t serve_ms)
{
    np_lane *lane = np_lane_at(w->lanes, w->own);
    const uint64_t end = np_clock_ns() + serve_ms * 1000000ull;
    swap_state(lane, NP_LANE_AWAY, NP_LANE_LISTENING);
    for (;;) {
        listen(lane, spin_us, idle_ms);
        if (swap_state(lane, NP_LANE_LISTENING, NP_LANE_AWAY) || state_of(lane) == NP_LANE_AWAY)
            return NP_E_TIMEOUT;
        while (state_of(lane) == NP_LANE_RESERVED)
            sched_yield();
        if (state_of(lane) != NP_LANE_GIVEN)
            continue;
        const int done = compute(w);
        if (done < 0) {
            __atomic_store_n(&lane->state, NP_LANE_AWAY, __ATOMIC_SEQ_CST);
            return done;
        }
        if (np_clock_ns() >= end)
            return NP_OK;
    }
}

int np_lane_serve_by(np_lane_compute *by, void *who, const np_lanes *lanes, uint32_t own, uint32_t spin_us, uint32_t idle_ms,
                     uint32_t serve_ms, np_lane_served *served)
{
    memset(served, 0, sizeof *served);
    if (own >= lanes->count || !lanes->tokens)
        return NP_E_ARGUMENT;
    const worker w = {by, who, lanes, own, malloc(3 * (size_t)lanes->tokens * sizeof(int32_t)), served};
    if (!w.numbers)
        return NP_E_MEMORY;
    const int done = serve(&w, spin_us, idle_ms, serve_ms);
    free(w.numbers);
    return done;
}

static int compute_by_engine(void *engine, const np_step *step, np_engine_counters *counters)
{
    np_engine_read_counters(engine, counters); /* a step that was abandoned left its own */
    const int done = np_engine_step(engine, step);
    if (done >= 0)
        np_engine_read_counters(engine, counters);
    return done;
}

int np_lane_serve(np_engine *engine, const np_lanes *lanes, uint32_t own, uint32_t spin_us, uint32_t idle_ms, uint32_t serve_ms,
                  np_lane_served *served)
{
    return np_lane_serve_by(compute_by_engine, engine, lanes, own, spin_us, idle_ms, serve_ms, served);
}

/* ---- the coordinator's side ----------------------------------------------------------------------------------------- */
static void wake(np_lane *lane)
{
    if (__atomic_load_n(&lane->sleepers, __ATOMIC_SEQ_CST))
        np_word_wake(&lane->state);
}

int np_lane_release(const np_lanes *lanes, uint32_t own)
{
    np_lane *lane = np_lane_at(lanes, own);
    if (!swap_state(lane, NP_LANE_LISTENING, NP_LANE_AWAY))
        return 0;
    wake(lane);
    return 1;
}

void np_lane_clear(const np_lanes *lanes, uint32_t own)
{
    np_lane *lane = np_lane_at(lanes, own);
    __atomic_store_n(&lane->state, NP_LANE_AWAY, __ATOMIC_SEQ_CST); /* a step that it did not answer stays unanswered */
    wake(lane);
}

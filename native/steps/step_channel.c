/* A decode worker's step channel: shared memory through which it receives steps and answers them, without messages.
 *
 * Ordering of results: a worker writes logits, keys, values and counters, stores `answered`, and then reads `answered`
 * of the other participants. These accesses are sequentially consistent, so of two workers that answer at the same time
 * the later one sees both answers and wakes the coordinator. A worker is LISTENING again before it answers: the
 * coordinator may send the next step as soon as it sees the answer.
 *
 * No wake-up is lost: a listener adds itself to `sleepers` and then reads `state`; the coordinator changes `state` and
 * then reads `sleepers`. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "neuronpipe.h"
#include "steps/step_channel.h"
#include "sync/clock.h"
#include "sync/wait.h"

enum { SPINS_PER_YIELD = 16 };

static size_t channel_bytes(uint32_t tokens)
{
    return (sizeof(np_step_channel) + NP_CHANNEL_NUMBERS * (size_t)tokens * sizeof(int32_t) + 63) & ~(size_t)63;
}

uint32_t np_channel_bytes(uint32_t tokens)
{
    return (uint32_t)channel_bytes(tokens);
}

np_step_channel *np_channel_at(const np_step_channels *channels, uint32_t number)
{
    return (np_step_channel *)(channels->memory + number * channel_bytes(channels->tokens));
}

int32_t *np_channel_numbers(const np_step_channels *channels, uint32_t number, int which)
{
    return (int32_t *)(np_channel_at(channels, number) + 1) + (size_t)which * channels->tokens;
}

static uint32_t state_of(const np_step_channel *channel)
{
    return __atomic_load_n(&channel->state, __ATOMIC_SEQ_CST);
}

static int swap_state(np_step_channel *channel, uint32_t from, uint32_t to)
{
    return __atomic_compare_exchange_n(&channel->state, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static int is_waiting(const np_step_channel *channel)
{
    const uint32_t state = state_of(channel);
    return state == NP_CHANNEL_LISTENING || state == NP_CHANNEL_RESERVED;
}

/* Wait for a step. While spinning, yield: the coordinator, the loader and clients may need this core. */
static void listen(np_step_channel *channel, uint32_t spin_us, uint32_t idle_ms)
{
    static const uint32_t no_epoch = 0;
    const uint64_t start = np_clock_ns(), idle_end = start + idle_ms * 1000000ull;
    while (np_clock_ns() - start < spin_us * 1000ull) {
        for (int spin = 0; spin < SPINS_PER_YIELD; spin++) {
            if (!is_waiting(channel))
                return;
            np_pause();
        }
        sched_yield();
    }
    for (uint64_t now = np_clock_ns(); is_waiting(channel); now = np_clock_ns()) {
        const uint32_t state = state_of(channel);
        if (state == NP_CHANNEL_LISTENING && now >= idle_end)
            return;
        if (state == NP_CHANNEL_LISTENING)
            np_wait_changed(&channel->state, state, &channel->sleepers, &no_epoch, 0, 0, (uint32_t)((idle_end - now) / 1000000u) + 1);
        else
            sched_yield(); /* the step is about to arrive */
    }
}

/* Wake the coordinator if all participants have answered. */
static void notify_if_last(const np_step_channels *channels, uint64_t participants)
{
    for (uint32_t i = 0; i < channels->count; i++) {
        const np_step_channel *other = np_channel_at(channels, i);
        if (participants >> i & 1 &&
            __atomic_load_n(&other->answered, __ATOMIC_SEQ_CST) != __atomic_load_n(&other->given, __ATOMIC_SEQ_CST))
            return;
    }
    __atomic_add_fetch(&channels->finished[0], 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&channels->finished[1], __ATOMIC_SEQ_CST))
        np_word_wake(&channels->finished[0]);
}

/* numbers: copies of the step's arrays. The engine validates them once; shared memory could change afterwards. */
typedef struct {
    np_compute_step *compute;
    void *context;
    const np_step_channels *channels;
    uint32_t number;
    int32_t *numbers;
    np_channel_progress *progress;
} worker;

static int compute_step(const worker *w)
{
    np_step_channel *channel = np_channel_at(w->channels, w->number);
    const uint32_t given = __atomic_load_n(&channel->given, __ATOMIC_SEQ_CST);
    const uint64_t participants = channel->channels;
    const np_step step = {
        .number = channel->number,
        .epoch = channel->epoch,
        .participants = channel->participants,
        .participant = channel->participant,
        .first_block = channel->first_block,
        .end_block = channel->end_block,
        .sharers = channel->sharers,
        .sharer = channel->sharer,
        .count = channel->count,
        .sequences = w->numbers,
        .positions = w->numbers + w->channels->tokens,
        .tokens = w->numbers + 2 * (size_t)w->channels->tokens,
        .states_from = w->numbers + 3 * (size_t)w->channels->tokens,
        .states_to = w->numbers + 4 * (size_t)w->channels->tokens,
        .logits_count = channel->count,
    };
    w->progress->step = step.number;
    w->progress->epoch = step.epoch;
    if (step.count > w->channels->tokens)
        return NP_E_ARGUMENT;
    memcpy(w->numbers, np_channel_numbers(w->channels, w->number, 0), NP_CHANNEL_NUMBERS * (size_t)w->channels->tokens * sizeof *w->numbers);
    const int done = w->compute(w->context, &step, &channel->counters);
    if (done < 0)
        return done;
    w->progress->computed++;
    __atomic_store_n(&channel->state, NP_CHANNEL_LISTENING, __ATOMIC_SEQ_CST);
    __atomic_store_n(&channel->answered, given, __ATOMIC_SEQ_CST);
    notify_if_last(w->channels, participants);
    return NP_OK;
}

static int serve(const worker *w, uint32_t spin_us, uint32_t idle_ms, uint32_t serve_ms)
{
    np_step_channel *channel = np_channel_at(w->channels, w->number);
    const uint64_t end = np_clock_ns() + serve_ms * 1000000ull;
    swap_state(channel, NP_CHANNEL_AWAY, NP_CHANNEL_LISTENING);
    for (;;) {
        listen(channel, spin_us, idle_ms);
        if (swap_state(channel, NP_CHANNEL_LISTENING, NP_CHANNEL_AWAY) || state_of(channel) == NP_CHANNEL_AWAY)
            return NP_E_TIMEOUT;
        while (state_of(channel) == NP_CHANNEL_RESERVED)
            sched_yield();
        if (state_of(channel) != NP_CHANNEL_GIVEN)
            continue;
        const int done = compute_step(w);
        if (done < 0) {
            __atomic_store_n(&channel->state, NP_CHANNEL_AWAY, __ATOMIC_SEQ_CST);
            return done;
        }
        if (np_clock_ns() >= end)
            return NP_OK;
    }
}

int np_serve_channel(np_compute_step *compute, void *context, const np_step_channels *channels, uint32_t number, uint32_t spin_us, uint32_t idle_ms,
                     uint32_t serve_ms, np_channel_progress *progress)
{
    memset(progress, 0, sizeof *progress);
    if (number >= channels->count || !channels->tokens)
        return NP_E_ARGUMENT;
    const worker w = {compute, context, channels, number, malloc(NP_CHANNEL_NUMBERS * (size_t)channels->tokens * sizeof(int32_t)), progress};
    if (!w.numbers)
        return NP_E_MEMORY;
    const int done = serve(&w, spin_us, idle_ms, serve_ms);
    free(w.numbers);
    return done;
}

static int compute_by_engine(void *engine, const np_step *step, np_engine_counters *counters)
{
    np_engine_read_counters(engine, counters); /* discards those of an abandoned step */
    const int done = np_engine_step(engine, step);
    if (done >= 0)
        np_engine_read_counters(engine, counters);
    return done;
}

int np_channel_serve(np_engine *engine, const np_step_channels *channels, uint32_t number, uint32_t spin_us, uint32_t idle_ms, uint32_t serve_ms,
                  np_channel_progress *progress)
{
    return np_serve_channel(compute_by_engine, engine, channels, number, spin_us, idle_ms, serve_ms, progress);
}

/* ---- the coordinator's side ----------------------------------------------------------------------------------------- */
static void wake(np_step_channel *channel)
{
    if (__atomic_load_n(&channel->sleepers, __ATOMIC_SEQ_CST))
        np_word_wake(&channel->state);
}

int np_channel_release(const np_step_channels *channels, uint32_t number)
{
    np_step_channel *channel = np_channel_at(channels, number);
    if (!swap_state(channel, NP_CHANNEL_LISTENING, NP_CHANNEL_AWAY))
        return 0;
    wake(channel);
    return 1;
}

void np_channel_clear(const np_step_channels *channels, uint32_t number)
{
    np_step_channel *channel = np_channel_at(channels, number);
    __atomic_store_n(&channel->state, NP_CHANNEL_AWAY, __ATOMIC_SEQ_CST); /* an unanswered step stays unanswered */
    wake(channel);
}

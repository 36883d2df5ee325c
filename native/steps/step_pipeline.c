/* The coordinator's side of step channels: a thread that waits for the answers to a step, samples and sends the next
 * step, so that only a few native calls lie between two steps. Python prepares the next step while the current one is
 * computed, and reads the results of the current one while the next is computed.
 *
 *   IDLE      no step is under way
 *   WATCHING  a step was sent; is_armed: the next one is prepared
 *   FINISHED  all participants have answered; `result` says what the thread did
 *
 * The lock guards all of these. The thread holds it while it samples and sends the next step, so that a caller finds
 * either nothing done or all of it. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "neuronpipe.h"
#include "process/thread.h"
#include "sync/clock.h"
#include "sync/wait.h"

enum { STACK_BYTES = 256 << 10, POLL_MS = 100, MAX_CHANNELS = 64 };
typedef enum { IDLE, WATCHING, FINISHED } pipeline_state;

struct np_step_pipeline {
    np_pipeline_config config;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t sent;
    int ending;
    pipeline_state state;
    uint64_t generation; /* grows with every step, so that the thread notices a change while it waited without the lock */
    uint64_t channels;
    uint32_t epoch, count;
    int is_armed;
    np_pipeline_next next;
    np_pipeline_result result;
    int32_t *tokens;
    np_engine_counters *counters; /* by channel */
    int32_t *collected_tokens;        /* of the last collected step: the thread may be writing the next one's */
    np_engine_counters *collected_counters;
};

static np_step_channel *channel_at(const np_step_pipeline *pipeline, uint32_t number)
{
    return np_channel_at(&pipeline->config.channels, number);
}

static int has(uint64_t channels, uint32_t number)
{
    return (int)(channels >> number & 1);
}

static uint64_t answered(const np_step_pipeline *pipeline, uint64_t channels)
{
    uint64_t mask = 0;
    for (uint32_t i = 0; i < pipeline->config.channels.count; i++) {
        const np_step_channel *channel = channel_at(pipeline, i);
        if (has(channels, i) && __atomic_load_n(&channel->answered, __ATOMIC_SEQ_CST) == __atomic_load_n(&channel->given, __ATOMIC_SEQ_CST))
            mask |= 1ull << i;
    }
    return mask;
}

static void copy_counters(np_step_pipeline *pipeline, uint64_t channels)
{
    for (uint32_t i = 0; i < pipeline->config.channels.count; i++)
        if (has(channels, i))
            pipeline->counters[i] = channel_at(pipeline, i)->counters;
}

/* ---- sending --------------------------------------------------------------------------------------------------------- */
static int swap_state(np_step_channel *channel, uint32_t from, uint32_t to)
{
    return __atomic_compare_exchange_n(&channel->state, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Reserve all channels or none: a step must not be sent partly by channels and partly by messages. */
static int reserve(np_step_pipeline *pipeline, uint64_t channels)
{
    uint32_t i = 0;
    while (i < pipeline->config.channels.count && (!has(channels, i) || swap_state(channel_at(pipeline, i), NP_CHANNEL_LISTENING, NP_CHANNEL_RESERVED)))
        i++;
    if (i == pipeline->config.channels.count)
        return 1;
    while (i-- > 0)
        if (has(channels, i))
            swap_state(channel_at(pipeline, i), NP_CHANNEL_RESERVED, NP_CHANNEL_LISTENING);
    return 0;
}

/* Reset barrier and claims. All channels are reserved, so no participant is computing. */
static void reset(const np_step_pipeline *pipeline)
{
    np_barrier_reset(pipeline->config.barrier);
    memset(pipeline->config.claims, 0, pipeline->config.claim_count * sizeof *pipeline->config.claims);
}

static void publish_step(np_step_pipeline *pipeline, uint64_t channels)
{
    for (uint32_t i = 0; i < pipeline->config.channels.count; i++)
        if (has(channels, i))
            __atomic_add_fetch(&channel_at(pipeline, i)->given, 1, __ATOMIC_SEQ_CST);
    for (uint32_t i = 0; i < pipeline->config.channels.count; i++) {
        np_step_channel *channel = channel_at(pipeline, i);
        if (!has(channels, i))
            continue;
        __atomic_store_n(&channel->state, NP_CHANNEL_GIVEN, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&channel->sleepers, __ATOMIC_SEQ_CST))
            np_word_wake(&channel->state);
    }
}

static void write_step(np_step_pipeline *pipeline, uint64_t channels, uint32_t i, const np_step *step)
{
    np_step_channel *channel = channel_at(pipeline, i);
    channel->number = step->number;
    channel->channels = channels;
    channel->epoch = step->epoch;
    channel->participants = step->participants;
    channel->participant = step->participant;
    channel->first_block = step->first_block;
    channel->end_block = step->end_block;
    channel->sharers = step->sharers;
    channel->sharer = step->sharer;
    channel->count = step->count;
    const int32_t *const numbers[] = {step->sequences, step->positions, step->tokens, step->states_from, step->states_to};
    for (int which = 0; which < NP_CHANNEL_NUMBERS; which++)
        if (numbers[which])
            memcpy(np_channel_numbers(&pipeline->config.channels, i, which), numbers[which], step->count * sizeof(int32_t));
}

static int are_valid(const np_step_pipeline *pipeline, uint64_t channels, const np_step *steps)
{
    const np_step_channels *l = &pipeline->config.channels;
    if (!channels || (l->count < MAX_CHANNELS && channels >> l->count))
        return 0;
    for (int n = 0; n < __builtin_popcountll(channels); n++)
        if (!steps[n].count || steps[n].count > l->tokens || steps[n].count != steps[0].count || steps[n].epoch != steps[0].epoch)
            return 0;
    return 1;
}

int np_pipeline_send(np_step_pipeline *pipeline, uint64_t channels, const np_step *steps)
{
    if (!are_valid(pipeline, channels, steps))
        return NP_E_ARGUMENT;
    if (!reserve(pipeline, channels)) {
        for (uint32_t i = 0; i < pipeline->config.channels.count; i++)
            if (has(channels, i))
                np_channel_release(&pipeline->config.channels, i);
        return 0;
    }
    reset(pipeline);
    for (uint32_t i = 0, n = 0; i < pipeline->config.channels.count; i++)
        if (has(channels, i))
            write_step(pipeline, channels, i, &steps[n++]);
    pthread_mutex_lock(&pipeline->lock);
    pipeline->state = WATCHING;
    pipeline->generation++;
    pipeline->channels = channels;
    pipeline->epoch = steps[0].epoch;
    pipeline->count = steps[0].count;
    pipeline->is_armed = 0;
    publish_step(pipeline, channels);
    pthread_cond_signal(&pipeline->sent);
    pthread_mutex_unlock(&pipeline->lock);
    return 1;
}

/* ---- the next step ----------------------------------------------------------------------------------------------------- */
static int ends(const np_pipeline_next *next, int32_t token)
{
    for (uint32_t i = 0; i < next->end_count; i++)
        if (next->ends[i] == token)
            return 1;
    return 0;
}

/* Sample all rows. Returns 1 if no sequence ends. */
static int sample(np_step_pipeline *pipeline)
{
    const np_pipeline_config *c = &pipeline->config;
    const np_pipeline_next *next = &pipeline->next;
    int all_continue = 1;
    for (uint32_t row = 0; row < next->count; row++) {
        const float *logits = c->logits + (size_t)row * c->vocabulary;
        pipeline->tokens[row] = np_sample(logits, c->vocabulary, &next->how[row], next->uniforms[row], c->scratch);
        all_continue &= pipeline->tokens[row] >= 0 && !ends(next, pipeline->tokens[row]);
    }
    pipeline->result.sampled = 1;
    pipeline->result.sampled_ns = np_clock_ns();
    return all_continue;
}

static void send_next(np_step_pipeline *pipeline)
{
    if (__atomic_load_n(pipeline->config.epoch, __ATOMIC_ACQUIRE) != pipeline->epoch || !reserve(pipeline, pipeline->channels))
        return;
    reset(pipeline);
    for (uint32_t i = 0; i < pipeline->config.channels.count; i++) {
        if (!has(pipeline->channels, i))
            continue;
        channel_at(pipeline, i)->number = pipeline->next.number;
        memcpy(np_channel_numbers(&pipeline->config.channels, i, 1), pipeline->next.positions, pipeline->count * sizeof(int32_t));
        memcpy(np_channel_numbers(&pipeline->config.channels, i, 2), pipeline->tokens, pipeline->count * sizeof(int32_t));
        const int32_t *const states[] = {pipeline->next.states_from, pipeline->next.states_to};
        for (int which = 0; which < 2; which++)
            if (states[which])
                memcpy(np_channel_numbers(&pipeline->config.channels, i, 3 + which), states[which], pipeline->count * sizeof(int32_t));
    }
    publish_step(pipeline, pipeline->channels);
    pipeline->result.next_sent = 1;
    pipeline->result.next_sent_ns = np_clock_ns();
}

/* All participants have answered; the lock is held. Counters are copied first, because the next step overwrites
 * them. */
static void finish(np_step_pipeline *pipeline)
{
    copy_counters(pipeline, pipeline->channels);
    pipeline->result = (np_pipeline_result){.channels = pipeline->channels, .all_answered = 1, .done_ns = np_clock_ns()};
    if (pipeline->is_armed && sample(pipeline))
        send_next(pipeline);
    pipeline->is_armed = 0;
    pipeline->state = FINISHED;
}

/* Wait a while for the answers. Returns 1 if all are there, 0 if not, -1 if the epoch changed. */
static int wait_for(np_step_pipeline *pipeline, uint64_t channels, uint32_t epoch)
{
    uint32_t *finished = pipeline->config.channels.finished;
    const uint32_t count = np_word_load(finished);
    if (answered(pipeline, channels) == channels)
        return 1;
    const int why = np_wait_changed(finished, count, finished + 1, pipeline->config.epoch, epoch, 0, POLL_MS);
    return why == NP_E_EPOCH ? -1 : answered(pipeline, channels) == channels;
}

static void *run(void *argument)
{
    np_step_pipeline *pipeline = argument;
    pthread_mutex_lock(&pipeline->lock);
    while (!pipeline->ending) {
        if (pipeline->state != WATCHING) {
            pthread_cond_wait(&pipeline->sent, &pipeline->lock);
            continue;
        }
        const uint64_t generation = pipeline->generation, channels = pipeline->channels;
        const uint32_t epoch = pipeline->epoch;
        pthread_mutex_unlock(&pipeline->lock);
        const int done = wait_for(pipeline, channels, epoch);
        pthread_mutex_lock(&pipeline->lock);
        if (pipeline->ending || pipeline->state != WATCHING || pipeline->generation != generation || !done)
            continue;
        if (done > 0)
            finish(pipeline);
        else
            pipeline->state = IDLE; /* the epoch changed: participants abandon the step, and may answer by message */
        pthread_mutex_unlock(&pipeline->lock); /* the woken thread needs it */
        const ssize_t ignored = write(pipeline->config.wake, "", 1); /* a full pipe is readable, too */
        (void)ignored;
        pthread_mutex_lock(&pipeline->lock);
    }
    pthread_mutex_unlock(&pipeline->lock);
    return NULL;
}

int np_pipeline_arm(np_step_pipeline *pipeline, const np_pipeline_next *next)
{
    pthread_mutex_lock(&pipeline->lock);
    const int fits = pipeline->state == WATCHING && next->count == pipeline->count;
    if (fits) {
        pipeline->next = *next;
        pipeline->is_armed = 1;
    }
    pthread_mutex_unlock(&pipeline->lock);
    return fits ? NP_OK : NP_E_ARGUMENT;
}

void np_pipeline_collect(np_step_pipeline *pipeline, np_pipeline_result *result)
{
    pthread_mutex_lock(&pipeline->lock);
    pipeline->is_armed = 0;
    if (pipeline->state == FINISHED) {
        *result = pipeline->result;
        pipeline->state = result->next_sent ? WATCHING : IDLE;
        pipeline->generation++;
        pthread_cond_signal(&pipeline->sent);
    } else {
        const uint64_t channels = answered(pipeline, pipeline->channels);
        copy_counters(pipeline, channels);
        *result = (np_pipeline_result){.channels = channels, .all_answered = channels == pipeline->channels, .done_ns = np_clock_ns()};
        if (result->all_answered)
            pipeline->state = IDLE;
    }
    memcpy(pipeline->collected_tokens, pipeline->tokens, pipeline->config.channels.tokens * sizeof *pipeline->tokens);
    memcpy(pipeline->collected_counters, pipeline->counters, pipeline->config.channels.count * sizeof *pipeline->counters);
    result->tokens = pipeline->collected_tokens;
    result->counters = pipeline->collected_counters;
    pthread_mutex_unlock(&pipeline->lock);
}

/* ---- creating and destroying ----------------------------------------------------------------------------------------------------------- */
static void release(np_step_pipeline *pipeline)
{
    pthread_cond_destroy(&pipeline->sent);
    pthread_mutex_destroy(&pipeline->lock);
    free(pipeline->tokens);
    free(pipeline->collected_tokens);
    free(pipeline->counters);
    free(pipeline->collected_counters);
    free(pipeline);
}

np_step_pipeline *np_pipeline_create(const np_pipeline_config *config)
{
    const np_step_channels *channels = &config->channels;
    if (!channels->count || channels->count > MAX_CHANNELS || !channels->tokens)
        return NULL;
    np_step_pipeline *pipeline = calloc(1, sizeof *pipeline);
    if (!pipeline)
        return NULL;
    pipeline->config = *config;
    pipeline->tokens = calloc(channels->tokens, sizeof *pipeline->tokens);
    pipeline->collected_tokens = calloc(channels->tokens, sizeof *pipeline->tokens);
    pipeline->counters = calloc(channels->count, sizeof *pipeline->counters);
    pipeline->collected_counters = calloc(channels->count, sizeof *pipeline->counters);
    pthread_mutex_init(&pipeline->lock, NULL);
    pthread_cond_init(&pipeline->sent, NULL);
    if (pipeline->tokens && pipeline->collected_tokens && pipeline->counters && pipeline->collected_counters &&
        np_thread_start(&pipeline->thread, STACK_BYTES, run, pipeline) == 0)
        return pipeline;
    release(pipeline);
    return NULL;
}

void np_pipeline_destroy(np_step_pipeline *pipeline)
{
    if (!pipeline)
        return;
    pthread_mutex_lock(&pipeline->lock);
    pipeline->ending = 1;
    pthread_cond_signal(&pipeline->sent);
    pthread_mutex_unlock(&pipeline->lock);
    pthread_join(pipeline->thread, NULL); /* it wakes every POLL_MS */
    release(pipeline);
}

/* The io_uring engine, by plain system calls. Needs Linux 5.5; on older kernels, or where io_uring is forbidden,
 * opening fails.
 *
 * Faster modes are used where the kernel has them: completing reads in this thread's calls instead of interrupting it
 * (5.19, 6.1), a registered file, registered memory (within the limit on locked memory).
 *
 * Two rings are shared with the kernel:
 *   word              moved by        publishes
 *   submission tail   us, release     the entries before it
 *   submission head   the kernel      that it has read the entries before it (counted here, by io_uring_enter's result)
 *   completion tail   the kernel      the entries before it, and the bytes that they are about: load acquire
 *   completion head   us, release     that we have read the entries before it
 */
#include <errno.h>
#include <linux/io_uring.h>
#include <linux/time_types.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "flash/reader.h"

typedef struct {
    int ring;
    void *rings, *entries; /* mappings */
    size_t rings_bytes, entries_bytes;
    uint32_t *submission_tail, *submission_flags, submission_mask;
    uint32_t *completion_head, *completion_tail, completion_mask;
    struct io_uring_sqe *submissions;
    struct io_uring_cqe *completions;
    uint32_t tail;      /* our submission tail */
    uint32_t unsubmitted;  /* entries before the tail that the kernel has not accepted yet */
    uint32_t *refused;  /* [depth] requests that the kernel did not accept */
    uint32_t refused_count;
    int refused_error;
    int defers;         /* reads complete in this thread's calls only (DEFER_TASKRUN); implies the next */
    int needs_call;    /* completed reads appear after a call of this thread; the kernel sets a flag when one is needed */
    int has_file, has_memory; /* registered, as number 0 each: of files only the first */
} ring_state;

/* Newer than some systems' headers. */
#ifndef IORING_SQ_TASKRUN
#define IORING_SQ_TASKRUN (1u << 2)
#endif
enum {
    COOP_TASKRUN = 1u << 8,
    TASKRUN_FLAG = 1u << 9,
    SINGLE_ISSUER = 1u << 12,
    DEFER_TASKRUN = 1u << 13,
};

static volatile sig_atomic_t setup_trapped;

static void on_trapped_call(int signal)
{
    setup_trapped = 1;
}

/* Android's app sandbox answers io_uring_setup with SIGSYS, which kills the process by default. The signal arrives in
 * this thread during the call; when the handler returns, execution continues after the call. */
static int setup(uint32_t entries, struct io_uring_params *params)
{
    struct sigaction handler = {.sa_handler = on_trapped_call}, before;
    sigset_t trapped, mask;
    sigemptyset(&handler.sa_mask);
    sigemptyset(&trapped);
    sigaddset(&trapped, SIGSYS);
    setup_trapped = 0;
    sigaction(SIGSYS, &handler, &before);
    pthread_sigmask(SIG_UNBLOCK, &trapped, &mask); /* a blocked SIGSYS would kill the process, too */
    const long ring = syscall(SYS_io_uring_setup, entries, params);
    const int error = errno;
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    sigaction(SIGSYS, &before, NULL);
    if (setup_trapped)
        return -EPERM; /* the call returned nothing meaningful */
    return ring < 0 ? -error : (int)ring;
}

static void ring_unmap(ring_state *state)
{
    if (state->rings != MAP_FAILED)
        munmap(state->rings, state->rings_bytes);
    if (state->entries != MAP_FAILED)
        munmap(state->entries, state->entries_bytes);
    close(state->ring);
    free(state->refused);
    free(state);
}

static int ring_map(ring_state *state, const struct io_uring_params *params)
{
    const size_t submission_bytes = params->sq_off.array + params->sq_entries * sizeof(uint32_t);
    const size_t completion_bytes = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    state->rings_bytes = submission_bytes > completion_bytes ? submission_bytes : completion_bytes;
    state->entries_bytes = params->sq_entries * sizeof(struct io_uring_sqe);
    const int flags = MAP_SHARED | MAP_POPULATE;
    state->rings = mmap(NULL, state->rings_bytes, PROT_READ | PROT_WRITE, flags, state->ring, IORING_OFF_SQ_RING);
    state->entries = mmap(NULL, state->entries_bytes, PROT_READ | PROT_WRITE, flags, state->ring, IORING_OFF_SQES);
    if (state->rings == MAP_FAILED || state->entries == MAP_FAILED)
        return errno;
    uint8_t *base = state->rings;
    state->submission_tail = (uint32_t *)(base + params->sq_off.tail);
    state->submission_flags = (uint32_t *)(base + params->sq_off.flags);
    state->submission_mask = params->sq_entries - 1;
    state->completion_head = (uint32_t *)(base + params->cq_off.head);
    state->completion_tail = (uint32_t *)(base + params->cq_off.tail);
    state->completion_mask = params->cq_entries - 1;
    state->submissions = state->entries;
    state->completions = (struct io_uring_cqe *)(base + params->cq_off.cqes);
    uint32_t *order = (uint32_t *)(base + params->sq_off.array);
    for (uint32_t i = 0; i < params->sq_entries; i++)
        order[i] = i; /* entries are used in ring order, so this never changes */
    return 0;
}

static int ring_open(np_reader *reader)
{
    static const uint32_t modes[] = {SINGLE_ISSUER | DEFER_TASKRUN | TASKRUN_FLAG, COOP_TASKRUN | TASKRUN_FLAG, 0}; /* best first */
    struct io_uring_params params;
    int ring = -EINVAL;
    for (size_t i = 0; i < sizeof modes / sizeof *modes && ring == -EINVAL; i++) {
        params = (struct io_uring_params){.flags = modes[i]};
        ring = setup(reader->depth, &params);
    }
    if (ring < 0)
        return -ring;
    ring_state *state = calloc(1, sizeof *state);
    uint32_t *refused = calloc(reader->depth, sizeof *refused);
    const uint32_t needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
    if (!state || !refused || (params.features & needed) != needed) {
        free(state);
        free(refused);
        close(ring);
        return (params.features & needed) != needed ? ENOSYS : ENOMEM;
    }
    *state = (ring_state){.ring = ring, .rings = MAP_FAILED, .entries = MAP_FAILED, .refused = refused};
    const int error = ring_map(state, &params);
    if (error) {
        ring_unmap(state);
        return error;
    }
    state->defers = (params.flags & DEFER_TASKRUN) != 0;
    state->needs_call = (params.flags & TASKRUN_FLAG) != 0;
    state->has_file = syscall(SYS_io_uring_register, ring, IORING_REGISTER_FILES, &reader->files[0], 1) == 0;
    reader->engine = state;
    return 0;
}

/* On errors has_memory stays 0: reads then pass their memory one by one. */
static int ring_register_memory(np_reader *reader)
{
    ring_state *state = reader->engine;
    if (state->has_memory)
        syscall(SYS_io_uring_register, state->ring, IORING_UNREGISTER_BUFFERS, NULL, 0);
    const struct iovec memory = {reader->memory, reader->memory_bytes};
    state->has_memory = reader->memory && syscall(SYS_io_uring_register, state->ring, IORING_REGISTER_BUFFERS, &memory, 1) == 0;
    return state->has_memory;
}

static void ring_close(np_reader *reader)
{
    ring_unmap(reader->engine);
}

static void ring_start(np_reader *reader, uint32_t index)
{
    ring_state *state = reader->engine;
    np_request *request = &reader->requests[index];
    const uintptr_t at = (uintptr_t)request->piece.iov_base, memory = (uintptr_t)reader->memory;
    const int fixed = state->has_memory && at >= memory && at - memory <= reader->memory_bytes &&
                      reader->memory_bytes - (at - memory) >= request->piece.iov_len;
    const uint32_t file = np_file_number(request->offset);
    const int is_registered = state->has_file && file == 0;
    state->submissions[state->tail & state->submission_mask] = (struct io_uring_sqe){
        .opcode = fixed ? IORING_OP_READ_FIXED : IORING_OP_READV, /* IORING_OP_READ came later, in 5.6 */
        .flags = is_registered ? IOSQE_FIXED_FILE : 0,
        .fd = is_registered ? 0 : reader->files[file],
        .off = np_place_in_file(request->offset) + request->done,
        .addr = fixed ? at : (uintptr_t)&request->piece,
        .len = fixed ? (uint32_t)request->piece.iov_len : 1,
        .user_data = index,
    };
    state->tail++;
    state->unsubmitted++;
}

static void ring_flush(np_reader *reader)
{
    ring_state *state = reader->engine;
    if (!state->unsubmitted)
        return;
    __atomic_store_n(state->submission_tail, state->tail, __ATOMIC_RELEASE);
    while (state->unsubmitted) {
        const long taken = syscall(SYS_io_uring_enter, state->ring, state->unsubmitted, 0, 0, NULL, 0);
        if (taken > 0) {
            state->unsubmitted -= (uint32_t)taken;
        } else if (taken == 0 || errno == EAGAIN || errno == EBUSY) {
            return; /* out of memory, or completions must be reaped first: the next flush tries again */
        } else if (errno != EINTR) {
            state->refused_error = -errno;
            for (; state->unsubmitted; state->unsubmitted--) { /* withdraw them: the kernel reads the ring during calls only */
                const uint32_t at = --state->tail & state->submission_mask;
                state->refused[state->refused_count++] = (uint32_t)state->submissions[at].user_data;
            }
            __atomic_store_n(state->submission_tail, state->tail, __ATOMIC_RELEASE);
        }
    }
}

static int ring_take(np_reader *reader, uint32_t *index, int32_t *result)
{
    ring_state *state = reader->engine;
    if (state->refused_count) {
        *index = state->refused[--state->refused_count];
        *result = state->refused_error;
        return 1;
    }
    const uint32_t head = *state->completion_head; /* only this thread moves it */
    if (head == __atomic_load_n(state->completion_tail, __ATOMIC_ACQUIRE)) {
        if (!state->needs_call || !(__atomic_load_n(state->submission_flags, __ATOMIC_RELAXED) & IORING_SQ_TASKRUN))
            return 0;
        syscall(SYS_io_uring_enter, state->ring, 0, 0, IORING_ENTER_GETEVENTS, NULL, 0);
        if (head == __atomic_load_n(state->completion_tail, __ATOMIC_ACQUIRE))
            return 0;
    }
    const struct io_uring_cqe *entry = &state->completions[head & state->completion_mask];
    *index = (uint32_t)entry->user_data;
    *result = entry->res;
    __atomic_store_n(state->completion_head, head + 1, __ATOMIC_RELEASE);
    return 1;
}

static void enter_until(const ring_state *state, uint32_t min_count, int64_t limit_ns)
{
    const struct __kernel_timespec limit = {limit_ns / 1000000000, limit_ns % 1000000000};
    const struct io_uring_getevents_arg until = {.ts = limit_ns < 0 ? 0 : (uintptr_t)&limit};
    syscall(SYS_io_uring_enter, state->ring, 0, min_count, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &until, sizeof until);
}

static void ring_wait(np_reader *reader, int timeout_ms)
{
    const ring_state *state = reader->engine;
    if (state->refused_count)
        return;
    const int wait_ms = state->unsubmitted ? 1 : timeout_ms; /* unsubmitted entries must be retried soon */
    if (state->defers) { /* poll would not return for reads that complete in this thread's calls only */
        enter_until(state, 1, wait_ms < 0 ? -1 : wait_ms * 1000000ll);
        return;
    }
    struct pollfd ready = {.fd = state->ring, .events = POLLIN};
    poll(&ready, 1, wait_ms);
}

static void ring_collect(np_reader *reader, uint32_t min_count, uint32_t max_us)
{
    const ring_state *state = reader->engine;
    if (state->defers && !state->refused_count)
        enter_until(state, min_count, max_us * 1000ll);
}

static int ring_watch(np_reader *reader, int event)
{
    const ring_state *state = reader->engine;
    return syscall(SYS_io_uring_register, state->ring, IORING_REGISTER_EVENTFD, &event, 1) < 0 ? errno : 0;
}

const np_reader_engine_calls np_engine_io_uring = {
    .name = "io_uring", .open = ring_open, .close = ring_close, .start = ring_start, .flush = ring_flush,
    .take = ring_take, .wait = ring_wait, .watch = ring_watch, .collect = ring_collect,
    .register_memory = ring_register_memory,
};

/* The latest spans of a process, in shared memory: one writer, no locks. A reader that is overtaken sees it by `next`. */
#include <string.h>

#include "neuronpipe.h"
#include "sync/clock.h"

uint64_t np_trace_now(void)
{
    return np_clock_ns();
}

void np_trace_put(const np_trace *trace, int kind, uint32_t layer, uint32_t value, uint64_t step, uint64_t start_ns)
{
    if (trace->capacity)
        np_trace_add(trace, kind, layer, value, step, start_ns, np_clock_ns());
}

void np_trace_add(const np_trace *trace, int kind, uint32_t layer, uint32_t value, uint64_t step, uint64_t start_ns, uint64_t end_ns)
{
    if (!trace->capacity)
        return;
    const uint64_t next = __atomic_load_n(trace->next, __ATOMIC_RELAXED);
    /* A reader that sees any byte of this span must also see that the one before it was put: it tells by `next` what is being overwritten. */
    __atomic_thread_fence(__ATOMIC_RELEASE);
    trace->spans[next & (trace->capacity - 1)] = (np_span){
        .start_ns = start_ns,
        .end_ns = end_ns,
        .kind = (uint16_t)kind,
        .layer = (uint16_t)layer,
        .value = value,
        .step = step,
    };
    __atomic_store_n(trace->next, next + 1, __ATOMIC_RELEASE);
}

int64_t np_trace_take(const np_trace *trace, uint64_t *from, np_span *out)
{
    const uint64_t capacity = trace->capacity;
    if (!capacity)
        return 0;
    const uint64_t end = __atomic_load_n(trace->next, __ATOMIC_ACQUIRE);
    if (*from > end)
        return NP_E_ARGUMENT;
    const uint64_t first = end - *from > capacity ? end - capacity : *from;
    for (uint64_t number = first; number < end; number++)
        out[number - first] = trace->spans[number & (capacity - 1)];
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    /* Meanwhile the writer has put spans up to `now` and may be at the one after: whatever that overwrites is not whole. */
    const uint64_t now = __atomic_load_n(trace->next, __ATOMIC_RELAXED);
    const uint64_t whole = now + 1 > capacity ? now + 1 - capacity : 0;
    const uint64_t kept = whole <= first ? first : whole < end ? whole : end;
    memmove(out, out + (kept - first), (size_t)(end - kept) * sizeof *out);
    *from = kept;
    return (int64_t)(end - kept);
}

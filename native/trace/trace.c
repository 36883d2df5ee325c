/* A ring of a process's latest spans, in shared memory: one writer, no locks. A reader notices by `next` that it was
 * overtaken. */
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
    /* A reader that sees a byte of this span must also see the `next` of the span before, by which it knows what is
     * being overwritten. */
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
    /* Meanwhile the writer has put spans up to `now` and may be writing one more: those that it overwrites are not
     * intact. */
    const uint64_t now = __atomic_load_n(trace->next, __ATOMIC_RELAXED);
    const uint64_t intact = now + 1 > capacity ? now + 1 - capacity : 0;
    const uint64_t start = intact <= first ? first : intact < end ? intact : end;
    memmove(out, out + (start - first), (size_t)(end - start) * sizeof *out);
    *from = start;
    return (int64_t)(end - start);
}

/* The latest spans of a process, in shared memory: one writer, no locks. A reader that is overtaken sees it by `next`. */
#include "neuronpipe.h"
#include "sync/clock.h"

uint64_t np_trace_now(void)
{
    return np_clock_ns();
}

void np_trace_put(const np_trace *trace, int kind, uint32_t layer, uint32_t value, uint64_t step, uint64_t start_ns)
{
    if (!trace->capacity)
        return;
    const uint64_t next = __atomic_load_n(trace->next, __ATOMIC_RELAXED);
    trace->spans[next & (trace->capacity - 1)] = (np_span){
        .start_ns = start_ns,
        .end_ns = np_clock_ns(),
        .kind = (uint16_t)kind,
        .layer = (uint16_t)layer,
        .value = value,
        .step = step,
    };
    __atomic_store_n(trace->next, next + 1, __ATOMIC_RELEASE);
}

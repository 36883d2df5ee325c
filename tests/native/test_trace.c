/* A ring of spans read while it is written: copied spans are intact and in order, and gaps are reported. */
#include <pthread.h>

#include "neuronpipe.h"
#include "require.h"

enum { CAPACITY = 16, SPANS = 300000 };

static uint64_t next;
static np_span spans[CAPACITY];
static const np_trace trace = {.next = &next, .spans = spans, .capacity = CAPACITY};

static void *write_all(void *unused)
{
    (void)unused;
    for (uint32_t number = 0; number < SPANS; number++)
        np_trace_put(&trace, NP_SPAN_NEURONS, number & 0x7fff, number, number, number);
    return NULL;
}

/* Every field of span `number` contains the number. */
static void check_span(const np_span *span, uint64_t number)
{
    REQUIRE_EQUAL(span->step, number);
    REQUIRE_EQUAL(span->start_ns, number);
    REQUIRE_EQUAL(span->value, number);
    REQUIRE_EQUAL(span->layer, number & 0x7fff);
    REQUIRE_EQUAL(span->kind, NP_SPAN_NEURONS);
}

int main(void)
{
    np_span out[CAPACITY];
    uint64_t from = 0;
    const np_trace none = {0};
    np_trace_put(&none, NP_SPAN_STEP, 0, 0, 0, 0);
    REQUIRE_EQUAL(np_trace_take(&none, &from, out), 0);
    from = 1;
    REQUIRE_EQUAL(np_trace_take(&trace, &from, out), NP_E_ARGUMENT);

    pthread_t writer;
    REQUIRE(pthread_create(&writer, NULL, write_all, NULL) == 0);
    uint64_t seen = 0, end_ns = 0;
    from = 0;
    while (from < SPANS) {
        const uint64_t asked = from;
        const int64_t count = np_trace_take(&trace, &from, out);
        REQUIRE(count >= 0 && count <= CAPACITY);
        REQUIRE(from >= asked);
        for (int64_t n = 0; n < count; n++) {
            check_span(&out[n], from + (uint64_t)n);
            REQUIRE(out[n].end_ns >= end_ns);
            end_ns = out[n].end_ns;
        }
        from += (uint64_t)count;
        seen += (uint64_t)count;
    }
    pthread_join(writer, NULL);
    REQUIRE(seen > 0);

    from = 0; /* at rest: all but the one that a writer could be overwriting */
    REQUIRE_EQUAL(np_trace_take(&trace, &from, out), CAPACITY - 1);
    REQUIRE_EQUAL(from, SPANS - (CAPACITY - 1));
    printf("%llu of %d spans read while they were written\n", (unsigned long long)seen, SPANS);
    return 0;
}

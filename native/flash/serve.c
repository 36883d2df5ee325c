/* The loader's main loop between two messages: turns while there is work, else sleep.
 *
 * No request is missed: the loader sets `asleep` and then reads every tail; a worker advances its tail and then reads
 * `asleep`; all accesses are sequentially consistent, so one of the two sees the other (requests.c). If a worker dies
 * between clearing `asleep` and ringing the doorbell, the sleep ends with the timeout. */
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <unistd.h>

#include "flash/drain.h"
#include "flash/loader.h"
#include "flash/queues.h"
#include "flash/reader.h"
#include "flash/slot_pages.h"
#include "sync/clock.h"

enum {
    MAX_DESCRIPTORS = 8,
    TURNS_PER_POLL = 64, /* while spinning: messages are less urgent than reads */
    BUSY_READS = 16,     /* with so many in flight flash stays busy while half of them are collected by one call, */
    MAX_COLLECT = 32,
    COLLECT_US = 200,    /* for at most this long: neither messages nor requests are handled meanwhile */
    MAPPED_AT_ONCE = 2 << 20, /* bytes of slots: a fraction of a millisecond, for which a request may have to wait */
};

typedef struct {
    uint32_t free, waiting;
} slot_counts;

/* True if the cache should be told the number of free slots. */
static int slots_are_short(const np_loader *loader, const slot_counts *before)
{
    for (int i = 0; i < NP_LOADER_PARTS; i++) {
        const np_part_state *part = &loader->parts[i];
        const uint32_t step = before[i].free / 4 + 1;
        if (part->free_count + step <= before[i].free || (part->free_count == 0 && np_loader_count_waiting(loader, i) > before[i].waiting))
            return 1;
    }
    return 0;
}

/* Empty a signalled descriptor. The next turn finds what it announced. */
static void clear_signal(int descriptor)
{
    char notices[256];
    const ssize_t bytes = read(descriptor, notices, sizeof notices);
    (void)bytes; /* nothing to read is fine */
}

/* Slots that were written through the memory file during warm-up are not mapped yet: each page would cost a fault while
 * a worker waits for a read. With nothing else to do, map some. Returns 0 if all are mapped or the kernel cannot map
 * them. If every cluster has a slot, none is written twice, and mapping would only delay the first requests. */
static int map_some_slots(np_loader *loader)
{
    for (int i = 0; i < NP_LOADER_PARTS; i++) {
        np_part_state *part = &loader->parts[i];
        if (part->config.slot_count < part->config.cluster_count && np_slot_pages_map(&part->pages, &part->config, MAPPED_AT_ONCE))
            return 1;
    }
    return 0;
}

int np_loader_serve(np_loader *loader, const int32_t *descriptors, uint32_t count, int timeout_ms, uint32_t spin_us)
{
    const int event = np_reader_event_fd(loader->reader);
    if (count > MAX_DESCRIPTORS || event < 0)
        return count > MAX_DESCRIPTORS ? NP_E_ARGUMENT : NP_E_IO;
    const np_requests *first = loader->ring_count ? &loader->rings[0].shared : NULL;
    struct pollfd watched[MAX_DESCRIPTORS + 2] = {
        {.fd = event, .events = POLLIN},
        {.fd = first ? first->doorbell : -1, .events = POLLIN}, /* poll passes over -1 */
    };
    for (uint32_t i = 0; i < count; i++)
        watched[2 + i] = (struct pollfd){.fd = descriptors[i], .events = POLLIN};

    slot_counts before[NP_LOADER_PARTS];
    for (int i = 0; i < NP_LOADER_PARTS; i++)
        before[i] = (slot_counts){loader->parts[i].free_count, np_loader_count_waiting(loader, i)};
    uint64_t now = np_clock_ns(), busy_until = now, reading_since = now;
    uint32_t spins = 0;
    const uint64_t end = now + (uint64_t)(timeout_ms > 0 ? timeout_ms : 0) * 1000000u;
    for (;;) {
        const uint64_t bytes_before = loader->counters.bytes;
        const int ended = np_loader_turn(loader, 0);
        if (loader->trace && loader->counters.bytes != bytes_before)
            np_trace_put(loader->trace, NP_SPAN_READ, 0, (uint32_t)(loader->counters.bytes - bytes_before), 0, reading_since);
        if (ended || np_loader_in_flight(loader) == 0)
            reading_since = np_trace_now();
        if (slots_are_short(loader, before))
            return 1;
        now = np_clock_ns();
        if (ended)
            busy_until = now + (uint64_t)spin_us * 1000u;
        const int spinning = np_reader_in_flight(loader->reader) > 0 && now < busy_until;
        if (spinning && ++spins % TURNS_PER_POLL) {
            np_pause();
            continue;
        }
        const uint32_t in_flight = np_reader_in_flight(loader->reader);
        const int collecting = in_flight >= BUSY_READS && loader->reader->calls->collect;
        if (collecting)
            loader->reader->calls->collect(loader->reader, in_flight / 2 < MAX_COLLECT ? in_flight / 2 : MAX_COLLECT, COLLECT_US);
        /* Reads that end after this turn signal the event, so no further turn is needed before sleeping. */
        int wait_ms = collecting || spinning || loader->has_more || now >= end ? 0 : (int)((end - now + 999999u) / 1000000u);
        if (wait_ms && first) {
            __atomic_store_n(first->asleep, 1, __ATOMIC_SEQ_CST);
            __atomic_thread_fence(__ATOMIC_SEQ_CST);
            if (np_loader_has_requests(loader))
                wait_ms = 0;
        }
        if (wait_ms && np_loader_in_flight(loader) == 0 && map_some_slots(loader))
            wait_ms = 0;
        const int ready = poll(watched, 2 + count, wait_ms);
        if (first)
            __atomic_store_n(first->asleep, 0, __ATOMIC_SEQ_CST);
        if (ready < 0 && errno != EINTR)
            return NP_E_IO;
        if (ready > 0) {
            for (int i = 0; i < 2; i++)
                if (watched[i].revents)
                    clear_signal(watched[i].fd);
            for (uint32_t i = 0; i < count; i++)
                if (watched[2 + i].revents)
                    return 1;
        }
        if (now >= end)
            return 0;
    }
}

/* LFU with ageing, for experts of which all clusters are read: of recorded routes it misses up to 12 % less than CLOCK where
 * memory holds a tenth to a fifth of the experts. A use counts more than the one before, by a factor, which is the same as if
 * all counts decayed. Uses are collected from reference bits, at each eviction, of entries that no window covers: what a
 * long chunk of a prompt has just read is forgotten by then, and does not count. */
#include "residency/eviction.h"

enum { MAX_CANDIDATES = 256 }; /* of one pass over all entries */
static const double LARGEST_WEIGHT = 1e100;

static void collect(uint32_t *words, size_t count, double *uses, double *weight, double growth, const uint64_t *windows, size_t window_count)
{
    for (size_t id = 0; id < count; id++) {
        uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST);
        if ((value & (NP_ENTRY_STATE_MASK | NP_ENTRY_REFERENCED)) != (NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED) || np_is_covered(windows, window_count, id))
            continue;
        if (!__atomic_compare_exchange_n(&words[id], &value, value & ~(uint32_t)NP_ENTRY_REFERENCED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue; /* it counts the next time */
        *weight *= growth;
        uses[id] += *weight;
    }
    if (*weight <= LARGEST_WEIGHT)
        return;
    for (size_t id = 0; id < count; id++)
        uses[id] /= *weight;
    *weight = 1.0;
}

/* An entry that can be evicted. at: its distance from the hand. */
typedef struct {
    double uses;
    size_t at;
} candidate;

/* True if `a` is to be evicted after `b`. */
static int comes_after(candidate a, candidate b)
{
    return a.uses > b.uses || (a.uses == b.uses && a.at > b.at);
}

/* Put a candidate into a heap at its root, of which only that may violate the order: parents come after their children. */
static void sift_down(candidate *heap, size_t count, candidate put)
{
    size_t place = 0;
    for (size_t child = 1; child < count; place = child, child = 2 * child + 1) {
        if (child + 1 < count && comes_after(heap[child + 1], heap[child]))
            child++;
        if (!comes_after(heap[child], put))
            break;
        heap[place] = heap[child];
    }
    heap[place] = put;
}

static void sift_up(candidate *heap, size_t place)
{
    const candidate put = heap[place];
    for (; place && comes_after(put, heap[(place - 1) / 2]); place = (place - 1) / 2)
        heap[place] = heap[(place - 1) / 2];
    heap[place] = put;
}

/* Find up to `most` entries that can be evicted, with the fewest uses, the fewest first; of equal ones those next after
 * `hand`. Returns their number. */
static size_t find_least_used(const uint32_t *words, size_t count, const double *uses, size_t hand, const uint64_t *windows, size_t window_count,
                              size_t most, candidate *candidates)
{
    size_t found = 0;
    for (size_t n = 0, id = hand; n < count; n++, id = id + 1 == count ? 0 : id + 1) {
        const uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST);
        if ((value & (NP_ENTRY_STATE_MASK | NP_ENTRY_PINNED | NP_ENTRY_REFERENCED)) != NP_ENTRY_PRESENT || np_is_covered(windows, window_count, id))
            continue;
        const candidate now = {uses[id], n};
        if (found < most) {
            candidates[found] = now;
            sift_up(candidates, found++);
        } else if (comes_after(candidates[0], now)) {
            sift_down(candidates, found, now);
        }
    }
    for (size_t left = found; left > 1;) { /* the last one goes to the end */
        const candidate last = candidates[0];
        left--;
        sift_down(candidates, left, candidates[left]);
        candidates[left] = last;
    }
    return found;
}

size_t np_least_used_take(uint32_t *words, size_t count, double *uses, double *weight, double growth, size_t *hand, const uint64_t *windows,
                          size_t window_count, size_t max_slots, uint32_t *slots)
{
    if (count == 0)
        return 0;
    collect(words, count, uses, weight, growth, windows, window_count);
    size_t evicted = np_scanned_take(words, count, uses, *weight, windows, window_count, max_slots, slots);
    for (size_t before = evicted + 1; evicted < max_slots && evicted != before;) {
        candidate candidates[MAX_CANDIDATES];
        const size_t from = *hand % count;
        const size_t most = max_slots - evicted < MAX_CANDIDATES ? max_slots - evicted : MAX_CANDIDATES;
        const size_t found = find_least_used(words, count, uses, from, windows, window_count, most, candidates);
        before = evicted;
        for (size_t i = 0; i < found; i++) {
            const size_t id = (from + candidates[i].at) % count;
            const uint32_t slot = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST) & NP_ENTRY_SLOT_MASK; /* of an entry that only this process evicts */
            if (!np_entry_vacate(&words[id], id, windows, window_count))
                continue;
            slots[evicted++] = slot;
            *hand = id + 1;
        }
    }
    return evicted;
}

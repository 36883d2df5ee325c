/* LFU with ageing, for experts of which a token uses all clusters: of recorded routes it misses up to 12 % less than CLOCK
 * where memory holds a tenth to a fifth of the experts. A use counts more than the one before, by a factor, which is the same as
 * if all counts decayed. Uses are collected from reference bits, at each eviction, of entries that no window covers: what a
 * long chunk of a prompt has just read is forgotten by then, and does not count.
 *
 * An expert may be dozens of clusters, and a model have hundreds of thousands. So an expert's use is that of its first cluster, and
 * its last clusters are evicted first. An expert of which nothing can be evicted is empty until its first cluster is loaded
 * again; since others may be loaded without that, by a warm-up, all experts are looked at again after LOOK_AGAIN calls. */
#include "residency/eviction.h"

#include <string.h>

enum { MAX_CANDIDATES = 256 /* of one pass over all experts */, LOOK_AGAIN = 64 };
enum { EMPTY = 1, BUSY = 2 }; /* of np_uses.empty; busy: nothing can be evicted in this call, since it is being loaded or read */
static const double LARGEST_WEIGHT = 1e100;

/* Collect the uses of experts since the last call. */
static void collect(uint32_t *words, size_t count, np_uses *uses, const uint64_t *windows, size_t window_count)
{
    const size_t experts = count / uses->clusters;
    if (uses->calls++ % LOOK_AGAIN == 0)
        memset(uses->empty, 0, experts);
    for (size_t expert = 0, id = 0; expert < experts; expert++, id += uses->clusters) {
        uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST);
        if (uses->empty[expert] == BUSY)
            uses->empty[expert] = 0;
        if ((value & (NP_ENTRY_STATE_MASK | NP_ENTRY_REFERENCED)) != (NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED) || np_is_covered(windows, window_count, id))
            continue;
        if (!__atomic_compare_exchange_n(&words[id], &value, value & ~(uint32_t)NP_ENTRY_REFERENCED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue; /* it counts the next time */
        uses->weight *= uses->growth;
        uses->sums[expert] += uses->weight;
        uses->empty[expert] = 0;
    }
    if (uses->weight <= LARGEST_WEIGHT)
        return;
    for (size_t expert = 0; expert < experts; expert++)
        uses->sums[expert] /= uses->weight;
    uses->weight = 1.0;
}

/* An expert of which clusters may be evicted. at: its distance from the hand. */
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

/* Find up to `most` experts of which clusters may be evicted, with the fewest uses, the fewest first; of equal ones those next
 * after the hand. Returns their number. */
static size_t find_least_used(const uint32_t *words, size_t count, const np_uses *uses, size_t hand, const uint64_t *windows, size_t window_count,
                              size_t most, candidate *candidates)
{
    const size_t experts = count / uses->clusters;
    size_t found = 0;
    for (size_t n = 0, expert = hand; n < experts; n++, expert = expert + 1 == experts ? 0 : expert + 1) {
        const size_t id = expert * uses->clusters;
        if (uses->empty[expert] == BUSY || (found == most && uses->sums[expert] >= candidates[0].uses))
            continue;
        const uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST);
        const int is_present = (value & NP_ENTRY_STATE_MASK) == NP_ENTRY_PRESENT;
        if (uses->empty[expert] == EMPTY && (!is_present || value & NP_ENTRY_PINNED)) /* else it was loaded, but not used */
            continue;
        if ((is_present && value & NP_ENTRY_REFERENCED) || np_is_covered(windows, window_count, id))
            continue;
        const candidate now = {uses->sums[expert], n};
        if (found < most) {
            candidates[found] = now;
            sift_up(candidates, found++);
        } else {
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

/* Evict clusters of an expert, the last first. Notes whether it is empty or busy then. Returns the number of freed slots. */
static size_t evict(uint32_t *words, np_uses *uses, size_t expert, const uint64_t *windows, size_t window_count, size_t max_slots, uint32_t *slots)
{
    size_t evicted = 0, stay = 0;
    for (size_t n = uses->clusters; n-- && evicted < max_slots;) {
        const size_t id = expert * uses->clusters + n;
        const uint32_t value = __atomic_load_n(&words[id], __ATOMIC_SEQ_CST), state = value & NP_ENTRY_STATE_MASK;
        if (state == NP_ENTRY_PRESENT && !(value & NP_ENTRY_PINNED) && np_entry_vacate(&words[id], id, windows, window_count))
            slots[evicted++] = value & NP_ENTRY_SLOT_MASK; /* only this process evicts: the slot is still that one */
        else if (state == NP_ENTRY_LOADING || (state == NP_ENTRY_PRESENT && !(value & NP_ENTRY_PINNED)))
            stay++;
    }
    if (evicted < max_slots)
        uses->empty[expert] = stay ? BUSY : EMPTY;
    return evicted;
}

size_t np_least_used_take(uint32_t *words, size_t count, np_uses *uses, const uint64_t *windows, size_t window_count, size_t max_slots, uint32_t *slots)
{
    const size_t experts = uses->clusters ? count / uses->clusters : 0;
    if (experts == 0)
        return 0;
    collect(words, count, uses, windows, window_count);
    size_t evicted = np_scanned_take(words, count, uses, windows, window_count, max_slots, slots);
    for (size_t found = 1; evicted < max_slots && found;) { /* each expert that was found is looked at no more */
        candidate candidates[MAX_CANDIDATES];
        const size_t from = uses->hand % experts;
        const size_t most = max_slots - evicted < MAX_CANDIDATES ? max_slots - evicted : MAX_CANDIDATES;
        found = find_least_used(words, count, uses, from, windows, window_count, most, candidates);
        for (size_t i = 0; i < found && evicted < max_slots; i++) {
            const size_t expert = (from + candidates[i].at) % experts;
            const size_t freed = evict(words, uses, expert, windows, window_count, max_slots - evicted, slots + evicted);
            evicted += freed;
            if (freed)
                uses->hand = expert + 1;
        }
    }
    return evicted;
}

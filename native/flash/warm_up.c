/* Warm-up: what to load while nothing more urgent waits.
 *
 * A set, not a queue: a request that arrives meanwhile looks up which of its neighbours are in the set, and one read
 * brings them all (gather.c). So requests during the warm-up do not turn its long reads into single ones. */
#include "flash/warm_up.h"

#include <string.h>

#include "flash/queues.h"
#include "sync/clock.h"

static size_t set_words(const np_loader *loader)
{
    return (loader->parts[0].config.cluster_count + (size_t)63) / 64;
}

int np_warm_up_is_on(const np_loader *loader)
{
    return loader->warm_up.cluster_counts[0] || loader->warm_up.cluster_counts[1];
}

uint32_t np_warm_up_parts(const np_loader *loader, uint32_t id)
{
    uint32_t parts = 0;
    for (int part = 0; part < NP_LOADER_PARTS; part++)
        if (loader->warm_up.cluster_counts[part] && np_set_has(loader->warm_up.clusters[part], id))
            parts |= np_part_bit(part);
    return parts;
}

int np_warm_up_is_pinned(const np_loader *loader, int part, uint32_t id)
{
    return loader->warm_up.pinned_counts[part] && np_set_has(loader->warm_up.pinned[part], id);
}

int np_warm_up_next(const np_loader *loader, uint32_t *id)
{
    const np_warm_up *warm = &loader->warm_up;
    const int has_pinned = warm->pinned_counts[0] || warm->pinned_counts[1];
    if (!np_warm_up_is_on(loader))
        return 0;
    uint64_t *const *sets = has_pinned ? warm->pinned : warm->clusters;
    const size_t words = set_words(loader), start = warm->next / 64;
    for (size_t i = 0; i <= words; i++) { /* the first word twice: at first its bits from `next` on, at the end those below */
        const size_t word = (start + i) % words;
        uint64_t bits = sets[0][word] | sets[1][word];
        if (i == 0)
            bits &= ~(uint64_t)0 << warm->next % 64;
        if (bits) {
            *id = (uint32_t)(64 * word) + (uint32_t)__builtin_ctzll(bits);
            return 1;
        }
    }
    return 0;
}

int np_warm_up_remove(np_loader *loader, int part, uint32_t id)
{
    np_warm_up *warm = &loader->warm_up;
    if (!warm->cluster_counts[part] || !np_set_has(warm->clusters[part], id))
        return 0;
    warm->pinned_counts[part] -= (uint32_t)np_set_has(warm->pinned[part], id);
    warm->cluster_counts[part]--;
    np_set_drop(warm->pinned[part], id);
    np_set_drop(warm->clusters[part], id);
    return 1;
}

static void drop_bytes(np_loader *loader, int part, uint32_t clusters)
{
    const uint64_t bytes = (uint64_t)clusters * loader->parts[part].config.part_bytes;
    loader->counters.warm_up_bytes -= bytes;
    loader->counters.warm_up_left_bytes -= bytes;
}

void np_warm_up_give_up(np_loader *loader, int part)
{
    np_warm_up *warm = &loader->warm_up;
    drop_bytes(loader, part, warm->cluster_counts[part] - warm->pinned_counts[part]);
    memcpy(warm->clusters[part], warm->pinned[part], set_words(loader) * sizeof(uint64_t));
    warm->cluster_counts[part] = warm->pinned_counts[part];
}

void np_warm_up_clear(np_loader *loader)
{
    np_warm_up *warm = &loader->warm_up;
    for (int part = 0; part < NP_LOADER_PARTS; part++) {
        memset(warm->clusters[part], 0, set_words(loader) * sizeof(uint64_t));
        memset(warm->pinned[part], 0, set_words(loader) * sizeof(uint64_t));
        warm->cluster_counts[part] = warm->pinned_counts[part] = 0;
    }
    warm->next = 0;
    warm->since_ns = 0;
    loader->counters.warm_up_bytes = loader->counters.warm_up_left_bytes = loader->counters.warm_up_ns = 0;
}

void np_warm_up_count_time(np_loader *loader)
{
    np_warm_up *warm = &loader->warm_up;
    const int is_incomplete = loader->counters.warm_up_left_bytes > 0;
    if (!is_incomplete && !warm->since_ns)
        return;
    const uint64_t now = np_clock_ns();
    if (warm->since_ns)
        loader->counters.warm_up_ns += now - warm->since_ns;
    warm->since_ns = is_incomplete ? now : 0;
}

static void add(np_loader *loader, int part, uint32_t id, uint32_t flags)
{
    np_warm_up *warm = &loader->warm_up;
    if (np_is_settled(&loader->parts[part].config.words[id], flags))
        return;
    if (!np_set_has(warm->clusters[part], id)) {
        np_set_add(warm->clusters[part], id);
        warm->cluster_counts[part]++;
        loader->counters.warm_up_bytes += loader->parts[part].config.part_bytes;
        loader->counters.warm_up_left_bytes += loader->parts[part].config.part_bytes;
    }
    if (flags && !np_set_has(warm->pinned[part], id)) {
        np_set_add(warm->pinned[part], id);
        warm->pinned_counts[part]++;
    }
}

int np_loader_warm_up(np_loader *loader, int parts, const uint32_t *ids, size_t count, uint32_t flags)
{
    if (!np_loader_is_request(loader, parts, ids, count, flags))
        return NP_E_ARGUMENT;
    for (size_t i = 0; i < count; i++)
        for (int part = 0; part < NP_LOADER_PARTS; part++)
            if ((uint32_t)parts & np_part_bit(part))
                add(loader, part, ids[i], flags);
    return NP_OK;
}

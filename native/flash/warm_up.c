/* Warming up: what to load while nothing more urgent waits.
 *
 * A set, not a queue: a demand that comes meanwhile looks up whether its neighbours are wanted as well, and one read brings them all
 * (gather.c). So a text that is asked before everything is there does not turn long reads into single ones. */
#include <string.h>

#include "flash/loader.h"
#include "sync/clock.h"

static const uint32_t part_bits[NP_LOADER_PARTS] = {NP_REQUEST_TRIGGER, NP_REQUEST_VALUE};

static size_t set_words(const np_loader *loader)
{
    return (loader->parts[0].config.cluster_count + (size_t)63) / 64;
}

int np_warm_up_is_on(const np_loader *loader)
{
    return loader->warm_up.wanted_count[0] || loader->warm_up.wanted_count[1];
}

uint32_t np_warm_up_parts(const np_loader *loader, uint32_t id)
{
    uint32_t parts = 0;
    for (int part = 0; part < NP_LOADER_PARTS; part++)
        if (loader->warm_up.wanted_count[part] && np_set_has(loader->warm_up.wanted[part], id))
            parts |= part_bits[part];
    return parts;
}

int np_warm_up_stays(const np_loader *loader, int part, uint32_t id)
{
    return loader->warm_up.pinned_count[part] && np_set_has(loader->warm_up.pinned[part], id);
}

int np_warm_up_next(const np_loader *loader, uint32_t *id)
{
    const np_warm_up *warm = &loader->warm_up;
    const int stays = warm->pinned_count[0] || warm->pinned_count[1];
    if (!np_warm_up_is_on(loader))
        return 0;
    uint64_t *const *sets = stays ? warm->pinned : warm->wanted;
    const size_t words = set_words(loader), start = warm->next / 64;
    for (size_t i = 0; i <= words; i++) { /* the first one twice: from `next` on, and at the end below it */
        const size_t at = (start + i) % words;
        uint64_t bits = sets[0][at] | sets[1][at];
        if (i == 0)
            bits &= ~(uint64_t)0 << warm->next % 64;
        if (bits) {
            *id = (uint32_t)(64 * at) + (uint32_t)__builtin_ctzll(bits);
            return 1;
        }
    }
    return 0;
}

int np_warm_up_take(np_loader *loader, int part, uint32_t id)
{
    np_warm_up *warm = &loader->warm_up;
    if (!warm->wanted_count[part] || !np_set_has(warm->wanted[part], id))
        return 0;
    warm->pinned_count[part] -= (uint32_t)np_set_has(warm->pinned[part], id);
    warm->wanted_count[part]--;
    np_set_drop(warm->pinned[part], id);
    np_set_drop(warm->wanted[part], id);
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
    drop_bytes(loader, part, warm->wanted_count[part] - warm->pinned_count[part]);
    memcpy(warm->wanted[part], warm->pinned[part], set_words(loader) * sizeof(uint64_t));
    warm->wanted_count[part] = warm->pinned_count[part];
}

void np_warm_up_forget(np_loader *loader)
{
    np_warm_up *warm = &loader->warm_up;
    for (int part = 0; part < NP_LOADER_PARTS; part++) {
        memset(warm->wanted[part], 0, set_words(loader) * sizeof(uint64_t));
        memset(warm->pinned[part], 0, set_words(loader) * sizeof(uint64_t));
        warm->wanted_count[part] = warm->pinned_count[part] = 0;
    }
    warm->next = 0;
    warm->since_ns = 0;
    loader->counters.warm_up_bytes = loader->counters.warm_up_left_bytes = loader->counters.warm_up_ns = 0;
}

void np_warm_up_count_time(np_loader *loader)
{
    np_warm_up *warm = &loader->warm_up;
    const int is_left = loader->counters.warm_up_left_bytes > 0;
    if (!is_left && !warm->since_ns)
        return;
    const uint64_t now = np_clock_ns();
    if (warm->since_ns)
        loader->counters.warm_up_ns += now - warm->since_ns;
    warm->since_ns = is_left ? now : 0;
}

static void want(np_loader *loader, int part, uint32_t id, uint32_t flags)
{
    np_warm_up *warm = &loader->warm_up;
    if (np_loader_settled(&loader->parts[part].config.words[id], flags))
        return;
    if (!np_set_has(warm->wanted[part], id)) {
        np_set_add(warm->wanted[part], id);
        warm->wanted_count[part]++;
        loader->counters.warm_up_bytes += loader->parts[part].config.part_bytes;
        loader->counters.warm_up_left_bytes += loader->parts[part].config.part_bytes;
    }
    if (flags && !np_set_has(warm->pinned[part], id)) {
        np_set_add(warm->pinned[part], id);
        warm->pinned_count[part]++;
    }
}

int np_loader_warm_up(np_loader *loader, int parts, const uint32_t *ids, size_t count, uint32_t flags)
{
    if (!np_loader_is_request(loader, parts, ids, count, flags))
        return NP_E_ARGUMENT;
    for (size_t i = 0; i < count; i++)
        for (int part = 0; part < NP_LOADER_PARTS; part++)
            if ((uint32_t)parts & part_bits[part])
                want(loader, part, ids[i], flags);
    return NP_OK;
}

#include "engine/clusters.h"

#include "engine/work.h"

np_range np_block_clusters(const np_engine *engine, uint32_t first_block, uint32_t end_block)
{
    const uint32_t per_block = engine->shape.block_neurons / engine->shape.cluster_neurons, all = engine->shape.clusters;
    const np_range range = {first_block * per_block, end_block * per_block}; /* the last block of a layer may be short */
    return (np_range){range.from < all ? range.from : all, range.to < all ? range.to : all};
}

int np_look_up(np_engine *engine, int part, uint32_t cluster)
{
    const uint32_t index = np_cluster_index(engine, engine->layer, engine->group->expert, cluster);
    const uint32_t value = np_entry_look(&engine->shared.entries[part][index]);
    switch (value & NP_ENTRY_STATE_MASK) {
    case NP_ENTRY_PRESENT:
        engine->slot[part][cluster] = value & NP_ENTRY_SLOT_MASK;
        return 1;
    case NP_ENTRY_FAILED:
        engine->counters.damaged_word = index;
        engine->counters.damaged_part = part;
        return NP_E_DAMAGED;
    default:
        engine->slot[part][cluster] = NP_NONE;
        return 0;
    }
}

/* After a layer that a long chunk of a prompt has used nearly whole, let its clusters be evicted first: otherwise each
 * layer evicts what the next chunk or prompt finds absent then, and a prompt reads everything, whatever is resident. The
 * clusters that were used before stay. An empty window says where the next ones are evicted. */
void np_forget_scan(np_engine *engine)
{
    if (engine->count < NP_SCAN_TOKENS || 2 * engine->group_count < engine->fixed.layers[engine->layer].experts)
        return;
    const np_range groups = np_even_share(engine, engine->group_count);
    for (uint32_t group = groups.from; group < groups.to; group++) {
        const uint32_t first = np_cluster_index(engine, engine->layer, engine->groups[group].expert, 0);
        for (uint32_t cluster = 0; cluster < engine->shape.clusters; cluster++)
            for (int part = 0; part < NP_PARTS; part++)
                np_entry_forget(&engine->shared.entries[part][first + cluster]);
    }
    const uint64_t end = np_cluster_index(engine, engine->layer, engine->fixed.layers[engine->layer].experts, 0);
    np_long_store(engine->shared.window, end << 32 | end);
}

/* True if a part is absent. is_used: mark a present part as used. Speculative requests and value parts of neurons that
 * may not fire do not: they may turn out not to be needed, and must not keep other clusters from staying. */
static int is_absent(np_engine *engine, int part, uint32_t index, int is_used)
{
    uint32_t *word = &engine->shared.entries[part][index];
    return ((is_used ? np_entry_look(word) : np_word_load(word)) & NP_ENTRY_STATE_MASK) == NP_ENTRY_ABSENT;
}

static uint32_t absent_parts(np_engine *engine, uint32_t index, uint32_t parts, int is_used)
{
    uint32_t absent = 0;
    if (parts & NP_REQUEST_TRIGGER && is_absent(engine, NP_TRIGGER, index, is_used))
        absent |= NP_REQUEST_TRIGGER;
    if (parts & NP_REQUEST_VALUE && is_absent(engine, NP_VALUE, index, 0))
        absent |= NP_REQUEST_VALUE;
    return absent ? absent | index : 0;
}

uint32_t np_absent_parts(np_engine *engine, uint32_t layer, uint32_t expert, uint32_t cluster, uint32_t parts)
{
    return absent_parts(engine, np_cluster_index(engine, layer, expert, cluster), parts, 1);
}

int np_request_clusters(np_engine *engine, const uint32_t *entries, uint32_t count)
{
    while (count) {
        const uint32_t head = np_word_load(engine->shared.requests.head); /* read before the attempt, so that no room made meanwhile is missed */
        const uint32_t accepted = np_requests_put(&engine->shared.requests, entries, count);
        entries += accepted;
        count -= accepted;
        if (!count)
            break;
        const int woken = np_word_wait(engine->shared.requests.head, head, engine->shared.epoch, engine->epoch, engine->config.spin_us, 0);
        if (woken < 0)
            return woken;
    }
    return NP_OK;
}

void np_request_ahead(np_engine *engine, uint32_t layer, uint32_t expert, np_range blocks, uint32_t parts, uint32_t flag)
{
    if (engine->config.offload_blocks)
        return; /* the backend has the weights of its blocks */
    for (uint32_t block = blocks.from; block < blocks.to; block++) {
        const np_range clusters = np_block_clusters(engine, block, block + 1);
        uint32_t count = 0;
        for (uint32_t cluster = clusters.from; cluster < clusters.to; cluster++) {
            const uint32_t index = np_cluster_index(engine, layer, expert, cluster);
            const uint32_t entry = absent_parts(engine, index, parts, flag != NP_REQUEST_SPECULATIVE);
            if (entry)
                engine->request_entries[count++] = entry | flag;
        }
        engine->counters.foreseen += clusters.to - clusters.from;
        engine->counters.foreseen_missed += count;
        if (np_requests_put(&engine->shared.requests, engine->request_entries, count) < count)
            return;
    }
}

uint32_t np_parts_ahead(const np_engine *engine, uint32_t layer, uint32_t tokens)
{
    const int needs_both = engine->config.bundle || tokens >= NP_DENSE_TOKENS || engine->shape.down_by_output ||
                           np_all_neurons_fire(engine, layer);
    return needs_both ? NP_REQUEST_TRIGGER | NP_REQUEST_VALUE : NP_REQUEST_TRIGGER;
}

/* The prefill worker of the backend `onnx` as a program without Python: README.md. */
#include <climits>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <poll.h>

#include "client/lifecycle.h"
#include "job.h"
#include "products.h"
#include "participants.h"

static const char USAGE[] = "npu-prefill [--graphs FOLDER] [--library FILE] [--provider cpu|qnn[:SOC]|qnn-emulated[:SOC]] [--plugins FOLDER]";
static const char LIBRARY[] = "ONNXRUNTIME_LIBRARY"; /* environment variable, used without --library */

static const double MARGIN = 1.3; /* the value in ../graphs.py */

enum { LARGE_BYTES = 1 << 20, MAX_PRODUCT_NEURONS = 2048 /* the value in plans/plan/runtime_memory.py */ };

struct Options {
    std::string graphs, library, provider = "cpu", plugins;
};

static Options options_of(int count, char **words)
{
    Options o;
    const char *library = getenv(LIBRARY);
    o.library = library ? library : "libonnxruntime.so";
    const std::map<std::string, std::string *> known = {
        {"--graphs", &o.graphs}, {"--library", &o.library}, {"--provider", &o.provider}, {"--plugins", &o.plugins}};
    for (int n = 1; n < count; n += 2) {
        const auto found = known.find(words[n]);
        if (found == known.end() || n + 1 == count)
            run_fail(words[n], USAGE);
        *found->second = words[n + 1];
    }
    return o;
}

/* The neurons per product of the worker in Python with this plan, at most max_neurons. */
static uint32_t planned_neurons(const Job &job, uint32_t max_neurons)
{
    const uint32_t block = job.shape.block_neurons, blocks = job.shape.blocks;
    const uint32_t products = (blocks + std::max(1u, max_neurons / block) - 1) / std::max(1u, max_neurons / block);
    return std::min((blocks + products - 1) / products, job.window_blocks) * block;
}

/* The folder where `neuronpipe compile` puts the graphs or contexts of this plan and provider. */
static std::string graphs_of(const Provider &provider, const Job &job)
{
    const std::string kind = provider.soc ? "soc" + std::to_string(provider.soc) : "graphs";
    return std::string(run_environment("PACKAGE")) + "/npu/" + kind + "-" + std::to_string(planned_neurons(job, MAX_PRODUCT_NEURONS));
}

/* End the run if the graphs were compiled before the package's ranges changed. */
static void require_ranges(const Graphs &graphs, const Job &job)
{
    const double planned = MARGIN * job.static_inputs, found = graphs.x.step * (MOST - MIDDLE);
    if (graphs.by_token ? job.static_inputs > 0 : !(std::fabs(found - planned) <= planned * 1e-6))
        run_fail("graphs.json", "has other ranges than the package, which was profiled since; make it again with `neuronpipe compile`");
}

/* The numerics: the provider's arithmetic and the engine's. Graphs of another size than the plan's have other ranges
 * and give other bits, so their size becomes part of the name. */
static std::string numerics_of(const Graphs &graphs, const Job &job)
{
    const std::string size = graphs.neurons == planned_neurons(job, graphs.max_neurons) ? "" : "-" + std::to_string(graphs.neurons);
    return graphs.numerics + size + "+cpu:" + np_isa_name();
}

/* ---- requests ------------------------------------------------------------------------------------------------- */
struct Prefill {
    uint64_t step, epoch;
    int32_t sequence, position, copy_from; /* copy_from -1: nothing is copied */
    std::vector<int32_t> tokens;
    uint32_t logits_first, logits_count;
};

static bool take(const uint8_t *map, size_t bytes, const char *name, uint64_t max_number, uint64_t *number)
{
    const value field = unpack_field(map, bytes, name);
    *number = field.number;
    return field.kind == 'n' && field.number <= max_number;
}

/* Parse a Prefill message. Returns false if it is none, or out of range: it is dropped. */
static bool parse_prefill(const Job &job, const uint8_t *map, size_t bytes, Prefill *p)
{
    uint64_t sequence, position, copy = 0;
    const value from = unpack_field(map, bytes, "copy_from"), logits = unpack_field(map, bytes, "logits");
    if (!value_is(unpack_field(map, bytes, "type"), "Prefill") || !take(map, bytes, "step", UINT64_MAX, &p->step) ||
        !take(map, bytes, "epoch", UINT32_MAX, &p->epoch) || !take(map, bytes, "sequence", job.sequences - 1, &sequence) ||
        !take(map, bytes, "position", job.shape.context_tokens, &position))
        return false;
    if (from.kind && from.kind != 'z' && !take(map, bytes, "copy_from", job.sequences - 1, &copy))
        return false;
    p->tokens.resize(job.max_tokens);
    const int count = unpack_items(unpack_field(map, bytes, "tokens"), p->tokens.data(), static_cast<int>(job.max_tokens));
    if (count < 1 || position + static_cast<uint64_t>(count) > job.shape.context_tokens)
        return false;
    p->tokens.resize(static_cast<size_t>(count));
    for (int32_t token : p->tokens)
        if (static_cast<uint32_t>(token) >= job.shape.vocabulary)
            return false;
    const uint32_t all = static_cast<uint32_t>(count);
    p->logits_first = value_is(logits, "last") ? all - 1 : 0;
    p->logits_count = value_is(logits, "last") ? 1 : value_is(logits, "all") ? all : 0;
    p->sequence = static_cast<int32_t>(sequence);
    p->position = static_cast<int32_t>(position);
    p->copy_from = from.kind == 'n' ? static_cast<int32_t>(copy) : -1;
    return p->logits_count <= job.logit_rows && (p->logits_count || value_is(logits, "none"));
}

/* Copy keys and values of the positions before the first one. Idempotent, since steps may be repeated. */
static void copy_keys_and_values(const Job &job, const Prefill &p)
{
    const np_shape &s = job.shape;
    const size_t row_bytes = np_kv_row_bytes(job.kv_type, s.head_width);
    const size_t stride = s.context_tokens * row_bytes, halves = 2 * static_cast<size_t>(s.key_heads);
    for (size_t layer = 0; layer < s.layers; layer++)
        for (size_t half = 0; half < halves; half++) {
            const size_t first = layer * job.sequences * halves + half;
            memmove(job.kv + (first + static_cast<size_t>(p.sequence) * halves) * stride,
                    job.kv + (first + static_cast<size_t>(p.copy_from) * halves) * stride,
                    static_cast<size_t>(p.position) * row_bytes);
        }
}

static void answer(lifecycle *service, pack *p, unsigned entries, const char *type, const Prefill &request)
{
    pack_map(p, entries + 3, type);
    pack_number(p, "step", request.step);
    pack_number(p, "epoch", request.epoch);
    pack_number(p, "index", service->index);
}

static void send_failed(lifecycle *service, const Job &job, const Participants &participants, int result, const Prefill &request)
{
    char why[200];
    pack p;
    const uint32_t clusters = job.shape.clusters;
    if (result == NP_E_DAMAGED)
        snprintf(why, sizeof why,
                 "bundles.bin: feed-forward %u, cluster %u: the %s part cannot be read or does not match its checksum; convert the model again or copy "
                 "the package again",
                 static_cast<uint32_t>(participants.damaged_word) / clusters, static_cast<uint32_t>(participants.damaged_word) % clusters,
                 participants.damaged_part == NP_TRIGGER ? "trigger" : "value");
    else
        snprintf(why, sizeof why, "the engine refused its arguments (%d)", result);
    answer(service, &p, 2, "StepFailed", request);
    pack_text(&p, "code", result == NP_E_DAMAGED ? "damaged" : "mismatch");
    pack_text(&p, "message", why);
    lifecycle_send(service, &p);
}

static void work(lifecycle *service, const Job &job, Participants &participants, const Prefill &request)
{
    const std::vector<int32_t> sequences(request.tokens.size(), request.sequence);
    std::vector<int32_t> positions(request.tokens.size());
    for (size_t n = 0; n < positions.size(); n++)
        positions[n] = request.position + static_cast<int32_t>(n);
    pack p;
    np_step step = {};
    step.number = request.step;
    step.epoch = static_cast<uint32_t>(request.epoch);
    step.count = static_cast<uint32_t>(request.tokens.size());
    step.sequences = sequences.data();
    step.positions = positions.data();
    step.tokens = request.tokens.data();
    step.logits_first = request.logits_first;
    step.logits_count = request.logits_count;
    int result = np_word_load(job.epoch) == request.epoch ? NP_OK : NP_E_EPOCH;
    if (result == NP_OK && request.copy_from >= 0 && request.copy_from != request.sequence)
        copy_keys_and_values(job, request);
    if (result == NP_OK)
        result = participants.compute(step);
    if (result == NP_OK) {
        const std::map<std::string, double> counters = participants.counters();
        answer(service, &p, 1, "Prefilled", request);
        pack_inner_map(&p, "counters", static_cast<unsigned>(counters.size()));
        for (const auto &counter : counters)
            pack_real(&p, counter.first.c_str(), counter.second);
        lifecycle_send(service, &p);
    } else if (result == NP_E_EPOCH) {
        answer(service, &p, 0, "StepAbandoned", request);
        lifecycle_send(service, &p);
    } else {
        send_failed(service, job, participants, result, request);
    }
}

/* ---- the loop ---------------------------------------------------------------------------------------------------------- */
static void serve(lifecycle *service, const Job &job, Participants &participants)
{
    Prefill request;
    while (!service->draining) {
        size_t bytes;
        lifecycle_tick(service);
        while (const uint8_t *map = lifecycle_receive(service, &bytes))
            if (parse_prefill(job, map, bytes, &request)) {
                service->step = request.step;
                work(service, job, participants, request);
            }
        pollfd source = {service->control.fd, POLLIN, 0};
        if (!service->draining)
            poll(&source, 1, service->control.fd < 0 ? LIFECYCLE_RETRY_MS : LIFECYCLE_TICK_MS);
    }
    lifecycle_report_drained(service);
}

/* Report a failed runtime. The process then ends; a new one repeats the step. */
static void send_runtime_failed(lifecycle *service, const char *why)
{
    pack p;
    pack_map(&p, 2, "Failed");
    pack_text(&p, "code", "internal");
    pack_text(&p, "message", why);
    lifecycle_send(service, &p);
    fprintf(stderr, "%s\n", why);
}

int main(int count, char **words)
{
    const Options o = options_of(count, words);
    lifecycle service;
    try {
        const Provider provider = provider_named(o.provider);
        Job job;
        job.open_fixed();
        np_memory_map_from(LARGE_BYTES); /* so that memory that the runtime frees after each product returns to the kernel */
        Runtime runtime(o.library, provider, o.plugins);
        Graphs graphs(o.graphs.empty() ? graphs_of(provider, job) : o.graphs, job.shape, job.max_tokens, runtime);
        require_ranges(graphs, job);
        Products products(job.shape, job.max_tokens, job.threads, graphs);
        Participants participants(job, products, std::min({job.window_blocks, job.shape.blocks, graphs.neurons / job.shape.block_neurons}));
        const std::string numerics = numerics_of(graphs, job);
        lifecycle_begin(&service, job.run_directory.c_str(), "prefill", numerics.c_str(), 1, 1);
        try {
            serve(&service, job, participants);
        } catch (const RuntimeError &error) {
            send_runtime_failed(&service, error.what());
            _Exit(1); /* threads may wait for each other */
        }
        _Exit(0);
    } catch (const RuntimeError &error) {
        run_fail("npu-prefill", error.what());
    }
}

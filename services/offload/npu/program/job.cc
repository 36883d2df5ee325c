#include "job.h"

#include <cstring>
#include <fcntl.h>
#include <unistd.h>

enum { MAX_LAYERS = 4096, LINE_WORDS = 16, WAIT_MS = 1000 };

/* ---- JSON to the engine's numbers ----------------------------------------------------------------------------------- */
struct Choice {
    const char *text;
    int number;
};

static int choice(const char *json, const char *path, std::initializer_list<Choice> choices)
{
    char *text = json_text(json, path);
    for (const Choice &choice : choices)
        if (!strcmp(text, choice.text)) {
            free(text);
            return choice.number;
        }
    run_fail(path, "this worker does not know it; use our own prefill worker");
}

static uint32_t number(const char *json, const char *path)
{
    const uint64_t value = json_number(json, path);
    if (value > INT32_MAX)
        run_fail(path, "is out of range");
    return static_cast<uint32_t>(value);
}

static uint32_t number_or(const char *json, const char *path, uint32_t otherwise)
{
    return json_has(json, path) ? number(json, path) : otherwise;
}

static float real_or(const char *json, const char *path, float otherwise)
{
    return json_has(json, path) ? static_cast<float>(json_real(json, path)) : otherwise;
}

/* ---- the package ----------------------------------------------------------------------------------------------------- */
/* The type of rows whose quantization stands at this path; `otherwise` if nothing does. */
static int quantization_at(const char *manifest, const std::string &path, int otherwise)
{
    if (!json_has(manifest, path.c_str()))
        return otherwise;
    return choice(manifest, path.c_str(), {{"q8", NP_Q8}, {"q4", NP_Q4}, {"q3", NP_Q3}, {"q4k", NP_Q4K}, {"q5k", NP_Q5K},
                                           {"q6k", NP_Q6K}, {"iq4", NP_IQ4}, {"mxfp4", NP_MXFP4}, {"q4h", NP_Q4H}, {"q5h", NP_Q5H}});
}

/* Offsets in bundles.bin. read_plan changes those of scales that lie elsewhere in memory. */
static np_matrix_place place_of(const char *manifest, const std::string &name)
{
    const std::string path = "layout/matrices/" + name + "/";
    const auto part = [&](const char *field) {
        return static_cast<uint32_t>(choice(manifest, (path + field).c_str(), {{"trigger", NP_TRIGGER}, {"value", NP_VALUE}}));
    };
    const int type = quantization_at(manifest, path + "quantization", quantization_at(manifest, "quantization", 0));
    return {part("part"), number(manifest, (path + "quants").c_str()), part("scales_part"), number(manifest, (path + "scales").c_str()), type};
}

void Job::read_shape()
{
    const char *m = manifest_;
    if (json_number(m, "version") != 3)
        run_fail("manifest.json", "is of another version; convert the model again");
    shape = {};
    shape.type = quantization_at(m, "quantization", 0);
    shape.activation = choice(m, "model/activation", {{"relu", NP_RELU}, {"drelu", NP_DRELU}});
    shape.norm = choice(m, "model/norm", {{"rms", NP_NORM_RMS}, {"layer", NP_NORM_LAYER}});
    shape.rotary = choice(m, "model/positions", {{"rotary", 1}, {"learned", 0}});
    shape.gated = json_truth(m, "model/gated");
    static_inputs = 0;
    if (json_has(m, "npu") && choice(m, "npu/scaling", {{"token", 0}, {"static", 1}}))
        static_inputs = json_real(m, "npu/ranges/neurons/inputs");
    shape.activation_threshold = real_or(m, "model/activation_threshold", 0);
    if (!shape.gated || shape.activation_threshold != 0)
        run_fail("model", "this worker needs a gate, and no threshold; use our own prefill worker");
    for (const char *name : {"router_bias", "attention_sinks", "shared_experts", "choosing_bias", "normalized_shares", "router_groups", "routed_scale",
                             "joint_norm", "norm_after_rotation", "logit_bias", "rotary_scale", "latent_width", "norms", "score_cap", "logit_cap"})
        if (json_has(m, (std::string("model/") + name).c_str()))
            run_fail("model", "this worker does not compute this model's routers or attention; use our own prefill worker");
    shape.width = number(m, "model/width");
    shape.neurons = number(m, "model/neurons");
    shape.query_heads = number(m, "model/query_heads");
    shape.heads_width = number(m, "model/query_heads") * number(m, "model/head_width");
    shape.key_heads = number(m, "model/key_heads");
    shape.head_width = number(m, "model/head_width");
    shape.vocabulary = number(m, "model/vocabulary");
    shape.experts = number(m, "model/experts");
    shape.experts_per_token = number_or(m, "model/experts_per_token", 1);
    shape.chosen_per_token = shape.experts > 1 ? shape.experts_per_token : 0;
    shape.router_groups = shape.groups_per_token = 1;
    shape.normalized_shares = 1;
    shape.routed_scale = 1;
    shape.router = json_has(m, "model/router") ? choice(m, "model/router", {{"softmax", NP_ROUTER_SOFTMAX}, {"sigmoid", NP_ROUTER_SIGMOID}})
                                               : NP_ROUTER_SOFTMAX;
    shape.router_reads = json_has(m, "model/router_reads")
                             ? choice(m, "model/router_reads", {{"feed_forward", NP_READS_FEED_FORWARD}, {"layer", NP_READS_LAYER}})
                             : NP_READS_FEED_FORWARD;
    shape.parallel = json_has(m, "model/parallel") && json_truth(m, "model/parallel");
    shape.head_norm = json_truth(m, "model/head_norm");
    shape.norm_epsilon = static_cast<float>(json_real(m, "model/norm_epsilon"));
    shape.embedding_scale = real_or(m, "model/embedding_scale", 1);
    shape.logit_scale = real_or(m, "model/logit_scale", 1);
    shape.rotary_scale = 1;
    shape.attention_scale = real_or(m, "model/attention_scale", 1);
    shape.residual_scale = real_or(m, "model/residual_scale", 1);
    shape.cluster_neurons = number(m, "layout/cluster_neurons");
    shape.clusters = number(m, "layout/clusters");
    shape.block_neurons = number(m, "layout/block_neurons");
    shape.blocks = number(m, "layout/blocks");
    shape.gate = place_of(m, "gate");
    shape.up = place_of(m, "up");
    shape.down = place_of(m, "down");
    for (size_t n = 0; const char *kind = json_item(m, "model/layer_kinds", n); n++) {
        np_layer layer = {};
        layer.key_heads = shape.key_heads;
        layer.head_width = shape.head_width;
        layer.window_tokens = number_or(kind, "window_tokens", 0);
        layer.rotary = !json_has(kind, "rotary") || json_truth(kind, "rotary");
        if (json_has(kind, "key_heads") || json_has(kind, "head_width") || json_has(kind, "value_from_key"))
            run_fail("model/layer_kinds", "this worker computes no models whose layers have other heads; use our own prefill worker");
        if (json_has(kind, "mixer") || json_has(kind, "feed_forward"))
            run_fail("model/layer_kinds", "this worker computes no recurrent layers; use our own prefill worker");
        if (json_has(kind, "local_positions"))
            run_fail("model/layer_kinds", "this worker computes no models with two tables of positions; use our own prefill worker");
        if (json_has(kind, "dense_experts"))
            run_fail("model/layer_kinds", "this worker computes no mixtures with layers that have no router; use our own prefill worker");
        layer.experts = shape.experts;
        layer.routed_experts = shape.experts > 1 ? shape.experts : 0;
        const uint32_t layers = number(kind, "layers");
        if (layers > MAX_LAYERS - layers_.size())
            run_fail("model/layer_kinds", "has too many layers");
        for (uint32_t i = 0; i < layers; i++, layers_.push_back(layer)) {
            layer.first_ffn = static_cast<uint32_t>(layers_.size()) * shape.experts;
            layer.cached_before = static_cast<uint32_t>(layers_.size()) * 2 * shape.key_heads * shape.head_width;
        }
    }
    shape.layers = static_cast<uint32_t>(layers_.size());
}

/* ---- the plan -------------------------------------------------------------------------------------------------------- */
/* Co-located scales: `bytes` of the trigger part from `from` on lie at the end of value slots. */
void Job::move_scales(uint32_t from, uint32_t bytes)
{
    for (np_matrix_place *place : {&shape.up, &shape.down}) {
        if (!bytes || place->scales_part != NP_TRIGGER)
            continue;
        if (place->scales < from || place->scales - from >= bytes || shape.slot_bytes[NP_VALUE] < bytes)
            run_fail("plan.json", "moves scales that the package has elsewhere");
        place->scales_part = NP_VALUE;
        place->scales = shape.slot_bytes[NP_VALUE] - bytes + (place->scales - from);
    }
}

void Job::read_plan()
{
    const uint32_t index = number(run_environment("INDEX"), "");
    threads = number(plan_, "compute/prefill_threads");
    sequences = number(plan_, "compute/sequences");
    logit_rows = number(plan_, "compute/logit_rows");
    window_blocks = number(plan_, "compute/prefill_window_blocks");
    spin_us_ = number(plan_, "compute/spin_us");
    prefetch_ = json_truth(plan_, "compute/prefetch");
    pipeline_ = json_truth(plan_, "compute/pipeline");
    bundle_ = json_truth(plan_, "flash/bundle");
    shape.context_tokens = number(plan_, "compute/context_tokens");
    move_scales(number(plan_, "memory/moved_scales_from"), number(plan_, "memory/moved_scales_bytes"));
    if (!threads || !window_blocks)
        run_fail("plan.json", "prefill has no threads, or no window");
    bool is_found = false;
    for (size_t n = 0; const char *process = json_item(plan_, "compute/processes", n); n++) {
        char *role = json_text(process, "role");
        if (!strcmp(role, "decode"))
            cores.push_back(json_has(process, "core") ? static_cast<int>(number(process, "core")) : -1);
        if (!strcmp(role, "prefill") && number(process, "index") == index) {
            size_t spans[2], rings[2];
            uint8_t *next = static_cast<uint8_t *>(segment_field(&trace_, "next", rings));
            uint8_t *first = static_cast<uint8_t *>(segment_field(&trace_, "spans", spans));
            if (n >= rings[0] || n >= spans[0] || !spans[1] || spans[1] & (spans[1] - 1))
                run_fail("trace", "has no ring for this process");
            shared_.trace.next = reinterpret_cast<uint64_t *>(next + n * LINE_WORDS * sizeof(uint32_t));
            shared_.trace.spans = reinterpret_cast<np_span *>(first + n * spans[1] * sizeof(np_span));
            shared_.trace.capacity = static_cast<uint32_t>(spans[1]);
            is_found = true;
        }
        free(role);
    }
    first_window_ = static_cast<uint32_t>(cores.size()) + threads * index;
    if (!is_found || first_window_ + threads > windows_)
        run_fail("plan.json", "has no such prefill worker");
}

/* ---- shared memory --------------------------------------------------------------------------------------------------- */
/* A field with at least so many elements of T. Ends the run if it is smaller. */
template <typename T> static T *elements(const segment &s, const char *name, size_t min_count)
{
    size_t bytes;
    if (__builtin_mul_overflow(min_count, sizeof(T), &bytes) || segment_field_bytes(&s, name) < bytes)
        run_fail(name, "is smaller in shared memory than the package and the plan say");
    return static_cast<T *>(segment_field(&s, name, nullptr));
}

static segment opened(const char *run_file, const char *name, int writable)
{
    const segment s = segment_open(run_file, name, writable);
    np_memory_lock(s.memory, s.bytes); /* optional: needs a permission */
    return s;
}

void Job::open_segments()
{
    size_t lengths[2];
    stage_ = segment_private(run_file_, "prefill_stage");
    fixed_segment_ = opened(run_file_, "fixed", 0);
    slots_ = opened(run_file_, "slots", 0);
    residency_ = opened(run_file_, "residency", 1);
    kv_segment_ = opened(run_file_, "kv", 1);
    exchange_ = opened(run_file_, "exchange", 1);
    trace_ = opened(run_file_, "trace", 1);
    segment_field(&residency_, "windows", lengths);
    windows_ = static_cast<uint32_t>(lengths[0]);
    segment_field(&stage_, "residual", lengths);
    max_tokens = static_cast<uint32_t>(lengths[0]);
    const char *const names[NP_PARTS] = {"trigger_slots", "value_slots"};
    for (int part = 0; part < NP_PARTS; part++) {
        shared_.slots[part] = static_cast<uint8_t *>(segment_field(&slots_, names[part], lengths));
        shape.slot_bytes[part] = static_cast<uint32_t>(lengths[1]);
    }
}

np_shared Job::shared(uint32_t number) const
{
    const np_shape &s = shape;
    const size_t tokens = max_tokens, heads_width = static_cast<size_t>(s.query_heads) * s.head_width;
    const size_t clusters = static_cast<size_t>(s.layers) * s.experts * s.clusters, window = first_window_ + number;
    size_t ring[2];
    np_shared view = shared_;
    view.residual = elements<float>(stage_, "residual", tokens * s.width);
    view.queries = elements<float>(stage_, "queries", tokens * heads_width);
    view.attention = elements<float>(stage_, "attention", tokens * heads_width);
    view.claims = elements<uint32_t>(stage_, "claims", np_engine_claims(s.layers));
    view.barrier = elements<np_barrier>(stage_, "barriers", 1);
    view.logits = elements<float>(exchange_, "logits", static_cast<size_t>(logit_rows) * s.vocabulary);
    view.epoch = elements<uint32_t>(exchange_, "epoch", 1);
    view.kv = elements<uint16_t>(kv_segment_, "kv", static_cast<size_t>(s.layers) * sequences * s.key_heads * 2 * s.context_tokens * s.head_width);
    view.entries[NP_TRIGGER] = elements<uint32_t>(residency_, "trigger_entries", clusters);
    view.entries[NP_VALUE] = elements<uint32_t>(residency_, "value_entries", clusters);
    view.window = elements<uint64_t>(residency_, "windows", windows_) + window;
    view.arrivals = elements<uint32_t>(residency_, "arrivals", 1);
    view.in_flight = elements<uint32_t>(residency_, "in_flight", 1);
    uint32_t *entries = static_cast<uint32_t *>(segment_field(&residency_, "requests", ring));
    elements<uint32_t>(residency_, "requests", windows_ * ring[1]);
    view.requests.tail = elements<uint32_t>(residency_, "request_tails", windows_ * LINE_WORDS) + window * LINE_WORDS;
    view.requests.head = elements<uint32_t>(residency_, "request_heads", windows_ * LINE_WORDS) + window * LINE_WORDS;
    view.requests.entries = entries + window * ring[1];
    view.requests.capacity = static_cast<uint32_t>(ring[1]);
    view.requests.asleep = elements<uint32_t>(residency_, "asleep", 1);
    view.requests.doorbell = doorbell_;
    if (number)
        view.trace = {}; /* a trace ring has one writer; the other threads do the same work */
    view.inputs = const_cast<float *>(inputs.data());
    view.outputs = const_cast<float *>(outputs.data());
    return view;
}

np_engine_config Job::config(uint32_t product_blocks) const
{
    np_engine_config c = {};
    c.sequences = sequences;
    c.max_tokens = max_tokens;
    c.logit_rows = logit_rows;
    c.window_blocks = window_blocks;
    c.product_blocks = product_blocks;
    c.spin_us = spin_us_;
    c.bundle = bundle_;
    c.prefetch = prefetch_;
    c.pipeline = pipeline_;
    c.external_products = 1;
    return c;
}

/* ---- the fixed tensors ------------------------------------------------------------------------------------------------ */
const void *Job::tensor(const std::string &name, size_t bytes) const
{
    const std::string path = name + "/data_offsets";
    const char *first = json_item(header_.c_str(), path.c_str(), 0), *second = json_item(header_.c_str(), path.c_str(), 1);
    const uint64_t from = first ? json_number(first, "") : 0, end = second ? json_number(second, "") : 0;
    if (from > end || end > tensors_bytes_ || end - from != bytes)
        run_fail(name.c_str(), "has another size than the model's shape says; convert the model again");
    return tensors_ + from;
}

np_matrix Job::matrix(const std::string &name, size_t rows, size_t columns) const
{
    const int type = quantization_at(manifest_, "quantizations/" + name, shape.type);
    return {tensor(name + ".quants", rows * np_quant_bytes(type, columns)), tensor(name + ".scales", rows * np_scale_bytes(type, columns)),
            type, 0};
}

const float *Job::vector_named(const std::string &name, size_t length, bool is_there) const
{
    return is_there ? static_cast<const float *>(tensor(name, length * sizeof(float))) : nullptr;
}

np_norm Job::norm(const std::string &name) const
{
    return {vector_named(name, shape.width), vector_named(name + ".bias", shape.width, shape.norm == NP_NORM_LAYER)};
}

void Job::open_fixed()
{
    const np_shape &s = shape;
    const size_t heads_width = static_cast<size_t>(s.query_heads) * s.head_width, bytes = segment_field_bytes(&fixed_segment_, "file");
    const size_t qkv = heads_width + 2 * static_cast<size_t>(s.key_heads) * s.head_width;
    const uint8_t *file = static_cast<const uint8_t *>(segment_field(&fixed_segment_, "file", nullptr));
    uint64_t length;
    for (; !np_word_load(loaded); )
        np_word_wait(loaded, 0, epoch, np_word_load(epoch), 0, WAIT_MS);
    if (bytes < sizeof length || (memcpy(&length, file, sizeof length), length > bytes - sizeof length))
        run_fail("fixed.safetensors", "its header does not fit; convert the model again");
    header_.assign(reinterpret_cast<const char *>(file) + sizeof length, length);
    tensors_ = file + sizeof length + length;
    tensors_bytes_ = bytes - sizeof length - length;
    const bool qkv_bias = json_truth(manifest_, "model/qkv_bias"), output_bias = json_truth(manifest_, "model/output_bias");
    for (uint32_t n = 0; n < s.layers; n++) {
        const std::string name = "layers." + std::to_string(n) + ".";
        np_layer &layer = layers_[n];
        layer.qkv = matrix(name + "qkv", qkv, s.width);
        layer.attention_output = matrix(name + "attention_output", s.width, heads_width);
        layer.attention_norm = norm(name + "attention_norm");
        layer.ffn_norm = norm(name + "ffn_norm");
        layer.qkv_bias = vector_named(name + "qkv.bias", qkv, qkv_bias);
        layer.attention_output_bias = vector_named(name + "attention_output.bias", s.width, output_bias);
        layer.query_norm = vector_named(name + "query_norm", s.head_width, s.head_norm);
        layer.key_norm = vector_named(name + "key_norm", s.head_width, s.head_norm);
        layer.router = vector_named(name + "router", static_cast<size_t>(s.experts) * s.width, s.experts > 1);
    }
    fixed.embedding = matrix("embedding", s.vocabulary, s.width);
    fixed.output = json_truth(manifest_, "model/tied_embeddings") ? fixed.embedding : matrix("output", s.vocabulary, s.width);
    fixed.output_norm = norm("output_norm");
    fixed.inverse_frequency = vector_named("rope.inverse_frequency", s.head_width / 2, s.rotary);
    const size_t positions = number(manifest_, "model/context_tokens");
    fixed.position_embedding = vector_named("position_embedding", positions * s.width, !s.rotary);
    fixed.layers = layers_.data();
}

/* ---- the job --------------------------------------------------------------------------------------------------------- */
Job::Job() : run_directory(run_environment("RUN")), fixed()
{
    run_file_ = run_read_file(run_directory.c_str(), "run.json", nullptr);
    plan_ = run_read_file(run_directory.c_str(), "plan.json", nullptr);
    manifest_ = run_read_file(run_environment("PACKAGE"), "manifest.json", nullptr);
    read_shape();
    open_segments();
    read_plan();
    const std::string bell = run_directory + "/doorbell";
    doorbell_ = open(bell.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (doorbell_ < 0)
        run_fail(bell.c_str(), strerror(errno));
    const size_t heads_width = static_cast<size_t>(shape.query_heads) * shape.head_width;
    const size_t qkv = heads_width + 2 * static_cast<size_t>(shape.key_heads) * shape.head_width;
    inputs.resize(max_tokens * std::max<size_t>(shape.width, heads_width));
    outputs.resize(max_tokens * std::max<size_t>(shape.width, qkv));
    const np_shared first = shared(0);
    epoch = first.epoch;
    loaded = elements<uint32_t>(residency_, "loaded", 1);
    claims = first.claims;
    claims_bytes = segment_field_bytes(&stage_, "claims");
    barrier = first.barrier;
    kv = first.kv;
}

#include "job.h"

#include <cstring>
#include <fcntl.h>
#include <unistd.h>

#include "engine/model_fields.h"

enum { LINE_WORDS = 16, WAIT_MS = 1000 };

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

/* Read the numbers of a structure, by their names at this path. */
template <size_t COUNT> static void read_numbers(const char *json, const std::string &path, const np_field (&fields)[COUNT], void *structure)
{
    for (const np_field &field : fields) {
        char *const at = static_cast<char *>(structure) + field.offset;
        const double value = json_real(json, (path + field.name).c_str());
        if (field.kind == NP_FIELD_FLOAT) {
            const float stored = static_cast<float>(value);
            memcpy(at, &stored, sizeof stored);
        } else if (value < (field.kind == NP_FIELD_INT32 ? INT32_MIN : 0) || value > (field.kind == NP_FIELD_INT32 ? INT32_MAX : UINT32_MAX)) {
            run_fail(field.name, "is out of range");
        } else if (field.kind == NP_FIELD_INT32) {
            const int32_t stored = static_cast<int32_t>(value);
            memcpy(at, &stored, sizeof stored);
        } else {
            const uint32_t stored = static_cast<uint32_t>(value);
            memcpy(at, &stored, sizeof stored);
        }
    }
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

/* The structures as the supervisor derived them from package and plan. */
void Job::read_shape()
{
    char *const engine = run_read_file(run_directory.c_str(), "engine.json", nullptr);
    if (json_number(engine, "fields") != NP_FIELD_NAMES)
        run_fail("engine.json", "was written by another version than this program; build the program again");
    shape = {};
    read_numbers(engine, "shape/", NP_SHAPE_FIELDS, &shape);
    if (!shape.gated || shape.activation_threshold != 0 || (shape.activation != NP_RELU && shape.activation != NP_DRELU))
        run_fail("model/activation", "this worker computes relu and drelu with a gate, without a threshold; use our own prefill worker");
    for (size_t n = 0; const char *numbers = json_item(engine, "layers", n); n++) {
        np_layer layer = {};
        read_numbers(numbers, "", NP_LAYER_FIELDS, &layer);
        layers_.push_back(layer);
    }
    if (layers_.size() != shape.layers)
        run_fail("engine.json", "has another number of layers than its shape");
    free(engine);
    static_inputs = 0;
    if (json_has(manifest_, "npu") && choice(manifest_, "npu/scaling", {{"token", 0}, {"static", 1}}))
        static_inputs = json_real(manifest_, "npu/ranges/neurons/inputs");
}

/* ---- the plan -------------------------------------------------------------------------------------------------------- */
void Job::read_plan()
{
    const uint32_t index = number(run_environment("INDEX"), "");
    threads = number(plan_, "compute/prefill_threads");
    sequences = number(plan_, "compute/sequences");
    logit_rows = number(plan_, "compute/logit_rows");
    kv_type = choice(plan_, "compute/kv_type", {{"f16", NP_F16}, {"q8", NP_Q8}});
    window_blocks = number(plan_, "compute/prefill_window_blocks");
    spin_us_ = number(plan_, "compute/spin_us");
    prefetch_ = json_truth(plan_, "compute/prefetch");
    pipeline_ = json_truth(plan_, "compute/pipeline");
    bundle_ = json_truth(plan_, "flash/bundle");
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
        if (lengths[1] != shape.slot_bytes[part])
            run_fail(names[part], "has slots of another size than the engine's");
    }
}

np_shared Job::shared(uint32_t number) const
{
    const np_shape &s = shape;
    const size_t tokens = max_tokens, heads_width = static_cast<size_t>(s.query_heads) * s.head_width;
    const size_t ffns = layers_.empty() ? 0 : static_cast<size_t>(layers_.back().first_ffn) + layers_.back().experts;
    const size_t clusters = ffns * s.clusters, window = first_window_ + number;
    size_t ring[2];
    np_shared view = shared_;
    view.residual = elements<float>(stage_, "residual", tokens * s.width);
    view.queries = elements<float>(stage_, "queries", tokens * heads_width);
    view.attention = elements<float>(stage_, "attention", tokens * heads_width);
    view.claims = elements<uint32_t>(stage_, "claims", np_engine_claims(s.layers));
    view.barrier = elements<np_barrier>(stage_, "barriers", 1);
    view.logits = elements<float>(exchange_, "logits", static_cast<size_t>(logit_rows) * s.vocabulary);
    view.epoch = elements<uint32_t>(exchange_, "epoch", 1);
    const size_t kv_rows = static_cast<size_t>(s.layers) * sequences * s.key_heads * 2 * s.context_tokens;
    view.kv = elements<uint16_t>(kv_segment_, "kv", kv_rows * np_kv_row_bytes(kv_type, s.head_width) / sizeof(uint16_t));
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
    c.kv_type = kv_type;
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
const void *Job::tensor(const std::string &name, size_t bytes)
{
    const std::string path = name + "/data_offsets";
    tensors_used_ += has_tensor(name);
    const char *first = json_item(header_.c_str(), path.c_str(), 0), *second = json_item(header_.c_str(), path.c_str(), 1);
    const uint64_t from = first ? json_number(first, "") : 0, end = second ? json_number(second, "") : 0;
    if (from > end || end > tensors_bytes_ || end - from != bytes)
        run_fail(name.c_str(), "has another size than the model's shape says; convert the model again");
    return tensors_ + from;
}

bool Job::has_tensor(const std::string &name) const
{
    return json_has(header_.c_str(), name.c_str());
}

np_matrix Job::matrix(const std::string &name, size_t rows, size_t columns)
{
    const int type = quantization_at(manifest_, "quantizations/" + name, shape.type);
    return {tensor(name + ".quants", rows * np_quant_bytes(type, columns)), tensor(name + ".scales", rows * np_scale_bytes(type, columns)),
            type, 0};
}

/* NULL if the package has no such tensor. */
const float *Job::vector_named(const std::string &name, size_t length)
{
    return has_tensor(name) ? static_cast<const float *>(tensor(name, length * sizeof(float))) : nullptr;
}

np_norm Job::norm(const std::string &name)
{
    return {vector_named(name, shape.width), vector_named(name + ".bias", shape.width)};
}

/* End the run unless every tensor has its place in `fixed`: the engine would compute another model without the others. */
void Job::require_all_used() const
{
    size_t tensors = 0;
    for (size_t at = 0; (at = header_.find("\"data_offsets\"", at)) != std::string::npos; at++)
        tensors++;
    if (tensors != tensors_used_)
        run_fail("model", "this worker does not compute this model's routers or attention; use our own prefill worker");
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
    for (uint32_t n = 0; n < s.layers; n++) {
        const std::string name = "layers." + std::to_string(n) + ".";
        np_layer &layer = layers_[n];
        layer.qkv = matrix(name + "qkv", qkv, s.width);
        layer.attention_output = matrix(name + "attention_output", s.width, heads_width);
        layer.attention_norm = norm(name + "attention_norm");
        layer.ffn_norm = norm(name + "ffn_norm");
        layer.qkv_bias = vector_named(name + "qkv.bias", qkv);
        layer.attention_output_bias = vector_named(name + "attention_output.bias", s.width);
        layer.query_norm = vector_named(name + "query_norm", static_cast<size_t>(s.joint_norm ? s.query_heads : 1) * s.head_width);
        layer.key_norm = vector_named(name + "key_norm", static_cast<size_t>(s.joint_norm ? s.key_heads : 1) * s.head_width);
        layer.router = vector_named(name + "router", static_cast<size_t>(layer.routed_experts) * s.width);
    }
    fixed_.embedding = matrix("embedding", s.vocabulary, s.width);
    fixed_.output = json_truth(manifest_, "model/tied_embeddings") ? fixed_.embedding : matrix("output", s.vocabulary, s.width);
    fixed_.output_norm = norm("output_norm");
    fixed_.inverse_frequency = vector_named("rope.inverse_frequency", s.head_width / 2);
    const size_t positions = number(manifest_, "model/context_tokens");
    fixed_.position_embedding = vector_named("position_embedding", positions * s.width);
    fixed_.layers = layers_.data();
    require_all_used();
}

np_fixed Job::fixed() const
{
    np_fixed own = fixed_;
    size_t rows[2] = {};
    const void *checksums = segment_field(&fixed_segment_, "embedding_checksums", rows);
    if (!rows[0])
        return own;
    const std::string path = std::string(run_environment("PACKAGE")) + "/fixed.safetensors";
    const uint8_t *file = static_cast<const uint8_t *>(segment_field(&fixed_segment_, "file", nullptr));
    const uint64_t offset = static_cast<uint64_t>(static_cast<const uint8_t *>(own.embedding.quants) - file);
    int error = 0;
    own.embedding_rows = np_row_file_open(path.c_str(), offset, static_cast<uint32_t>(np_quant_bytes(own.embedding.type, shape.width)), shape.vocabulary,
                                          static_cast<const uint32_t *>(checksums), &error);
    if (!own.embedding_rows)
        run_fail("fixed.safetensors", "cannot be opened for reading; convert the model again");
    return own;
}

/* ---- the job --------------------------------------------------------------------------------------------------------- */
Job::Job() : run_directory(run_environment("RUN"))
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
    kv = static_cast<uint8_t *>(first.kv);
}

#include "runtime.h"

#include <cstring>
#include <dlfcn.h>

static const size_t MAX_REASON = 200;
static const char HTP[] = "libQnnHtp.so"; /* the CPU-side library of the Hexagon processor */

static std::string one_line(const char *text)
{
    std::string line;
    for (; *text; text++)
        if (static_cast<unsigned char>(*text) > ' ')
            line += *text;
        else if (!line.empty() && line.back() != ' ')
            line += ' ';
    return line.size() <= MAX_REASON ? line : line.substr(0, MAX_REASON) + "...";
}

/* ---- providers ----------------------------------------------------------------------------------------------------- */
static const std::vector<Provider> PROVIDERS = {
    {"cpu", "CPUExecutionProvider", false, false, 0},
    {"qnn", "QNNExecutionProvider", true, true, 0},
    {"qnn-emulated", "QNNExecutionProvider", true, false, 0},
};
/* Options for graphs that are prepared at the start, for no particular chip; those of ../sessions.py. */
static const std::vector<std::pair<const char *, const char *>> EMULATED = {{"htp_arch", "73"}, {"htp_graph_finalization_optimization_mode", "1"}};

Provider provider_named(const std::string &text)
{
    const size_t colon = text.find(':');
    const std::string name = text.substr(0, colon), soc = colon == std::string::npos ? "" : text.substr(colon + 1);
    std::string names;
    for (const Provider &provider : PROVIDERS) {
        names += (names.empty() ? "" : ", ") + provider.name;
        if (name != provider.name || (colon != std::string::npos && !provider.is_plugin))
            continue;
        Provider found = provider;
        if (colon != std::string::npos && (soc.empty() || soc.size() > 4 || soc.find_first_not_of("0123456789") != std::string::npos))
            throw RuntimeError("--provider " + text + ": name a chip by its number, as in " + name + ":57");
        found.soc = soc.empty() ? 0 : std::stoul(soc);
        return found;
    }
    throw RuntimeError("--provider " + text + ": the providers are " + names + "; of a chip qnn:57");
}

/* ---- sessions ------------------------------------------------------------------------------------------------------ */
Session::~Session()
{
    runtime_.api_->ReleaseSession(session_);
}

OrtValue *Session::value_of(const Tensor &tensor) const
{
    OrtValue *value = nullptr;
    const int64_t shape[2] = {tensor.rows, tensor.columns};
    const size_t bytes = static_cast<size_t>(tensor.rows * tensor.columns) * (tensor.type == ORT_U16 ? 2 : 1);
    runtime_.check(runtime_.api_->CreateTensorWithDataAsOrtValue(runtime_.memory_, tensor.memory, bytes, shape, 2, tensor.type, &value), tensor.name);
    return value;
}

void Session::run(const std::vector<Tensor> &inputs, const std::vector<Tensor> &outputs)
{
    const OrtApi *api = runtime_.api_;
    std::vector<const char *> names;
    std::vector<OrtValue *> values;
    for (const std::vector<Tensor> *tensors : {&inputs, &outputs})
        for (const Tensor &tensor : *tensors) {
            names.push_back(tensor.name);
            values.push_back(value_of(tensor));
        }
    const size_t count = inputs.size();
    OrtStatus *wrong = api->Run(session_, nullptr, names.data(), values.data(), count, names.data() + count, outputs.size(), values.data() + count);
    for (OrtValue *value : values)
        api->ReleaseValue(value);
    runtime_.check(wrong, "a graph cannot be computed");
}

/* ---- the runtime --------------------------------------------------------------------------------------------------- */
Runtime::Runtime(const std::string &library, const Provider &provider, const std::string &plugins) : provider_(provider), plugins_(plugins)
{
#ifndef __aarch64__
    if (provider_.needs_device) /* on other machines the same library is an emulator */
        throw RuntimeError("--provider qnn: this machine is no 64-bit Arm; qnn-emulated emulates one");
#endif
    void *handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        throw RuntimeError("ONNX Runtime does not load: " + one_line(dlerror()) + "; name its libonnxruntime.so by --library");
    const auto base = reinterpret_cast<const OrtApiBase *(*)()>(dlsym(handle, "OrtGetApiBase"));
    if (!base)
        throw RuntimeError(library + ": is no ONNX Runtime; name its libonnxruntime.so by --library");
    api_ = base()->GetApi(ORT_VERSION);
    if (!api_)
        throw RuntimeError(library + ": ONNX Runtime " + base()->GetVersionString() + " is too old; 1." + std::to_string(ORT_VERSION) +
                           " or later is needed");
    check(api_->CreateEnv(ORT_ERRORS_ONLY, "neuronpipe", &environment_), "ONNX Runtime does not start");
    check(api_->CreateCpuMemoryInfo(ORT_ARENA, ORT_CPU_MEMORY, &memory_), "ONNX Runtime does not start");
    if (provider_.is_plugin)
        register_plugin();
}

void Runtime::check(OrtStatus *status, const std::string &what) const
{
    if (!status)
        return;
    const std::string why = one_line(api_->GetErrorMessage(status));
    api_->ReleaseStatus(status);
    throw RuntimeError(what + ": " + why);
}

void Runtime::register_plugin()
{
    const OrtEpDevice *const *devices;
    size_t count = 0;
    if (plugins_.empty())
        throw RuntimeError("--provider " + provider_.name + ": name the folder of its libraries by --plugins");
    const std::string path = plugins_ + "/libonnxruntime_providers_qnn.so";
    check(api_->RegisterExecutionProviderLibrary(environment_, provider_.runtime_name.c_str(), path.c_str()), path + " does not load");
    check(api_->GetEpDevices(environment_, &devices, &count), path);
    for (size_t n = 0; n < count && !device_; n++)
        if (provider_.runtime_name == api_->EpDevice_EpName(devices[n]))
            device_ = devices[n];
    if (!device_)
        throw RuntimeError(provider_.runtime_name + " finds no device");
}

/* The first fields of QNN's interface: the backend's id and name, and two versions of three numbers. */
struct QnnInterface {
    uint32_t id;
    const char *name;
    uint32_t core[3], backend[3];
};

std::string Runtime::qnn_version() const
{
    const std::string path = plugins_ + "/" + HTP;
    const QnnInterface *const *interfaces = nullptr;
    uint32_t count = 0;
    void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        throw RuntimeError("QNN does not load: " + one_line(dlerror()) + "; name the folder of its libraries by --plugins");
    const auto ask = reinterpret_cast<uint64_t (*)(const QnnInterface *const **, uint32_t *)>(dlsym(handle, "QnnInterface_getProviders"));
    if (!ask || ask(&interfaces, &count) || !count)
        throw RuntimeError(path + ": does not say its version; name the folder of QNN's libraries by --plugins");
    const auto text = [](const uint32_t *v) { return std::to_string(v[0]) + "." + std::to_string(v[1]) + "." + std::to_string(v[2]); };
    return text(interfaces[0]->core) + "-" + text(interfaces[0]->backend);
}

std::unique_ptr<Session> Runtime::session(const std::string &graph_file, bool is_prepared)
{
    OrtSessionOptions *options;
    OrtSession *native = nullptr;
    check(api_->CreateSessionOptions(&options), graph_file);
    const auto set = [&](OrtStatus *status) { check(status, graph_file); };
    set(api_->SetSessionLogSeverityLevel(options, ORT_ERRORS_ONLY));
    set(api_->SetIntraOpNumThreads(options, 1));
    set(api_->DisableCpuMemArena(options)); /* an arena per session would never be freed */
    set(api_->DisableMemPattern(options));
    set(api_->AddSessionConfigEntry(options, "session.record_ep_graph_assignment_info", "1"));
    if (provider_.is_plugin) {
        const std::string backend = plugins_ + "/" + HTP;
        std::vector<const char *> keys = {"backend_path"}, values = {backend.c_str()};
        for (const auto &option : EMULATED) {
            if (is_prepared)
                break;
            keys.push_back(option.first);
            values.push_back(option.second);
        }
        /* otherwise the runtime silently runs on its CPU what the provider refuses */
        set(api_->AddSessionConfigEntry(options, "session.disable_cpu_ep_fallback", "1"));
        set(api_->SessionOptionsAppendExecutionProvider_V2(options, environment_, &device_, 1, keys.data(), values.data(), keys.size()));
    }
    set(api_->CreateSession(environment_, graph_file.c_str(), options, &native));
    api_->ReleaseSessionOptions(options);
    std::unique_ptr<Session> session(new Session(*this, native));
    check_placement(native, graph_file);
    return session;
}

void Runtime::check_placement(OrtSession *session, const std::string &graph_file) const
{
    const OrtEpAssignedSubgraph *const *parts;
    size_t count = 0;
    check(api_->Session_GetEpGraphAssignmentInfo(session, &parts, &count), graph_file);
    for (size_t n = 0; n < count; n++) {
        const char *name;
        check(api_->EpAssignedSubgraph_GetEpName(parts[n], &name), graph_file);
        if (provider_.runtime_name != name)
            throw RuntimeError(graph_file + ": a part of it went to " + name + " and not to " + provider_.runtime_name);
    }
    if (!count)
        throw RuntimeError(graph_file + ": went to nobody");
}

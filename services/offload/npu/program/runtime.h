/* ONNX Runtime: loaded from a file, with one provider; and sessions over graphs, each on this provider altogether, or not at all. What it
 * refuses is thrown as RuntimeError, whose text is one line for a person. */
#ifndef RUNTIME_H
#define RUNTIME_H
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort.h"

struct RuntimeError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/* How a provider is called here, and by the runtime; whether it comes with a library of its own, and whether an emulated processor will not do;
 * the chip it computes for, as QNN numbers it; 0: no certain one. */
struct Provider {
    std::string name, runtime_name;
    bool is_plugin, needs_device;
    uint64_t soc;
};
/* By NAME or NAME:SOC; throws RuntimeError. */
Provider provider_named(const std::string &text);

/* A tensor of two dimensions in the caller's memory. */
struct Tensor {
    const char *name;
    int type; /* ORT_S8, ORT_U16 */
    int64_t rows, columns;
    void *memory;
};

class Runtime;

class Session {
public:
    ~Session();
    /* Computes the graph. The runtime refuses tensors of other types or shapes than the graph's. */
    void run(const std::vector<Tensor> &inputs, const std::vector<Tensor> &outputs);

private:
    friend class Runtime;
    Session(Runtime &runtime, OrtSession *session) : runtime_(runtime), session_(session) {}
    OrtValue *value_of(const Tensor &tensor) const;

    Runtime &runtime_;
    OrtSession *session_;
};

class Runtime {
public:
    /* library: the file of ONNX Runtime. plugins: the folder of the provider's libraries, where it has any. */
    Runtime(const std::string &library, const Provider &provider, const std::string &plugins);
    /* is_prepared: the file holds what a graph was prepared as, not the graph. */
    std::unique_ptr<Session> session(const std::string &graph_file, bool is_prepared);
    /* The version of the provider's library, as it says itself: of QNN's interface, and of its own. */
    std::string qnn_version() const;
    const Provider &provider() const { return provider_; }

private:
    friend class Session;
    void check(OrtStatus *status, const std::string &what) const;
    void register_plugin();
    void check_placement(OrtSession *session, const std::string &graph_file) const;

    const Provider provider_;
    const std::string plugins_;
    const OrtApi *api_ = nullptr;
    OrtEnv *environment_ = nullptr;
    OrtMemoryInfo *memory_ = nullptr;
    const OrtEpDevice *device_ = nullptr;
};
#endif

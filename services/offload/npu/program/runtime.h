/* ONNX Runtime, loaded from a file, with one provider; and sessions of graphs that run on this provider entirely.
 * Errors are thrown as RuntimeError with one line for the user. */
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

/* name: as in --provider; runtime_name: the runtime's name. is_plugin: it has a library of its own. needs_device: an
 * emulator does not suffice. soc: QNN's number of the chip; 0: any. */
struct Provider {
    std::string name, runtime_name;
    bool is_plugin, needs_device;
    uint64_t soc;
};
/* Parse NAME or NAME:SOC. Throws RuntimeError. */
Provider provider_named(const std::string &text);

/* A two-dimensional tensor in the caller's memory. */
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
    /* Compute the graph. The runtime refuses tensors of another type or shape. */
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
    /* library: ONNX Runtime's file. plugins: the folder of the provider's libraries, if it has any. */
    Runtime(const std::string &library, const Provider &provider, const std::string &plugins);
    /* is_prepared: the file is a context for a chip, not a graph. */
    std::unique_ptr<Session> session(const std::string &graph_file, bool is_prepared);
    /* The versions of QNN's interface and of the provider's library, as the library reports them. */
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

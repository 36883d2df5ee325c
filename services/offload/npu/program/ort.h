/* The part of ONNX Runtime's C API that this program calls. Wheels of the runtime do not contain its header, so
 * functions are declared here by their index in the runtime's table. The table only grows at its end: a function keeps
 * its index from the version that introduced it. The newest function called is of version 24 (runtime 1.24); older
 * runtimes are refused. */
#ifndef ORT_H
#define ORT_H
#include <cstddef>
#include <cstdint>

enum { ORT_VERSION = 24, ORT_ERRORS_ONLY = 3, ORT_S8 = 3, ORT_U16 = 4, ORT_ARENA = 1, ORT_CPU_MEMORY = 0 };

struct OrtStatus;
struct OrtEnv;
struct OrtSession;
struct OrtSessionOptions;
struct OrtRunOptions;
struct OrtValue;
struct OrtMemoryInfo;
struct OrtEpDevice;
struct OrtEpAssignedSubgraph;

struct OrtApi {
    void *to_2[2];
    const char *(*GetErrorMessage)(const OrtStatus *);
    OrtStatus *(*CreateEnv)(int severity, const char *name, OrtEnv **);
    void *to_7[3];
    OrtStatus *(*CreateSession)(const OrtEnv *, const char *path, const OrtSessionOptions *, OrtSession **);
    void *to_9[1];
    OrtStatus *(*Run)(OrtSession *, const OrtRunOptions *, const char *const *input_names, const OrtValue *const *inputs, size_t input_count,
                      const char *const *output_names, size_t output_count, OrtValue **outputs);
    OrtStatus *(*CreateSessionOptions)(OrtSessionOptions **);
    void *to_17[6];
    OrtStatus *(*DisableMemPattern)(OrtSessionOptions *);
    void *to_19[1];
    OrtStatus *(*DisableCpuMemArena)(OrtSessionOptions *);
    void *to_22[2];
    OrtStatus *(*SetSessionLogSeverityLevel)(OrtSessionOptions *, int);
    void *to_24[1];
    OrtStatus *(*SetIntraOpNumThreads)(OrtSessionOptions *, int);
    void *to_49[24];
    OrtStatus *(*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo *, void *, size_t bytes, const int64_t *shape, size_t dimensions, int type,
                                                 OrtValue **);
    void *to_69[19];
    OrtStatus *(*CreateCpuMemoryInfo)(int allocator, int memory, OrtMemoryInfo **);
    void *to_93[23];
    void (*ReleaseStatus)(OrtStatus *);
    void *to_95[1];
    void (*ReleaseSession)(OrtSession *);
    void (*ReleaseValue)(OrtValue *);
    void *to_100[3];
    void (*ReleaseSessionOptions)(OrtSessionOptions *);
    void *to_130[29];
    OrtStatus *(*AddSessionConfigEntry)(OrtSessionOptions *, const char *, const char *);
    void *to_301[170];
    OrtStatus *(*RegisterExecutionProviderLibrary)(OrtEnv *, const char *name, const char *path);
    void *to_303[1];
    OrtStatus *(*GetEpDevices)(const OrtEnv *, const OrtEpDevice *const **, size_t *);
    OrtStatus *(*SessionOptionsAppendExecutionProvider_V2)(OrtSessionOptions *, OrtEnv *, const OrtEpDevice *const *, size_t,
                                                           const char *const *keys, const char *const *values, size_t);
    void *to_312[7];
    const char *(*EpDevice_EpName)(const OrtEpDevice *);
    void *to_407[94];
    OrtStatus *(*Session_GetEpGraphAssignmentInfo)(const OrtSession *, const OrtEpAssignedSubgraph *const **, size_t *);
    OrtStatus *(*EpAssignedSubgraph_GetEpName)(const OrtEpAssignedSubgraph *, const char **);
};
#define ORT_PLACE(function, place) static_assert(offsetof(OrtApi, function) == (place) * sizeof(void *), #function)
ORT_PLACE(GetErrorMessage, 2);
ORT_PLACE(CreateSession, 7);
ORT_PLACE(Run, 9);
ORT_PLACE(DisableMemPattern, 17);
ORT_PLACE(DisableCpuMemArena, 19);
ORT_PLACE(SetSessionLogSeverityLevel, 22);
ORT_PLACE(SetIntraOpNumThreads, 24);
ORT_PLACE(CreateTensorWithDataAsOrtValue, 49);
ORT_PLACE(CreateCpuMemoryInfo, 69);
ORT_PLACE(ReleaseStatus, 93);
ORT_PLACE(ReleaseSession, 95);
ORT_PLACE(ReleaseSessionOptions, 100);
ORT_PLACE(AddSessionConfigEntry, 130);
ORT_PLACE(RegisterExecutionProviderLibrary, 301);
ORT_PLACE(GetEpDevices, 303);
ORT_PLACE(EpDevice_EpName, 312);
ORT_PLACE(Session_GetEpGraphAssignmentInfo, 407);
#undef ORT_PLACE

struct OrtApiBase {
    const OrtApi *(*GetApi)(uint32_t version); /* nullptr: the runtime is older */
    const char *(*GetVersionString)();
};
#endif

/* This process's part of the run: the plan's figures, the package's shape and shared memory, as the engine's
 * structures. Unsuitable input ends the run with one line (run_fail). One object, which lives as long as the
 * process. */
#ifndef JOB_H
#define JOB_H
#include <cstdint>
#include <string>
#include <vector>

#include "neuronpipe.h"
#include "client/run_context.h"

class Job {
public:
    Job();

    /* The engine's arguments for a participant. number: the thread's, from 0. */
    np_shared shared(uint32_t number) const;
    np_fixed fixed() const;       /* with rows of the embedding of its own, if the embedding stays on flash */
    np_engine_config config(uint32_t product_blocks) const;

    std::string run_directory;
    np_shape shape;
    uint32_t threads;             /* participants of this process's steps */
    uint32_t max_tokens;          /* maximum of one step */
    uint32_t logit_rows, sequences;
    uint32_t window_blocks;       /* of a feed-forward, open at once */
    std::vector<int> cores;       /* of the decode workers, -1: none; several threads are pinned to these cores */
    double static_inputs;         /* the maximum of the calibration text, if it decides ranges; 0: tokens have scales of their own */
    const uint32_t *epoch, *loaded;
    uint32_t *claims;
    size_t claims_bytes;
    np_barrier *barrier;
    int kv_type;                  /* NP_F16 or NP_Q8 */
    uint8_t *kv;
    std::vector<float> inputs, outputs; /* of external products */

    /* Wait until the loader has verified and sealed the fixed tensors, and find them. */
    void open_fixed();

private:
    void read_plan();
    void read_shape();
    void open_segments();
    bool has_tensor(const std::string &name) const;
    const void *tensor(const std::string &name, size_t bytes);
    np_matrix matrix(const std::string &name, size_t rows, size_t columns);
    const float *vector_named(const std::string &name, size_t length);
    np_norm norm(const std::string &name);
    void require_all_used() const;

    const char *run_file_, *plan_, *manifest_;
    segment fixed_segment_, slots_, residency_, kv_segment_, exchange_, trace_, stage_;
    np_shared shared_ = {};
    np_fixed fixed_ = {};
    bool bundle_, prefetch_, pipeline_;
    uint32_t spin_us_;
    uint32_t first_window_, windows_;
    int doorbell_;
    std::string header_;          /* of the fixed tensors, in JSON */
    const uint8_t *tensors_;      /* behind the header */
    size_t tensors_bytes_, tensors_used_ = 0;
    std::vector<np_layer> layers_;
};
#endif

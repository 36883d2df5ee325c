/* What this process was given: its place in the run, the plan's figures, the package's shape, shared memory; in the engine's words. What does not
 * suit ends the run with a line (run_fail). One object, alive as long as the process. */
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

    /* A participant's view of memory, and how it computes. number: of the thread, from 0. */
    np_shared shared(uint32_t number) const;
    np_engine_config config(uint32_t product_blocks) const;

    std::string run_directory;
    np_shape shape;
    np_fixed fixed;
    uint32_t threads;             /* participants of this process's steps */
    uint32_t max_tokens;          /* of one step */
    uint32_t logit_rows, sequences;
    uint32_t window_blocks;       /* of a feed-forward that may be open at once */
    std::vector<int> cores;       /* of the decode workers, -1: none; threads may take them, where there are several */
    double static_inputs;         /* what calibration text had at most, where it decides ranges; 0: tokens have scales of their own */
    const uint32_t *epoch, *loaded;
    uint32_t *claims;
    size_t claims_bytes;
    np_barrier *barrier;
    uint16_t *kv;
    std::vector<float> inputs, outputs; /* of products that are computed outside */

    /* Set fixed, once the loader has verified and sealed the tensors. */
    void open_fixed();

private:
    void read_plan();
    void read_shape();
    void move_scales(uint32_t from, uint32_t bytes);
    void open_segments();
    const void *tensor(const std::string &name, size_t bytes) const;
    np_matrix matrix(const std::string &name, size_t rows, size_t columns) const;
    const float *vector_named(const std::string &name, size_t length, bool is_there = true) const;
    np_norm norm(const std::string &name) const;

    const char *run_file_, *plan_, *manifest_;
    segment fixed_segment_, slots_, residency_, kv_segment_, exchange_, trace_, stage_;
    np_shared shared_ = {};
    bool bundle_, prefetch_, pipeline_;
    uint32_t spin_us_;
    uint32_t first_window_, windows_;
    int doorbell_;
    std::string header_;          /* of the fixed tensors, in JSON */
    const uint8_t *tensors_;      /* behind it */
    size_t tensors_bytes_;
    std::vector<np_layer> layers_;
};
#endif

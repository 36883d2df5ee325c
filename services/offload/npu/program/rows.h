/* Rows of weights as signed bytes, prepared ahead of the products that use them, as in ../weight_rows.py. */
#ifndef ROWS_H
#define ROWS_H
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "graphs.h"

/* The rows of one product, ready for its graph. Neurons have three matrices, and factors relative to max_scale, the
 * greatest product of a neuron's three scales; if it is 0, all neurons are zero. */
struct PreparedRows {
    np_product_rows place;
    std::vector<int8_t> rows[3];
    std::vector<float> scales[3];
    std::vector<uint16_t> factor;
    double max_scale;
};

/* Threads, including the caller, that share the parts of a task. */
class ThreadPool {
public:
    explicit ThreadPool(uint32_t threads);
    /* Call once with each number from 0 to parts - 1, and return when all calls have returned. */
    void share(size_t parts, const std::function<void(size_t)> &call);

private:
    void serve();
    void take_parts();

    std::mutex mutex_;
    std::condition_variable changed_;
    const std::function<void(size_t)> *call_ = nullptr;
    size_t parts_ = 0;
    uint64_t number_ = 0; /* of the task */
    uint32_t helpers_, busy_ = 0;
    std::atomic<size_t> next_{0};
};

class RowsAhead {
public:
    RowsAhead(const np_shape &shape, const Graphs &graphs, uint32_t threads);
    /* A step of this engine begins; it is over, or was abandoned. */
    void begin(np_engine *engine);
    void end();
    /* A product has begun: the next rows may be known now. */
    void notify_product();
    /* The next product's rows; nullptr if the step cannot go on (see `failure`). Their buffers stay in use until they
     * are released. */
    PreparedRows *take();
    void release(PreparedRows *rows);
    /* Compute a product of one token by the engine's own kernels. Returns NP_OK, or the failure. */
    int recompute(const np_product &product, const np_product_rows &place, uint32_t token, float *out, size_t stride);
    int failure();

    uint64_t ready = 0, late = 0; /* products whose rows were ready when their graph was free; those whose rows were not */
    double waited_ms = 0;         /* for late rows */

private:
    struct Recomputation {
        const np_product *product;
        np_product_rows place;
        uint32_t token;
        float *out;
        size_t stride;
        bool is_done;
    };
    void serve();
    int read();
    bool wait_until(const std::function<bool()> &is_so);
    int next(np_product_rows *place);
    int convert(PreparedRows *rows);

    const np_shape &shape_;
    const Scale factor_;
    const uint32_t neurons_;
    ThreadPool converters_;
    std::vector<std::unique_ptr<PreparedRows>> buffers_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<PreparedRows *> free_[4], ready_rows_; /* by kind */
    np_engine *engine_ = nullptr;       /* of the current step */
    Recomputation *recomputation_ = nullptr;
    bool is_idle_ = true;
    int failure_ = NP_OK;
    uint64_t requests_ = 0;
};
#endif

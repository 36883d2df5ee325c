/* Rows of weights as bytes, made ahead of the products that take them; as ../rows.py, which says how. */
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

/* Rows of one product, ready for its graph. Of neurons there are three matrices, and factors: parts of `most`, the greatest product of three
 * scales; where that is 0 all neurons are nothing. */
struct Made {
    np_product_rows place;
    std::vector<int8_t> rows[3];
    std::vector<float> scales[3];
    std::vector<uint16_t> factor;
    double most;
};

/* So many threads, of which the caller is one, that share parts of a piece of work. */
class Crew {
public:
    explicit Crew(uint32_t threads);
    /* Calls with 0 to parts - 1, each once, and returns when all have returned. */
    void share(size_t parts, const std::function<void(size_t)> &call);

private:
    void serve();
    void take_parts();

    std::mutex mutex_;
    std::condition_variable changed_;
    const std::function<void(size_t)> *call_ = nullptr;
    size_t parts_ = 0;
    uint64_t number_ = 0; /* of the piece of work */
    uint32_t others_, busy_ = 0;
    std::atomic<size_t> next_{0};
};

class RowsAhead {
public:
    RowsAhead(const np_shape &shape, const Graphs &graphs, uint32_t threads);
    /* A step of this engine; it is over, or was left. */
    void begin(np_engine *engine);
    void end();
    /* A product is wanted: which rows come next may be known now. */
    void want();
    /* The next product's; nullptr where the step cannot go on: `failure` says why. Its buffers are free once it is given back. */
    Made *take();
    void give_back(Made *made);
    /* A product of one token by the engine's own kernels. Returns NP_OK, or the failure. */
    int compute_again(const np_product &product, const np_product_rows &place, uint32_t token, float *out, size_t stride);
    int failure();

    uint64_t ready = 0, late = 0; /* products whose rows were made when a graph was free for them, or were not */
    double waited_ms = 0;         /* for those */

private:
    struct Again {
        const np_product *product;
        np_product_rows place;
        uint32_t token;
        float *out;
        size_t stride;
        bool is_done;
    };
    void serve();
    int read();
    bool until(const std::function<bool()> &is_so);
    int next(np_product_rows *place);
    int make(Made *made);

    const np_shape &shape_;
    const Scale factor_;
    const uint32_t neurons_;
    Crew makers_;
    std::vector<std::unique_ptr<Made>> all_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Made *> free_[4], made_; /* free_: by kind */
    np_engine *engine_ = nullptr;       /* of the step that is read */
    Again *again_ = nullptr;
    bool is_over_ = true;
    int failure_ = NP_OK;
    uint64_t wanted_ = 0;
};
#endif

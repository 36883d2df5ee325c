/* Products of a layer's matrices by graphs: activations to integers, and back; in the very order of operations of ../products.py,
 * so that both give the same bits. Graphs are computed in a thread of their own, of whose products two may wait. */
#ifndef PRODUCTS_H
#define PRODUCTS_H
#include <map>

#include "rows.h"

class Products {
public:
    Products(const np_shape &shape, uint32_t most_tokens, uint32_t threads, Graphs &graphs);
    /* A step of this engine; it is over, or was left. */
    void begin(np_engine *engine);
    void end();
    /* Have what the engine wants computed into its outputs; after a turn's last product all of the turn are. NP_OK, or an error as np_engine_next_product
     * has it. Throws RuntimeError. */
    int compute(const np_product &wanted);
    /* Of the last step: as those of the worker in Python. */
    std::map<std::string, double> counters() const;

private:
    /* A product that waits for its graph, or its result. */
    struct Work {
        np_product product;
        Made *made;            /* nullptr: the step was left */
        np_product_rows place; /* the rows'; what follows is of them too */
        std::vector<float> scales;
        double most;
        std::vector<uint16_t> y;                  /* [tokens, padded][outputs_stride] */
        std::vector<std::vector<uint16_t>> peaks; /* [tokens, padded] each */
        bool is_done;
        std::string why; /* the runtime failed */
    };
    void measure(const np_product &wanted, const Scale &scale, uint32_t t);
    void encode(const np_product &wanted);
    void encode_token(const np_product &wanted, uint32_t t);
    void serve();
    void run(Work *work);
    void run_part(Work *work, uint32_t first, uint32_t length, Session &session, const Graphs::Matrix *matrix);
    int finish();
    void take_matrix(const Work &work, uint32_t t);
    void add_neurons(const Work &work, uint32_t t);
    int again(const Work &work);
    const Graphs::Matrix *matrix_of(const np_product &wanted) const;
    const Lengths &graph_of(const np_product &wanted) const;

    const np_shape &shape_;
    Graphs &graphs_;
    RowsAhead rows_;
    Crew sharers_; /* of tokens */
    std::vector<float> lengths_, row_;
    std::vector<uint16_t> x_;
    std::vector<uint8_t> unsound_, clamped_; /* by token: of the turn's inputs, of one product */
    Work works_[2];
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Work *> idle_, waiting_, running_; /* waiting_: for the graphs' thread; running_: not finished */
    uint64_t recomputed_ = 0;
    double graphs_ms_ = 0;
};
#endif

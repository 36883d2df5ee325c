/* External products by graphs: encodes activations as integers, and decodes results. The order of operations is that of
 * ../layer_products.py, so that both give the same bits. Graphs run in a thread of their own, with at most two products
 * queued. */
#ifndef PRODUCTS_H
#define PRODUCTS_H
#include <map>

#include "rows.h"

class Products {
public:
    Products(const np_shape &shape, uint32_t max_tokens, uint32_t threads, Graphs &graphs);
    /* A step of this engine begins; it is over, or was abandoned. */
    void begin(np_engine *engine);
    void end();
    /* Compute a product into its outputs; after a turn's last product all products of the turn are computed. Returns
     * NP_OK or an error of np_engine_next_product. Throws RuntimeError. */
    int compute(const np_product &product);
    /* Counters of the last step, those of the worker in Python. */
    std::map<std::string, double> counters() const;

private:
    /* A product in progress. */
    struct Work {
        np_product product;
        PreparedRows *rows;            /* nullptr: the step was abandoned */
        np_product_rows place; /* of the rows, like the next two */
        std::vector<float> scales;
        double max_scale;
        std::vector<uint16_t> y;                  /* [tokens, padded][outputs_stride] */
        std::vector<std::vector<uint16_t>> peaks; /* [tokens, padded] each */
        bool is_done;
        std::string error; /* of the runtime; empty: none */
    };
    void measure(const np_product &product, const Scale &scale, uint32_t t);
    void encode(const np_product &product);
    void encode_token(const np_product &product, uint32_t t);
    void serve();
    void run(Work *work);
    void run_part(Work *work, uint32_t first, uint32_t length, Session &session, const Graphs::Matrix *matrix);
    int finish();
    void store_matrix(const Work &work, uint32_t t);
    void add_neurons(const Work &work, uint32_t t);
    int recompute_clamped(const Work &work);
    const Graphs::Matrix *matrix_of(const np_product &product) const;
    const GraphLengths &graph_of(const np_product &product) const;

    const np_shape &shape_;
    Graphs &graphs_;
    RowsAhead rows_;
    ThreadPool threads_; /* share the tokens of a product */
    std::vector<float> lengths_, row_;
    std::vector<uint16_t> x_;
    std::vector<uint8_t> invalid_, clamped_; /* by token; invalid_: the turn's inputs; clamped_: one product's results */
    Work works_[2];
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Work *> idle_, waiting_, running_; /* waiting_: for the graph thread; running_: not finished */
    uint64_t recomputed_ = 0;
    double graphs_ms_ = 0;
};
#endif

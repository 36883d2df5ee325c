/* The graphs that services/offload/npu/graph_files.py wrote into a folder, or contexts for a chip, loaded as
 * sessions. */
#ifndef GRAPHS_H
#define GRAPHS_H
#include <memory>
#include <string>
#include <vector>

#include "integers.h"
#include "neuronpipe.h"
#include "runtime.h"

struct Peak {
    std::string name;
    bool is_signed; /* 0 is an end of the range as well */
};

/* A graph for several numbers of tokens, ascending. */
struct GraphLengths {
    std::vector<std::pair<uint32_t, std::unique_ptr<Session>>> sessions; /* with their numbers of tokens */
};

class Graphs {
public:
    /* Ends the run if the files are damaged or do not suit the model, the chip or the runtime; throws RuntimeError.
     * max_tokens: of one step. */
    Graphs(const std::string &folder, const np_shape &shape, uint32_t max_tokens, Runtime &runtime);

    /* The id of the products' arithmetic: of a Hexagon processor, its emulator, or the runtime's CPU provider. */
    std::string numerics;

    struct Matrix {
        uint32_t rows, columns;
        Scale x, y;
        GraphLengths graph;
    };
    std::vector<Matrix> matrices;
    uint32_t neurons, max_neurons; /* per product; and the maximum that a plan could have */
    Scale x, factor, y;
    std::vector<Peak> peaks;
    GraphLengths feed_forward;
    bool by_token; /* tokens have scales of their own; else ranges come from the calibration text */
};
#endif

/* What services/offload/npu/graph_files.py wrote into a folder, ready to be computed: graphs, or what they were prepared as for a chip. */
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
    bool is_signed; /* 0 is an end of its range */
};

/* A graph in several lengths, the shortest first. */
struct Lengths {
    std::vector<std::pair<uint32_t, std::unique_ptr<Session>>> sessions; /* by tokens */
};

class Graphs {
public:
    /* Ends the run where they do not suit the model, the chip or the runtime, or are damaged; throws RuntimeError. most_tokens: of one step. */
    Graphs(const std::string &folder, const np_shape &shape, uint32_t most_tokens, Runtime &runtime);

    /* The arithmetic of the products: of a device's Hexagon, of its emulator's, or of the runtime's CPU provider. */
    std::string numerics;

    struct Matrix {
        uint32_t rows, columns;
        Scale x, y;
        Lengths graph;
    };
    std::vector<Matrix> matrices;
    uint32_t neurons, most_neurons; /* of one product here; and the most that a plan could have */
    Scale x, factor, y;
    std::vector<Peak> peaks;
    Lengths feed_forward;
    bool by_token; /* each token has a scale of its own; else ranges are those that calibration text had */
};
#endif

/* The engine's own state; see neuronpipe.h for what it does. */
#ifndef NP_ENGINE_H
#define NP_ENGINE_H
#include "neuronpipe.h"
#include "sync/clock.h"

typedef struct {
    uint32_t from, to;
} np_range;

struct np_engine {
    np_shape shape;
    np_fixed fixed;
    np_shared shared;
    uint32_t sequences, max_tokens, logit_rows, members, spin_us;
    double share_from, share_to;

    /* the step */
    uint32_t epoch, count;
    int32_t *sequence, *position, *token; /* [max_tokens] */

    /* scratch, private to this member */
    uint8_t *activations;      /* [max_tokens] prepared vectors, the longest of width and query_heads*head_width */
    size_t activation_stride;  /* bytes between two tokens' vectors */
    float *vector;             /* [max(width, query_heads*head_width)] */
    float *rows;               /* [max_tokens][max_rows] results of a dot product */
    size_t max_rows;
    float *scores;             /* [context_tokens] */

    /* the feed-forward layer in work */
    uint32_t layer;
    np_range own_blocks;       /* of every layer */
    np_range window;           /* blocks */
    uint32_t row_quant_bytes, row_scale_bytes;
    float *hidden;             /* [max_tokens][own clusters * cluster_neurons]: gates, then activations */
    size_t hidden_stride;
    uint8_t *cluster_state;    /* [own clusters]: NP_CLUSTER_* bits */
    uint8_t *block_done;       /* [own blocks] */
    uint32_t *block_slots;     /* [clusters of a block] where the rest parts of the block in work lie */
    np_engine_counters counters;
};

enum {
    NP_CLUSTER_GATED = 1,     /* its gates are computed */
    NP_CLUSTER_FIRED = 2,     /* at least one of its neurons fired for some token */
    NP_CLUSTER_ASKED = 4,     /* its rest part was asked for */
    NP_CLUSTER_GATE_LATE = 8, /* its gate part was not there at first look */
    NP_CLUSTER_REST_LATE = 16
};

/* This member's range of `n` things. */
np_range np_engine_share(const np_engine *engine, uint32_t n);
/* Barrier with the engine's epoch; counts the time. */
int np_engine_meet(np_engine *engine);
/* Prepare `n`-long activation vectors of all tokens from `source` ([tokens][stride]); norm weight or NULL. */
void np_engine_prepare(np_engine *engine, const float *source, size_t stride, size_t n, const float *norm);

#endif

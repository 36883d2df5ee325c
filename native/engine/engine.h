/* The engine's state. Each stage has a header of its own with its functions; this one has none but small helpers that
 * read the state. */
#ifndef NP_ENGINE_H
#define NP_ENGINE_H
#include "neuronpipe.h"
#include "sync/clock.h"

#include <string.h>

#define NP_NONE UINT32_MAX /* no slot, no piece of work, no layer */

typedef struct {
    uint32_t from, to; /* [from, to) */
} np_range;

/* Input vectors of a matrix product, one per token, quantized for rows of one type; from NP_PANEL_TOKENS on packed into
 * a panel as well. */
typedef struct {
    int type;
    size_t n, stride;   /* elements per vector; bytes from one token's vector to the next */
    uint32_t count;     /* prepared vectors */
    uint8_t *prepared;  /* [max_tokens][stride] */
    uint8_t *panel;     /* NULL if steps have too few tokens for one */
} np_vectors;
enum { NP_PANEL_TOKENS = 16 }; /* with fewer tokens packing a panel costs more than it saves */

/* Rows of one type at arbitrary addresses: the arguments of the scattered kernels. */
typedef struct {
    const void **quants, **scales; /* [block_neurons] */
    const void **prefetch;         /* [block_neurons] memory to fetch with each row */
    float *values;                 /* [NP_DOWN_TOKENS][block_neurons] factors of np_add_rows_for_tokens */
    uint16_t *token_masks;         /* [block_neurons] bit t: the row is multiplied with token t's vector */
    uint32_t *neurons;             /* [block_neurons] the rows' neurons */
    uint32_t count;
} np_row_list;
enum {
    NP_DOWN_TOKENS = 16,  /* tokens whose down rows are added together if they are the same */
    NP_OUTPUT_TOKENS = 64 /* tokens that are multiplied together with down by output */
};

/* How many experts of a layer were prefetched speculatively, and how many of those its router chose (prefetch.c). */
typedef struct {
    uint32_t requested, chosen;
} np_likely_counts;

/* Tokens of one sequence in a step, and the slots of its state; NP_NONE: it begins with zeros. A run that continues the
 * one before it goes on from the state that that one writes. */
typedef struct {
    uint32_t first, count, from, to;
    int continues;
} np_run;

/* The position in a step with external products (offload/external_products.c), and that of the reader of their rows
 * (offload/product_rows.c), which may be another thread. */
typedef struct {
    uint32_t layer, turn;       /* a turn is one matrix, or the neurons of one group */
    uint32_t groups;            /* of this layer; 1 until the first of them has begun */
    int is_prepared;            /* 1: the turn's inputs are written */
    uint32_t product, products; /* the turn's next product, and their number */
    int result;                 /* how the step ended; 1 while it runs */
    uint32_t routed;            /* layers whose groups are known; written by the step's thread, read by the reader's */

    struct np_engine *reader;   /* of participant 0: an engine that only opens windows and makes requests */
    uint32_t rows_layer, rows_turn, rows_product; /* the reader's position */
    const void **quants[3], **scales[3]; /* [max_rows] addresses of the open rows: gate, up, down */
    uint32_t max_rows;
} np_external_state;

/* The position in a step with offloaded blocks (offload/offloaded_blocks.c). */
typedef struct {
    uint64_t requested_ns;      /* when np_engine_next_offload returned, for the trace */
    uint32_t layer, stage;
    int is_pending;             /* 1: the offload backend computes blocks, or the rows of `matrix` */
    int has_sums;               /* 1: np_engine_put_block_sums was called for these blocks */
    uint32_t matrix;            /* NP_OFFLOAD_*: the matrix that is pending or just computed; else 0 */
    uint32_t claimed;           /* pieces of the work that depends on `matrix` */
    int result;                 /* how the step ended; 1 while it runs */
} np_offload_state;

struct np_engine {
    np_shape shape;
    np_fixed fixed;
    np_shared shared;
    np_engine_config config;

    /* the step */
    uint64_t step, started;               /* its number; np_clock_ns at its begin */
    uint64_t counted_step;                /* the last step that was counted in np_reuse */
    int is_counted;                       /* 1: the step has one token, so its uses of clusters are counted */
    uint32_t reuse_inverse;               /* of np_reuse.stride, modulo 2^32 */
    uint32_t epoch, count;
    uint32_t logits_first, logits_count;
    const np_norm *logits_norm;           /* of what the output matrix reads */
    uint32_t end_layer;                   /* computation stops before this layer */
    const np_token_scores *token_scores;
    uint32_t participants, participant;
    np_range blocks;                      /* the blocks that this participant computes */
    uint32_t sharers, sharer;             /* participants that share these blocks; this one's number among them */
    uint32_t offloaded_blocks;            /* the first blocks of each feed-forward: an accelerator computes them */
    uint32_t offloaded_matrices;          /* NP_OFFLOAD_* bits */
    int32_t *sequence, *position, *token; /* [max_tokens] */
    int32_t *drafted;                     /* [max_tokens] the step's tokens from the draft layer */
    np_run *runs;                         /* [max_tokens] the sequences of the step, if layers have a state */
    uint32_t run_count;

    /* scratch memory, private to this participant */
    np_vectors vectors;         /* inputs of the matrices and neurons in work; of their type */
    np_vectors predictor_input; /* the predictor's input where it differs from `vectors` (np_predictor_has_input) */
    np_vectors ranks;           /* rank vectors of the current group */
    np_vectors routed;          /* with branch_norms: inputs of the experts that the router chooses */
    np_vectors gathered;        /* `vectors` of the current group's tokens; unused in dense layers */
    np_vectors gathered_input;  /* the same of predictor_input */
    np_vectors values;          /* values of an expert's neurons, the inputs of down by output */
    uint32_t values_pair;       /* the first pair of the current layer whose values these are; NP_NONE: of no pair */
    float *vector;             /* [max(width, np_output_columns of all layers, latent_width, query_rank)] */
    float *rows;               /* [max_tokens][max_rows] results of dot products */
    size_t max_rows;
    float *scores;             /* [NP_ATTEND_QUERIES][context_tokens + 1] */

    /* routing of the current layer (routing.c) */
    np_group *groups;          /* [G] */
    uint32_t group_count;
    uint32_t *pair_token;      /* [P] */
    float *pair_weight;        /* [P] the expert's weight in the token's sum */
    uint32_t *token_pairs;     /* [max_tokens][np_active_experts], ascending by expert */
    uint32_t *expert_counts;   /* [experts] */
    float *expert_values;      /* [experts] router values of one token */
    float *expert_scores;      /* [experts] likewise its scores */
    float *expert_weights;     /* [max_tokens][np_active_experts] */
    np_likely_counts *likely_counts; /* [layers] */
    uint8_t *likely_experts;   /* [experts] 1: prefetched speculatively for likely_layer */
    uint32_t likely_layer;     /* NP_NONE: no expert was prefetched speculatively for the current layer */

    /* the current feed-forward layer (feed_forward.c) */
    uint32_t layer;
    const np_group *group;     /* the current group: cluster_state, slot and inputs are this group's */
    const np_vectors *inputs;  /* of the group's tokens */
    uint32_t pieces;           /* of a group, for participants to claim: its blocks, or with down_by_output np_neuron_pieces */
    uint32_t piece, down_piece; /* claimed but not begun, possibly of a later group */
    uint32_t down_pieces_done; /* pieces of the groups before */
    np_range window;           /* open blocks of the current group */
    int is_layer_open;         /* 1: the window is the whole layer; all groups are open at once */
    uint32_t opened_groups;    /* with is_layer_open: groups whose states are initialized */
    uint32_t claimed[2];       /* claimed pieces (blocks, down rows) if no other participant shares the blocks */
    size_t mask_bytes;         /* of one neuron's predictions */
    size_t layer_neurons;      /* blocks * block_neurons */
    uint32_t max_open_groups;
    uint8_t *states;           /* [max_open_groups][clusters] NP_CLUSTER_* bits */
    uint32_t *slot_tables[NP_PARTS]; /* by part: [max_open_groups][clusters] slots or NP_NONE; valid while the window is open */
    uint8_t *cluster_state;    /* the current group's row of `states` */
    uint32_t *slot[NP_PARTS];  /* the current group's rows of slot_tables */
    uint32_t *pending;         /* [max_open_groups*pieces] group * pieces + piece: claimed pieces that wait for clusters */
    uint32_t pending_count;
    uint32_t *open;            /* [clusters of a block] clusters of the current block that are not done */
    uint32_t open_count;
    np_row_list list;
    uint32_t *request_entries; /* [G*clusters] entries for the loader's ring */
    np_external_state external;
    np_offload_state offload;
    np_engine_counters counters;
};

/* The progress of one cluster in the current layer. */
enum {
    NP_CLUSTER_LOOKED_UP = 1,
    NP_CLUSTER_TRIGGERED = 2, /* its triggers are computed, or no token needs them */
    NP_CLUSTER_FIRED = 4,     /* at least one neuron fired for some token: its value part is needed */
    NP_CLUSTER_DONE = 8,      /* its values are computed */
    NP_CLUSTER_TRIGGER_REQUESTED = 16,
    NP_CLUSTER_VALUE_REQUESTED = 32
};

enum {
    NP_PIECE_ROWS = 64,  /* rows of a matrix per piece of work: a few microseconds, so that participants finish together */
    NP_DENSE_TOKENS = 16, /* with at least as many, nearly every neuron fires: value parts are requested with triggers */
    NP_SCAN_TOKENS = 64   /* with at least as many, a prompt's layers are read one after the other, and not soon again */
};

/* x[j] *= factor; skipped for a factor of 1, the usual one. */
static inline void np_scale(float *x, size_t n, float factor)
{
    for (size_t j = 0; factor != 1.0f && j < n; j++)
        x[j] *= factor;
}

/* Up to eight bytes as a word, the first one lowest (every supported processor is little-endian). If fewer than eight
 * are left, the upper bytes are those of `padding`. */
static inline uint64_t np_eight_bytes(const uint8_t *from, size_t left, uint64_t padding)
{
    memcpy(&padding, from, left < sizeof padding ? left : sizeof padding);
    return padding;
}

/* True if another participant's offload backend computes this matrix (NP_OFFLOAD_*). */
static inline int np_is_offloaded_elsewhere(const np_engine *engine, uint32_t matrix)
{
    return (engine->offloaded_matrices & matrix) != 0 && !engine->config.offload_blocks;
}

/* True if the predictor decides which triggers are computed. A predictor that only gives hints decides nothing. */
static inline int np_predictor_decides(const np_engine *engine)
{
    return engine->shape.predictor_rank && !engine->config.hints;
}

/* True if every neuron has a value other than 0, so that all fire unless a threshold silences them. */
static inline int np_is_smooth(const np_shape *s)
{
    return s->activation == NP_SILU || s->activation == NP_CLAMPED_SWIGLU || s->activation == NP_GELU || s->activation == NP_GELU_ERF;
}

/* True if every expert computes every token, with down by output: they are the slices of a dense model. */
static inline int np_has_slices(const np_shape *s)
{
    return s->down_by_output && !s->chosen_per_token;
}

/* True if every neuron of a layer fires for every token: a smooth activation without a threshold. */
static inline int np_all_neurons_fire(const np_engine *engine, uint32_t layer)
{
    return np_is_smooth(&engine->shape) && engine->fixed.layers[layer].silent_below == 0.0f;
}

/* A bias of the group's expert, `length` elements long; NULL: none. */
static inline const float *np_bias_of(const np_engine *engine, const float *biases, size_t length)
{
    return biases ? biases + engine->group->expert * length : NULL;
}

static inline int np_is_token(const np_shape *s, int32_t token)
{
    return token >= 0 && (uint32_t)token < s->vocabulary;
}

/* The number of layers that every token passes. */
static inline uint32_t np_text_layers(const np_shape *s)
{
    return s->layers - s->draft_layers;
}

/* The heads whose products are rows of a layer's joint query, key and value matrix, or gates of attention's output. */
static inline uint32_t np_qkv_heads(const np_shape *s, const np_layer *l)
{
    return s->query_heads * (s->gated_attention ? 2 : 1) + (l->value_from_key ? 1 : 2) * l->key_heads;
}

/* The number of rows of that matrix. */
static inline uint32_t np_qkv_rows(const np_shape *s, const np_layer *l)
{
    return np_qkv_heads(s, l) * l->head_width;
}

/* The width of a vector of the KV cache of a model with latents: of a latent and a rotated key. */
static inline uint32_t np_cached_width(const np_shape *s)
{
    return s->latent_width + s->rotary_width;
}

/* The bytes of the whole context of one sequence in rows of so many elements. */
static inline size_t np_context_bytes(const np_engine *engine, size_t elements)
{
    return np_kv_row_bytes(engine->config.kv_type, elements) * engine->shape.context_tokens;
}

/* The keys and values of one layer, of all sequences. */
static inline uint8_t *np_layer_kv(const np_engine *engine, uint32_t layer)
{
    return (uint8_t *)engine->shared.kv + engine->config.sequences * np_context_bytes(engine, engine->fixed.layers[layer].cached_before);
}

/* The number of columns of a layer's attention output matrix. */
static inline size_t np_output_columns(const np_shape *s, const np_layer *l)
{
    return (size_t)s->query_heads * (s->latent_width ? s->value_width : l->head_width);
}

/* The elements from one token's queries to the next one's in a model with latents, and likewise of attention. */
static inline size_t np_heads_width(const np_shape *s)
{
    return s->heads_width;
}

/* True if this mixer has a recurrent state. */
static inline int np_is_recurrent(int32_t mixer)
{
    return mixer != NP_MIXER_ATTENTION && mixer != NP_MIXER_NONE;
}

/* The index of a cluster's residency entries, the same in both parts. */
static inline uint32_t np_cluster_index(const np_engine *engine, uint32_t layer, uint32_t expert, uint32_t cluster)
{
    return (engine->fixed.layers[layer].first_ffn + expert) * engine->shape.clusters + cluster;
}

/* The number of experts of a layer that compute a token. */
static inline uint32_t np_active_experts(const np_engine *engine, uint32_t layer)
{
    const np_layer *l = &engine->fixed.layers[layer];
    return l->experts - l->routed_experts + (l->routed_experts ? engine->shape.chosen_per_token : 0);
}

/* The bytes of one row of a feed-forward matrix: its quants, its scales. */
static inline size_t np_row_quant_bytes(const np_engine *engine, const np_matrix_place *matrix)
{
    return np_quant_bytes(matrix->type, engine->shape.width);
}
static inline size_t np_row_scale_bytes(const np_engine *engine, const np_matrix_place *matrix)
{
    return np_scale_bytes(matrix->type, engine->shape.width);
}

#endif

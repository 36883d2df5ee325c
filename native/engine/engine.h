/* The engine's own state; see neuronpipe.h for what it does. */
#ifndef NP_ENGINE_H
#define NP_ENGINE_H
#include "neuronpipe.h"
#include "sync/clock.h"

#include <string.h>

typedef struct {
    uint32_t from, to;
} np_range;

/* The vectors that rows are multiplied with, one for each token, prepared for rows of one type; for many tokens packed as well. */
typedef struct {
    int type;
    size_t n, stride;   /* elements of a vector now; bytes from one token's to the next */
    uint32_t count;     /* vectors that are prepared */
    uint8_t *prepared;  /* [most vectors] */
    uint8_t *panel;     /* NULL when steps have too few tokens for one */
} np_vectors;
enum { NP_PANEL_TOKENS = 16 }; /* from so many on a panel pays */

/* Rows of one type that lie anywhere: what the scattered kernels take. */
typedef struct {
    const void **quants, **scales; /* [block_neurons] */
    const void **beside;           /* [block_neurons] what to fetch with each row */
    float *values;                 /* [block_neurons] in or out */
    uint16_t *wanted;              /* [block_neurons] bit t: by token t */
    uint32_t *neurons;             /* [block_neurons] whose rows they are */
    uint32_t count;
} np_row_list;

/* How many experts were guessed for a layer, and how many of them it chose. */
typedef struct {
    uint32_t made, right;
} np_guesses;

/* Where a step is whose products are computed outside (outside.c), and where the reader of their rows is (rows.c). */
typedef struct {
    uint32_t layer, turn;      /* turns of a layer: one product each, or the products of one group's neurons */
    uint32_t groups;           /* of this layer; 1 until the first of them has begun */
    int begun;                 /* 1: the turn's inputs are there */
    uint32_t product, products; /* the next one of this turn, and how many there are */
    int result;                /* what the step ended with; 1 while it goes on */
    uint32_t routed;           /* layers of this step whose groups are known: a word that two threads use */

    struct np_engine *reader;  /* of participant 0: an engine with nothing but windows and requests of its own */
    uint32_t rows_layer, rows_turn, rows_product; /* whose rows are next */
    const void **quants[3], **scales[3]; /* [rows], of those that are open */
    uint32_t most_rows;
} np_outside;

/* Where a step is whose blocks another computes (held.c). */
typedef struct {
    uint64_t wanted;           /* when blocks or rows were last wanted, by np_clock_ns */
    uint32_t layer, stage;     /* of this layer's stages, the next */
    int are_wanted;            /* 1: this layer's blocks, or the rows of `matrix`, */
    int are_there;             /* and these blocks' sums are there */
    uint32_t matrix;           /* NP_HELD_*: its rows are wanted, or there; else 0 */
    uint32_t taken;            /* pieces of work with these rows */
    int result;                /* what the step ended with; 1 while it goes on */
} np_held;

struct np_engine {
    np_shape shape;
    np_fixed fixed;
    np_shared shared;
    np_engine_config config;

    /* the step */
    uint64_t step, started;               /* its number; when it began, by np_clock_ns */
    uint32_t epoch, count;
    uint32_t logits_first, logits_count;
    const np_ratings *ratings;
    uint32_t participants, participant;
    np_range blocks;                      /* whose neurons are this participant's to compute, */
    uint32_t sharers, sharer;             /* with so many others */
    uint32_t held_blocks;                 /* the first ones are looked for by nobody */
    uint32_t held_matrices;               /* NP_HELD_* */
    int32_t *sequence, *position, *token; /* [max_tokens] */

    /* scratch, private to this participant */
    np_vectors vectors;         /* what the matrices and the neurons read */
    np_vectors predictor_input; /* the same for the predictor, where it reads another (np_predictor_has_input) */
    np_vectors ranks;           /* of the group in work */
    np_vectors gathered;        /* those of one group's tokens; of a dense layer's nobody needs a copy */
    np_vectors gathered_input;  /* the same of predictor_input */
    float *vector;             /* [max(width, query_heads*head_width)] */
    float *rows;               /* [max_tokens][max_rows] results of a dot product */
    size_t max_rows;
    float *scores;             /* [4][context_tokens] */

    /* who computes which token of the layer in work (route.c) */
    np_group *groups;          /* [G] */
    uint32_t group_count;
    uint32_t *pair_token;      /* [P] */
    float *pair_weight;        /* [P] the expert's share of the token's sum */
    uint32_t *token_pairs;     /* [max_tokens][experts_per_token], by ascending expert */
    uint32_t *expert_counts;   /* [experts] */
    float *expert_values;      /* [experts] of one token */
    float *shares;             /* [max_tokens][experts_per_token] */
    np_guesses *guesses;       /* [layers] (guess.c) */
    uint8_t *guessed;          /* [experts] 1: of the layer in work */
    uint32_t guessed_layer;    /* NP_NO_PIECE: nothing was guessed for the layer in work */

    /* the feed-forward layer in work */
    uint32_t layer;
    const np_group *group;     /* in work: what clusters, neurons and tokens below are of */
    const np_vectors *inputs;  /* of the group's tokens */
    uint32_t block_piece, down_piece; /* taken, and not begun: maybe of a later group */
    uint32_t downs_done;       /* pieces of the groups before */
    np_range window;           /* blocks of the group in work */
    int layer_open;            /* 1: the window is the whole layer: all groups are open at once */
    uint32_t opened_groups;    /* of these, the first that has no states yet */
    uint32_t claimed[2];       /* pieces of the layer's blocks and Downs that were taken, where nobody shares them */
    uint32_t row_quant_bytes, row_scale_bytes; /* of a row of `width` weights; */
    uint32_t trigger_quant_bytes;              /* of one of the trigger part, whose scales take as much */
    size_t mask_bytes;         /* of one neuron's predictions */
    size_t layer_neurons;      /* blocks * block_neurons */
    uint32_t open_groups;      /* most groups that are open at once */
    uint8_t *states;           /* [open_groups][clusters] NP_CLUSTER_* bits */
    uint32_t *found[NP_PARTS]; /* by part: [open_groups][clusters] slots, NP_NO_PIECE until found; good while the window is open */
    uint8_t *cluster_state;    /* of these, those of the group in work */
    uint32_t *slot[NP_PARTS];
    uint32_t *pending;         /* [open_groups*blocks] group * blocks + block: claimed, and not done for want of clusters */
    uint32_t pending_count;
    uint32_t *open;            /* [clusters of a block] of the block in work, those that are not done */
    uint32_t open_count;
    np_row_list list;
    uint32_t *asked;           /* [G*clusters] requests for the loader */
    np_outside outside;
    np_held held;
    np_engine_counters counters;
};

enum {
    NP_CLUSTER_LOOKED = 1,  /* was looked for once */
    NP_CLUSTER_TRIGGERED = 2,   /* its triggers are computed, or not needed */
    NP_CLUSTER_FIRED = 4,   /* at least one of its neurons fired for some token */
    NP_CLUSTER_DONE = 8,    /* its values are computed, and the rows of Down that they need are there */
    NP_CLUSTER_TRIGGER_ASKED = 16,
    NP_CLUSTER_VALUE_ASKED = 32
};

enum { NP_PIECE_ROWS = 64 }; /* of a matrix: a few microseconds of work, so that participants end together */

/* Work that participants take piece by piece. One counter each per layer; the logits have one of their own. */
enum { NP_WORK_QKV, NP_WORK_ATTEND, NP_WORK_PROJECT, NP_WORK_RANK, NP_WORK_SCORE, NP_WORK_BLOCKS, NP_WORK_DOWNS, NP_WORKS };

/* The first field that is out of its range or contradicts another, or NULL (check.c). */
const char *np_engine_wrong_field(const np_shape *shape, const np_fixed *fixed, const np_shared *shared, const np_engine_config *config);

/* The next piece of `pieces`, or NP_NO_PIECE. */
#define NP_NO_PIECE UINT32_MAX
uint32_t np_engine_claim(np_engine *engine, uint32_t layer, int work, uint32_t pieces);
/* Of the work that follows a matrix whose rows are there (held.c): all of it is who holds them's. */
uint32_t np_held_claim(np_engine *engine, int work, uint32_t pieces);
/* The same for NP_WORK_BLOCKS and NP_WORK_DOWNS of the layer in work: pieces of this participant's own blocks. */
uint32_t np_engine_claim_own(np_engine *engine, int work, uint32_t pieces);

/* This participant's even share of `n` things, where the work is uniform and small. */
np_range np_engine_share(const np_engine *engine, uint32_t n);
/* Barrier with the engine's epoch; counts the time. */
int np_engine_barrier(np_engine *engine);
/* Prepare `count` vectors, `n` long, from `source` ([count][stride]); norm: theirs, or NULL. */
void np_engine_prepare(np_engine *engine, np_vectors *to, const float *source, uint32_t count, size_t stride, size_t n, const np_norm *norm);
/* One token's vector, normed; out is n long. */
void np_engine_norm(const np_engine *engine, const np_norm *norm, const float *x, size_t n, float *out);
/* out[t*out_stride + r] = row first_row + r of the matrix times vector t. */
void np_engine_dot(const np_engine *engine, const np_vectors *x, const np_matrix *m, uint32_t first_row, uint32_t rows,
                   const float *bias, float *out, size_t out_stride);

/* x[j] *= factor. A factor of 1 leaves every bit. */
static inline void np_scale(float *x, size_t n, float factor)
{
    for (size_t j = 0; factor != 1.0f && j < n; j++)
        x[j] *= factor;
}

/* Whether another participant holds this matrix (NP_HELD_*), and computes its rows. */
static inline int np_is_anothers(const np_engine *engine, uint32_t matrix)
{
    return (engine->held_matrices & matrix) != 0 && !engine->config.held;
}

/* Up to eight bytes, the first of them the lowest of the word; behind the `left` that there are, bytes of `rest`. */
static inline uint64_t np_eight_bytes(const uint8_t *from, size_t left, uint64_t rest)
{
    memcpy(&rest, from, left < sizeof rest ? left : sizeof rest); /* all processors here are little endian */
    return rest;
}

/* A step's two ends: take its arguments over, if they are in range; and, when all layers are done or one ended with an error, compute
 * the logits, note what it took, and say how it ended. */
int np_engine_take_step(np_engine *engine, const np_step *step);
int np_engine_end_step(np_engine *engine, int done);
/* After the last layer, with ratings: the participants' part of them. */
int np_engine_rate(np_engine *engine);
int np_engine_embed(np_engine *engine);
/* Who computes what in a layer, as far as that is known before its attention. */
void np_engine_begin_layer(np_engine *engine, uint32_t layer);
/* Attention of a layer, which leaves the residual stream as it is; and its output, which is added to it. */
int np_engine_attention(np_engine *engine, uint32_t layer);
int np_engine_project(np_engine *engine, uint32_t layer);
/* Of these the parts that make the inputs of their matrix, and of attention predictions; */
int np_engine_begin_attention(np_engine *engine, uint32_t layer);
void np_engine_begin_projection(np_engine *engine);
/* and the parts behind: heads, and what follows from them; rows of the output, added. */
int np_engine_heads(np_engine *engine, uint32_t layer);
int np_engine_add_projection(np_engine *engine, uint32_t layer);
int np_engine_feed_forward(np_engine *engine, uint32_t layer);
/* Of this the parts before its blocks and behind them, where all block sums are held at once: inputs, routes and predictions; sums. */
int np_feed_forward_begin(np_engine *engine, uint32_t layer);
int np_feed_forward_end(np_engine *engine);
/* A layer's three stages in the model's order: attention, its output, feed-forward. */
typedef int np_stage(np_engine *engine, uint32_t layer);
enum { NP_STAGES = 3 };
np_stage *np_engine_stage(const np_engine *engine, uint32_t number);
/* Routing (route.c): who computes which token of a layer, and asking for what that will need. np_engine_route_all is for dense layers. */
int np_engine_routes(const np_engine *engine, int reads);
void np_engine_route(np_engine *engine, uint32_t layer);
void np_engine_route_all(np_engine *engine);
/* The experts that a router chooses for the stream x, ascending; their values stay in expert_values. */
void np_engine_choose(np_engine *engine, uint32_t layer, const float *x, uint32_t *chosen);
/* Ask for the experts that a layer will probably choose (guess.c); and, once it has chosen, count who was guessed. */
void np_engine_guess(np_engine *engine, uint32_t layer);
void np_engine_judge(np_engine *engine, uint32_t layer);
/* What is asked for ahead where every trigger is needed: in units of whole clusters, with many tokens, or where every neuron fires, the
 * value parts as well. */
uint32_t np_parts_ahead(const np_engine *engine, uint32_t layer, uint32_t tokens);
/* Ask ahead for what the chosen experts will need in a layer (ffn.c). */
void np_ask_for_groups(np_engine *engine, uint32_t layer);
/* The vectors of a group's tokens, out of those of all tokens: `from` itself, or a copy in `to`. */
const np_vectors *np_engine_gather(np_engine *engine, const np_group *group, const np_vectors *from, np_vectors *to);
/* Logits of the tokens that the step wants some of; and the part that makes the inputs of their matrix. */
int np_engine_logits(np_engine *engine);
void np_engine_begin_logits(np_engine *engine);

/* Whether a predictor decides which triggers are computed. Otherwise there is none, or it gives hints. */
static inline int np_decides(const np_engine *engine)
{
    return engine->shape.predictor_rank && !engine->config.hints;
}

/* Of what a turn of a layer is made (outside.c): number: of the group. */
enum { NP_TURN_QKV, NP_TURN_OUTPUT, NP_TURN_GROUP };
int np_turn(const np_engine *engine, uint32_t turn, uint32_t groups, uint32_t *number);
/* Products of a group's neurons, and the blocks of one of them. */
uint32_t np_neuron_products(const np_engine *engine);
np_range np_product_blocks(const np_engine *engine, uint32_t number);
uint32_t np_qkv_rows(const np_shape *shape);

/* Who reads the rows of participant 0's products (rows.c). Made with the first step, and told of each; 0 when memory is short. */
int np_rows_begin(np_engine *engine);
void np_rows_destroy(np_engine *engine);
/* Add what the reader has counted, and let it begin anew. */
void np_rows_count(np_engine *engine, np_engine_counters *to);

/* Blocks of a group inside one window (ffn.c), for who reads neurons' rows without computing them here: the window is opened, if it is not, and
 * asks for the next; returns 1 when all parts of the blocks' clusters are there. */
int np_fetch_blocks(np_engine *engine, const np_group *group, np_range blocks);
void np_close_window(np_engine *engine);
/* Of the rows of a feed-forward's matrix: their type, and the bytes of one's quants. */
static inline int np_type_of(const np_engine *engine, const np_matrix_place *matrix)
{
    return matrix->part == NP_TRIGGER ? engine->shape.trigger_type : engine->shape.type;
}
static inline size_t np_quant_bytes_of(const np_engine *engine, const np_matrix_place *matrix)
{
    return matrix->part == NP_TRIGGER ? engine->trigger_quant_bytes : engine->row_quant_bytes;
}
/* Where a neuron's row of a matrix lies, inside a window whose clusters are there; padding beyond the clusters has none. */
void np_neuron_row(const np_engine *engine, const np_matrix_place *matrix, uint32_t neuron, const void **quants, const void **scales);
/* A neuron's value, from its gate's product and its up's. */
float np_neuron_value(const np_engine *engine, float gate, float up);

/* Prediction (predict.c): rank vectors from the residual stream; and, after a barrier, scores: who is predicted, and what of it
 * flash must bring. np_predicts: whether the predictor reads here (NP_READS_*). Unless it decides, everybody is predicted. */
int np_predicts(const np_engine *engine, int reads);
/* Whether a predictor's vectors are others than the neurons': of another type, or not normed. */
int np_predictor_has_input(const np_shape *shape);
void np_predict_ranks(np_engine *engine, const np_norm *norm);
int np_predict_scores(np_engine *engine);
/* Bit t: the predictor, which decides, names the neuron for token first + t of the group, of 16; first: a multiple of 8. */
uint32_t np_predicted_for(const np_engine *engine, uint32_t neuron, uint32_t first);
/* Of a range of clusters, those that are predicted for any token, ascending. Returns how many. */
uint32_t np_list_predicted(const np_engine *engine, np_range clusters, uint32_t *list);
int np_was_hinted(const np_engine *engine, uint32_t cluster); /* its value part was asked for because of a hint */

/* Whether steps of few tokens keep a whole layer of a mixture in place (ffn.c). */
int np_may_open_layers(const np_engine *engine);

/* Neurons (triggers.c, neurons.c), of a range of clusters inside one block. The two that find return how many parts are still to come, or an
 * error; the two that compute do what is there. */
int np_find_triggers(np_engine *engine, np_range clusters);
void np_compute_triggers(np_engine *engine, np_range clusters);
int np_find_values(np_engine *engine, np_range clusters);
/* Look both parts of a block's clusters up, for who wants all of them. Returns as the two that find. */
int np_find_clusters(np_engine *engine, np_range clusters);
void np_compute_values(np_engine *engine, np_range clusters);
/* The block's partial sums of the group's tokens [from, to), into rows of `partials` from first_row on: its neurons' rows of Down in
 * index order, times the expert's share. */
int np_add_downs(np_engine *engine, uint32_t block, np_range tokens, uint32_t first_row);
/* From so many tokens on, some token wants nearly every neuron's value part: it is asked for with the trigger part. */
enum { NP_DENSE_TOKENS = 16 };
/* Whether every neuron of a layer fires for every token. */
static inline int np_all_fire(const np_engine *engine, uint32_t layer)
{
    return engine->shape.activation == NP_SILU && engine->fixed.layers[layer].silent_below == 0.0f;
}

/* Residency (ask.c) */
/* The index of a cluster's entries, in either part. */
static inline uint32_t np_cluster_index(const np_engine *engine, uint32_t layer, uint32_t expert, uint32_t cluster)
{
    return (layer * engine->shape.experts + expert) * engine->shape.clusters + cluster;
}
np_range np_clusters_of(const np_engine *engine, uint32_t first_block, uint32_t end_block);
/* 1 when the part is present: its slot is in engine->slot, good while the window is open. 0 when it is not there, and the slot
 * NP_NO_PIECE. NP_E_DAMAGED when it failed. */
int np_look_up(np_engine *engine, int part, uint32_t cluster);
/* The request for what a cluster lacks of these parts (NP_REQUEST_TRIGGER, NP_REQUEST_VALUE), or 0. */
uint32_t np_lacking(np_engine *engine, uint32_t layer, uint32_t expert, uint32_t cluster, uint32_t parts);
/* Ask the loader for clusters that the step waits for. Returns NP_OK or NP_E_EPOCH. */
int np_ask(np_engine *engine, const uint32_t *entries, uint32_t count);
/* What later work wants (how: NP_REQUEST_PREFETCH) or may want (NP_REQUEST_GUESS); what the ring has no room for is let go. */
void np_ask_ahead(np_engine *engine, uint32_t layer, uint32_t expert, np_range blocks, uint32_t parts, uint32_t how);

#endif

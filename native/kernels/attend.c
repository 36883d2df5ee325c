/* Attention of query heads that share a key head. Keys and values are f16 rows, so the dot and add kernels are used.
 * Queries are computed together, the heads of a token or a head of several tokens, so that a key or value is converted
 * once for four of them and comes from memory once for all. */
#include "kernels/isa.h"

#include <string.h>

enum { CHUNK = 64 }; /* positions per chunk: their values stay in the first-level cache for all queries */

/* Up to NP_ATTEND_QUERIES queries. Query i attends to the positions from[i] to to[i] (excluded), which never shrink. */
typedef struct {
    const float *queries;
    float *out, *scores;      /* scores: [count][score_stride] from position from[0] on, and a sink's behind a query's */
    const float *sinks;       /* of query i sinks[i * sink_step], or NULL */
    size_t stride, count, score_stride, sink_step;
    size_t from[NP_ATTEND_QUERIES], to[NP_ATTEND_QUERIES];
} query_block;

NP_INLINE float *scores_at(const query_block *b, size_t i, size_t position) {
    return b->scores + i * b->score_stride + (position - b->from[0]);
}

static np_rows rows_at(const uint16_t *rows, size_t width, size_t from, size_t to) {
    return (np_rows){.quants = (const uint8_t *)(rows + from * width), .quant_bytes = 2 * width, .rows = to - from, .n = width};
}

/* Add the values at some positions to the output of queries first to first + count. */
static void add_values(const np_attend_job *job, const query_block *b, size_t first, size_t count, size_t from, size_t to) {
    const np_isa *isa = np_isa_current();
    for (; from < to; from += CHUNK) {
        const np_rows rows = rows_at(job->values, job->width, from, to - from < CHUNK ? to : from + CHUNK);
        float *out = b->out + first * b->stride;
        const float *weights = scores_at(b, first, from);
        if (count > 1 && isa->add_for_tokens && isa->add_for_tokens(NP_F16, &rows, weights, b->score_stride, count, out, b->stride)) continue;
        for (size_t i = 0; i < count; i++) isa->add_rows[NP_F16](&rows, weights + i * b->score_stride, out + i * b->stride);
    }
}

static void attend_block(const np_attend_job *job, const query_block *b) {
    const np_isa *isa = np_isa_current();
    const size_t width = job->width, last = b->count - 1, begin = b->from[last], end = b->to[0];
    float sums[NP_ATTEND_QUERIES];
    isa->dot_rows[NP_F16](&(np_dot_job){
        .rows = rows_at(job->keys, width, b->from[0], b->to[last]),
        .activations = (const uint8_t *)b->queries,
        .activation_stride_bytes = b->stride * sizeof *b->queries,
        .tokens = b->count,
        .out = b->scores,
        .out_stride = b->score_stride,
    });
    for (size_t i = 0; i < b->count; i++) {
        const size_t positions = b->to[i] - b->from[i];
        float *scores = scores_at(b, i, b->from[i]);
        for (size_t p = 0; p < positions; p++) scores[p] *= job->scale;
        if (job->score_cap != 0.0f) np_soft_cap(scores, positions, job->score_cap);
        if (b->sinks) scores[positions] = b->sinks[i * b->sink_step];
        sums[i] = isa->softmax_weights(scores, positions + (b->sinks != NULL));
    }
    /* Each query's values are added in their order: those before the common positions, these, and those behind. */
    for (size_t i = 0; i < b->count; i++) {
        memset(b->out + i * b->stride, 0, width * sizeof *b->out);
        add_values(job, b, i, 1, b->from[i], begin < b->to[i] ? begin : b->to[i]);
    }
    add_values(job, b, 0, b->count, begin, end);
    for (size_t i = 0; i < b->count; i++) {
        add_values(job, b, i, 1, begin < end ? end : begin, b->to[i]);
        for (size_t j = 0; j < width; j++) b->out[i * b->stride + j] /= sums[i];
    }
}

void np_attend(const np_attend_job *job) {
    const int by_tokens = job->tokens > 1;
    const size_t blocked = by_tokens ? job->tokens : job->heads, others = by_tokens ? job->heads : 1;
    for (size_t other = 0; other < others && job->width; other++)
        for (size_t first = 0; first < blocked; first += NP_ATTEND_QUERIES) {
            const size_t head = by_tokens ? other : first, token = by_tokens ? first : 0;
            const size_t offset = token * job->token_stride + head * job->width;
            query_block b = {
                .queries = job->queries + offset,
                .out = job->out + offset,
                .scores = job->scores,
                .sinks = job->sinks ? job->sinks + head : NULL,
                .stride = by_tokens ? job->token_stride : job->width,
                .count = blocked - first < NP_ATTEND_QUERIES ? blocked - first : NP_ATTEND_QUERIES,
                .sink_step = !by_tokens,
            };
            for (size_t i = 0; i < b.count; i++) {
                b.to[i] = job->positions + token + (by_tokens ? i : 0);
                b.from[i] = job->window && b.to[i] > job->window ? b.to[i] - job->window : 0;
            }
            b.score_stride = b.to[b.count - 1] - b.from[0] + 1;
            attend_block(job, &b);
        }
}

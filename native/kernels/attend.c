/* Attention of query heads that share a key head. Queries are computed together, the heads of a token or a head of several
 * tokens, so that a key or value is converted once for some of them and comes from memory once for all. */
#include "kernels/isa.h"
#include "kernels/half.h"

#include <math.h>
#include <string.h>

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

static int is_for_vectors(const np_attend_job *job) { return job->width >= NP_MIN_COLUMNS && job->width <= NP_MAX_COLUMNS; }

/* At most a chunk of the keys or values from a position on. */
static np_kv_rows rows_at(const np_attend_job *job, const uint8_t *rows, size_t from, size_t to) {
    const size_t row_bytes = np_kv_row_bytes(job->type, job->width), count = to - from < NP_ATTEND_CHUNK ? to - from : NP_ATTEND_CHUNK;
    return (np_kv_rows){.type = job->type, .rows = rows + from * row_bytes, .row_bytes = row_bytes, .count = count, .n = job->width, .following = to - from - count};
}

/* The scores of all queries, without scale, at the positions that any of them attends to. */
static void compute_scores(const np_attend_job *job, const query_block *b) {
    np_scores_function *scores = is_for_vectors(job) ? np_isa_current()->scores : np_scalar_scores;
    for (size_t from = b->from[0]; from < b->to[b->count - 1]; from += NP_ATTEND_CHUNK) {
        const np_kv_rows keys = rows_at(job, job->keys, from, b->to[b->count - 1]);
        scores(&keys, b->queries, b->stride, b->count, scores_at(b, 0, from), b->score_stride);
    }
}

/* Add the values at some positions to the output of queries first to first + count. */
static void add_values(const np_attend_job *job, const query_block *b, size_t first, size_t count, size_t from, size_t to) {
    np_mix_function *mix = is_for_vectors(job) ? np_isa_current()->mix : np_scalar_mix;
    for (; from < to; from += NP_ATTEND_CHUNK) {
        const np_kv_rows values = rows_at(job, job->values, from, to);
        mix(&values, scores_at(b, first, from), b->score_stride, count, b->out + first * b->stride, b->stride);
    }
}

static void attend_block(const np_attend_job *job, const query_block *b) {
    const size_t width = job->width, last = b->count - 1, begin = b->from[last], end = b->to[0];
    float sums[NP_ATTEND_QUERIES];
    compute_scores(job, b);
    for (size_t i = 0; i < b->count; i++) {
        const size_t positions = b->to[i] - b->from[i];
        float *scores = scores_at(b, i, b->from[i]);
        for (size_t p = 0; p < positions; p++) scores[p] *= job->scale;
        if (job->score_cap != 0.0f) np_soft_cap(scores, positions, job->score_cap);
        if (b->sinks) scores[positions] = b->sinks[i * b->sink_step];
        sums[i] = np_isa_current()->softmax_weights(scores, positions + (b->sinks != NULL));
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

size_t np_kv_row_bytes(int type, size_t n) { return type == NP_F16 || type == NP_Q8 ? np_quant_bytes(type, n) + np_scale_bytes(type, n) : 0; }

/* The largest magnitude of a group as bits of a float, which are in the order of magnitudes, with those that are not finite
 * on top. */
static uint32_t largest_bits(const float *x) {
    uint32_t largest = 0;
    for (size_t j = 0; j < NP_GROUP; j++) {
        const uint32_t bits = np_bits_of(x[j]) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

void np_kv_store(int type, const float *x, size_t n, void *row) {
    if (type == NP_F16) {
        np_isa_current()->f32_to_f16(x, n, row);
        return;
    }
    int8_t *quants = row;
    uint16_t *scales = (uint16_t *)(quants + n);
    for (size_t g = 0; g < n / NP_GROUP; g++, x += NP_GROUP, quants += NP_GROUP) {
        scales[g] = np_float_to_half(np_float_of(largest_bits(x)) / 127.0f);
        const float scale = np_half_to_float(scales[g]), inverse = scale > 0.0f && scale < INFINITY ? 1.0f / scale : 0.0f;
        for (size_t j = 0; j < NP_GROUP; j++) {
            const float code = inverse ? rintf(x[j] * inverse) : 0.0f;
            quants[j] = (int8_t)(code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code);
        }
    }
}

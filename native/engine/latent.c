/* Multi-head latent attention of one layer: stages with a barrier after each. Keys and values of all heads are products
 * with the latent of a position. They are not computed: a head's query is multiplied with the head's rows of key_up
 * instead, and the mixed latents with those of value_up. Attention thus has one key for all heads, a latent followed by
 * the rotated part, and its values are the keys' first elements.
 *
 *   stage    piece of work                    writes
 *   down     rows of latent_down, query_down  attention: for each token latent, rotated key, input of queries
 *   norm     an even share of the tokens      the same, normed and rotated; this position of the KV cache
 *   queries  a head                           queries: for each token and head as wide as a latent and a rotated key
 *   attend   (some heads, token)              attention: likewise
 *   values   a head                           queries: for each token and head a value
 *
 * Down, queries and values claim the pieces of one counter, in turn. Every participant has claimed once in vain before a
 * stage is over, so the first piece of the next stage is known. */
#include "engine/latent.h"

#include <string.h>

#include "engine/attention.h"
#include "engine/vectors.h"
#include "engine/work.h"

#define LATENT_EPSILON 1e-6f /* of the norms of latents, in every model */

static uint32_t pieces_of_rows(uint32_t rows)
{
    return (rows + NP_PIECE_ROWS - 1) / NP_PIECE_ROWS;
}

static uint32_t down_pieces(const np_shape *s)
{
    return pieces_of_rows(np_cached_width(s)) + pieces_of_rows(s->query_rank);
}

/* Claim a piece of the stage whose first piece has this number. */
static uint32_t claim(np_engine *engine, uint32_t layer, uint32_t first, uint32_t pieces)
{
    const uint32_t piece = np_claim(engine, layer, NP_WORK_QKV, first + pieces);
    return piece == NP_NONE ? NP_NONE : piece - first;
}

/* The latents of one layer and sequence: [context_tokens] rows of np_cached_width. */
static uint8_t *latents_of(const np_engine *engine, uint32_t layer, uint32_t sequence)
{
    return np_layer_kv(engine, layer) + sequence * np_context_bytes(engine, np_cached_width(&engine->shape));
}

/* Rows of a matrix times each token's vector, into engine->rows. */
static void multiply(np_engine *engine, const np_matrix *matrix, uint32_t first_row, uint32_t rows)
{
    engine->counters.matrix_rows += (uint64_t)rows * engine->count;
    np_multiply_rows(engine, &engine->vectors, matrix, first_row, rows, NULL, engine->rows, engine->max_rows);
}

static void prepare(np_engine *engine, const np_matrix *matrix, const float *source, size_t stride, size_t n, const np_norm *norm)
{
    engine->vectors.type = matrix->type;
    np_prepare_vectors(engine, &engine->vectors, source, engine->count, stride, n, norm);
}

/* Prepare the layer's normed input for this matrix, unless that was done for another one with such inputs. */
static void prepare_input(np_engine *engine, uint32_t layer, const np_matrix *matrix)
{
    const size_t width = engine->shape.width;
    if (!np_reads_inputs_of(matrix->type, engine->vectors.type))
        prepare(engine, matrix, engine->shared.residual, width, width, &engine->fixed.layers[layer].attention_norm);
}

static void compute_down(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const uint32_t of_latents = pieces_of_rows(np_cached_width(s));
    const uint64_t started = np_clock_ns();
    for (uint32_t piece; (piece = claim(engine, layer, 0, down_pieces(s))) != NP_NONE;) {
        const int is_query = piece >= of_latents;
        const np_matrix *matrix = is_query ? &l->query_down : &l->latent_down;
        const uint32_t all_rows = is_query ? s->query_rank : np_cached_width(s);
        const uint32_t row = (is_query ? piece - of_latents : piece) * NP_PIECE_ROWS;
        const uint32_t rows = all_rows - row < NP_PIECE_ROWS ? all_rows - row : NP_PIECE_ROWS;
        prepare_input(engine, layer, matrix);
        multiply(engine, matrix, row, rows);
        float *to = engine->shared.attention + (is_query ? np_cached_width(s) : 0) + row;
        for (uint32_t t = 0; t < engine->count; t++)
            memcpy(to + t * np_heads_width(s), engine->rows + t * engine->max_rows, rows * sizeof(float));
    }
    np_trace_put(&engine->shared.trace, NP_SPAN_QKV, layer, 0, engine->step, started);
}

/* Rotate the end of a token's query or key. */
static void rotate(const np_engine *engine, uint32_t t, float *end)
{
    np_rope(end, engine->shape.rotary_width, engine->fixed.inverse_frequency, engine->position[t]);
    np_scale(end, engine->shape.rotary_width, engine->shape.rotary_scale);
}

static void norm_and_store(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const size_t width = np_cached_width(s), row_bytes = np_kv_row_bytes(engine->config.kv_type, width);
    const np_range tokens = np_even_share(engine, engine->count);
    for (uint32_t t = tokens.from; t < tokens.to; t++) {
        float *latent = engine->shared.attention + t * np_heads_width(s), *query = latent + width;
        np_rms_norm(latent, l->latent_norm, s->latent_width, LATENT_EPSILON, latent);
        if (l->rotary)
            rotate(engine, t, latent + s->latent_width);
        np_kv_store(engine->config.kv_type, latent, width,
                    latents_of(engine, layer, (uint32_t)engine->sequence[t]) + (size_t)engine->position[t] * row_bytes);
        if (s->query_rank)
            np_rms_norm(query, l->query_down_norm, s->query_rank, LATENT_EPSILON, query);
    }
}

/* Add a head's rows of key_up, times the elements of each token's query in engine->rows, to `to`. */
static void add_keys(np_engine *engine, const np_matrix *m, uint32_t head, float *to)
{
    const np_shape *s = &engine->shape;
    const size_t quant_bytes = np_quant_bytes(m->type, s->latent_width), scale_bytes = np_scale_bytes(m->type, s->latent_width);
    const uint32_t all_rows = s->head_width - s->rotary_width;
    const void *quants[NP_PIECE_ROWS], *scales[NP_PIECE_ROWS];
    for (uint32_t row = 0; row < all_rows; row += NP_PIECE_ROWS) {
        const uint32_t rows = all_rows - row < NP_PIECE_ROWS ? all_rows - row : NP_PIECE_ROWS;
        for (uint32_t r = 0; r < rows; r++) {
            const size_t number = (size_t)head * all_rows + row + r;
            quants[r] = (const uint8_t *)m->quants + number * quant_bytes;
            scales[r] = scale_bytes ? (const uint8_t *)m->scales + number * scale_bytes : NULL;
        }
        np_add_rows_for_tokens(m->type, quants, scales, engine->rows + row, engine->max_rows, rows, engine->count, s->latent_width, to,
                               np_heads_width(s));
    }
    engine->counters.matrix_rows += (uint64_t)all_rows * engine->count;
}

static void compute_queries(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const uint32_t first = down_pieces(s) + engine->participants, unrotated = s->head_width - s->rotary_width;
    const uint64_t started = np_clock_ns();
    if (s->query_rank)
        prepare(engine, &l->query, engine->shared.attention + np_cached_width(s), np_heads_width(s), s->query_rank, NULL);
    else
        prepare_input(engine, layer, &l->query);
    for (uint32_t head; (head = claim(engine, layer, first, s->query_heads)) != NP_NONE;) {
        float *queries = engine->shared.queries + (size_t)head * np_cached_width(s);
        multiply(engine, &l->query, head * s->head_width, s->head_width);
        for (uint32_t t = 0; t < engine->count; t++) {
            float *query = queries + t * np_heads_width(s), *rotated = query + s->latent_width;
            memset(query, 0, s->latent_width * sizeof *query);
            memcpy(rotated, engine->rows + t * engine->max_rows + unrotated, s->rotary_width * sizeof *rotated);
            if (l->rotary)
                rotate(engine, t, rotated);
        }
        add_keys(engine, &l->key_up, head, queries);
        for (uint32_t t = 0; t < engine->count; t++)
            np_grow_query(engine, t, np_cached_width(s), queries + t * np_heads_width(s));
    }
    np_trace_put(&engine->shared.trace, NP_SPAN_QKV, layer, 0, engine->step, started);
}

static void attend(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const size_t width = np_cached_width(s);
    const float scale = s->attention_scale / __builtin_sqrtf((float)s->head_width);
    const uint32_t block = np_attended_tokens(engine), blocks = (engine->count + block - 1) / block;
    /* With eight heads a head takes 0.7 to 0.9 of the time that it takes with four, at 500 and 8,192 positions (Zen 5). */
    const uint32_t most = (s->query_heads + NP_ATTEND_QUERIES - 1) / NP_ATTEND_QUERIES >= engine->participants ? NP_ATTEND_QUERIES : NP_ATTEND_QUERIES / 2;
    const uint32_t pieces = (s->query_heads + most - 1) / most * blocks;
    const uint64_t started = np_clock_ns();
    for (uint32_t piece; (piece = np_claim(engine, layer, NP_WORK_ATTEND, pieces)) != NP_NONE;) {
        const uint32_t head = piece / blocks * most, first = piece % blocks * block;
        const uint32_t end = engine->count - first < block ? engine->count : first + block;
        for (uint32_t t = first, tokens; t < end; t += tokens) {
            const uint8_t *latents = latents_of(engine, layer, (uint32_t)engine->sequence[t]);
            const size_t offset = t * np_heads_width(s) + head * width;
            tokens = np_following_tokens(engine, t, end);
            /* The rotated keys are mixed along with the latents, and not read any more. */
            np_attend(&(np_attend_job){
                .queries = engine->shared.queries + offset,
                .token_stride = np_heads_width(s),
                .heads = s->query_heads - head < most ? s->query_heads - head : most,
                .tokens = tokens,
                .keys = latents,
                .values = latents,
                .type = engine->config.kv_type,
                .positions = (size_t)engine->position[t] + 1,
                .window = engine->fixed.layers[layer].window_tokens,
                .width = width,
                .scale = scale,
                .score_cap = s->score_cap,
                .scores = engine->scores,
                .out = engine->shared.attention + offset,
            });
        }
    }
    np_trace_put(&engine->shared.trace, NP_SPAN_ATTEND, layer, 0, engine->step, started);
}

static void compute_values(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const uint32_t first = down_pieces(s) + s->query_heads + 2 * engine->participants, width = s->value_width;
    const uint64_t started = np_clock_ns();
    for (uint32_t head; (head = claim(engine, layer, first, s->query_heads)) != NP_NONE;) {
        const float *mixed = engine->shared.attention + (size_t)head * np_cached_width(s);
        float *values = engine->shared.queries + (size_t)head * width;
        prepare(engine, &l->value_up, mixed, np_heads_width(s), s->latent_width, NULL);
        multiply(engine, &l->value_up, head * width, width);
        for (uint32_t t = 0; t < engine->count; t++)
            memcpy(values + t * np_heads_width(s), engine->rows + t * engine->max_rows, width * sizeof *values);
    }
    np_trace_put(&engine->shared.trace, NP_SPAN_ATTEND, layer, 0, engine->step, started);
}

int np_attend_latents(np_engine *engine, uint32_t layer)
{
    void (*const stages[])(np_engine *, uint32_t) = {compute_down, norm_and_store, compute_queries, attend, compute_values};
    int done = NP_OK;
    for (size_t n = 0; n < sizeof stages / sizeof *stages && done >= 0; n++) {
        stages[n](engine, layer);
        done = np_meet(engine);
    }
    return done;
}

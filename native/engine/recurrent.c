/* Recurrent layers: stages with a barrier after each. A step reads a sequence's state in one slot and writes it to
 * another, so that it can be computed again with the same result.
 *
 *   stage     piece of work                 writes
 *   input     rows of recurrent_input, and  queries: for each token channels, gate, rates
 *             of recurrent_rates
 *   convolve  (channels, sequence)          attention: channels; the state's last inputs. Without memories: queries, the
 *                                           gate times the channels
 *   raise     rows of recurrent_gates, and  KDA only: queries: the gate and the decays' rates, in place of the channels
 *             of recurrent_decays
 *   remember  (head, sequence)              queries: the outputs in place of the gate; the state's memories
 *   norm      an even share of the tokens   Mamba-2 only: the same, normed by groups
 *
 * Input, convolve and raise claim the pieces of one counter, as the stages of latents do. */
#include "engine/recurrent.h"

#include <math.h>
#include <string.h>

#include "engine/vectors.h"
#include "engine/work.h"
#include "kernels/exponential.h"

#define LENGTH_EPSILON 1e-6 /* of the lengths of DeltaNet's queries and keys, in every model */

enum { CHANNELS = 256, MAX_TAPS = 8 }; /* of a piece; of a convolution */

/* ---- sizes -------------------------------------------------------------------------------------------------------- */
static int has_delta_rule(const np_layer *l)
{
    return l->mixer == NP_MIXER_DELTANET || l->mixer == NP_MIXER_KDA;
}

static int has_memories(const np_layer *l)
{
    return has_delta_rule(l) || l->mixer == NP_MIXER_MAMBA2;
}

uint32_t np_channels(const np_shape *s, const np_layer *l)
{
    return has_memories(l) ? 2 * s->state_key_heads * s->state_key_width + s->state_heads * s->state_value_width : s->width;
}

uint32_t np_gate_width(const np_shape *s, const np_layer *l)
{
    return has_memories(l) ? s->state_heads * s->state_value_width : s->width;
}

uint32_t np_recurrent_rows(const np_shape *s, const np_layer *l)
{
    if (l->mixer == NP_MIXER_KDA)
        return np_channels(s, l) + 2 * s->state_rank;
    return (has_memories(l) ? 1 : 2) * np_channels(s, l) + np_gate_width(s, l);
}

uint32_t np_rates(const np_shape *s, const np_layer *l)
{
    return has_memories(l) ? (l->mixer == NP_MIXER_DELTANET ? 2 : 1) * s->state_heads : 0;
}

size_t np_state_elements(const np_shape *s, const np_layer *l)
{
    if (l->draft_input.quants) /* of the draft layer: the last hidden state of the latest token */
        return s->width;
    const size_t memories = has_memories(l) ? (size_t)s->state_heads * s->state_key_width * s->state_value_width : 0;
    return np_is_recurrent(l->mixer) ? (s->convolution_tokens - 1) * (size_t)np_channels(s, l) + memories : 0;
}

size_t np_mixer_width(const np_shape *s, const np_layer *l)
{
    if (np_is_recurrent(l->mixer))
        return (size_t)np_recurrent_rows(s, l) + np_rates(s, l);
    if (!s->latent_width)
        return (size_t)s->query_heads * l->head_width * (s->gated_attention ? 2 : 1);
    const size_t down = (size_t)np_cached_width(s) + s->query_rank;
    const size_t heads = (size_t)s->query_heads * (s->value_width > np_cached_width(s) ? s->value_width : np_cached_width(s));
    return heads > down ? heads : down;
}

size_t np_state_rows(const np_shape *s)
{
    const size_t units = 2 * (size_t)s->state_key_width, skipped = s->state_value_width;
    return (units > skipped ? units : skipped) + 2 + (s->state_rank ? s->state_key_width : 0);
}

float *np_recurrent_outputs(const np_engine *engine, const np_layer *l)
{
    return engine->shared.queries + (l->mixer == NP_MIXER_KDA ? 0 : np_recurrent_rows(&engine->shape, l) - np_gate_width(&engine->shape, l));
}

/* ---- the sequences of a step -------------------------------------------------------------------------------------- */
static int is_state(const np_engine *engine, int32_t slot)
{
    return slot >= 0 && (uint32_t)slot < engine->config.state_slots;
}

int np_find_runs(np_engine *engine, const np_step *step)
{
    engine->run_count = 0;
    if (!engine->shape.state_elements)
        return NP_OK;
    if (!step->states_from || !step->states_to)
        return NP_E_ARGUMENT;
    for (uint32_t t = 0; t < step->count; t++) {
        np_run *last = engine->run_count ? &engine->runs[engine->run_count - 1] : NULL;
        const int32_t from = step->states_from[t], to = step->states_to[t];
        const int continues = last && step->sequences[last->first] == step->sequences[t];
        if (continues && step->positions[t] != step->positions[t - 1] + 1)
            return NP_E_ARGUMENT;
        if (continues && from == step->states_from[t - 1] && to == step->states_to[t - 1]) {
            last->count++;
            continue;
        }
        if (!is_state(engine, to) || from == to || (step->positions[t] ? !is_state(engine, from) : from != NP_NO_STATE) ||
            (continues && last->to != (uint32_t)from))
            return NP_E_ARGUMENT;
        for (uint32_t r = 0; r < engine->run_count; r++) {
            const np_run *run = &engine->runs[r];
            const int is_read = run->to == (uint32_t)from && !(continues && run == last);
            const int is_repeated = step->sequences[run->first] == step->sequences[t] && !continues;
            if (run->to == (uint32_t)to || run->from == (uint32_t)to || is_read || is_repeated)
                return NP_E_ARGUMENT;
        }
        engine->runs[engine->run_count++] = (np_run){t, 1, from < 0 ? NP_NONE : (uint32_t)from, (uint32_t)to, continues};
    }
    return NP_OK;
}

/* The number of runs from this one on that continue one another: one participant computes them in turn. 0 for a run that
 * continues another. */
static uint32_t runs_in_turn(const np_engine *engine, uint32_t first)
{
    uint32_t count = !engine->runs[first].continues;
    while (count && first + count < engine->run_count && engine->runs[first + count].continues)
        count++;
    return count;
}

float *np_state_at(const np_engine *engine, const np_layer *l, uint32_t slot, size_t element)
{
    return slot == NP_NONE ? NULL : engine->shared.states + (size_t)slot * engine->shape.state_elements + l->state_before + element;
}

/* ---- input -------------------------------------------------------------------------------------------------------- */
static uint32_t pieces_of(uint32_t rows)
{
    return (rows + NP_PIECE_ROWS - 1) / NP_PIECE_ROWS;
}

static uint32_t input_pieces(const np_engine *engine, const np_layer *l)
{
    return pieces_of(np_recurrent_rows(&engine->shape, l)) + pieces_of(np_rates(&engine->shape, l));
}

/* Rows of a matrix times the layer's normed input, into queries from this element on. */
static void multiply(np_engine *engine, const np_layer *l, const np_matrix *matrix, uint32_t row, uint32_t all_rows, uint32_t element)
{
    const np_shape *s = &engine->shape;
    const uint32_t rows = all_rows - row < NP_PIECE_ROWS ? all_rows - row : NP_PIECE_ROWS;
    if (!np_reads_inputs_of(matrix->type, engine->vectors.type)) {
        engine->vectors.type = matrix->type;
        np_prepare_vectors(engine, &engine->vectors, engine->shared.residual, engine->count, s->width, s->width, &l->attention_norm);
    }
    engine->counters.matrix_rows += (uint64_t)rows * engine->count;
    np_multiply_rows(engine, &engine->vectors, matrix, row, rows, NULL, engine->shared.queries + element + row, s->heads_width);
}

static void compute_input(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const uint32_t rows = np_recurrent_rows(s, l), of_input = pieces_of(rows), pieces = input_pieces(engine, l);
    const uint64_t started = np_clock_ns();
    for (uint32_t piece; (piece = np_claim(engine, layer, NP_WORK_QKV, pieces)) != NP_NONE;) {
        if (piece < of_input)
            multiply(engine, l, &l->recurrent_input, piece * NP_PIECE_ROWS, rows, 0);
        else
            multiply(engine, l, &l->recurrent_rates, (piece - of_input) * NP_PIECE_ROWS, np_rates(s, l), rows);
    }
    np_trace_put(&engine->shared.trace, NP_SPAN_QKV, layer, 0, engine->step, started);
}

/* ---- convolution -------------------------------------------------------------------------------------------------- */
/* Convolve channels of a sequence. Inputs before the step are those of the state, or zeros; the last ones of all are the
 * new state. Without memories the input is the product of two factors, which takes the place of the first one. */
static void convolve(np_engine *engine, const np_layer *l, const np_run *run, np_range channels)
{
    static const float zeros[CHANNELS];
    const np_shape *s = &engine->shape;
    const uint32_t earlier = s->convolution_tokens - 1, count = channels.to - channels.from;
    const size_t all = np_channels(s, l), stride = s->heads_width, bytes = count * sizeof(float);
    const float *inputs[MAX_TAPS];
    float *x = engine->shared.queries + run->first * stride + channels.from;
    for (uint32_t t = 0; t < run->count && !has_memories(l); t++)
        for (uint32_t c = 0; c < count; c++)
            x[t * stride + c] *= x[t * stride + all + c];
    for (uint32_t t = 0; t < run->count; t++) {
        for (uint32_t tap = 0; tap <= earlier; tap++) {
            const float *before = np_state_at(engine, l, run->from, (size_t)(t + tap) * all + channels.from);
            inputs[tap] = t + tap >= earlier ? x + (t + tap - earlier) * stride : before ? before : zeros;
        }
        float *out = engine->shared.attention + (run->first + t) * stride + channels.from;
        np_convolve(&(np_convolution_job){.channels = count, .tokens = 1, .taps = earlier + 1, .inputs = inputs,
                                          .weights = l->convolution + channels.from, .weights_stride = all,
                                          .bias = l->convolution_bias ? l->convolution_bias + channels.from : NULL,
                                          .out = out, .out_stride = stride, .is_activated = has_memories(l)});
    }
    for (uint32_t n = 0; n < earlier; n++) { /* the state's n-th input is that of token count - earlier + n */
        const float *input = run->count + n >= earlier ? x + (run->count + n - earlier) * stride : NULL;
        const float *before = np_state_at(engine, l, run->from, (size_t)(run->count + n) * all + channels.from);
        memcpy(np_state_at(engine, l, run->to, (size_t)n * all + channels.from), input ? input : before ? before : zeros, bytes);
    }
    for (uint32_t t = 0; t < run->count && !has_memories(l); t++)
        for (uint32_t c = 0; c < count; c++)
            x[t * stride + 2 * all + c] *= engine->shared.attention[(run->first + t) * stride + channels.from + c];
}

static uint32_t convolution_pieces(const np_engine *engine, const np_layer *l)
{
    return (np_channels(&engine->shape, l) + CHANNELS - 1) / CHANNELS * engine->run_count;
}

static void compute_convolution(np_engine *engine, uint32_t layer)
{
    const np_layer *l = &engine->fixed.layers[layer];
    const uint32_t all = np_channels(&engine->shape, l), parts = (all + CHANNELS - 1) / CHANNELS;
    const uint32_t first = input_pieces(engine, l) + engine->participants, pieces = convolution_pieces(engine, l);
    const uint64_t started = np_clock_ns();
    for (uint32_t piece; (piece = np_claim(engine, layer, NP_WORK_QKV, first + pieces)) != NP_NONE;) {
        const uint32_t from = (piece - first) % parts * CHANNELS, run = (piece - first) / parts, count = runs_in_turn(engine, run);
        for (uint32_t n = 0; n < count; n++)
            convolve(engine, l, &engine->runs[run + n], (np_range){from, all - from < CHANNELS ? all : from + CHANNELS});
    }
    np_trace_put(&engine->shared.trace, NP_SPAN_QKV, layer, 0, engine->step, started);
}

/* ---- decays and gates of KDA -------------------------------------------------------------------------------------- */
/* The channels are convolved by now: the products take their place. */
static void compute_raised(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const uint32_t gates = np_gate_width(s, l), decays = s->state_heads * s->state_key_width, of_gates = pieces_of(gates);
    const uint32_t first = input_pieces(engine, l) + convolution_pieces(engine, l) + 2 * engine->participants;
    const np_matrix *prepared = NULL;
    const uint64_t started = np_clock_ns();
    for (uint32_t claimed; (claimed = np_claim(engine, layer, NP_WORK_QKV, first + of_gates + pieces_of(decays))) != NP_NONE;) {
        const int is_decay = claimed - first >= of_gates;
        const np_matrix *matrix = is_decay ? &l->recurrent_decays : &l->recurrent_gates;
        const uint32_t row = (claimed - first - (is_decay ? of_gates : 0)) * NP_PIECE_ROWS, all_rows = is_decay ? decays : gates;
        const uint32_t rows = all_rows - row < NP_PIECE_ROWS ? all_rows - row : NP_PIECE_ROWS;
        if (prepared != matrix) {
            const float *inputs = engine->shared.queries + np_channels(s, l) + (is_decay ? 0 : s->state_rank);
            engine->vectors.type = matrix->type;
            np_prepare_vectors(engine, &engine->vectors, inputs, engine->count, s->heads_width, s->state_rank, NULL);
            prepared = matrix;
        }
        engine->counters.matrix_rows += (uint64_t)rows * engine->count;
        float *to = engine->shared.queries + (is_decay ? gates : 0) + row;
        np_multiply_rows(engine, &engine->vectors, matrix, row, rows, NULL, to, s->heads_width);
    }
    np_trace_put(&engine->shared.trace, NP_SPAN_QKV, layer, 0, engine->step, started);
}

/* ---- memories ----------------------------------------------------------------------------------------------------- */
/* x * scale / |x|, with the sum of squares in double precision in a fixed order. */
static void make_unit(const float *x, size_t n, double scale, float *out)
{
    double sums[4] = {0};
    for (size_t j = 0; j < n; j++)
        sums[j % 4] += (double)x[j] * x[j];
    const float factor = (float)(scale / sqrt((sums[0] + sums[1]) + (sums[2] + sums[3]) + LENGTH_EPSILON));
    for (size_t j = 0; j < n; j++)
        out[j] = x[j] * factor;
}

/* The times of a sequence's tokens in one head, as the share of a memory that is kept (with KDA of each of its rows) and
 * that of the value. */
static void compute_shares(np_engine *engine, const np_layer *l, const np_run *run, uint32_t head, float *kept, float *shares)
{
    const np_shape *s = &engine->shape;
    const size_t keys = s->state_key_width;
    for (uint32_t t = 0; t < run->count; t++) {
        const float *products = engine->shared.queries + (run->first + t) * (size_t)s->heads_width, *rates = products + np_recurrent_rows(s, l);
        if (l->mixer == NP_MIXER_KDA) {
            np_keep(products + np_gate_width(s, l) + head * keys, l->time_bias + head * keys, l->decay[head], keys, kept + t * keys);
            shares[t] = np_sigmoid(rates[head]);
            continue;
        }
        float time = np_softplus(rates[head] + l->time_bias[head]);
        time = time < s->min_time_step ? s->min_time_step : time;
        kept[t] = np_exponential(time * l->decay[head]);
        shares[t] = l->mixer == NP_MIXER_DELTANET ? np_sigmoid(rates[s->state_heads + head]) : time;
    }
}

/* What follows a head's memory: DeltaNet and KDA norm the output, then the gate; Mamba-2 adds the value, then the gate. */
static void gate_outputs(np_engine *engine, const np_layer *l, const np_run *run, uint32_t head)
{
    const np_shape *s = &engine->shape;
    const uint32_t width = s->state_value_width, column = head * width;
    const size_t values_at = 2 * (size_t)s->state_key_heads * s->state_key_width + column;
    for (uint32_t t = 0; t < run->count; t++) {
        float *output = engine->shared.attention + (run->first + t) * (size_t)s->heads_width + values_at;
        float *gate = np_recurrent_outputs(engine, l) + (run->first + t) * (size_t)s->heads_width + column;
        if (has_delta_rule(l))
            np_rms_norm(output, l->recurrent_norm, width, s->norm_epsilon, output);
        np_activate(l->mixer == NP_MIXER_KDA ? NP_SIGMOID : NP_SILU, 0.0f, gate, output, width, gate);
    }
}

static void remember(np_engine *engine, const np_layer *l, const np_run *run, uint32_t head)
{
    const np_shape *s = &engine->shape;
    const size_t keys = s->state_key_width, width = s->state_value_width, all_keys = s->state_key_heads * keys, stride = s->heads_width;
    const int is_delta = has_delta_rule(l), is_by_row = l->mixer == NP_MIXER_KDA;
    const size_t key_at = head / (s->state_heads / s->state_key_heads) * keys, count = run->count;
    float *of_run = engine->shared.attention + run->first * stride;
    const float *queries = of_run + key_at, *key_rows = of_run + all_keys + key_at;
    float *values = of_run + 2 * all_keys + head * width;
    float *kept = engine->rows, *shares = kept + count * (is_by_row ? keys : 1), *units = shares + count; /* np_state_rows elements for each token */
    compute_shares(engine, l, run, head, kept, shares);
    for (uint32_t t = 0; t < count && is_delta; t++) {
        make_unit(queries + t * stride, keys, 1.0 / sqrt((double)keys), units + 2 * t * keys);
        make_unit(key_rows + t * stride, keys, 1.0, units + (2 * t + 1) * keys);
    }
    /* Mamba-2's skipped values are added to the outputs, which take their place. */
    float *skipped = units;
    for (uint32_t t = 0; t < count && !is_delta; t++)
        for (size_t c = 0; c < width; c++)
            skipped[t * width + c] = l->skip[head] * values[t * stride + c];
    const size_t memory_at = (s->convolution_tokens - 1) * (size_t)np_channels(s, l) + head * keys * width;
    np_remember(&(np_memory_job){.key_width = keys, .value_width = width, .tokens = count,
                                 .from = np_state_at(engine, l, run->from, memory_at), .to = np_state_at(engine, l, run->to, memory_at),
                                 .queries = is_delta ? units : queries, .keys = is_delta ? units + keys : key_rows,
                                 .keys_stride = is_delta ? 2 * keys : stride, .values = values, .values_stride = stride,
                                 .kept = kept, .shares = shares, .is_delta = is_delta, .is_by_row = is_by_row});
    for (uint32_t t = 0; t < count && !is_delta; t++)
        np_add(skipped + t * width, width, values + t * stride);
    gate_outputs(engine, l, run, head);
}

static void compute_memories(np_engine *engine, uint32_t layer)
{
    const np_layer *l = &engine->fixed.layers[layer];
    const uint32_t heads = engine->shape.state_heads, pieces = heads * engine->run_count;
    const uint64_t started = np_clock_ns();
    for (uint32_t piece; (piece = np_claim(engine, layer, NP_WORK_ATTEND, pieces)) != NP_NONE;)
        for (uint32_t n = 0, count = runs_in_turn(engine, piece / heads); n < count; n++)
            remember(engine, l, &engine->runs[piece / heads + n], piece % heads);
    np_trace_put(&engine->shared.trace, NP_SPAN_ATTEND, layer, 0, engine->step, started);
}

static void norm_groups(np_engine *engine, uint32_t layer)
{
    const np_shape *s = &engine->shape;
    const np_layer *l = &engine->fixed.layers[layer];
    const size_t width = np_gate_width(s, l) / s->state_norm_groups;
    const np_range tokens = np_even_share(engine, engine->count);
    for (uint32_t t = tokens.from; t < tokens.to; t++)
        for (uint32_t group = 0; group < s->state_norm_groups; group++) {
            float *x = np_recurrent_outputs(engine, l) + t * (size_t)s->heads_width + group * width;
            np_rms_norm(x, l->recurrent_norm + group * width, width, s->norm_epsilon, x);
        }
}

int np_mix_states(np_engine *engine, uint32_t layer)
{
    const np_layer *l = &engine->fixed.layers[layer];
    const int32_t mixer = l->mixer;
    void (*const stages[])(np_engine *, uint32_t) = {compute_input, compute_convolution, mixer == NP_MIXER_KDA ? compute_raised : NULL,
                                                     has_memories(l) ? compute_memories : NULL, mixer == NP_MIXER_MAMBA2 ? norm_groups : NULL};
    int done = NP_OK;
    for (size_t n = 0; n < sizeof stages / sizeof *stages && done >= 0; n++) {
        if (!stages[n])
            continue;
        stages[n](engine, layer);
        done = np_meet(engine);
    }
    return done;
}

/* The table of kernels that differ between instruction sets. isa.c chooses one at run time.
 *
 * All files are compiled with the same options; code for an instruction set has a function target attribute, and a file
 * for another architecture is empty after preprocessing. */
#ifndef NP_KERNELS_ISA_H
#define NP_KERNELS_ISA_H
#include "neuronpipe.h"

#define NP_INLINE static inline __attribute__((always_inline))

enum { NP_GROUP = 32 };      /* weights that share a scale */
enum { NP_TYPES = NP_Q5H + 1 };
enum { NP_TOKEN_BLOCK = 4 }; /* tokens computed together, so that a row's weights are unpacked once for all of them */

/* True if computing all NP_TOKEN_BLOCK tokens together is faster than those in the mask by themselves. */
NP_INLINE int np_are_faster_together(unsigned mask) { return __builtin_popcount(mask) >= NP_TOKEN_BLOCK - 1; }

/* Rows of weights: consecutive ones from quants and scales on, or those at the addresses in quants_at and scales_at. */
typedef struct {
    const uint8_t *quants, *scales;
    size_t quant_bytes, scale_bytes; /* of one row */
    const void *const *quants_at, *const *scales_at; /* NULL: consecutive rows */
    np_fetch fetch; /* with scattered rows */
    size_t rows, n;
} np_rows;

typedef struct {
    const uint8_t *quants, *scales;
} np_row;

NP_INLINE np_row np_row_at(const np_rows *rows, size_t r) {
    if (rows->quants_at) return (np_row){rows->quants_at[r], rows->scales_at ? rows->scales_at[r] : NULL};
    return (np_row){rows->quants + r * rows->quant_bytes, rows->scales + r * rows->scale_bytes};
}

/* One np_dot_rows or np_dot_scattered call. */
typedef struct {
    np_rows rows;
    const uint8_t *activations;
    size_t activation_stride_bytes, tokens;
    const float *bias; /* or NULL */
    float *out;
    size_t out_stride;
    const uint16_t *token_masks; /* [rows] bit t: the product with token t is needed; at most 16 tokens; other results are undefined. NULL: all */
} np_dot_job;

/* Bit i: row r's product with token first + i is needed. */
NP_INLINE unsigned np_token_mask(const np_dot_job *job, size_t r, size_t first, size_t tokens) {
    const unsigned all = (1u << tokens) - 1;
    return job->token_masks ? job->token_masks[r] >> first & all : all;
}

typedef void np_dot_function(const np_dot_job *job);
/* y[j] += sum over r of a[r] * w[r][j], in an order that depends on the number of rows only. */
typedef void np_add_function(const np_rows *rows, const float *a, float *y);
/* np_add_rows_for_tokens, of at most NP_ADD_TOKENS. Returns 0, and adds nothing, for types that it does not know. */
typedef int np_add_tokens_function(int type, const np_rows *rows, const float *a, size_t a_stride, size_t tokens, float *y, size_t y_stride);
enum { NP_ADD_TOKENS = 16 };

/* A quantized row as signed bytes with one scale: np_rows_to_s8. */
typedef void np_narrow_function(int type, const uint8_t *quants, const uint16_t *scales, size_t n, int8_t *out, float *row_scale);

/* A row of a GGUF file whose blocks are decoded and encoded again as q8 or q6k (gguf_rows.h). Returns 0, or 1 if a value
 * is not finite or does not fit fp16. */
typedef unsigned np_recode_function(int encoding, const uint8_t *stored, size_t n, int type, uint8_t *quants,
                                    uint8_t *scales);

/* Quantized rows times a panel: np_panel_bytes, np_panel_prepare and np_dot_panel (whose job's activations are
 * the panel). */
typedef struct {
    size_t most_columns; /* for a greater n the panel is a copy of the activations (panel.c) */
    size_t (*bytes)(int type, size_t n, size_t tokens);
    void (*prepare)(int type, const uint8_t *activations, size_t stride, size_t tokens, size_t n, uint8_t *panel);
    void (*dot)(int type, const np_dot_job *job);
} np_panel_kernel;

/* Up to NP_ATTEND_CHUNK rows of the KV cache, row_bytes apart. They stay in the first-level cache for all queries. */
enum { NP_ATTEND_CHUNK = 64 };
typedef struct {
    int type;
    const uint8_t *rows;
    size_t row_bytes, count, n;
    size_t following; /* rows behind them that are read next */
} np_kv_rows;
/* Attention's two products with rows of NP_MIN_COLUMNS to NP_MAX_COLUMNS elements (scalar's take any number).
 * Scores: out[q*out_stride + r] = the product of row r and query q.
 * Mix: out[q*out_stride + j] += weights[q*stride + r] * row[r][j], for one row r after the other.
 * The bits of a result do not depend on the other queries. */
typedef void np_scores_function(const np_kv_rows *rows, const float *queries, size_t stride, size_t count, float *out, size_t out_stride);
typedef void np_mix_function(const np_kv_rows *rows, const float *weights, size_t stride, size_t count, float *out, size_t out_stride);
enum { NP_MIN_COLUMNS = 16, NP_MAX_COLUMNS = 1024 };

typedef struct {
    const char *name;
    int (*runs_here)(void);
    np_dot_function *dot_rows[NP_TYPES]; /* by NP_F16, NP_Q8, ... */
    np_add_function *add_rows[NP_TYPES]; /* NULL for NP_Q3 */
    void (*prepare)(int type, const float *x, size_t n, uint8_t *activation); /* any but NP_F16 */
    float (*softmax_weights)(float *scores, size_t count); /* x -> exp(x - max); returns their sum */
    void (*f32_to_f16)(const float *x, size_t n, uint16_t *out);
    void (*f16_to_f32)(const uint16_t *x, size_t n, float *out);
    void (*sum_tree)(const float *rows, size_t summed, size_t count, size_t stride, size_t n, float *out); /* summed <= count > 0 */
    void (*rope)(float *head, size_t width, const float *inverse_frequency, int32_t position);
    void (*remember)(const np_memory_job *job);
    void (*convolve)(const np_convolution_job *job);
    void (*dot_floats)(const float *rows, size_t count, size_t n, const float *x, float *out);
    void (*keep)(const float *rates, const float *biases, float decay, size_t n, float *kept);
    void (*activate)(int activation, float limit, const float *gates, const float *ups, size_t n, float *values);
    np_narrow_function *narrow;
    np_recode_function *recode;
    const np_panel_kernel *panel; /* NULL: through dot_rows */
    np_add_tokens_function *add_for_tokens; /* NULL: through add_rows */
    np_scores_function *scores;
    np_mix_function *mix;
} np_isa;

/* The instruction set in use. Aborts with a message if NEURONPIPE_ISA names one that this machine lacks. */
const np_isa *np_isa_current(void);

extern const np_isa np_isa_scalar;
np_scores_function np_scalar_scores;
np_mix_function np_scalar_mix;
np_dot_function np_scalar_dot_q4k, np_scalar_dot_q5k, np_scalar_dot_q6k, np_scalar_dot_q4h, np_scalar_dot_q5h;
np_add_function np_scalar_add_q4k, np_scalar_add_q5k, np_scalar_add_q6k, np_scalar_add_q4h, np_scalar_add_q5h;
#if defined(__x86_64__)
extern const np_isa np_isa_avx2, np_isa_avx512, np_isa_amx;
np_dot_function np_avx2_dot_f16, np_avx2_dot_q8, np_avx2_dot_q4, np_avx2_dot_q3, np_avx2_dot_q4k, np_avx2_dot_q5k, np_avx2_dot_q6k, np_avx2_dot_iq4, np_avx2_dot_mxfp4,
    np_avx2_dot_q4h, np_avx2_dot_q5h;
np_add_function np_avx2_add_q4k, np_avx2_add_q5k, np_avx2_add_q6k, np_avx2_add_q4h, np_avx2_add_q5h;
np_dot_function np_avx512_dot_f16, np_avx512_dot_q8, np_avx512_dot_q4, np_avx512_dot_q3, np_avx512_dot_q4k, np_avx512_dot_q5k, np_avx512_dot_q6k, np_avx512_dot_iq4, np_avx512_dot_mxfp4,
    np_avx512_dot_q4h, np_avx512_dot_q5h;
np_add_function np_avx512_add_f16, np_avx512_add_q8, np_avx512_add_q4, np_avx512_add_q4k, np_avx512_add_q5k, np_avx512_add_q6k, np_avx512_add_iq4, np_avx512_add_mxfp4, np_avx512_add_q4h,
    np_avx512_add_q5h;
np_add_tokens_function np_avx512_add_for_tokens;
void np_avx512_add_f16_for_tokens(const np_rows *rows, const float *a, size_t a_stride, size_t tokens, float *y, size_t y_stride);
extern const np_panel_kernel np_avx512_panel, np_amx_panel;
/* True if two panel kernels give the same bits for some rows and tokens of each quantized type. 0 if memory is short. */
int np_panels_agree(const np_panel_kernel *a, const np_panel_kernel *b);
np_scores_function np_avx2_scores, np_avx512_scores;
np_mix_function np_avx2_mix, np_avx512_mix;
#define NP_AVX2 __attribute__((target("avx2,fma,f16c")))
#define NP_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#elif defined(__aarch64__)
extern const np_isa np_isa_neon, np_isa_dotprod;
np_dot_function np_neon_dot_f16, np_neon_dot_q8, np_neon_dot_q4, np_neon_dot_q3, np_neon_dot_q4k, np_neon_dot_q5k, np_neon_dot_q6k, np_neon_dot_iq4, np_neon_dot_mxfp4,
    np_neon_dot_q4h, np_neon_dot_q5h;
np_add_function np_neon_add_q4k, np_neon_add_q5k, np_neon_add_q6k, np_neon_add_q4h, np_neon_add_q5h;
np_dot_function np_dotprod_dot_q8, np_dotprod_dot_q4, np_dotprod_dot_q3, np_dotprod_dot_q4k, np_dotprod_dot_q5k, np_dotprod_dot_q6k, np_dotprod_dot_iq4, np_dotprod_dot_mxfp4,
    np_dotprod_dot_q4h, np_dotprod_dot_q5h;
np_scores_function np_neon_scores;
np_mix_function np_neon_mix;
#endif

/* Prefetch stays within the requested rows: in a cache slot the next row may belong to a neuron that does not fire, and
 * reading it would take bandwidth from one that does. The distance in bytes from the place being read to the place to
 * prefetch: in a following row, or for scattered rows in one a few rows ahead; 0 if none follows. Prefetching into the
 * second-level cache makes scattered pieces of 2 KiB 1.2 times as fast. Six KiB ahead make q4k 1.2 and q6k 1.7 times as
 * fast as two (rows of 2048, Zen 4, pages of 4 KiB); with eight, q4 and q8 lose what they gain. Of scattered rows, 2 to 8
 * ahead make no difference, unless one follows the other: then six decode a 1B of which every neuron fires 1.05 times as
 * fast as three. */
enum { NP_AHEAD_BYTES = 6144, NP_AHEAD_ROWS = 6 };

NP_INLINE size_t np_ahead_bytes(const np_rows *rows, size_t r) {
    if (rows->quants_at)
        return r + NP_AHEAD_ROWS < rows->rows ? (uintptr_t)rows->quants_at[r + NP_AHEAD_ROWS] - (uintptr_t)rows->quants_at[r] : 0;
    return (rows->rows - r - 1) * rows->quant_bytes >= NP_AHEAD_BYTES ? NP_AHEAD_BYTES : 0;
}

/* The same for rows that are read at several places at once: a distance of whole rows, so that all of these places are
 * fetched. */
NP_INLINE size_t np_ahead_whole_rows(const np_rows *rows, size_t r) {
    const size_t ahead = np_ahead_bytes(rows, r), bytes = rows->quant_bytes;
    if (rows->quants_at || !ahead) return ahead;
    return bytes < NP_AHEAD_BYTES ? (size_t)((uint32_t)NP_AHEAD_BYTES / (uint32_t)bytes) * bytes : bytes;
}

/* Computed on integers, because `ahead` may lead into another allocation. */
NP_INLINE void np_prefetch(const uint8_t *at, size_t ahead) { __builtin_prefetch((const void *)((uintptr_t)at + ahead), 0, 2); }

/* Prefetch what the row function does not: scales, what lies behind the quants, and fetch.prefetch. */
NP_INLINE void np_prefetch_extra(const np_rows *rows, size_t r) {
    if (!rows->scales_at || r + NP_AHEAD_ROWS >= rows->rows) return;
    const uint8_t *quants = rows->quants_at[r + NP_AHEAD_ROWS], *scales = rows->scales_at[r + NP_AHEAD_ROWS];
    for (size_t i = rows->quant_bytes; i < rows->fetch.row_bytes; i += 64) __builtin_prefetch(quants + i, 0, 2);
    for (size_t i = 0; rows->fetch.prefetch && i < rows->fetch.prefetch_bytes; i += 64)
        __builtin_prefetch((const uint8_t *)rows->fetch.prefetch[r + NP_AHEAD_ROWS] + i, 0, 2);
    const size_t scale_bytes = rows->scale_bytes > rows->fetch.scale_bytes ? rows->scale_bytes : rows->fetch.scale_bytes;
    for (size_t i = 0; i < scale_bytes; i += 64) __builtin_prefetch(scales + i, 0, 2);
}

/* Define the np_dot_function NAME from ROW(quants, scales, n, ahead, activation, stride_bytes, tokens, sums), an
 * always-inlined function whose token count is a constant at both places it is used. A (row, token) goes through the
 * same operations in both places, so its bits do not depend on the other tokens. */
#define NP_DEFINE_DOT_ROWS(TARGET, NAME, ROW) NP_DEFINE_DOT_ROWS_AHEAD(TARGET, NAME, ROW, np_ahead_bytes)
#define NP_DEFINE_DOT_ROWS_AHEAD(TARGET, NAME, ROW, AHEAD)                                          \
    TARGET void NAME(const np_dot_job *job) {                                                       \
        const size_t n = job->rows.n, stride = job->activation_stride_bytes;                        \
        for (size_t r = 0; r < job->rows.rows; r++) {                                               \
            const np_row row = np_row_at(&job->rows, r);                                            \
            const size_t ahead = AHEAD(&job->rows, r);                                              \
            const float bias = job->bias ? job->bias[r] : 0.0f;                                     \
            np_prefetch_extra(&job->rows, r);                                                      \
            for (size_t first = 0; first < job->tokens;) {                                          \
                const size_t left = job->tokens - first;                                            \
                const uint8_t *activation = job->activations + first * stride;                      \
                float sums[NP_TOKEN_BLOCK], *out = job->out + first * job->out_stride + r;          \
                if (left >= NP_TOKEN_BLOCK && np_are_faster_together(np_token_mask(job, r, first, NP_TOKEN_BLOCK))) { \
                    ROW(row.quants, row.scales, n, ahead, activation, stride, NP_TOKEN_BLOCK, sums); \
                    for (int t = 0; t < NP_TOKEN_BLOCK; t++) out[t * job->out_stride] = sums[t] + bias; \
                    first += NP_TOKEN_BLOCK;                                                        \
                    continue;                                                                       \
                }                                                                                   \
                if (np_token_mask(job, r, first++, 1)) {                                             \
                    ROW(row.quants, row.scales, n, ahead, activation, stride, 1, sums);             \
                    *out = sums[0] + bias;                                                          \
                }                                                                                   \
            }                                                                                       \
        }                                                                                           \
    }

/* Define the np_add_function NAME from ROW(quants, scales, n, a, y), prefetching the next row. */
#define NP_DEFINE_ADD_ROWS(TARGET, NAME, ROW)                                                                 \
    TARGET void NAME(const np_rows *rows, const float *a, float *y) {                                         \
        for (size_t r = 0; r < rows->rows; r++) {                                                             \
            const np_row row = np_row_at(rows, r);                                                            \
            const size_t ahead = np_ahead_bytes(rows, r);                                                     \
            np_prefetch_extra(rows, r);                                                                      \
            for (size_t i = 0; ahead && i < rows->quant_bytes; i += 64) np_prefetch(row.quants + i, ahead);   \
            ROW(row.quants, row.scales, rows->n, a[r], y);                                                    \
        }                                                                                                     \
    }

/* Define the np_add_tokens_function NAME of f16 rows from FOUR(rows, a, a_stride, j, eights, y, y_stride), which adds one
 * or two times eight columns from j on for four tokens, and from the np_add_function ONE. */
#define NP_DEFINE_ADD_F16_FOR_TOKENS(TARGET, NAME, FOUR, ONE)                                                                   \
    TARGET int NAME(int type, const np_rows *rows, const float *a, size_t a_stride, size_t tokens, float *y, size_t y_stride) { \
        if (type != NP_F16 || rows->n % 8) return 0;                                                                            \
        size_t t = 0;                                                                                                           \
        for (; t + 4 <= tokens; t += 4, a += 4 * a_stride, y += 4 * y_stride) {                                                 \
            size_t j = 0;                                                                                                       \
            for (; j + 16 <= rows->n; j += 16) FOUR(rows, a, a_stride, j, 2, y, y_stride);                                      \
            if (j < rows->n) FOUR(rows, a, a_stride, j, 1, y, y_stride);                                                        \
        }                                                                                                                       \
        for (; t < tokens; t++, a += a_stride, y += y_stride) ONE(rows, a, y);                                                  \
        return 1;                                                                                                               \
    }
#endif

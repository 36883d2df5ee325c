/* neuronpipe: the public header of the native library.
 *
 * cffi reads everything between the two cdef markers (bind.py), so there are plain declarations only. Conventions:
 * sizes are in bytes where the name says _bytes, else in elements. Functions that can fail return a negative NP_E_*
 * code. A function allocates memory only where its comment says so. No function takes Python's lock. */
#ifndef NEURONPIPE_H
#define NEURONPIPE_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* cdef begin */

/* ---- errors -------------------------------------------------------------------------------------------- */
enum {
    NP_OK = 0,
    NP_E_EPOCH = -1,    /* the epoch changed: abandon the step */
    NP_E_TIMEOUT = -2,  /* the wait timed out */
    NP_E_ARGUMENT = -3, /* an argument is outside its documented range */
    NP_E_IO = -4,       /* a read failed; the errno is in the completion */
    NP_E_CHECKSUM = -5, /* the checksum of a read is wrong */
    NP_E_DAMAGED = -6,  /* a cluster that the step needs is marked as failed */
    NP_E_MEMORY = -7,   /* out of memory */
    NP_E_BANNED = -8    /* all tokens are banned from sampling */
};

/* ---- weights ------------------------------------------------------------------------------------------- */
/* A matrix consists of rows of `n` weights. Quantized rows have groups of 32 weights; a row's quants are contiguous,
 * its fp16 scales are stored separately. q8: int8, w = s*q. q4: two per byte, byte j of a group holds element j (low
 * nibble) and j+16 (high nibble), w = s*(nibble-8), which is GGUF's Q4_0 with the scales moved out. iq4, mxfp4: as q4,
 * with w = s*value[nibble] (kernels/codebook.h), the values of GGUF's IQ4_NL and MXFP4. q3: 12 bytes a group, with w =
 * s*(code-4) and a code of three bits (kernels/three_bits.h); results of a q3 row have the bits of a q4 row with the
 * same weights and scales. q4k, q5k, q6k: groups with a minimum, w = d*scale*code - dmin*minimum, with a code of 4, 5
 * or 6 bits. Every 8 groups share 16 bytes with d, dmin, scales and minimums (kernels/minimum.h); the values of q4k and
 * q5k are those of GGUF's Q4_K and Q5_K. q4h, q5h: the same with fp16 scales and minimums, the values of GGUF's Q4_1
 * and Q5_1. */
enum { NP_F16 = 0, NP_Q8 = 1, NP_Q4 = 2, NP_Q3 = 3, NP_Q4K = 4, NP_Q5K = 5, NP_Q6K = 6, NP_IQ4 = 7, NP_MXFP4 = 8, NP_Q4H = 9, NP_Q5H = 10 };

size_t np_quant_bytes(int type, size_t n); /* bytes of one row's quants; 0 for an unknown type or n%32 != 0 when quantized */
size_t np_scale_bytes(int type, size_t n); /* bytes of one row's scales; 0 for f16 */

/* ---- kernels (kernels/) -------------------------------------------------------------------------------- */
/* Choose the instruction set: "scalar", "avx2", "avx512", "amx", "neon", "dotprod", or NULL for the best one of this
 * machine. Returns the name in use; NULL, and changes nothing, if the machine lacks it. np_isa_names lists those of
 * this machine, separated by commas. */
const char *np_isa_select(const char *name);
const char *np_isa_name(void);
const char *np_isa_names(void);
/* The reason why "amx" is not among them; NULL if it is. The first call asks the kernel for the tile registers. */
const char *np_isa_amx_lacks(void);

/* A prepared activation vector, the input of a dot product with rows of `type`. f16 rows read float32; others read int8
 * in groups of 32 (scale = absmax/127, round to nearest even) with scale and group sum. Quantized types other than q8
 * have the same activations. Buffers have np_activation_bytes and are 64-byte aligned. */
size_t np_activation_bytes(int type, size_t n);
/* 1 if rows of `type` read activations and panels that are prepared for `prepared_type`, else 0. */
int np_reads_inputs_of(int type, int prepared_type);
void np_activation_prepare(int type, const float *x, size_t n, void *activation);

/* out[t*out_stride + r] = dot(row r, activation t) + (bias ? bias[r] : 0), for r < rows, t < tokens.
 * The result of a (row, token) has the same bits whatever other rows and tokens are in the call. */
void np_dot_rows(int type, const void *quants, const void *scales, size_t rows, size_t n,
                 const void *activations, size_t activation_stride_bytes, size_t tokens,
                 const float *bias, float *out, size_t out_stride);

/* Many tokens: their activations are packed into a panel once, for all rows. A panel is valid for rows of its type and
 * n, and for the instruction set in use when it was prepared. q4, q3, iq4 and mxfp4 have the same panels, and so have
 * all types with a minimum. Buffers have np_panel_bytes (0 where np_quant_bytes is) and are 64-byte aligned. */
size_t np_panel_bytes(int type, size_t n, size_t tokens);
void np_panel_prepare(int type, const void *activations, size_t activation_stride_bytes, size_t tokens, size_t n, void *panel);

/* out[t*out_stride + r] with the bits of np_dot_rows, for rows at arbitrary addresses and all tokens of the panel.
 * Threads may share a panel. Needs 100 KiB of stack, 400 KiB on amx. Faster than np_dot_rows from about 16 tokens
 * on. */
void np_dot_panel(int type, const void *const *quants, const void *const *scales, size_t rows, size_t n, const void *panel,
                  size_t tokens, const float *bias, float *out, size_t out_stride);

/* Rows at arbitrary addresses: out[t*out_stride + r] = dot(row at quants[r] with scales[r], activation t), with the
 * bits of np_dot_rows. Rows are prefetched from memory a few rows ahead; `fetch` (or NULL) names what to prefetch with
 * each row. */
typedef struct {
    size_t row_bytes;          /* from the row's start on: more than the row if what lies behind it is needed next */
    const void *const *prefetch; /* [rows] other memory to fetch with each row; or NULL */
    size_t prefetch_bytes;
    size_t scale_bytes;        /* from the row's scales on: more than the row's if those behind them are needed next */
} np_fetch;
void np_dot_scattered(int type, const void *const *quants, const void *const *scales, size_t rows, size_t n,
                      const np_fetch *fetch, const void *activations, size_t activation_stride_bytes, size_t tokens, float *out,
                      size_t out_stride);

/* The same for some (row, token) pairs only: those with bit t set in token_masks[r]; at most 16 tokens. A row is read
 * once for all of its tokens. `out` is undefined for the other pairs. token_masks may be NULL: all pairs. */
void np_dot_masked(int type, const void *const *quants, const void *const *scales, const uint16_t *token_masks, size_t rows, size_t n,
                   const np_fetch *fetch, const void *activations, size_t activation_stride_bytes, size_t tokens, float *out,
                   size_t out_stride);

/* y[j] += sum over r of a[r] * w[r][j]. The bits depend on y and on the list (rows and factors, in order) only; a list
 * split in two may give other bits. On avx512 the factors of quantized rows are rounded: within 32 rows and one group,
 * by at most half a 32639th of the largest |a * scale|. A factor, scale or minimum that is not finite makes all of its
 * columns not finite. Not for q3. Needs 25 KiB of stack. */
void np_add_rows(int type, const void *const *quants, const void *const *scales, const float *a, size_t rows, size_t n, float *y);

/* The same for several tokens with the same rows: y[t*y_stride + j] += sum over r of a[t*a_stride + r] * w[r][j], with the
 * bits of np_add_rows for each token. On avx512 rows are unpacked once for 16 tokens. Needs 50 KiB of stack. */
void np_add_rows_for_tokens(int type, const void *const *quants, const void *const *scales, const float *a, size_t a_stride, size_t rows,
                            size_t tokens, size_t n, float *y, size_t y_stride);

/* Convert quantized rows to signed bytes, `out_stride` apart, with one scale each: w[r][j] ~ row_scales[r] *
 * out[r*out_stride + j], rounded to nearest even; a row's largest magnitude becomes 127. The same bits on every
 * instruction set. A row with a scale that is not finite gets NaN as its scale, and zeros. Returns NP_OK; or
 * NP_E_ARGUMENT, and writes nothing, for another type, if n is no multiple of 32 or out_stride < n. */
int np_rows_to_s8(int type, const void *const *quants, const void *const *scales, size_t rows, size_t n, int8_t *out,
                  size_t out_stride, float *row_scales);

/* Encode a row of q4k, q5k, q6k, q4h, q5h, iq4 or mxfp4. importance: [n], not negative, how much the error of each
 * weight counts; NULL: all count alike. Returns NP_OK; NP_E_ARGUMENT for another type, if n is no multiple of 32, or if
 * a weight is not finite or does not fit. */
int np_encode_row(int type, const float *w, const float *importance, size_t n, void *quants, void *scales);

/* Decode a row to float32. */
void np_decode_row(int type, const void *quants, const void *scales, size_t n, float *w);

/* Rows as GGUF stores them; the numbers are GGUF's. */
enum {
    NP_GGUF_Q4_0 = 2,
    NP_GGUF_Q5_0 = 6,
    NP_GGUF_Q8_0 = 8,
    NP_GGUF_Q4_K = 12,
    NP_GGUF_Q5_K = 13,
    NP_GGUF_Q6_K = 14,
    NP_GGUF_IQ4_NL = 20,
    NP_GGUF_IQ4_XS = 23,
    NP_GGUF_MXFP4 = 39
};
size_t np_gguf_row_bytes(int encoding, size_t n); /* 0 for an unknown encoding, or if n is no multiple of its blocks */
/* 1 if np_unpack_gguf_rows can convert this encoding to rows of `type`, else 0. */
int np_gguf_fits(int encoding, int type);
/* Convert `rows` rows of n weights, at any address, to quants [rows][np_quant_bytes] and scales [rows][np_scale_bytes].
 * The values stay the same, but: scales of IQ4_XS as iq4 are rounded to fp16; Q6_K as q6k, and anything but Q4_0, Q5_0
 * and Q8_0 as q8, is encoded again. Returns NP_OK; NP_E_ARGUMENT for a pair that np_gguf_fits refuses, a wrong n, or
 * values that fp16 cannot express (rows so far may have been written). */
int np_unpack_gguf_rows(int encoding, const void *stored, size_t rows, size_t n, int type, void *quants, void *scales);

/* out = x / rms(x) * weight, rms with epsilon under the root. out may be x. weight NULL: 1 for all. */
void np_rms_norm(const float *x, const float *weight, size_t n, float epsilon, float *out);

/* out = (x - mean(x)) / deviation(x) * weight + bias, the deviation with epsilon under the root. out may be x. */
void np_layer_norm(const float *x, const float *weight, const float *bias, size_t n, float epsilon, float *out);

/* Rotate one head in place: pairs (j, j+width/2) by angle position * inverse_frequency[j]. */
void np_rope(float *head, size_t width, const float *inverse_frequency, int32_t position);

/* The memory of one head of a recurrent layer and consecutive tokens: for each token a change,
 * memory = memory * kept + key (x) change, with change = value * share, or with is_delta
 * (value - kept * memory^T key) * share; and its output memory^T query, which takes the place of the value. */
typedef struct {
    size_t key_width, value_width, tokens;
    const float *from;            /* [key_width][value_width]; NULL: zeros */
    float *to;                    /* likewise, after the last token; apart from `from` */
    const float *keys, *queries;  /* of a token [key_width]; keys_stride elements from one token's to the next */
    float *values;                /* of a token [value_width] */
    size_t keys_stride, values_stride;
    const float *kept, *shares;   /* [tokens] */
    int is_delta;
    int is_by_row;                /* 1: kept is [tokens][key_width], of each row of the memory; only with is_delta */
} np_memory_job;
void np_remember(const np_memory_job *job);

/* The share of a memory's row that a token keeps, for n rows: exp(decay * log(1 + exp(rate + bias))). */
void np_keep(const float *rates, const float *biases, float decay, size_t n, float *kept);

/* Values of n neurons from their gates and ups, by NP_RELU ... (engine/), or up * sigmoid(gate) by NP_SIGMOID. `values`
 * may be `gates` or `ups`. limit: that of NP_CLAMPED_SWIGLU. The same bits with all instruction sets. */
enum { NP_SIGMOID = 100 };
void np_activate(int activation, float limit, const float *gates, const float *ups, size_t n, float *values);

/* A causal convolution of consecutive tokens: out = sum of weights[tap] * inputs[token + tap], plus bias, then
 * x * sigmoid(x) with is_activated. */
typedef struct {
    size_t channels, tokens, taps;
    const float *const *inputs;   /* [tokens + taps - 1] of each token [channels], the earlier ones first */
    const float *weights, *bias;  /* [taps][channels], weights_stride elements from one tap's to the next; [channels] or NULL */
    size_t weights_stride;
    float *out;                   /* of a token [channels] */
    size_t out_stride;
    int is_activated;
} np_convolution_job;
void np_convolve(const np_convolution_job *job);

/* out[r] = the product of row r of rows [count, n] with x. A row's bits do not depend on the others. */
void np_dot_floats(const float *rows, size_t count, size_t n, const float *x, float *out);

void np_f32_to_f16(const float *x, size_t n, uint16_t *out); /* round to nearest even */
void np_f16_to_f32(const uint16_t *x, size_t n, float *out);

/* Rows of the KV cache, of n elements, at even addresses: NP_F16, or NP_Q8 with a row's scales behind its quants. A group
 * with an element that is not finite has no finite elements when it is read. */
size_t np_kv_row_bytes(int type, size_t n); /* 0 for another type, or n%32 != 0 with NP_Q8 */
void np_kv_store(int type, const float *x, size_t n, void *row);

/* Attention of tokens at consecutive positions, whose query heads share keys and values. */
typedef struct {
    const float *queries; /* of a token [heads, width] */
    size_t token_stride;  /* floats from one token to the next, in queries and in out */
    size_t heads, tokens;
    const void *keys, *values; /* [positions] rows of the KV cache, of `width` elements, from the sequence's first position on */
    int type;             /* of these rows */
    size_t positions;     /* of the first token, itself included, so at least 1; each further token has one more */
    size_t window;        /* a token attends to so many positions, the latest; 0: to all */
    size_t width;
    float scale, score_cap; /* scores are soft-capped, other than sinks; 0: they are not */
    const float *sinks;   /* [heads] scores that join each softmax and whose shares are dropped, or NULL */
    float *scores;        /* scratch of NP_ATTEND_QUERIES * (positions + tokens) floats */
    float *out;           /* of a token [heads, width] */
} np_attend_job;

/* Keys and values are read from memory once for so many heads of a token, or for a head of so many tokens. A head's bits
 * do not depend on the other heads and tokens. */
enum { NP_ATTEND_QUERIES = 8 };
void np_attend(const np_attend_job *job);

/* y[j] += x[j]. */
void np_add(const float *x, size_t n, float *y);

/* x[j] = cap * tanh(x[j] / cap), with the same bits on every instruction set; absolute error below cap * 2e-7. */
void np_soft_cap(float *x, size_t n, float cap);

/* out[j] = sum over i < count of rows[i*stride + j], pairwise in a fixed tree over i: ((0+1)+(2+3))+((4+5)+...). */
void np_sum_tree(const float *rows, size_t count, size_t stride, size_t n, float *out);
/* The same sum, with the same bits, if the first `summed` rows (at most `count`) were already summed into nodes of the
 * tree. There is one node for each bit set in `summed`, from the highest bit on: the sum of 2^bit rows, stored in the
 * place of its first row. The places of its other rows are not read. */
void np_sum_tree_on(const float *rows, size_t summed, size_t count, size_t stride, size_t n, float *out);
/* The number of nodes that the first `rows` rows make up, and the first row of a node. */
uint32_t np_tree_nodes(uint32_t rows);
uint32_t np_tree_node_first(uint32_t rows, uint32_t node);

/* ---- sampling (kernels/sample.c) ------------------------------------------------------------------------ */
/* Options of sampling, applied in this order: penalties, biases, allowed; temperature; top_k, top_p, min_p. Neutral
 * values (a penalty of 1 or 0, no bias, allowed = NULL) leave a logit's bits unchanged. */
typedef struct {
    float temperature;              /* <= 0: greedy; the lowest id of equal logits */
    int32_t top_k;                  /* only the k most likely tokens; 0: all */
    float top_p;                    /* only the smallest set whose probability, within the top_k, reaches this; 1: all */
    float min_p;                    /* only tokens at least this fraction as likely as the most likely one; 0: all */
    float repetition_penalty;       /* > 0; positive logits of the sequence's tokens are divided by it, negative ones multiplied; 1: off */
    float frequency_penalty;        /* subtracted from a token's logit for each time it was generated; 0: off */
    float presence_penalty;         /* subtracted once if the token was generated; 0: off */
    int32_t penalty_tokens;         /* the penalties consider this many of the last tokens of the text; 0: all */
    const int32_t *text;            /* the sequence's ids in [0, n): the prompt, then generated tokens; read only if a penalty is on */
    size_t text_tokens;
    size_t prompt_tokens;
    const int32_t *biased;          /* ids whose logits get `biases` added; -INFINITY bans a token */
    const float *biases;
    size_t biased_count;
    const uint8_t *allowed;         /* NULL, or n bits: an id may be sampled if bit id % 8 of byte id / 8 is set */
} np_sampling;
/* Sample an id. uniform: in [0, 1). Returns NP_E_ARGUMENT if a logit is NaN, n is 0, or an id or option is out of
 * range; NP_E_BANNED if biases and allowed leave no token. scratch: 3*n words of 4 bytes. */
int32_t np_sample(const float *logits, size_t n, const np_sampling *how, double uniform, int32_t *scratch);
/* A uniform number in [0, 1) from (seed, counter), so that a repeated step gets the same number. */
double np_uniform(uint64_t seed, uint64_t counter);
/* The ids of the `count` <= n greatest logits, greatest first; of equal logits, the lowest id first. For small counts:
 * O(n * count) at worst. */
void np_greatest(const float *logits, size_t n, size_t count, int32_t *ids);
/* Natural logarithms of the softmax probabilities of `count` ids, in double precision; NAN for an id out of range. */
void np_log_probabilities(const float *logits, size_t n, const int32_t *ids, size_t count, double *out);

/* ---- waiting (sync/) ------------------------------------------------------------------------------------- */
/* All words are in shared memory. Every wait ends with NP_E_EPOCH once *epoch != expected_epoch; it spins for at most
 * spin_us, then sleeps on a futex (not a private one: several processes wait). */
typedef struct {
    uint32_t arrived;    /* number of participants that arrived in the current phase */
    uint32_t phase;      /* incremented when the last participant arrives; the futex word */
    uint32_t waiters;    /* participants asleep on `phase` */
    uint32_t unused[13]; /* one cache line */
} np_barrier;

void np_barrier_reset(np_barrier *barrier);
/* Returns 1 to the last participant, 0 to the others, or NP_E_EPOCH / NP_E_TIMEOUT. */
int np_barrier_wait(np_barrier *barrier, uint32_t participants, const uint32_t *epoch, uint32_t expected_epoch,
                    uint32_t spin_us, uint32_t timeout_ms);

uint32_t np_word_load(const uint32_t *word);                 /* acquire */
void np_word_store(uint32_t *word, uint32_t value);          /* release */
uint32_t np_word_add(uint32_t *word, uint32_t value);        /* acquire-release; returns the new value */
int np_word_swap(uint32_t *word, uint32_t from, uint32_t to);/* compare and set, acquire-release; returns 1 if it was `from` */
void np_long_store(uint64_t *word, uint64_t value);          /* sequentially consistent, and a full fence after it */
void np_word_wake(uint32_t *word);                           /* wake all sleepers on the word */
/* Wait until *word != old_value. */
int np_word_wait(const uint32_t *word, uint32_t old_value, const uint32_t *epoch, uint32_t expected_epoch,
                 uint32_t spin_us, uint32_t timeout_ms);
/* Begin a new epoch and wake all sleepers on these words, so that all waits end. Returns the epoch. */
uint32_t np_epoch_advance(uint32_t *epoch, uint32_t **words, size_t count);

/* ---- flash reader (flash/) -------------------------------------------------------------------------------- */
/* Reads of files: with direct I/O if the file system supports it, by io_uring ("io_uring") or a pool of pread threads
 * ("threads"). For one thread. Completions arrive in any order. */
typedef struct np_reader np_reader;
typedef struct {
    uint64_t tag;
    int32_t result; /* bytes read, fewer than requested only if the file ends before; or -errno */
    uint32_t unused;
} np_completion;

/* Rows of a matrix that stay in a file, for one thread. path: the file; offset: of row 0 in it; checksums: [rows] CRC-32C
 * of each row, which must stay valid. Allocates. On errors returns NULL and sets *error to errno. */
typedef struct np_row_file np_row_file;
enum { NP_KEPT_ROWS = 4 }; /* a draft layer reads the rows of a decode step's tokens again */
np_row_file *np_row_file_open(const char *path, uint64_t offset, uint32_t row_bytes, uint32_t rows, const uint32_t *checksums, int *error);
void np_row_file_close(np_row_file *file);
/* Return a row; the last NP_KEPT_ROWS are not read again. It is valid until the next call; NULL: the row cannot be read,
 * or has another checksum. */
const uint8_t *np_row_file_read(np_row_file *file, uint32_t row);
/* The CRC-32C of each of `rows` rows that follow each other. */
void np_row_checksums(const void *data, uint32_t row_bytes, uint32_t rows, uint32_t *checksums);

/* engine: "io_uring", "threads", or NULL for the best available. depth: maximal reads in flight, 1 to 4096. Allocates.
 * On errors returns NULL and sets *error to errno. np_reader_close waits for reads in flight. */
np_reader *np_reader_open(const char *path, const char *engine, uint32_t depth, int *error);
void np_reader_close(np_reader *reader);
/* Open another file, before the first read. Returns its number, from 1 on; or -errno. The offset of a read has the
 * file's number in its bits from NP_FILE_SHIFT on; the first file is number 0. May increase the alignment. */
enum { NP_FILE_SHIFT = 48, NP_READER_FILES = 1024 };
int np_reader_add(np_reader *reader, const char *path);
const char *np_reader_engine(const np_reader *reader);
int np_reader_direct(const np_reader *reader);        /* 1 if the page cache is bypassed, for all files */
uint32_t np_reader_alignment(const np_reader *reader); /* of offset, length and address, in bytes, at most 4096; 1 without direct I/O */
/* Submit reads. Returns how many were accepted, from the first on: fewer than count if the queue is full; NP_E_ARGUMENT
 * if one is misaligned. */
int np_reader_submit(np_reader *reader, const uint64_t *offsets, const uint32_t *bytes, void *const *targets,
                     const uint64_t *tags, size_t count);
/* Get up to max_count completions; wait until there are min_count, for at most timeout_ms (-1: no limit). Returns their
 * number. */
int np_reader_reap(np_reader *reader, np_completion *out, size_t min_count, size_t max_count, int timeout_ms);
/* An event descriptor, readable when there may be completions: read it, then reap until fewer than max_count come.
 * Created by the first call. Returns -errno on errors. */
int np_reader_event_fd(np_reader *reader);
/* Register the memory that reads go to, which makes them cheaper (io_uring, within the limit on locked memory). Returns
 * 1 if the kernel accepted it, else 0; reads work in both cases. NULL, 0: unregister it, before it is unmapped. */
int np_reader_register(np_reader *reader, void *memory, size_t bytes);
uint32_t np_reader_in_flight(const np_reader *reader);

uint32_t np_crc32c(uint32_t crc, const void *data, size_t bytes); /* Castagnoli; start with 0 */

/* ---- residency (residency/) -------------------------------------------------------------------------------- */
/* The parts of a cluster: the rows that decide whether a neuron fires, and the others. Arrays by part are indexed by
 * these. */
enum { NP_TRIGGER = 0, NP_VALUE = 1, NP_PARTS = 2 };

/* A residency entry, one 32-bit word per cluster part: bits 0-23 slot, 24-25 state, 26 referenced, 27 pinned, 28-30
 * uses.
 *   from     to       by      ordering
 *   absent   loading  loader  claims the cluster; bits 0-23: the slot that it is read for
 *   loading  present  loader  release: the bytes are in the slot before the entry changes
 *   loading  failed   loader  after three I/O errors or two wrong checksums; bits 0-23: the epoch's
 *   failed   absent   loader  in a later epoch: the cluster can be requested again
 *   loading  absent   loader  before another attempt; or after a restart (np_loader_create)
 *   present  absent   cache   compare and set of an unreferenced entry that no window covers (np_clock_take, np_least_used_take)
 *   bit 26   set      decode, prefill: by np_entry_look only; cleared by the cache, or by a worker with np_entry_forget. It
 *                     also prevents the eviction of a slot between a worker's look-up and the cache's check (proof in
 *                     residency/eviction.c)
 *   bit 27   set      loader, on request; cache, of a present entry (np_pins_follow)
 *   bit 27   cleared  cache, of a present entry
 *   bit 31   set      prefill, by np_entry_forget: a long chunk of a prompt used it, and needs it no more; cleared by np_entry_look
 *   uses     changed  cache, of a present entry: how often it found bit 26 set, minus how often not; 0 after loading
 * The other bits of an absent entry are undefined: compare states with NP_ENTRY_STATE_MASK. */
enum {
    NP_ENTRY_SLOT_MASK = 0xffffff,
    NP_ENTRY_STATE_MASK = 0x3000000,
    NP_ENTRY_ABSENT = 0x0000000,
    NP_ENTRY_LOADING = 0x1000000,
    NP_ENTRY_PRESENT = 0x2000000,
    NP_ENTRY_FAILED = 0x3000000,
    NP_ENTRY_REFERENCED = 0x4000000,
    NP_ENTRY_PINNED = 0x8000000,
    NP_ENTRY_USE = 0x10000000,
    NP_MAX_USES = 7,
    NP_ENTRY_SCANNED = 0x80000000
};

/* Look up a cluster: mark a present entry as referenced and return it. If it is present, the slot stays valid while
 * this worker's window covers the cluster; reading an entry in any other way guarantees nothing. */
uint32_t np_entry_look(uint32_t *word);
/* Mark a present entry as scanned, after all that take part in a long chunk of a prompt read its slot: it loses its reference bit and is evicted
 * first, while the prompt's layers are near, unless it has uses. */
void np_entry_forget(uint32_t *word);

/* A worker's window: the clusters whose slots it may be reading, published by np_long_store before it looks up their
 * entries. 64 bits: first cluster << 32 | end cluster; 0: none. It covers both parts. An empty one says where a scan is. */

/* CLOCK with usage counts: from *hand on, evict up to max_slots present, unpinned entries that no window covers. The
 * hand turns a reference bit into a use; without the bit it removes a use; an entry with neither becomes absent. Before
 * that go scanned entries without uses that lie up to some windows before a window, the nearest first. Writes
 * the freed slots and returns their number. windows: sequentially consistent 64-bit words. */
size_t np_clock_take(uint32_t *words, size_t count, size_t *hand, const uint64_t *windows, size_t window_count, size_t max_slots,
                     uint32_t *slots);

/* The uses of experts of `clusters` clusters each. All is 0 at first, but for weight, growth and clusters. */
typedef struct {
    uint32_t clusters; /* 1 or more */
    double *sums;      /* [experts] weights of the uses that were collected from the reference bits of first clusters */
    uint8_t *empty;    /* [experts] 1: nothing of it can be evicted until its first cluster is loaded again; 2: nor in this call */
    double weight;     /* of the last use; 1 at first */
    double growth;     /* factor of each use's weight to the one's before */
    size_t hand;       /* the expert after the last one that was evicted */
    uint64_t calls;
} np_uses;
/* LFU with ageing: evict up to max_slots present, unpinned entries that no window covers, of the experts with the fewest
 * uses first, from their last clusters on; of equal experts those next from the hand on. Before that go scanned entries as
 * in np_clock_take. Writes the freed slots and returns their number. count: a multiple of uses->clusters. */
size_t np_least_used_take(uint32_t *words, size_t count, np_uses *uses, const uint64_t *windows, size_t window_count, size_t max_slots, uint32_t *slots);

/* Evict chosen clusters, for other policies: of the ids, in this order, up to max_slots whose entries are
 * present, unpinned and not covered by a window; ids from `count` on are skipped. Writes the freed slots and returns
 * their number. */
size_t np_clusters_evict(uint32_t *words, size_t count, const uint32_t *ids, size_t id_count, const uint64_t *windows,
                         size_t window_count, size_t max_slots, uint32_t *slots);

/* Set free[slot] to 0 for all slots below slot_count that present entries name. */
void np_slots_mark(const uint32_t *words, size_t count, uint8_t *free, size_t slot_count);
/* Empty the slots from first_slot on: present entries that name one become absent, pinned ones as well, unless a window
 * covers them. Returns the number of entries left: call it again until it is 0. Nothing may be loading into these
 * slots. */
size_t np_slots_vacate(uint32_t *words, size_t count, uint32_t first_slot, const uint64_t *windows, size_t window_count);

/* Pin the first keep[ffn] clusters of each feed-forward, and unpin the others below widest[ffn] (residency/pins.c).
 * Returns how many clusters to pin are not present yet; writes the ids of the first max_absent absent ones, padded with
 * UINT32_MAX. pinned_in_excess: loading entries that will be pinned although they should not be. */
size_t np_pins_follow(uint32_t *words, size_t ffns, size_t clusters, const uint32_t *keep, const uint32_t *widest, uint32_t *absent,
                      size_t max_absent, size_t *pinned_in_excess);

/* ---- requests (flash/requests.c) ------------------------------------------------------------------------------ */
/* A ring in shared memory from one worker to the loader. An entry is a cluster index (24 bits) and NP_REQUEST_* bits.
 *   word      written by   ordering
 *   tail      worker       release, after the entries before it; counts all entries ever put, modulo 2^32
 *   head      loader       release, after it has read the entries before it
 *   asleep    loader: 1 before it sleeps and reads all tails again; worker: 0 when it rings. Sequentially consistent */
enum {
    NP_REQUEST_CLUSTER_MASK = 0xffffff,
    NP_REQUEST_TRIGGER = 0x1000000,
    NP_REQUEST_VALUE = 0x2000000,    /* together with the trigger: one read of both */
    NP_REQUEST_PREFETCH = 0x4000000, /* needed later; without this bit the step waits for the cluster */
    NP_REQUEST_SPECULATIVE = 0x8000000     /* may be needed: read while flash is idle; dropped when an entry without this bit arrives */
};
typedef struct {
    uint32_t *tail, *head; /* each on a cache line of its own */
    uint32_t *entries;     /* [capacity] */
    uint32_t capacity;     /* a power of two */
    uint32_t *asleep;      /* one for all rings of a loader */
    int32_t doorbell;      /* a descriptor: one byte is written to it if the loader sleeps; -1: none */
} np_requests;
/* Put up to `count` entries, and ring the doorbell if the loader sleeps. Returns how many fit. To put more, wait for
 * `head` to change: the loader wakes its sleepers when it has drained a full ring. */
uint32_t np_requests_put(const np_requests *requests, const uint32_t *entries, uint32_t count);

/* ---- trace (trace/) ---------------------------------------------------------------------------------------------- */
/* A ring of the latest spans of one writer, for any number of readers. next: the number of spans ever put (release,
 * after the span and before the next span's bytes). */
typedef struct {
    uint64_t start_ns, end_ns; /* CLOCK_MONOTONIC */
    uint16_t kind, layer;
    uint32_t value;            /* clusters, bytes or tokens, by kind */
    uint64_t step;
} np_span;
typedef struct {
    uint64_t *next;
    np_span *spans;    /* [capacity] */
    uint32_t capacity; /* a power of two; 0: no trace */
    uint32_t unused;
} np_trace;
enum {
    NP_SPAN_STEP = 1,    /* a whole step; value: tokens */
    NP_SPAN_QKV = 2,     /* heads of queries, keys, values */
    NP_SPAN_ATTEND = 3,
    NP_SPAN_PROJECT = 4,
    NP_SPAN_PREDICT = 5, /* value: neurons predicted */
    NP_SPAN_NEURONS = 6, /* computing the neurons of blocks; value: active neurons */
    NP_SPAN_COMBINE = 7,
    NP_SPAN_LOGITS = 8,
    NP_SPAN_BARRIER = 9,    /* waiting for the other participants */
    NP_SPAN_FLASH = 10,  /* waiting for clusters; value: pending blocks */
    NP_SPAN_READ = 11,   /* loader: reads in flight; value: bytes read */
    NP_SPAN_EVICT = 12,  /* cache: eviction; value: slots freed */
    NP_SPAN_SEND = 13,   /* coordinator: sending a step; value: participants */
    NP_SPAN_AWAIT = 14,  /* coordinator: waiting for the last answer; value: tokens */
    NP_SPAN_SAMPLE = 15, /* coordinator: sampling; value: tokens */
    NP_SPAN_TELL = 16    /* coordinator: messages to clients between two steps; value: their number */
};
uint64_t np_trace_now(void);
/* Put a span that started at start_ns and ends now. */
void np_trace_put(const np_trace *trace, int kind, uint32_t layer, uint32_t value, uint64_t step, uint64_t start_ns);
/* Put a span that ended at end_ns. */
void np_trace_add(const np_trace *trace, int kind, uint32_t layer, uint32_t value, uint64_t step, uint64_t start_ns, uint64_t end_ns);
/* Copy another process's spans from number *from on, as far as they are intact, to out [capacity]. Returns their
 * number, and sets *from to the number of the first: greater than before if the ring was overwritten. NP_E_ARGUMENT if
 * *from is greater than the number of spans put. */
int64_t np_trace_take(const np_trace *trace, uint64_t *from, np_span *out);

/* ---- loader core (flash/loader.c) -------------------------------------------------------------------------- */
/* Queues cluster ids, claims their entries, reads them, verifies checksums, copies them into free slots, publishes the
 * entries, wakes waiters. A part of the bundle file: offset(id) = base + id*stride + part_offset; slot s lies at slots
 * + s*slot_bytes and holds the first bytes of its part. With moved_bytes, slots of part 1 also hold that many bytes of
 * part 0 at their end (co-located scales): both parts are then read and verified together, so that values can be
 * computed without a slot of part 0. */
typedef struct np_loader np_loader;
/* Experts that are read in place, from files of another format. A cluster is an expert. A part is several pieces, each
 * the rows of one matrix; they are converted to the engine's types (np_unpack_gguf_rows). */
enum { NP_SOURCE_READS = 3 }; /* reads of one cluster at most: gate, up, down */
typedef struct {
    uint32_t part;            /* whose slots get the rows */
    uint32_t quants, scales;  /* places in the slot */
    uint32_t rows, columns;
    int32_t type;             /* of the rows in the slot */
    const uint64_t *offsets;  /* [runs] of the first expert's rows in the reader's files */
    const uint64_t *strides;  /* [runs] bytes from one expert's rows to the next one's; NULL or 0: they follow one another */
    const int32_t *encodings; /* [runs] NP_GGUF_* */
} np_source_matrix;
typedef struct {
    uint64_t bytes;
    int64_t modified_ns; /* since 1970 */
} np_source_file;
typedef struct {
    np_source_matrix gate, up, down; /* gate is the trigger part, the others are the value part */
    uint32_t runs;                   /* of experts of one layer whose rows lie at equal distances */
    const uint32_t *first_experts;   /* [runs+1] of each run, counted through all layers; then the number of all experts */
    const np_source_file *files; /* [file_count] the reader's files. Nothing is published that was read from one that differs */
    uint32_t file_count;
    uint32_t *checksums; /* [experts of all layers][2] crc32c of each part's pieces; 0: not known, and set by the first read. The loader is the only writer */
} np_source;
typedef struct {
    uint64_t base_offset, stride_bytes; /* of the bundle file */
    uint64_t part_offset;               /* within a cluster */
    uint32_t part_bytes;                /* multiple of the reader's alignment */
    uint32_t slot_bytes;                /* of a slot: first bytes of the part, then moved_bytes */
    uint32_t moved_from, moved_bytes;   /* within part 0; moved_bytes is 0 in part 0 */
    uint32_t slot_count;
    uint32_t demand_slots;              /* free slots that are reserved for demands */
    uint8_t *slots;
    int32_t slots_file;         /* the memory file that `slots` maps, or -1: several neighbouring slots are written to it by one call */
    uint64_t slots_file_offset; /* offset of `slots` in it */
    uint32_t *words;
    uint32_t cluster_count;
    const uint32_t *checksums;  /* crc32c of each cluster's part, at cluster * checksum_stride */
    uint32_t checksum_stride;   /* 1, or more if the table interleaves other checksums */
} np_loader_part;
typedef struct {
    uint32_t most_read_bytes; /* maximum of one read, and size of its staging buffer; at least the longer part. With a source: of a cluster's reads together */
    uint32_t merge_gap_bytes; /* clusters with at most this gap between them are read together */
    uint32_t prefetch_depth;  /* prefetches start only while fewer reads are in flight; 0: no prefetching */
    uint32_t warm_up_reads;   /* long reads, for warm-up only, within the reader's depth; 0: warm-up uses ordinary reads */
    uint32_t warm_up_read_bytes; /* maximum of a long read, at least most_read_bytes */
    const np_source *source;  /* NULL: a bundle file. Else offsets, checksums and moved bytes of the parts are not used, and part_bytes are for statistics */
} np_loader_reading;
typedef struct {
    uint64_t reads, bytes;    /* from flash, gaps included */
    uint64_t checksum_failures, io_errors; /* a source file that has changed counts as an I/O error */
    uint64_t refused;         /* invalid entries in request rings */
    uint64_t dropped;         /* prefetches whose queue was full */
    uint64_t gap_bytes;       /* read between requested clusters */
    uint64_t waited_for_slot; /* demands that had to wait for a slot */
    uint64_t warm_up_bytes, warm_up_left_bytes; /* of the warm-up since the last reset; those not loaded yet */
    uint64_t warm_up_ns;      /* duration of the warm-up */
    uint64_t already_there;   /* requested cluster parts whose entries were not absent */
    uint32_t free_slots[2], waiting[2], in_flight, unused;
} np_loader_state;

/* parts: trigger and value, of the same clusters. arrivals: a futex word, incremented after entries become present or
 * failed. queue_capacity: maximal queued clusters of one kind and priority, at most 32768. Allocates, among others, a
 * staging buffer per np_loader_flight_reads of the reader's depth. Returns NULL if memory is short, or if a part contradicts itself, the
 * reading or the reader's alignment. The reader must outlive the loader and have no other user; np_loader_destroy waits
 * for reads in flight. Entries that an earlier loader left loading become absent. */
np_loader *np_loader_create(np_reader *reader, const np_loader_part *parts, const np_loader_reading *reading, uint32_t *arrivals,
                            uint32_t queue_capacity);
/* A longer range is read in pieces of at least so much: flash reads them at full speed, and each is checked and copied in
 * a fraction of a millisecond. */
enum { NP_PIECE_BYTES = 1 << 20 };
/* The most reads at once of what fills one staging buffer: pieces of a long range, or reads of a source's cluster. */
uint32_t np_loader_flight_reads(const np_loader_reading *reading, const np_loader_part *parts);
void np_loader_destroy(np_loader *loader);
/* Add free slots. Returns count; or NP_E_ARGUMENT, and adds none, if a slot is out of range, free already or being
 * filled. A count of 0 means that the cache can free none now: until the next grant, pairs that lack this part's slots
 * are read as two parts. */
int np_loader_grant(np_loader *loader, int part, const uint32_t *slots, size_t count);
/* Queue clusters. parts: NP_REQUEST_TRIGGER, _VALUE, or both for one read. priority: 0 demand, 1 prefetch, 2
 * speculative. flags: NP_ENTRY_PINNED or 0. Returns how many were accepted, from the first on: fewer than count if the
 * queue is full. Entries that are not absent are pinned if requested, and counted (already_there). A cluster that is
 * queued at a lower priority may be requested again. */
int np_loader_request(np_loader *loader, int parts, const uint32_t *ids, size_t count, int priority, uint32_t flags);
/* Add clusters to the warm-up: they are loaded in the order of the file while nothing else waits, those with
 * NP_ENTRY_PINNED first. Meanwhile reads for demands and prefetches bring the warm-up clusters of their stretch of
 * most_read_bytes as well. When no slot is left, clusters without the flag are dropped. Returns NP_OK or
 * NP_E_ARGUMENT. */
int np_loader_warm_up(np_loader *loader, int parts, const uint32_t *ids, size_t count, uint32_t flags);
/* Attach request rings: every turn takes their entries, and np_loader_serve waits for the first ring's doorbell.
 * Invalid entries are counted as refused and dropped; a ring with an impossible tail is emptied. A demand whose queue
 * is full stays in its ring. Each of the following may be NULL. board: where every turn stores the first
 * NP_LOADER_BOARD counters. epoch: the run's; in a new epoch, failed entries of earlier ones become absent. in_flight:
 * where every turn stores the number of reads in flight. trace: where np_loader_serve puts a span per batch of reads.
 * Copies `rings`. Returns NP_OK, NP_E_ARGUMENT or NP_E_MEMORY. */
enum { NP_LOADER_BOARD = 11 };
int np_loader_attach(np_loader *loader, const np_requests *rings, uint32_t count, uint64_t *board,
                     const uint32_t *epoch, uint32_t *in_flight, const np_trace *trace);
/* Run turns, and sleep while there is nothing to do. Returns 1 when the caller is needed: one of `descriptors` (at most
 * 8) is readable, a quarter of a part's free slots was used since the call, or clusters begin to wait for slots.
 * Returns 0 after timeout_ms; NP_E_ARGUMENT; NP_E_IO if waiting fails. While reads are in flight it spins for at most
 * spin_us before it sleeps. */
int np_loader_serve(np_loader *loader, const int32_t *descriptors, uint32_t count, int timeout_ms, uint32_t spin_us);
/* Land completed reads, take requests, submit reads. A failed read is repeated as a demand: at most twice after I/O
 * errors, once after a wrong checksum; each failure is counted. If reads are in flight, waits up to timeout_ms (-1: no
 * limit) for one completion. Returns the number of clusters published or failed; call it until it returns 0 before
 * sleeping on the reader's event descriptor. */
int np_loader_turn(np_loader *loader, int timeout_ms);
/* Finish reads in flight (published as usual), then drop free slots, queued prefetches and the warm-up. Demands stay
 * queued: a step waits for them and requests them only once. Afterwards no entry is loading, and the cache may grant
 * every slot that no present entry names. */
void np_loader_reset(np_loader *loader);
/* Return the memory of a part's slots from first_slot on to the system, whole pages only. No present entry may name
 * one. Returns NP_OK; NP_E_ARGUMENT if one is granted or there is no such part; NP_E_IO if the system refuses. */
int np_loader_trim(np_loader *loader, int part, uint32_t first_slot);
void np_loader_read_state(const np_loader *loader, np_loader_state *out);

/* ---- engine (engine/) ---------------------------------------------------------------------------------------- */
/* An engine is one participant of a step. Several engines over the same shared memory compute a step together: each
 * claims the next head, rows or block of neurons. Results do not depend on which participant claims what: a row, head
 * or block is always computed as a whole, by the same kernel, in index order. Participants and their blocks may change
 * with every step. */
enum { NP_RELU = 0, NP_DRELU = 1, NP_RELU2 = 2, NP_SILU = 3, NP_CLAMPED_SWIGLU = 4, NP_GELU = 5, NP_GELU_ERF = 6 };
enum { NP_NORM_RMS = 0, NP_NORM_LAYER = 1 };
/* Norms of what attention and feed-forward read (before), or of what they add to the residual stream (after), or both. */
enum { NP_NORMS_BEFORE = 0, NP_NORMS_AFTER = 1, NP_NORMS_BOTH = 2 };
/* The input of a layer's predictor or router: the normed input of its attention or feed-forward. Routers may read the
 * layer's input instead, predictors the residual stream before the feed-forward's norm. */
enum { NP_READS_FEED_FORWARD = 0, NP_READS_ATTENTION = 1, NP_READS_LAYER = 2, NP_READS_RESIDUAL = 3 };
/* The scores of experts, from their router values: their softmax, or their sigmoids. Sparsemixer chooses two experts. The
 * share of each is its softmax among those whose values u are near its own v: (v - u) / max(|u|, v) is at most twice
 * router_jitter. The first expert is left out for the second. */
enum { NP_MIXER_ATTENTION = 0, NP_MIXER_DELTANET = 1, NP_MIXER_MAMBA2 = 2, NP_MIXER_CONVOLUTION = 3, NP_MIXER_NONE = 4, NP_MIXER_KDA = 5 };
enum { NP_ROUTER_SOFTMAX = 0, NP_ROUTER_SIGMOID = 1, NP_ROUTER_SPARSEMIXER = 2 };

/* The place of a feed-forward matrix in a cluster: the part and offset of its first row's quants, and of its scales. */
typedef struct {
    uint32_t part, quants;
    uint32_t scales_part, scales;
    int32_t type; /* of its rows */
} np_matrix_place;

typedef struct {
    uint32_t width, neurons, layers, query_heads, key_heads, head_width, vocabulary, context_tokens;
    uint32_t draft_layers;          /* the last one of `layers`, or none: it drafts tokens, and no text needs it */
    uint32_t experts;               /* the most of a layer; 1 in a dense model */
    uint32_t experts_per_token;     /* the most experts of a layer that compute a token */
    uint32_t chosen_per_token;      /* how many a router chooses: those with the greatest scores; 0 in a dense model */
    int32_t router;                 /* NP_ROUTER_* */
    int32_t router_reads;           /* NP_READS_FEED_FORWARD, NP_READS_LAYER */
    uint32_t router_groups, groups_per_token; /* a token's experts are in groups_per_token of router_groups groups of consecutive experts: in
                                               * those with the greatest sum of two scores. 1 and 1: no groups */
    int32_t groups_by_best;         /* 1: groups with the greatest score instead */
    int32_t normalized_shares;      /* 1: the scores of a token's chosen experts are divided by their sum */
    float router_jitter;            /* 0 unless the router is sparsemixer */
    float routed_scale;             /* a factor of chosen experts' scores */
    uint32_t latent_width;          /* multi-head latent attention: the width of a latent, from which keys and values of all heads are computed; 0: none.
                                     * key_heads is then 1, and head_width that of a query */
    uint32_t rotary_width, value_width; /* with latents: the last elements of a head, which are rotated, and of keys the same in all heads; the width of a
                                         * head's value */
    uint32_t query_rank;            /* with latents: the width of the input of queries; 0: that is the layer's input */
    uint32_t heads_width;           /* elements of a token in np_shared.queries and np_shared.attention; np_mixer_width of every layer fits */
    int32_t gated_attention;        /* 1: qkv has further rows, as many as queries; attention's output is multiplied by the sigmoids of their products */
    uint32_t state_heads, state_key_heads;           /* memories of a recurrent layer; heads of their keys and queries */
    uint32_t state_key_width, state_value_width;     /* of one memory */
    uint32_t state_rank;            /* with NP_MIXER_KDA: the width of the inputs of decays and of the gate */
    uint32_t state_norm_groups;     /* with NP_MIXER_MAMBA2: groups of the output that are normed by themselves */
    uint32_t convolution_tokens;    /* tokens that convolutions of recurrent layers mix; 0: there are no such layers */
    float min_time_step;            /* with NP_MIXER_MAMBA2: the least time of a token */
    uint32_t state_elements;        /* of one state, in all layers */
    int32_t norm;                   /* NP_NORM_RMS, NP_NORM_LAYER: of the residual stream */
    float norm_epsilon;             /* of all norms */
    int32_t norms;                  /* NP_NORMS_* */
    int32_t branch_norms;           /* 1: with NP_NORMS_BOTH, experts that a router chooses have norms of input and output besides those of the others */
    int32_t head_norm;              /* 1: each head of queries and keys is RMS-normed before it is rotated */
    int32_t norm_after_rotation;    /* 1: with head_norm, after they are rotated */
    int32_t joint_norm;             /* 1: all heads of queries are RMS-normed together before they are rotated, and all heads of keys */
    int32_t value_norm;             /* 1: each head of values is RMS-normed, without weights */
    float qkv_limit;                /* queries, keys and values are clipped to this magnitude before heads are rotated; 0: they are not. Not with latents */
    int32_t rotary;                 /* 1: heads are rotated; 0: learned position embeddings are added to the token embeddings */
    int32_t type;                   /* the inputs of the layers' matrices are prepared for this type: each has it, or another that reads the same inputs. With
                                     * NP_SILU, NP_CLAMPED_SWIGLU, NP_GELU and NP_GELU_ERF attention's matrices may have any quantized type */
    int32_t activation;             /* NP_RELU ...; without a gate NP_RELU, NP_RELU2, NP_GELU or NP_GELU_ERF */
    float activation_threshold;     /* a neuron fires if its trigger exceeds this; nonzero only with NP_RELU */
    float activation_limit;         /* NP_CLAMPED_SWIGLU: the limit of gate, from above, and of up, on both sides; otherwise 0 */
    float embedding_scale, logit_scale; /* factors of token embeddings and of logits */
    float rotary_scale;             /* a factor of the rotated elements of queries and keys */
    float attention_scale;          /* a factor of attention scores, besides 1 / sqrt(head_width) */
    float local_attention_scale;    /* the same of layers with local positions */
    float query_growth;             /* a rotated query at position p is multiplied by 1 + query_growth * ln(1 + p / query_growth_tokens), rounded down; 0: it is not */
    uint32_t query_growth_tokens;   /* not 0 with query_growth */
    float score_cap, logit_cap;     /* attention scores and logits are soft-capped at this; 0: they are not */
    float residual_scale;           /* a factor of what attention and feed-forward add to the residual stream */
    int32_t parallel;               /* 1: feed-forward and attention read the same input; 0: the feed-forward reads attention's result */
    int32_t gated;                  /* 1: a neuron's value is activation(gate) * up; 0: activation(up), without a gate */
    uint32_t cluster_neurons, clusters, block_neurons, blocks; /* per layer and expert */
    uint32_t slot_bytes[2];         /* by part */
    np_matrix_place gate, up, down; /* the first existing one is in the trigger part, the others in the value part */
    int32_t down_by_output;         /* 1: down has a row of `neurons` weights per output; needs a gate, and an expert that is one cluster. The slices of a dense layer are experts that compute every token. 0: a row per neuron */
    uint32_t predictor_rank;        /* the greatest rank of all predictors; 0: no predictor, all triggers are computed */
    int32_t predictor_type;
    int32_t predictor_relu;         /* 1: negative elements of rank vectors are set to zero */
    int32_t predictor_reads;        /* NP_READS_*, except NP_READS_LAYER, and in a mixture NP_READS_ATTENTION */
} np_shape;

typedef struct {
    const void *quants, *scales;
    int32_t type, unused;
} np_matrix;

typedef struct {
    const float *weight, *bias; /* bias: only with NP_NORM_LAYER */
} np_norm;

/* A neuron is predicted if score + bias > 0 on all sides. The first side approximates the trigger; the second, for
 * gated models only, the sign of the up product. */
typedef struct {
    np_matrix input;        /* [rank, width] */
    np_matrix sides[2];     /* [neurons, rank]; sides[1].quants NULL: only the trigger */
    const float *biases[2]; /* [neurons] */
    uint32_t rank, unused;  /* 1 to shape.predictor_rank */
} np_predictor;

typedef struct {
    uint32_t first_ffn;     /* the number of the layer's first expert among the experts of all layers */
    uint32_t experts, routed_experts; /* the first routed_experts are those that the router chooses from; the others compute every token */
    uint32_t window_tokens; /* maximal number of positions that a token attends to; 0: all */
    uint32_t cached_before; /* elements of a position in the KV cache of the layers before */
    int32_t mixer;          /* NP_MIXER_* */
    uint32_t state_before;  /* elements of a state in the layers before */
    uint32_t key_heads, head_width; /* of this layer; shape has the usual ones. Layers with the same table of positions have one width */
    int32_t value_from_key; /* 1: qkv has no rows of values: a value is the product of a key's rows, before it is normed and rotated */
    np_matrix qkv, attention_output;
    np_matrix recurrent_input, recurrent_output; /* of recurrent layers: rows of channels (queries, keys, values; with NP_MIXER_CONVOLUTION two factors), then
                                                  * of the gate; there are no attention matrices then */
    np_matrix recurrent_rates;                   /* [state_heads], with NP_MIXER_DELTANET twice that */
    np_matrix recurrent_decays, recurrent_gates; /* with NP_MIXER_KDA, where recurrent_input ends with the rows of their inputs instead of the gate:
                                                  * [state_heads*state_key_width, state_rank], [state_heads*state_value_width, state_rank] */
    const float *convolution, *convolution_bias; /* [convolution_tokens][channels]; [channels] or NULL */
    const float *decay, *time_bias, *skip;       /* [state_heads] each; time_bias with NP_MIXER_KDA [state_heads][state_key_width]; skip only with
                                                  * NP_MIXER_MAMBA2 */
    const float *recurrent_norm;                 /* [state_value_width], with NP_MIXER_MAMBA2 of all heads */
    np_matrix latent_down, query_down; /* with latents: [latent_width+rotary_width, width], [query_rank, width]; there is no qkv then */
    np_matrix query, key_up, value_up; /* [query_heads*head_width, query_rank or width]; [query_heads*(head_width-rotary_width), latent_width]: rows are
                                        * multiplied with the elements of queries, and added; [query_heads*value_width, latent_width] */
    np_norm attention_norm, ffn_norm;               /* unless shape.norms is NP_NORMS_AFTER */
    np_norm attention_output_norm, ffn_output_norm; /* unless shape.norms is NP_NORMS_BEFORE */
    np_norm routed_norm, routed_output_norm, shared_output_norm; /* with shape.branch_norms: of the experts that the router chooses, and of the
                                                     * others' output. The others read through ffn_norm; ffn_output_norm is of the sum of both */
    const float *scale;                             /* a factor of the residual stream behind the layer; NULL: none. Not with NP_NORMS_BEFORE */
    const float *qkv_bias, *attention_output_bias;  /* NULL: none */
    const float *query_norm, *key_norm;             /* [head_width of the layer] with shape.head_norm; all heads' widths with shape.joint_norm */
    const float *latent_norm, *query_down_norm;     /* [latent_width], [query_rank]; their epsilon is 1e-6 */
    const float *gate_bias, *up_bias, *down_bias;   /* [experts][neurons] twice, [experts][width]; NULL: none */
    const float *router, *router_bias;              /* [routed_experts][width], [routed_experts]; router_bias NULL: none */
    const float *router_norm;                       /* [width] RMS norm of the feed-forward's input that the router reads through; NULL: as the experts */
    const float *expert_scales;                     /* [routed_experts] factors of shares; NULL: none */
    const float *choosing_bias;                     /* [routed_experts], added to scores when experts are chosen; NULL: none */
    const float *shared_gate;                       /* [width]: outputs of experts that compute every token are multiplied by the sigmoid of its product
                                                     * with the router's input; NULL: they are not */
    np_matrix draft_input;                          /* of the draft layer, [width, 2*width]: the columns of a token's normed embedding, then those of the normed
                                                     * last hidden state of the token before it */
    np_norm draft_embedding_norm, draft_hidden_norm, draft_output_norm; /* of the draft layer: norms of these two, and of the output matrix's input */
    const float *sinks;                             /* [query_heads] scores that join each softmax and whose shares are dropped; NULL: none */
    const np_predictor *predictors;                 /* [experts], with shape.predictor_rank > 0 */
    int32_t rotary;                                 /* 0: heads are not rotated in this layer, even with shape.rotary */
    int32_t local_positions;                        /* 1: heads are rotated by fixed.local_inverse_frequency */
    float silent_below; /* NP_SILU only: a neuron fires if |silu(gate)| is not less than this; 0: if its gate is not 0 */
} np_layer;

typedef struct {
    np_matrix embedding, output;
    np_norm output_norm;
    const float *output_bias;        /* [vocabulary]; NULL: none */
    const float *inverse_frequency;  /* [head_width/2] of its layers, with latents [rotary_width/2]; with shape.rotary; 0: the pair is not rotated */
    const float *local_inverse_frequency; /* the same, if a layer has local positions */
    const float *position_embedding; /* [context_tokens][width], without shape.rotary */
    const np_layer *layers;
    np_row_file *embedding_rows;     /* of this participant: embedding.quants, which are read row by row; NULL: they are in memory */
} np_fixed;

/* What a neuron did since its byte was zeroed, for any token: its trigger was computed (in predicted mode: it was
 * predicted); it fired, so its value part was needed; its value was not zero. */
enum np_activity { NP_TRIGGERED = 1, NP_FIRED = 2, NP_ACTIVE = 4 };

/* How soon clusters are used again, in steps of one token: of every `stride`-th cluster, so that the memory is bounded
 * and a look-up costs hardly anything. Bucket 0 counts the first uses; np_reuse_bucket says which gaps the others
 * count. */
enum { NP_REUSE_BUCKETS = 128 };
typedef struct {
    uint32_t *last_uses; /* [NP_PARTS][sampled] the last step that used the cluster, plus 1, modulo 2^32; 0: none did */
    uint64_t *gaps;      /* [NP_PARTS][NP_REUSE_BUCKETS] uses by the number of steps since the use before; NULL: nothing is counted */
    uint64_t *steps;     /* [1] counted steps */
    uint32_t sampled;    /* clusters, rounded up, divided by the stride */
    uint32_t stride;     /* odd */
} np_reuse;
/* The bucket of a gap of 1 or more steps: single gaps below 8, then four buckets for each power of two. */
uint32_t np_reuse_bucket(uint32_t gap);

/* Memory that the participants share. T: maximal tokens of a step; P = T * experts_per_token: maximal pairs of a token
 * and one of its experts; G: the minimum of P and experts. */
typedef struct {
    float *residual;   /* [T][width] */
    float *queries;    /* [T][query_heads*head_width], the most of any layer; with latents, L = latent_width+rotary_width: [T][the most of query_heads*L,
                        * query_heads*value_width, L+query_rank] */
    float *attention;  /* likewise */
    float *hidden;     /* [P][blocks*block_neurons]: gates, if any; then values */
    float *partials;   /* [partial_tokens*experts_per_token][blocks][width] */
    float *changes;    /* [T][width] outputs of attention and feed-forward before their norms, with branch_norms [T][2][width]: of the experts that compute
                        * every token, then of the others; unused with NP_NORMS_BEFORE */
    float *ranks;      /* [P][predictor_rank]; NULL without a predictor */
    uint8_t *predicted;/* [G][blocks*block_neurons][(T+7)/8], bit t%8 of byte t/8: predicted for token t of the group; NULL without a
                        * predictor */
    uint32_t *claims;  /* [np_engine_claims(layers)], zeroed before every step */
    float *logits;     /* [logit_rows][vocabulary] */
    int32_t *drafted;  /* [max_tokens] with a draft layer: the drafted tokens of the last step, in order */
    void *kv;          /* rows of config.kv_type: of each layer [sequences][key_heads][2][context_tokens] of head_width elements, its own sizes; with
                        * latents [sequences][context_tokens] of latent_width+rotary_width */
    float *states;     /* [state_slots][state_elements]: for each recurrent layer the last inputs of its convolution, the earliest first, then memories
                        * [state_heads][state_key_width][state_value_width]; for a draft layer the last hidden state of the latest token */
    const uint8_t *slots[2];               /* by part */
    uint32_t *entries[2];                  /* by part: [layers*clusters] */
    uint64_t *window;                      /* of this participant only */
    uint32_t *arrivals;
    const uint32_t *in_flight;             /* reads in flight; NULL: unknown, and no expert is prefetched speculatively */
    const uint32_t *epoch;
    np_barrier *barrier;
    np_requests requests;                  /* of this participant only */
    np_trace trace;                        /* of this participant only */
    np_reuse reuse;                        /* gaps is NULL: not counted */
    float *inputs;                         /* [T][max(width, query_heads*head_width)] with config.external_products; [T][width] or NULL (normed inputs as
                                            * floats are not needed) with config.offload_blocks; else unused */
    float *outputs;                        /* [T][max((query_heads+2*key_heads)*head_width, width)] with config.external_products, or with
                                            * config.offload_blocks and offloaded matrices; else unused */
    uint8_t *activity;                     /* [experts of all layers][blocks*block_neurons] of this participant: np_activity bits are set; or NULL */
} np_shared;

typedef struct {
    uint32_t sequences, max_tokens, logit_rows;
    int32_t kv_type;           /* NP_F16; or NP_Q8, if all rows of the KV cache have a multiple of 32 elements */
    uint32_t state_slots;      /* of np_shared.states */
    uint32_t window_blocks;    /* blocks of an expert that are open at once; from experts * blocks on: all experts of a layer */
    uint32_t partial_tokens;   /* tokens whose block sums fit `partials`; fewer than max_tokens only if a window is a whole layer */
    uint32_t spin_us;
    int32_t bundle;            /* 1: both parts of a cluster are read together whenever its trigger is needed */
    int32_t prefetch;          /* 1: request what later work will need */
    int32_t pipeline;          /* 0: one matrix after the other, each when all its clusters are present; for comparison */
    int32_t hints;             /* 1: the predictor decides nothing; with `prefetch` and few tokens, value parts of predicted neurons are requested
                                * before their triggers are computed, and likely experts before their router's input is known */
    int32_t external_products;         /* 1: an external runtime computes the products of layers: np_engine_begin_external, np_engine_next_product */
    uint32_t product_blocks;   /* with external_products: blocks per product; window_blocks is rounded down to a multiple of it */
    int32_t offload_blocks;    /* 1: an offload backend computes this participant's blocks: np_engine_begin_offload, np_engine_next_offload */
} np_engine_config;

/* Matrices that an offload backend may compute besides blocks: those of attention in every layer, and that of the
 * logits. */
enum { NP_OFFLOAD_QKV = 1, NP_OFFLOAD_ATTENTION_OUTPUT = 2, NP_OFFLOAD_OUTPUT = 4 };

/* Scores of target tokens after each of a step's first `count` tokens; in the memory of one process. Row t: the first
 * id is the target, set by the caller; the others receive the `likely` most likely ids, greatest logit first, of equal
 * logits the lowest id first. logs receives the log-probabilities of all ids of a row, after token t. */
typedef struct {
    uint32_t count, likely;
    int32_t *ids; /* [count][1 + likely] */
    double *logs; /* [count][1 + likely] */
} np_token_scores;

/* A step of one participant: one pass of `count` tokens over all layers, then the logits of `logits_count` tokens from
 * `logits_first` on, into logit rows from 0 on. Arrays have `count` items. With `token_scores`, the same for all
 * participants, logits_count is 0: logits are computed and read for as many tokens at a time as there are logit
 * rows. If all items of `tokens` but the first are NP_DRAFTED, they are of one sequence, and the draft layer
 * predicts them first. */
typedef struct {
    uint64_t number;
    uint32_t epoch;
    uint32_t participants, participant; /* their number, and this one's number */
    uint32_t first_block, end_block;    /* the blocks that it computes, in every layer and expert */
    uint32_t offloaded_blocks;             /* the first blocks: an offload backend computes them; their clusters are not requested, and
                                         * their sums are those of tree nodes (np_sum_tree_on) */
    uint32_t offloaded_matrices;             /* NP_OFFLOAD_* bits: the offload backend of one participant computes these matrices */
    uint32_t sharers, sharer;           /* participants that share these blocks, and this one's number; only one group of participants
                                         * may share blocks */
    uint32_t count;
    const int32_t *sequences, *positions, *tokens;
    const int32_t *states_from, *states_to; /* for each token two slots of its sequence's state, which differ: before and after the tokens that
                                             * have the same two; NP_NO_STATE before position 0. The tokens of a sequence follow each other, and
                                             * those with other slots go on from the slot before. NULL if no layer has a state */
    uint32_t logits_first, logits_count;
    const np_token_scores *token_scores; /* or NULL */
} np_step;

enum { NP_NO_STATE = -1, NP_DRAFTED = -1 };
typedef struct np_engine np_engine;

uint32_t np_engine_claims(uint32_t layers);
/* Create an engine. All pointers are kept. Allocates. On errors returns NULL: *wrong is the name of a field of shape,
 * shared or config that is out of range or contradicts another one; or NULL if memory is short. */
np_engine *np_engine_create(const np_shape *shape, const np_fixed *fixed, const np_shared *shared, const np_engine_config *config,
                            const char **wrong);
void np_engine_destroy(np_engine *engine);
/* Compute this participant's share of a step, together with the others. Validates all fields. Returns NP_OK,
 * NP_E_ARGUMENT, NP_E_EPOCH or NP_E_DAMAGED. */
int np_engine_step(np_engine *engine, const np_step *step);

/* An external product: a matrix times each token's input, computed by the runtime of a neural processor for example.
 * Input t is row token[t] of `inputs` (row t if token is NULL); output t is row t of `outputs`. NP_PRODUCT_NEURONS has
 * three matrices: output t[j] is the sum over the neurons r of activation(gate r * input, up r * input) * down[r][j],
 * added to the present content, which is zero before a group's first product. The `count` products of a turn have the
 * same inputs and outputs, which are valid until the end of the turn. */
enum { NP_PRODUCT_QKV = 1, NP_PRODUCT_ATTENTION_OUTPUT = 2, NP_PRODUCT_NEURONS = 3 };
typedef struct {
    int32_t kind; /* NP_PRODUCT_* */
    uint32_t layer, tokens;
    uint32_t number, count; /* the product's number in its turn, and their number */
    uint32_t rows, columns;
    uint32_t inputs_stride, outputs_stride; /* elements from one token's to the next */
    const uint32_t *token; /* [tokens], ascending; or NULL */
    const float *inputs;
    float *outputs;
} np_product;

/* The addresses of a product's rows: of gate, up and down with NP_PRODUCT_NEURONS, else of one matrix. */
typedef struct {
    int32_t kind; /* NP_PRODUCT_* */
    uint32_t layer, expert, first_block;
    uint32_t rows, columns;
    int32_t types[3];
    const void *const *quants[3], *const *scales[3]; /* [rows] each; these and the types are set by np_engine_open_rows */
} np_product_rows;

/* A step with external products (config.external_products). Each participant begins it, then calls
 * np_engine_next_product until it returns NP_OK (the step is over) or an error of np_engine_step. For participant 0 it
 * returns 1 for each product; after a turn's last product the next call must wait until all products of the turn are
 * computed. The other participants wait inside. Requires a gate, a quantized type, no NP_SILU, and no predictor that
 * decides. */
int np_engine_begin_external(np_engine *engine, const np_step *step);
int np_engine_next_product(np_engine *engine, np_product *product);
/* The rows of participant 0's products, in the order of the products and ahead of them. For one thread at a time, which
 * may differ from that of np_engine_next_product; from the return of np_engine_begin_external to np_engine_close_rows,
 * and the rows of the step before must be closed. np_engine_next_rows describes the next rows and returns 1;
 * NP_ROWS_UNKNOWN if they depend on a product that is not requested yet; NP_OK if there are no more.
 * np_engine_open_rows waits until rows are resident and sets their addresses, valid until other rows are opened.
 * Earlier rows may be opened again. Returns NP_OK, or an error of np_engine_step. np_engine_close_rows closes the
 * window. */
enum { NP_ROWS_UNKNOWN = 2 };
int np_engine_next_rows(np_engine *engine, np_product_rows *next);
int np_engine_open_rows(np_engine *engine, np_product_rows *rows);
void np_engine_close_rows(np_engine *engine);
/* Compute a product by the engine's kernels for `count` of its tokens: out[i*out_stride...] is the output of tokens[i].
 * rows: open. */
int np_engine_compute_product(np_engine *engine, const np_product *product, const np_product_rows *rows, const uint32_t *tokens, uint32_t count, float *out,
                      size_t out_stride);

/* The tokens that one expert computes. A token and one of its experts are a pair. A group's pairs are consecutive,
 * ascending by token; groups are ascending by expert. A dense layer has one group of all tokens. */
typedef struct {
    uint32_t expert, first, count; /* pairs [first, first+count) */
} np_group;

/* The offloaded blocks of a layer: the first `blocks` of each group's expert, for the group's tokens. Pointers are
 * valid until the next np_engine_next_offload. Token t's prepared vector lies at t * vector_stride. A block's sum adds,
 * in index order, each neuron's row of Down times its value and the pair's weight, with the bits of the kernels in use.
 * The sum of a node is that of its blocks, by the tree of np_sum_tree, which has np_tree_nodes(blocks) nodes. A backend
 * with numerics of its own may deliver the sum of all blocks in the first node, and zeros in the others. */
typedef struct {
    uint32_t layer, tokens, pairs, blocks, groups;
    const np_group *group;        /* [groups] */
    const uint32_t *pair_token;   /* [pairs] */
    const float *pair_weight;     /* [pairs] */
    const uint8_t *vectors;
    size_t vector_stride;         /* in bytes */
    const uint8_t *predicted;     /* as in np_shared, if a predictor decides which triggers are computed; else NULL */
    uint32_t mask_bytes, predicted_neurons; /* per neuron; neurons per group */
    const float *inputs;          /* [tokens][width] what the vectors were prepared from; NULL if np_shared has no `inputs` */
} np_offloaded_blocks;

/* An offloaded matrix: out[t*out_stride + r] is row r times token t's prepared vector, plus the row's bias, with the
 * bits of the kernels in use. Pointers are valid until the next np_engine_next_offload. */
typedef struct {
    int32_t matrix; /* one of NP_OFFLOAD_* */
    uint32_t layer; /* 0 with NP_OFFLOAD_OUTPUT */
    uint32_t tokens, rows, columns;
    const uint8_t *vectors;
    size_t vector_stride; /* in bytes */
    float *out;
    size_t out_stride;
} np_offloaded_matrix;

/* A step of the participant with an offload backend (config.offload_blocks). It begins the step, then calls
 * np_engine_next_offload until that returns NP_OK (the step is over) or an error of np_engine_step. 1: compute the
 * blocks of a layer, pass their sums to np_engine_put_block_sums, and call again. NP_OFFLOADED_MATRIX: compute the
 * matrix that np_engine_offloaded_matrix describes, and call again. first_block must be 0 and offloaded_blocks equal to
 * end_block; if this is 0 there are no blocks to compute. Requires quantized weights and no NP_SILU; offloaded matrices
 * require `kv` and `outputs` in np_shared. */
enum { NP_OFFLOADED_MATRIX = 2 };
int np_engine_begin_offload(np_engine *engine, const np_step *step);
int np_engine_next_offload(np_engine *engine, np_offloaded_blocks *blocks);
/* Deliver the sums of the pending blocks: [pairs][nodes][width], `count` floats. They are copied; the next
 * np_engine_next_offload adds them to those of the other blocks. Returns NP_OK; or NP_E_ARGUMENT if no blocks are
 * pending or count differs. */
int np_engine_put_block_sums(np_engine *engine, const float *sums, size_t count);
void np_engine_offloaded_matrix(const np_engine *engine, np_offloaded_matrix *out); /* all zero if none is pending */

typedef struct {
    uint64_t neurons;                            /* (neuron, token) pairs of the blocks that this participant claimed */
    uint64_t predicted;                          /* of these: pairs whose trigger was computed */
    uint64_t fired, active;                      /* pairs that fired; whose value is not zero */
    uint64_t gate_rows, up_rows, down_rows;      /* rows read from slots, counted once per token; of down by output: its neurons */
    uint64_t matrix_rows;                        /* the same of attention's matrices and of the output, offloaded or not */
    uint64_t clusters[2], missed[2];             /* by part: clusters needed; of these, absent when computing came to them */
    uint64_t foreseen, foreseen_missed;          /* clusters looked up ahead of computing; of these, requested */
    uint64_t guessed, guessed_right;             /* experts prefetched speculatively; of these, chosen by their router */
    uint64_t hinted, hinted_fired;               /* clusters requested by a predictor's hint; of these, fired */
    uint64_t step_ns, flash_ns, barrier_ns;         /* the whole step; of this, waiting for flash and for other participants */
    int64_t damaged_word;                        /* the index of a failed cluster, or -1 */
    int32_t damaged_part, unused;
} np_engine_counters;
void np_engine_read_counters(np_engine *engine, np_engine_counters *out); /* and reset them */

/* ---- steps without messages (steps/) ------------------------------------------------------------------------- */
/* A decode worker's step channel, in shared memory (a "lane" in SPEC.md). A worker that has just computed a step
 * listens on it for a while, and the coordinator sends the next step there instead of a message.
 *   state     a futex word. AWAY: the worker does not listen. LISTENING: it waits. RESERVED: the coordinator is about
 *             to send. GIVEN: it has sent. Worker: any -> AWAY, or LISTENING when it begins to listen or has computed;
 *             LISTENING -> AWAY. Coordinator: LISTENING -> RESERVED -> GIVEN, or back; LISTENING -> AWAY before it
 *             sends a message; any -> AWAY before it welcomes a worker.
 *   given     counts steps sent; written by the coordinator before GIVEN
 *   answered  `given` of the last completed step; written by the worker after results, counters and state
 * The three words are sequentially consistent. A step that ends with an error is answered by a message instead. */
enum { NP_CHANNEL_AWAY = 0, NP_CHANNEL_LISTENING = 1, NP_CHANNEL_RESERVED = 2, NP_CHANNEL_GIVEN = 3 };
typedef struct {
    uint32_t state, sleepers, given, answered, unused1[12];
    uint64_t number;   /* the step: fields of np_step */
    uint64_t channels; /* of all its participants: bit n is channel n */
    uint32_t epoch, participants, participant, first_block, end_block, sharers, sharer, count;
    uint32_t unused2[4];
    np_engine_counters counters;
    uint64_t unused3; /* then int32_t sequences, positions, tokens, states_from, states_to, each [tokens of np_step_channels] */
} np_step_channel;
enum { NP_CHANNEL_NUMBERS = 5 }; /* arrays behind a channel */
typedef struct {
    uint8_t *memory;     /* [count][np_channel_bytes(tokens)] */
    uint32_t count;      /* at most 64 */
    uint32_t tokens;     /* maximum of a step */
    uint32_t *finished;  /* word 0 grows when the last participant of a step has answered; word 1: sleepers on it */
} np_step_channels;
uint32_t np_channel_bytes(uint32_t tokens);
np_step_channel *np_channel_at(const np_step_channels *channels, uint32_t number);
int32_t *np_channel_numbers(const np_step_channels *channels, uint32_t number, int which); /* in the order of np_step */

typedef struct {
    uint64_t step; /* number and epoch of the last step that was begun; 0: none was */
    uint32_t epoch, computed;
} np_channel_progress;
/* The worker: compute the steps that arrive on this channel. Returns NP_OK after serve_ms: the worker may do something
 * else for a moment and must call again, because it still counts as listening. NP_E_TIMEOUT: no step came for idle_ms,
 * or the coordinator has a message. Any other value is np_engine_step's for a step that is not answered here. After
 * these two it does not listen any more. Spins, yielding, for spin_us. */
int np_channel_serve(np_engine *engine, const np_step_channels *channels, uint32_t number, uint32_t spin_us, uint32_t idle_ms, uint32_t serve_ms,
                     np_channel_progress *progress);
/* The coordinator: make a listening worker look for messages. Returns 1 if it was listening. */
int np_channel_release(const np_step_channels *channels, uint32_t number);
/* The coordinator: reset the channel of a worker that is gone. */
void np_channel_clear(const np_step_channels *channels, uint32_t number);

/* The coordinator's step pipeline: a thread that waits for the answers to a step. If the next step is prepared
 * (np_pipeline_arm), it samples the tokens and sends that step before it wakes Python. Only one other thread may call
 * these functions. */
typedef struct np_step_pipeline np_step_pipeline;
typedef struct {
    np_step_channels channels;
    const uint32_t *epoch;
    np_barrier *barrier;
    uint32_t *claims;
    uint32_t claim_count;
    const float *logits; /* [rows][vocabulary] */
    uint32_t vocabulary;
    int32_t *scratch;    /* np_sample's; used between np_pipeline_arm and np_pipeline_collect only */
    int32_t wake;        /* a descriptor: one byte is written when a step is finished */
} np_pipeline_config;
/* Pointers are kept. Returns NULL if memory or threads are short. */
np_step_pipeline *np_pipeline_create(const np_pipeline_config *config);
void np_pipeline_destroy(np_step_pipeline *pipeline);
/* Send a step to these channels; steps: one per channel, ascending. Resets barrier and claims. Returns 1; 0 if a worker
 * was not listening: nothing was sent, and none of them listens any more; or NP_E_ARGUMENT. */
int np_pipeline_send(np_step_pipeline *pipeline, uint64_t channels, const np_step *steps);
/* The next step. It is sent unless a token cannot be sampled or is one of `ends`. how, uniforms, positions: [count],
 * kept until np_pipeline_collect; states_from, states_to likewise, or NULL. */
typedef struct {
    uint64_t number;
    uint32_t count;
    const np_sampling *how;
    const double *uniforms;
    const int32_t *positions, *states_from, *states_to;
    const int32_t *ends;
    uint32_t end_count;
} np_pipeline_next;
/* Prepare the next step. Returns NP_OK, or NP_E_ARGUMENT if no step is under way or `count` differs from its tokens. */
int np_pipeline_arm(np_step_pipeline *pipeline, const np_pipeline_next *next);
/* channels: those that have answered. all_answered: the step is over. sampled: its tokens were sampled. next_sent: the
 * next step was sent and is the one under way. Times in ns, 0 for what was not done. */
typedef struct {
    uint64_t channels;
    int32_t all_answered, sampled, next_sent, unused;
    uint64_t done_ns, sampled_ns, next_sent_ns;
    const int32_t *tokens;
    const np_engine_counters *counters; /* by channel; valid until the next call, like tokens */
} np_pipeline_result;
/* Get what has happened, and disarm: nothing is sampled or sent before the next np_pipeline_arm. */
void np_pipeline_collect(np_step_pipeline *pipeline, np_pipeline_result *result);

/* ---- processes (process/) ------------------------------------------------------------------------------------- */
/* Have the kernel kill this process when `parent` ends. */
int np_process_die_with(int32_t parent);
int np_process_name(const char *name); /* as shown by `ps` and `top`; 15 characters */
/* Return freed memory that the C library keeps to the kernel, if the library supports it. */
void np_memory_give_back(void);
/* Have the C library map allocations of at least this size, if it supports this: they return to the kernel when freed.
 * Otherwise freed memory may stay, fragmented, depending on the order of all allocations. */
void np_memory_map_from(size_t bytes);
/* Return the whole pages within these bytes of a memory file to the kernel; they then read as zeros in every mapping.
 * Returns NP_OK or -errno. */
int np_file_give_back(int32_t file, uint64_t offset, uint64_t bytes);
/* Ask for huge pages, an optimization. Returns NP_OK or -errno. */
int np_memory_advise_huge(void *memory, size_t bytes);
/* The size of the huge pages that np_memory_collapse makes; 0 if the system has none, or only ones above 4 MiB. */
size_t np_huge_page_bytes(void);
/* Map a file from its start, shared, at an address that is a multiple of np_huge_page_bytes. NULL with errno if that
 * fails, or if bytes is 0 or above half of the address space. */
void *np_memory_map(int32_t file, size_t bytes, int32_t is_writable);
int np_memory_unmap(void *memory, size_t bytes); /* of np_memory_map. NP_OK or -errno */
/* Make every whole huge page of this memory one in fact, allocated as a whole; what it holds stays. The memory is a
 * writable mapping of a memory file (np_memory_map). Every process that has mapped the file so reads it faster. Returns
 * NP_OK; -EAGAIN if some were in use and stay as they were; or another -errno, and stops, at the first that the kernel
 * refuses because its memory is short or scattered, or because it makes none. */
int np_memory_collapse(void *memory, size_t bytes);
/* Lock the pages of this mapping in memory, each when it is first touched. Fails beyond RLIMIT_MEMLOCK. Returns NP_OK
 * or -errno. */
int np_memory_lock(const void *memory, size_t bytes);

/* Read memory, to measure its bandwidth: pieces of piece_bytes (a multiple of 64), one of every `every` (1 to 1024),
 * ascending at pseudo-random places. `every` turns (0, 1, ...) read each piece once. sum: the exclusive or of all
 * 8-byte words read. Returns the bytes read; 0 for an invalid argument. */
uint64_t np_probe_read(const void *memory, size_t bytes, size_t piece_bytes, uint32_t every, uint32_t turn, uint64_t *sum);

/* ---- vocabularies (text/) ------------------------------------------------------------------------------ */
/* The tokens and merges of a byte-pair encoding. Ids and names are those of the file; names are UTF-8. */
typedef struct np_vocabulary np_vocabulary;
#define NP_NO_TOKEN 4294967295

/* Read the fields `vocab` and `merges` of the field `model` from the content of a tokenizer.json. Allocates; *vocabulary
 * is NULL unless the result is NP_OK. cut: start and end of the values of `vocab` and of `merges` in the content, with
 * white space before them.
 * NP_E_ARGUMENT: they are not there once each, two tokens have the same id, a merge has parts that are no tokens, a limit
 * of ids and names is exceeded, or names collide; NP_E_MEMORY: out of memory, or the tables would exceed max_bytes. */
int np_vocabulary_read(const uint8_t *json, uint64_t bytes, uint64_t max_bytes, np_vocabulary **vocabulary, uint64_t cut[4]);
void np_vocabulary_free(np_vocabulary *vocabulary);
uint64_t np_vocabulary_bytes(const np_vocabulary *vocabulary);         /* memory of the tables */
uint32_t np_vocabulary_tokens(const np_vocabulary *vocabulary);        /* number of tokens */
uint32_t np_vocabulary_ids(const np_vocabulary *vocabulary);           /* one more than the largest id */
uint32_t np_vocabulary_longest_bytes(const np_vocabulary *vocabulary); /* of a name */
/* Name of a token, not terminated; NULL if no token has this id. */
const uint8_t *np_vocabulary_name(const np_vocabulary *vocabulary, uint32_t id, uint32_t *bytes);
/* Id of a name; NP_NO_TOKEN if no token has it. */
uint32_t np_vocabulary_token(const np_vocabulary *vocabulary, const uint8_t *name, uint32_t bytes);
/* Write the ids of all names of one character, in order. Returns their number, also if `ids` is NULL. */
uint32_t np_vocabulary_characters(const np_vocabulary *vocabulary, uint32_t *ids);
/* 1 if the characters of all names are tokens, too, else 0. */
int np_vocabulary_is_spelled(const np_vocabulary *vocabulary);
/* Merge the symbols of words in place, by rank and then from the left. Returns the number of tokens that remain, or
 * NP_E_MEMORY: a word of n symbols takes 28 n bytes meanwhile. Ids without a token stay as they are.
 * starts: [count] 1 for the first symbol of a word, else 0
 * whole_words: not 0 if a word that is a token as a whole becomes this token, whatever the merges are */
int64_t np_vocabulary_merge(const np_vocabulary *vocabulary, uint32_t *tokens, const uint8_t *starts, uint64_t count, int whole_words);

/* cdef end */

#ifdef __cplusplus
}
#endif
#endif

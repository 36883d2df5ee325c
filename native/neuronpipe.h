/* neuronpipe: the one header of the native library.
 *
 * Everything between the two cdef markers is also read by cffi (bind.py), so it holds plain declarations only.
 * Conventions: sizes are in bytes where the name says _bytes, else in elements; functions that can fail return
 * a negative NP_E_* code; nothing allocates except where the comment says so; nothing here takes the Python lock.
 */
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
    NP_E_EPOCH = -1,    /* the epoch changed while waiting: leave the step */
    NP_E_TIMEOUT = -2,  /* the wait ran out of time */
    NP_E_ARGUMENT = -3, /* an argument is outside its documented range */
    NP_E_IO = -4,       /* a read failed; the errno is in the completion */
    NP_E_CHECKSUM = -5, /* bytes read do not match their checksum */
    NP_E_DAMAGED = -6,  /* a cluster that the step needs is marked failed */
    NP_E_MEMORY = -7,   /* out of memory */
    NP_E_BANNED = -8    /* no token may be sampled */
};

/* ---- weights ------------------------------------------------------------------------------------------- */
/* A matrix is rows of `n` weights. Quantized rows come in groups of 32: the quants of a row are contiguous, its
 * fp16 scales lie apart. q8: int8, w = s*q. q4: two per byte, byte j of a group holds element j (low nibble) and
 * j+16 (high nibble), w = s*(nibble-8), which is GGUF's Q4_0 with the scales moved out. q3: 12 bytes a group, w = s*(code-4) with a
 * code of three bits (kernels/three_bits.h); whatever is made of a q3 row has the bits of a q4 row of the same weights and scales. */
enum { NP_F16 = 0, NP_Q8 = 1, NP_Q4 = 2, NP_Q3 = 3 };

size_t np_quant_bytes(int type, size_t n); /* bytes of one row's quants; 0 for an unknown type or n%32 != 0 when quantized */
size_t np_scale_bytes(int type, size_t n); /* bytes of one row's scales; 0 for f16 */

/* ---- kernels (kernels/) -------------------------------------------------------------------------------- */
/* Choose the instruction set: "scalar", "avx2", "avx512", "amx", "neon", "dotprod", or NULL for the best one here. Returns the name
 * in use, or NULL (and changes nothing) when this machine lacks it. np_isa_names lists what this machine can run, comma separated. */
const char *np_isa_select(const char *name);
const char *np_isa_name(void);
const char *np_isa_names(void);
/* Why "amx" is not among them, in a few words; NULL where it is. The first call asks the kernel for the tile registers. */
const char *np_isa_amx_lacks(void);

/* A prepared activation vector: what a dot product with rows of `type` reads. f16 rows read float32; q8, q4 and q3 rows read
 * int8 in groups of 32 (scale = absmax/127, round to nearest even) with scale and group sum. Those for q4 and for q3 are the same.
 * 64-byte aligned buffers of np_activation_bytes. */
size_t np_activation_bytes(int type, size_t n);
void np_activation_prepare(int type, const float *x, size_t n, void *activation);

/* out[t*out_stride + r] = dot(row r, activation t) + (bias ? bias[r] : 0), for r < rows, t < tokens.
 * The value for one (row, token) has the same bits whatever rows and tokens are asked for together. */
void np_dot_rows(int type, const void *quants, const void *scales, size_t rows, size_t n,
                 const void *activations, size_t activation_stride_bytes, size_t tokens,
                 const float *bias, float *out, size_t out_stride);

/* Many tokens at once: activations packed once for all rows that they meet. A panel serves rows of the type and n it was prepared for (of
 * q4 and q3 alike), under the instruction set in use then. 64-byte aligned buffers of np_panel_bytes, which is 0 where np_quant_bytes is. */
size_t np_panel_bytes(int type, size_t n, size_t tokens);
void np_panel_prepare(int type, const void *activations, size_t activation_stride_bytes, size_t tokens, size_t n, void *panel);

/* out[t*out_stride + r] as np_dot_rows gives it, with the same bits, for rows that lie anywhere and all tokens of the panel. Threads
 * may share a panel. Takes 100 KiB of stack, on amx 400. Worth it from about 16 tokens on. */
void np_dot_panel(int type, const void *const *quants, const void *const *scales, size_t rows, size_t n, const void *panel,
                  size_t tokens, const float *bias, float *out, size_t out_stride);

/* Rows that lie anywhere: out[t*out_stride + r] = dot(row at quants[r] with scales[r], activation t), with the bits of np_dot_rows.
 * From memory a row comes faster when it is fetched before its turn: `fetch` says what else to fetch with each row, or is NULL. */
typedef struct {
    size_t row_bytes;          /* from the row's start on; more than the row where what lies behind it is wanted next */
    const void *const *prefetch; /* [rows] other memory to fetch with each row; or NULL */
    size_t prefetch_bytes;
    size_t scale_bytes;        /* from the row's scales on; more than the row's where others behind them are wanted next */
} np_fetch;
void np_dot_scattered(int type, const void *const *quants, const void *const *scales, size_t rows, size_t n,
                      const np_fetch *fetch, const void *activations, size_t activation_stride_bytes, size_t tokens, float *out,
                      size_t out_stride);

/* The same of those (row, token) pairs alone that are wanted: bit t of wanted[r], of 16 tokens at most. A row is read once for all tokens that want it.
 * Where a pair is not wanted `out` holds anything. wanted may be NULL: all are. */
void np_dot_masked(int type, const void *const *quants, const void *const *scales, const uint16_t *wanted, size_t rows, size_t n,
                   const np_fetch *fetch, const void *activations, size_t activation_stride_bytes, size_t tokens, float *out,
                   size_t out_stride);

/* y[j] += sum over r of a[r] * w[r][j]. The bits depend on y and the list (rows and factors, in order), and on nothing else; a list
 * cut in two may give others. On avx512 the factors of q8 and q4 rows are rounded: in each 32 rows and group by half a 32639th of the
 * largest |a * scale| at most. A factor or scale that is not finite shows in all of its columns. Of q3
 * rows nothing is added: they are only multiplied with vectors. Takes 25 KiB of stack. */
void np_add_rows(int type, const void *const *quants, const void *const *scales, const float *a, size_t rows, size_t n, float *y);

/* Rows of q8, q4 or q3 that lie anywhere as signed bytes, `out_stride` apart, with one scale each: w[r][j] is about row_scales[r] *
 * out[r*out_stride + j], rounded to the nearest, to even between two; the largest magnitude of a row becomes 127. The same bits under every
 * instruction set. A row with a scale that is not finite gets no number as its scale, and zeros. Returns NP_OK, or NP_E_ARGUMENT for
 * another type, for n that is no multiple of 32, or for an out_stride below n, and then writes nothing. */
int np_rows_to_s8(int type, const void *const *quants, const void *const *scales, size_t rows, size_t n, int8_t *out,
                  size_t out_stride, float *row_scales);

/* w[j] as float32. */
void np_decode_row(int type, const void *quants, const void *scales, size_t n, float *w);

/* out = x / rms(x) * weight, rms with epsilon under the root. out may be x. */
void np_rms_norm(const float *x, const float *weight, size_t n, float epsilon, float *out);

/* out = (x - mean(x)) / deviation(x) * weight + bias, the deviation with epsilon under the root. out may be x. */
void np_layer_norm(const float *x, const float *weight, const float *bias, size_t n, float epsilon, float *out);

/* Rotate one head in place: pairs (j, j+width/2) by angle position * inverse_frequency[j]. */
void np_rope(float *head, size_t width, const float *inverse_frequency, int32_t position);

void np_f32_to_f16(const float *x, size_t n, uint16_t *out); /* round to nearest even */
void np_f16_to_f32(const uint16_t *x, size_t n, float *out);

/* Query heads over the keys and values [positions, width] fp16 that they share, which are read once for four of them. queries and out
 * [heads, width]; a head's bits do not depend on what others come with it. scores: scratch of min(heads, 4) * positions floats. */
void np_attend(const float *queries, size_t heads, const uint16_t *keys, const uint16_t *values, size_t positions, size_t width,
               float scale, float *scores, float *out);

/* y[j] += x[j]. */
void np_add(const float *x, size_t n, float *y);

/* out[j] = sum over i < count of rows[i*stride + j], pairwise in a fixed tree over i: ((0+1)+(2+3))+((4+5)+...). */
void np_sum_tree(const float *rows, size_t count, size_t stride, size_t n, float *out);
/* The same bits where the first `summed` rows (at most `count`) were summed before, into the nodes of the tree that they make up: one for
 * each bit set in their number, from the highest, each the sum of 2^bit rows and in the place of its first. The other places of these rows
 * are not read. */
void np_sum_tree_on(const float *rows, size_t summed, size_t count, size_t stride, size_t n, float *out);
/* How many nodes so many first rows make up, and the first row of one of them. */
uint32_t np_tree_nodes(uint32_t rows);
uint32_t np_tree_node_first(uint32_t rows, uint32_t node);

/* ---- sampling (kernels/sample.c) ------------------------------------------------------------------------ */
/* How one token is sampled. Applied in this order: penalties, biases, allowed; temperature; top_k, top_p, min_p. A logit that a
 * penalty of 1 or 0, no bias and allowed = NULL leave as it is has the same bits as without them. */
typedef struct {
    float temperature;              /* <= 0: greedy, the lowest id among equals */
    int32_t top_k;                  /* of the k most likely; 0: of all */
    float top_p;                    /* of the smallest set whose probability, within the top_k, reaches this; 1: no cut */
    float min_p;                    /* of those at least this fraction as likely as the most likely; 0: no cut */
    float repetition_penalty;       /* > 0; a positive logit of a token of the text is divided by it, another one multiplied; 1: off */
    float frequency_penalty;        /* taken off a token's logit for each time it was generated; 0: off */
    float presence_penalty;         /* taken off once if it was generated at all; 0: off */
    const int32_t *text;            /* the text so far, ids in [0, n): the prompt, then what was generated; read if a penalty is on */
    size_t text_tokens;
    size_t prompt_tokens;
    const int32_t *biased;          /* ids whose logits get `biases` added; -INFINITY bans one */
    const float *biases;
    size_t biased_count;
    const uint8_t *allowed;         /* NULL, or n bits: id may be sampled when bit id % 8 of byte id / 8 is set */
} np_sampling;
/* The id sampled with `uniform` in [0, 1). NP_E_ARGUMENT when a logit is NaN, n is 0, or an id or option is out of range;
 * NP_E_BANNED when biases and allowed leave nothing. scratch: 3*n words of 4 bytes. */
int32_t np_sample(const float *logits, size_t n, const np_sampling *how, double uniform, int32_t *scratch);
/* The uniform number of (seed, counter): counter-based, so that a repeated step gets the same number. */
double np_uniform(uint64_t seed, uint64_t counter);
/* The `count` <= n greatest logits' ids, greatest first, lowest id among equals. For small counts: n times count at worst. */
void np_greatest(const float *logits, size_t n, size_t count, int32_t *ids);
/* Natural logs of the softmax probabilities of `count` ids, in double precision; NAN for an id outside. */
void np_log_probabilities(const float *logits, size_t n, const int32_t *ids, size_t count, double *out);

/* ---- waiting (sync/) ------------------------------------------------------------------------------------- */
/* All words live in shared memory; every wait gives up with NP_E_EPOCH as soon as *epoch != expected_epoch,
 * spins for at most spin_us, then sleeps on a futex (plain futex, not private: several processes wait on it). */
typedef struct {
    uint32_t arrived;    /* number of participants that arrived in the current phase */
    uint32_t phase;      /* grows by one when the last participant arrives; the futex word */
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
int np_word_swap(uint32_t *word, uint32_t from, uint32_t to);/* compare and set, acquire-release; 1 when it was `from` */
void np_long_store(uint64_t *word, uint64_t value);          /* sequentially consistent, and a full fence after it */
void np_word_wake(uint32_t *word);                           /* wake everybody asleep on the word */
/* Wait until *word != seen. */
int np_word_wait(const uint32_t *word, uint32_t seen, const uint32_t *epoch, uint32_t expected_epoch,
                 uint32_t spin_us, uint32_t timeout_ms);
/* New epoch (returns it) and wake every sleeper on the `count` words given, so that all waits are abandoned. */
uint32_t np_epoch_advance(uint32_t *epoch, uint32_t **words, size_t count);

/* ---- flash reader (flash/) -------------------------------------------------------------------------------- */
/* One file, direct I/O where the file system allows, io_uring ("io_uring") or a pool of pread threads ("threads").
 * One thread uses a reader; completions come back in any order. */
typedef struct np_reader np_reader;
typedef struct {
    uint64_t tag;
    int32_t result; /* all the bytes asked for, or -errno; -EIO when the file ends before */
    uint32_t unused;
} np_completion;

/* engine: "io_uring", "threads" or NULL for the best allowed. depth: most reads in flight, 1..4096. Returns NULL and sets *error to
 * errno. Allocates. np_reader_close waits for what is in flight. */
np_reader *np_reader_open(const char *path, const char *engine, uint32_t depth, int *error);
void np_reader_close(np_reader *reader);
const char *np_reader_engine(const np_reader *reader);
int np_reader_direct(const np_reader *reader);        /* 1 when the page cache is bypassed */
uint32_t np_reader_alignment(const np_reader *reader); /* of offset, length and address, in bytes; 1 when not direct, at most 4096 */
/* Number of requests taken, from the first on: fewer than count when the queue is full; NP_E_ARGUMENT when misaligned. */
int np_reader_submit(np_reader *reader, const uint64_t *offsets, const uint32_t *bytes, void *const *targets,
                     const uint64_t *tags, size_t count);
/* Up to `most` completions; waits until `least` are there, at most timeout_ms (-1: for ever). Returns how many. */
int np_reader_reap(np_reader *reader, np_completion *out, size_t least, size_t most, int timeout_ms);
/* Readable when completions may wait: read it, then reap until fewer than `most` come. Made at the first call; or -errno. */
int np_reader_event_fd(np_reader *reader);
/* Memory that reads will go to: reads into it cost less where the kernel takes it (io_uring, within the limit on locked memory).
 * Returns 1 when it did, else 0, which costs speed and nothing else. NULL, 0: forget it, before it is unmapped. */
int np_reader_register(np_reader *reader, void *memory, size_t bytes);
uint32_t np_reader_in_flight(const np_reader *reader);

uint32_t np_crc32c(uint32_t crc, const void *data, size_t bytes); /* Castagnoli; start with 0 */

/* ---- residency (residency/) -------------------------------------------------------------------------------- */
/* The parts of a cluster: the rows that decide whether a neuron fires, and the others. What there is of each part is an array by these. */
enum { NP_TRIGGER = 0, NP_VALUE = 1, NP_PARTS = 2 };

/* One 32-bit word per cluster part: bits 0-23 slot, 24-25 state, 26 referenced, 27 pinned, 28-30 uses.
 *   from     to       by      ordering
 *   absent   loading  loader  claims the cluster; bits 0-23 say for which slot it is read
 *   loading  present  loader  release: the bytes in the slot come before the word
 *   loading  failed   loader  I/O error three times, or wrong checksum twice; bits 0-23 are those of the epoch
 *   failed   absent   loader  in another epoch: whoever met it has been told, and it may be asked for again
 *   loading  absent   loader  to be read again after one of these; or after a restart (np_loader_create)
 *   present  absent   cache   compare and set of an unreferenced word, after no window covered it (see np_clock_take)
 *   bit 26   set      decode, prefill: by np_entry_look alone; cleared by cache. It also keeps a slot from being taken
 *                     between a worker's look and the cache's (residency/clock.c has the argument)
 *   bit 27   set      loader, on request; cache, of a present word (np_pins_follow)
 *   bit 27   clear    cache, of a present word
 *   uses     changed  cache, of a present word: how often it found bit 26 set, less how often not; 0 in a word just read
 * Bits outside the state say nothing about an absent word: compare states with NP_ENTRY_STATE_MASK.
 */
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
    NP_MAX_USES = 7
};

/* Look a cluster up: marks a present word as referenced and returns what the word then was. When it says present, the slot stays
 * as it is while this worker's window covers the cluster; a word that was read in any other way promises nothing. */
uint32_t np_entry_look(uint32_t *word);

/* A worker's window: the clusters it may be reading, of either part, published by np_long_store before it looks at their words.
 * 64 bits: first cluster (32 bits) << 32 | end cluster. 0 = none. Both parts' entries are covered. */

/* CLOCK with usage counts: from *hand on, take up to `want` present, unpinned words that no window covers. The hand turns a reference
 * bit into a use and, where there is none, takes a use away; a word without either is set to absent. Writes freed slots; returns how
 * many. windows: sequentially consistent 64-bit words. */
size_t np_clock_take(uint32_t *words, size_t count, size_t *hand, const uint64_t *windows, size_t window_count, size_t want,
                     uint32_t *slots);

/* Evict chosen clusters: of the `id_count` ids take up to `want` that are present, unpinned and covered by no window, in this order;
 * ids from `count` on are passed over. Writes freed slots; returns how many. For policies other than CLOCK. */
size_t np_clusters_evict(uint32_t *words, size_t count, const uint32_t *ids, size_t id_count, const uint64_t *windows,
                         size_t window_count, size_t want, uint32_t *slots);

/* Mark the slots that present words name as not free: sets free[slot] to 0, of slots below slot_count. */
void np_slots_mark(const uint32_t *words, size_t count, uint8_t *free, size_t slot_count);
/* Empty the slots from `first_slot` on, whatever is in them: present words that name one are set to absent, pinned ones too, unless a
 * window covers them. Returns how many are left: call it again. Nothing may be loading into such a slot. */
size_t np_slots_vacate(uint32_t *words, size_t count, uint32_t first_slot, const uint64_t *windows, size_t window_count);

/* Which clusters stay (residency/pins.c). Of each feed-forward the first `keep`: present words of these are pinned, other words below
 * `widest` are no longer. Returns how many of those that stay are not there yet, and writes the ids of the first `most` of them that
 * are absent, the rest filled with UINT32_MAX. others: words that are on their way and will be pinned though they should not. */
size_t np_pins_follow(uint32_t *words, size_t ffns, size_t clusters, const uint32_t *keep, const uint32_t *widest, uint32_t *absent,
                      size_t most, size_t *others);

/* ---- requests (flash/requests.c) ------------------------------------------------------------------------------ */
/* A ring in shared memory from one worker to the loader. An entry is a cluster index (24 bits) and what is wanted of it.
 *   word      written by   ordering
 *   tail      worker       release, after the entries below it; counts entries ever put, modulo 2^32
 *   head      loader       release, after it has read the entries below it
 *   asleep    loader: 1 before it sleeps, then looks at every tail again; worker: 0 when it rings. Sequentially consistent */
enum {
    NP_REQUEST_CLUSTER_MASK = 0xffffff,
    NP_REQUEST_TRIGGER = 0x1000000,
    NP_REQUEST_VALUE = 0x2000000,    /* with the trigger: one read of both */
    NP_REQUEST_PREFETCH = 0x4000000, /* it will be wanted; without this the step waits for the cluster */
    NP_REQUEST_SPECULATIVE = 0x8000000     /* it may be wanted: read if nothing else is, until anybody asks for something without this */
};
typedef struct {
    uint32_t *tail, *head; /* each on a cache line of its own */
    uint32_t *entries;     /* [capacity] */
    uint32_t capacity;     /* a power of two */
    uint32_t *asleep;      /* one for all rings of a loader */
    int32_t doorbell;      /* a descriptor to write one byte to when the loader sleeps; -1: none */
} np_requests;
/* Put up to `count` entries, ring the doorbell if the loader sleeps. Returns how many there was room for. Who must put more waits
 * for `head` to change: the loader wakes its sleepers when it has emptied a ring that was full. */
uint32_t np_requests_put(const np_requests *requests, const uint32_t *entries, uint32_t count);

/* ---- trace (trace/) ---------------------------------------------------------------------------------------------- */
/* A ring of the latest spans of one writer; it writes, anybody reads. next: spans ever put (release, after the span and before the
 * bytes of the one after it). */
typedef struct {
    uint64_t start_ns, end_ns; /* CLOCK_MONOTONIC */
    uint16_t kind, layer;
    uint32_t value;            /* what the kind says: clusters, bytes, tokens */
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
    NP_SPAN_NEURONS = 6, /* computing neurons of blocks; value: neurons fired */
    NP_SPAN_COMBINE = 7,
    NP_SPAN_LOGITS = 8,
    NP_SPAN_BARRIER = 9,    /* waiting for other participants */
    NP_SPAN_FLASH = 10,  /* waiting for clusters to arrive; value: blocks still to come */
    NP_SPAN_READ = 11,   /* loader: reads in flight; value: bytes landed */
    NP_SPAN_EVICT = 12,  /* cache: value: slots freed */
    NP_SPAN_SEND = 13,   /* coordinator: handing out a step; value: participants */
    NP_SPAN_AWAIT = 14,  /* coordinator: until the last answer; value: tokens */
    NP_SPAN_SAMPLE = 15, /* coordinator: value: tokens sampled */
    NP_SPAN_TELL = 16    /* coordinator: between a step's logits and the next step; value: messages to clients */
};
uint64_t np_trace_now(void);
/* A span that started at start_ns and ends now. */
void np_trace_put(const np_trace *trace, int kind, uint32_t layer, uint32_t value, uint64_t step, uint64_t start_ns);
/* The same of a span that ended at end_ns. */
void np_trace_add(const np_trace *trace, int kind, uint32_t layer, uint32_t value, uint64_t step, uint64_t start_ns, uint64_t end_ns);
/* Another process's spans from number *from on, as many as are still whole, into out [capacity]. Returns how many, and sets *from to the
 * number of the first: greater than asked for when the ring was overwritten. NP_E_ARGUMENT when *from lies ahead of what was put. */
int64_t np_trace_take(const np_trace *trace, uint64_t *from, np_span *out);

/* ---- loader core (flash/loader.c) -------------------------------------------------------------------------- */
/* Takes cluster ids, claims their words, reads them, verifies checksums, copies them into free slots, publishes them, wakes waiters.
 * One part of one bundle file: offset(id) = base + id*stride + part_offset; slot s lies at slots + s*slot_bytes. A slot holds the first bytes
 * of its part. With moved_bytes, slots of part 1 hold so many bytes of part 0 as well, at their end: both are then read, and checked,
 * as one, so that nobody needs part 0 for what is part 1's. */
typedef struct np_loader np_loader;
typedef struct {
    uint64_t base_offset, stride_bytes; /* of the bundle file */
    uint64_t part_offset;               /* within a cluster */
    uint32_t part_bytes;                /* multiple of the reader's alignment */
    uint32_t slot_bytes;                /* of these the first, and moved_bytes behind them */
    uint32_t moved_from, moved_bytes;   /* within part 0: 0 bytes but in part 1 */
    uint32_t slot_count;
    uint32_t demand_slots;              /* this many free slots are for demands alone */
    uint8_t *slots;
    int32_t slots_file;         /* the memory file that `slots` maps, or -1: neighbouring slots are written to it by one call */
    uint64_t slots_file_offset; /* of `slots` in it */
    uint32_t *words;
    uint32_t cluster_count;
    const uint32_t *checksums;  /* crc32c of each cluster's part; that of cluster n at n * checksum_stride */
    uint32_t checksum_stride;   /* 1, or more where the table has other sums between them */
} np_loader_part;
typedef struct {
    uint32_t most_read_bytes; /* of one read, and of its staging buffer; at least the longer part */
    uint32_t merge_gap_bytes; /* clusters no further apart than this are read together */
    uint32_t prefetch_depth;  /* a guess is read only while fewer reads than this are in flight; 0: none is */
    uint32_t warm_up_reads;   /* so many of the reader's depth are long reads, for warming up alone; 0: it reads as others do */
    uint32_t warm_up_read_bytes; /* of one of these, at least most_read_bytes */
} np_loader_reading;
typedef struct {
    uint64_t reads, bytes;    /* what came from flash, gaps included */
    uint64_t checksum_failures, io_errors;
    uint64_t refused;         /* entries of rings that name no cluster or no part */
    uint64_t dropped;         /* prefetches for which there was no room */
    uint64_t gap_bytes;       /* read between clusters, for nobody */
    uint64_t waited_for_slot; /* demands that found no free slot */
    uint64_t warm_up_bytes, warm_up_left_bytes; /* to warm up since the last reset, and what of it has not arrived */
    uint64_t warm_up_ns;      /* for how long something of it was left */
    uint64_t already_there;
    uint32_t free_slots[2], waiting[2], in_flight, unused;
} np_loader_state;

/* Two parts: 0 trigger, 1 value, of as many clusters. arrivals: futex word advanced after words become present or failed. Allocates, staging
 * buffers for as many reads as the reader's depth among it; NULL when out of memory or when a part contradicts itself, the
 * reading or the reader's alignment. queue_capacity: clusters of one kind and priority that may wait, no more than 32768. The reader must outlive the loader and serve nobody else; the loader waits for reads in flight when it
 * is destroyed. Words that a loader before this one left loading become absent. */
np_loader *np_loader_create(np_reader *reader, const np_loader_part *parts, const np_loader_reading *reading, uint32_t *arrivals,
                            uint32_t queue_capacity);
void np_loader_destroy(np_loader *loader);
/* More free slots. Returns count, or NP_E_ARGUMENT (and takes none) when one is out of range, free already or being filled. A count of 0 says
 * that none can be freed now: until the next grant of this part, pairs that lack its slots are read as two parts. */
int np_loader_grant(np_loader *loader, int part, const uint32_t *slots, size_t count);
/* Queue ids; parts: NP_REQUEST_TRIGGER, _VALUE or both, for one read; priority 0 demand, 1 prefetch, 2 guess; flags: NP_ENTRY_PINNED sets
 * that bit. Returns how many were taken, from the first on: fewer than count when the queue of this kind and priority is full. Words that are not absent are pinned if asked, and
 * otherwise only counted (already_there); a cluster that waits at a lower priority may be asked for again. */
int np_loader_request(np_loader *loader, int parts, const uint32_t *ids, size_t count, int priority, uint32_t flags);
/* Load these as well, in the order of the file, while nothing else waits; those with NP_ENTRY_PINNED first. Reads for demands and
 * prefetches meanwhile bring all of their stretch of most_read_bytes that is to be loaded anyway. When no slot is left, those without the flag are
 * forgotten: memory is full of what was wanted. Returns NP_OK or NP_E_ARGUMENT. */
int np_loader_warm_up(np_loader *loader, int parts, const uint32_t *ids, size_t count, uint32_t flags);
/* Take requests from these rings at every turn from now on, and wait for their doorbell and `asleep` word (the first ring's) in
 * np_loader_serve. Rings may hold anything: what names no cluster of the package is counted as refused, and dropped by itself; a ring
 * whose tail cannot be is emptied. A demand that finds its queue full stays in its ring. board: NULL, or where the first
 * NP_LOADER_BOARD counters of the state are stored after every turn. epoch: NULL, or the run's; every turn in a new one makes words absent
 * that failed in another. in_flight: NULL, or where every turn stores how many reads are in flight. trace: NULL, or where np_loader_serve puts a span for every batch of
 * reads, from their submission or the batch before. Copies `rings`. Returns NP_OK, NP_E_ARGUMENT or NP_E_MEMORY. */
enum { NP_LOADER_BOARD = 11 };
int np_loader_attach(np_loader *loader, const np_requests *rings, uint32_t count, uint64_t *board,
                     const uint32_t *epoch, uint32_t *in_flight, const np_trace *trace);
/* Turn, and sleep while there is nothing to do, until the caller is needed: returns 1 when one of `descriptors` (at most 8) can be
 * read, or when a quarter of the free slots of a part that there were at the call is used, or clusters begin to wait for
 * slots; 0 after timeout_ms. Spins for at most spin_us, while reads are in flight, before it sleeps. NP_E_ARGUMENT; NP_E_IO when
 * waiting fails. */
int np_loader_serve(np_loader *loader, const int32_t *descriptors, uint32_t count, int timeout_ms, uint32_t spin_us);
/* Take requests, submit what can be submitted, reap what is done, publish. A read that failed is made again, as a demand: after an I/O error at most
 * twice, after a wrong checksum once; the counters count each failure. Waits up to timeout_ms (-1: for ever) for one completion when any is in
 * flight. Call it until it returns 0 before sleeping on the reader's event descriptor.
 * Returns the number of clusters published or failed. */
int np_loader_turn(np_loader *loader, int timeout_ms);
/* Finish what is in flight (published as usual), forget free slots and what is queued as prefetch or warm-up. Demands stay queued: a
 * step waits for them and does not ask twice; what has been settled meanwhile is passed over when its turn comes. Afterwards no word
 * is loading, and every slot that no present word names is free, for the cache to grant. */
void np_loader_reset(np_loader *loader);
/* Give the memory of a part's slots from `first_slot` on back to the system, whole pages of it. No present word may name one. Returns
 * NP_OK, NP_E_ARGUMENT when one is granted or there is no such part, or NP_E_IO where the system does not take it back. */
int np_loader_trim(np_loader *loader, int part, uint32_t first_slot);
void np_loader_read_state(const np_loader *loader, np_loader_state *out);

/* ---- engine (engine/) ---------------------------------------------------------------------------------------- */
/* One participant of a step. Several engines over the same shared memory compute a step together: each takes the next head, stretch of
 * rows or block of neurons that nobody has taken (claims). What is computed never depends on who took it: a row, a head, a block is
 * always computed whole, by the same kernel, in index order. Who takes part, and whose blocks are which, may change with every step. */
enum { NP_RELU = 0, NP_DRELU = 1, NP_RELU2 = 2, NP_SILU = 3 };
enum { NP_NORM_RMS = 0, NP_NORM_LAYER = 1 };
/* What a layer's predictor or router reads: the normed input of its attention or of its feed-forward; a router instead the layer's input,
 * and a predictor instead the residual stream as the feed-forward's norm gets it. */
enum { NP_READS_FEED_FORWARD = 0, NP_READS_ATTENTION = 1, NP_READS_LAYER = 2, NP_READS_RESIDUAL = 3 };
/* The shares of the experts that were chosen, from the router's values for them: softmax, or sigmoids over their sum. */
enum { NP_ROUTER_SOFTMAX = 0, NP_ROUTER_SIGMOID = 1 };

/* Where a matrix of the feed-forward lies in a cluster: its first row's quants and scales, each by part and offset within it. */
typedef struct {
    uint32_t part, quants;
    uint32_t scales_part, scales;
} np_matrix_place;

typedef struct {
    uint32_t width, neurons, layers, query_heads, key_heads, head_width, vocabulary, context_tokens;
    uint32_t experts;               /* of each layer: 1 in a dense model */
    uint32_t experts_per_token;     /* how many compute a token: those whose router values are greatest */
    int32_t router;                 /* NP_ROUTER_* */
    int32_t router_reads;           /* NP_READS_FEED_FORWARD, NP_READS_LAYER */
    int32_t norm;                   /* NP_NORM_RMS, NP_NORM_LAYER: of the residual stream */
    float norm_epsilon;             /* of every norm */
    int32_t head_norm;              /* 1: queries and keys are RMS-normed, each head by itself, before they are rotated */
    int32_t rotary;                 /* 1: heads are rotated; 0: a position has a learned row, which is added to the embedding */
    int32_t type;                   /* NP_F16, NP_Q8, NP_Q4: of every matrix, */
    int32_t trigger_type;           /* but for that of the trigger part: the same, or with NP_Q4 and a gate NP_Q3, */
    int32_t embedding_type;         /* and for embedding and output: the same, or with NP_Q4 NP_Q8 */
    int32_t activation;             /* NP_RELU ...; without a gate NP_RELU or NP_RELU2 */
    float activation_threshold;     /* what a trigger must exceed for its neuron to fire; other than 0 with NP_RELU alone */
    float embedding_scale, logit_scale; /* a token's embedding, and every logit, is multiplied by it */
    float attention_scale;          /* scores are multiplied by it, besides 1 / sqrt(head_width) */
    float residual_scale;           /* what attention and feed-forward add is multiplied by it */
    int32_t parallel;               /* 1: a layer's feed-forward reads what its attention reads; 0: what attention has added to */
    int32_t gated;                  /* 1: a neuron's value is activation(gate) * up; 0: activation(up), and there is no gate */
    uint32_t cluster_neurons, clusters, block_neurons, blocks; /* per layer and expert */
    uint32_t slot_bytes[2];         /* by part */
    np_matrix_place gate, up, down; /* the first that there is lies in the trigger part, the others in the value part */
    uint32_t predictor_rank;        /* the greatest of the predictors' ranks; 0: no predictor, every trigger is computed */
    int32_t predictor_type;
    int32_t predictor_relu;         /* 1: a rank vector's negative elements count as zero */
    int32_t predictor_reads;        /* NP_READS_* but NP_READS_LAYER; in a mixture not NP_READS_ATTENTION either */
} np_shape;

typedef struct {
    const void *quants, *scales;
} np_matrix;

typedef struct {
    const float *weight, *bias; /* bias: of NP_NORM_LAYER alone */
} np_norm;

/* Predicted: score + bias > 0 on every side. The first guesses the trigger; the second, behind a gate, whether Up is positive. */
typedef struct {
    np_matrix input;        /* [rank, width] */
    np_matrix sides[2];     /* [neurons, rank]; sides[1].quants NULL: the trigger alone */
    const float *biases[2]; /* [neurons] */
    uint32_t rank, unused;  /* 1 to shape.predictor_rank */
} np_predictor;

typedef struct {
    uint32_t window_tokens; /* a token attends to this many positions at most; 0: to all */
    np_matrix qkv, attention_output;
    np_norm attention_norm, ffn_norm;
    const float *qkv_bias, *attention_output_bias;  /* NULL: none */
    const float *query_norm, *key_norm;             /* [head_width], where shape.head_norm */
    const float *up_bias, *down_bias;               /* [neurons], [width], where there is no gate; NULL: none */
    const float *router;                            /* [experts][width], where there are several experts */
    const np_predictor *predictors;                 /* [experts], looked at when shape.predictor_rank > 0 */
    int32_t rotary;                                 /* 0: heads are not rotated in this layer, even where shape.rotary */
    float silent_below; /* of NP_SILU alone: a neuron fires only where |silu(gate)| is no less than this; 0: wherever gate is not 0 */
} np_layer;

typedef struct {
    np_matrix embedding, output;
    np_norm output_norm;
    const float *inverse_frequency;  /* [head_width/2], where shape.rotary */
    const float *position_embedding; /* [context_tokens][width], where not */
    const np_layer *layers;
} np_fixed;

/* What a neuron did in the steps since its byte was zeroed, for any of their tokens. Its trigger was computed (in predicted mode: it was
 * predicted); it fired, so that its value part was wanted; its value was other than zero. */
enum np_activity { NP_TRIGGERED = 1, NP_FIRED = 2, NP_ACTIVE = 4 };

/* Memory that the participants share. T: most tokens of a step; P = T * experts_per_token: most pairs of a token and its expert; G: the
 * lesser of P and experts. */
typedef struct {
    float *residual;   /* [T][width] */
    float *queries;    /* [T][query_heads*head_width] */
    float *attention;  /* [T][query_heads*head_width] */
    float *hidden;     /* [P][blocks*block_neurons]: gates where there are, then values */
    float *partials;   /* [partial_tokens*experts_per_token][blocks][width] */
    float *ranks;      /* [P][predictor_rank]; NULL without a predictor */
    uint8_t *predicted;/* [G][blocks*block_neurons][(T+7)/8], bit t%8 of byte t/8: predicted for token t of the expert's; NULL without a
                        * predictor */
    uint32_t *claims;  /* [np_engine_claims(layers)], zeroed before every step */
    float *logits;     /* [logit_rows][vocabulary] */
    uint16_t *kv;      /* [layers][sequences][key_heads][2][context_tokens][head_width] */
    const uint8_t *slots[2];               /* by part */
    uint32_t *entries[2];                  /* by part: [layers*clusters] */
    uint64_t *window;                      /* this participant's own */
    uint32_t *arrivals;
    const uint32_t *in_flight;             /* reads that flash has to do now; NULL: not known, and no expert is guessed */
    const uint32_t *epoch;
    np_barrier *barrier;
    np_requests requests;                  /* this participant's own */
    np_trace trace;                        /* this participant's own */
    float *inputs;                         /* [T][max(width, query_heads*head_width)], with config.external_products; with config.offload_blocks [T][width],
                                            * where the normed inputs are wanted, or NULL; else not looked at */
    float *outputs;                        /* [T][max((query_heads+2*key_heads)*head_width, width)], with config.external_products; and with
                                            * config.offload_blocks where matrices are held, or NULL; else not looked at */
    uint8_t *activity;                     /* [layers][experts][blocks*block_neurons], this participant's own: bits of np_activity are set; or NULL */
} np_shared;

typedef struct {
    uint32_t sequences, max_tokens, logit_rows;
    uint32_t window_blocks;    /* blocks of an expert that are open at once; from experts * blocks on, those of all experts of a layer */
    uint32_t partial_tokens;   /* tokens whose block sums are held at once; fewer than max_tokens only when a window is a whole layer */
    uint32_t spin_us;
    int32_t bundle;            /* 1: a cluster whose trigger is wanted is read whole, both parts by one read */
    int32_t prefetch;          /* 1: ask for what later work will want before it wants it */
    int32_t pipeline;          /* 0: one matrix after the other, each when all that it needs is there */
    int32_t hints;             /* 1: the predictor decides nothing; in steps of few tokens, where there is prefetch, the value parts of those
                                * whom it names are asked for before their triggers are computed; experts before their router's input is there */
    int32_t external_products;         /* 1: another computes the products of layers: steps go by np_engine_begin_external and np_engine_next_product */
    uint32_t product_blocks;   /* with outside: blocks of one product; at most window_blocks, of which a multiple of it is used */
    int32_t offload_blocks;            /* 1: another, who holds their weights, computes this participant's blocks: steps go by np_engine_begin_offload and
                                * np_engine_next_offload; nothing else is computed here than norms, routes and a share of sums */
} np_engine_config;

/* Matrices that a participant may hold, besides blocks: those of attention in every layer, and that of the logits. */
enum { NP_OFFLOAD_QKV = 1, NP_OFFLOAD_ATTENTION_OUTPUT = 2, NP_OFFLOAD_OUTPUT = 4 };

/* What the logits after a step's first `count` tokens make of given tokens, and which they find likeliest; in the memory of one process.
 * Of row t the first id is given; the others are written, greatest first, lowest id among equals; and with them the logarithms of the
 * probabilities of all, after token t. */
typedef struct {
    uint32_t count, likely;
    int32_t *ids; /* [count][1 + likely] */
    double *logs; /* [count][1 + likely] */
} np_token_scores;

/* One step, as one participant gets it: one pass of `count` tokens over all layers; then the logits of `logits_count` tokens from
 * `logits_first` on into logit rows 0... Arrays are of `count` items. With `ratings`, the same for all participants, no logits are asked
 * for: they are computed and read a few tokens at a time, as many as there are logit rows. */
typedef struct {
    uint64_t number;
    uint32_t epoch;
    uint32_t participants, participant; /* how many compute it, and which of them this is */
    uint32_t first_block, end_block;    /* whose neurons it computes, in every layer and expert */
    uint32_t offloaded_blocks;             /* the first ones are of who holds their weights: nobody looks for their clusters, and their sums are
                                         * those of nodes (np_sum_tree_on) */
    uint32_t offloaded_matrices;             /* NP_HELD_*: these are of the one participant who holds them, and nobody else computes their rows */
    uint32_t sharers, sharer;           /* how many participants have these blocks and take them by turns, and which of them this is; two
                                         * groups that share blocks are one too many */
    uint32_t count;
    const int32_t *sequences, *positions, *tokens;
    uint32_t logits_first, logits_count;
    const np_token_scores *token_scores; /* or NULL */
} np_step;

typedef struct np_engine np_engine;

uint32_t np_engine_claims(uint32_t layers);
/* All pointers are kept. Allocates. NULL: *wrong names the field of shape, shared or config that is out of its range or contradicts
 * another; or is NULL, when memory is short. */
np_engine *np_engine_create(const np_shape *shape, const np_fixed *fixed, const np_shared *shared, const np_engine_config *config,
                            const char **wrong);
void np_engine_destroy(np_engine *engine);
/* Compute this participant's share of a step, together with the others. Every field is checked. Returns NP_OK, NP_E_ARGUMENT,
 * NP_E_EPOCH or NP_E_DAMAGED. */
int np_engine_step(np_engine *engine, const np_step *step);

/* A product that another computes, a neural processor say: a matrix times each token's input. Input t is the row token[t] of `inputs` (row t,
 * where token is NULL); output t goes into row t of `outputs`. Of neurons there are three matrices: output t[j] is the sum, over the neurons r, of
 * activation(gate r * input, up r * input) * down[r][j]; it is added to what is there, and that is zero before a layer's (in a mixture an
 * expert's) first. The `of` products of a turn have the same inputs and outputs, and are good until the turn's end. */
enum { NP_PRODUCT_QKV = 1, NP_PRODUCT_ATTENTION_OUTPUT = 2, NP_PRODUCT_NEURONS = 3 };
typedef struct {
    int32_t kind; /* NP_PRODUCT_* */
    uint32_t layer, tokens;
    uint32_t number, count; /* which product of its turn this is, and of how many */
    uint32_t rows, columns;
    uint32_t inputs_stride, outputs_stride; /* elements from one token's to the next */
    const uint32_t *token; /* [tokens], ascending; or NULL */
    const float *inputs;
    float *outputs;
} np_product;

/* Where the rows of a product lie: anywhere. NP_PRODUCT_NEURONS: of gate, up and down; else of the first matrix alone. */
typedef struct {
    int32_t kind; /* NP_PRODUCT_* */
    uint32_t layer, expert, first_block;
    uint32_t rows, columns;
    const void *const *quants[3], *const *scales[3]; /* [rows] each, once they are open */
} np_product_rows;

/* A step whose products are computed outside (config.external_products; native/README.md has its states). Each participant begins it, then calls
 * np_engine_next_product until that returns NP_OK: the step is over, or an error, as np_engine_step has it. Participant 0 gets 1 for each product
 * wanted, and calls again; after a turn's last product once all of the turn are computed. The others wait inside. The shape must be gated,
 * without a predictor that decides, and not NP_SILU or NP_F16. */
int np_engine_begin_external(np_engine *engine, const np_step *step);
int np_engine_next_product(np_engine *engine, np_product *wanted);
/* The rows of participant 0's products, in the order in which those are wanted, and ahead of them: for one thread at a time, which may be another
 * than that of np_engine_next_product, between the return of np_engine_begin_external and np_engine_close_rows; the step before must be closed. np_engine_next_rows names the
 * next rows and returns 1; NP_ROWS_UNKNOWN: which they are depends on a product that is not wanted yet; NP_OK: there are no more. np_engine_open_rows
 * waits until they are there, and says where: they stay until other rows are opened. Rows of before may be opened again. It
 * returns NP_OK, or an error as np_engine_step has it. np_engine_close_rows lets go of what is open. */
enum { NP_ROWS_UNKNOWN = 2 };
int np_engine_next_rows(np_engine *engine, np_product_rows *next);
int np_engine_open_rows(np_engine *engine, np_product_rows *rows);
void np_engine_close_rows(np_engine *engine);
/* A product by the engine's own kernels, for `count` of its tokens: out[i*out_stride...] is that of tokens[i] alone. rows: open. */
int np_engine_compute_product(np_engine *engine, const np_product *product, const np_product_rows *rows, const uint32_t *tokens, uint32_t count, float *out,
                      size_t out_stride);

/* The tokens that one expert computes. A token and one of its experts are a pair; a group's pairs follow each other, by ascending token,
 * and groups by ascending expert. A dense layer is one group of all tokens. */
typedef struct {
    uint32_t expert, first, count; /* pairs [first, first+count) */
} np_group;

/* Blocks that another computes, a GPU say, who holds their weights: of a layer the first `blocks` of every group's expert, for the group's
 * tokens. What is named here is good until the next np_engine_next_offload. Token t's prepared vector lies at t * vector_stride. A block's
 * sum is its neurons' rows of Down in index order times value and the pair's weight, with the bits of the kernels in use; a node's is that
 * of its blocks, by the tree of np_sum_tree: np_tree_nodes(blocks) nodes. In numerics of its own the first node may have all, and the others zeros. */
typedef struct {
    uint32_t layer, tokens, pairs, blocks, groups;
    const np_group *group;        /* [groups] */
    const uint32_t *pair_token;   /* [pairs] */
    const float *pair_weight;     /* [pairs] */
    const uint8_t *vectors;
    size_t vector_stride;         /* in bytes */
    const uint8_t *predicted;     /* as in np_shared, where a predictor decides which triggers are computed; else NULL */
    uint32_t mask_bytes, predicted_neurons; /* of a neuron's predictions; neurons of a group in `predicted` */
    const float *inputs;          /* [tokens][width] what the vectors were prepared from, where np_shared has room for it; else NULL */
} np_offloaded_blocks;

/* All rows of a matrix that another computes, who holds it: out[t*out_stride + r] is row r times token t's prepared vector, and the row's
 * bias, with the bits of the kernels in use. What is named here is good until the next np_engine_next_offload. */
typedef struct {
    int32_t matrix; /* one of NP_HELD_* */
    uint32_t layer; /* 0 with NP_OFFLOAD_OUTPUT */
    uint32_t tokens, rows, columns;
    const uint8_t *vectors;
    size_t vector_stride; /* in bytes */
    float *out;
    size_t out_stride;
} np_offloaded_matrix;

/* A step of a participant whose blocks another computes (config.offload_blocks): it begins, then calls np_engine_next_offload until that returns
 * NP_OK: the step is over, or an error, as np_engine_step has it. 1: the blocks of a layer are wanted; it gives their sums to
 * np_engine_put_block_sums and calls again. The first block must be 0, and the step's held_blocks end_block; where that is 0 no blocks are wanted.
 * NP_OFFLOADED_MATRIX, with held_matrices in the step: a matrix's rows are wanted, of which np_engine_offloaded_matrix says more; it calls again when
 * they are there. Quantized weights, no NP_SILU; with held_matrices, `outputs` in np_shared, which may be this participant's own, and `kv`. */
enum { NP_OFFLOADED_MATRIX = 2 };
int np_engine_begin_offload(np_engine *engine, const np_step *step);
int np_engine_next_offload(np_engine *engine, np_offloaded_blocks *wanted);
/* The sums of the blocks that are wanted: [pairs][nodes][width], `count` of them. They are copied, and meet with the others' in
 * np_engine_next_offload. Returns NP_OK; or NP_E_ARGUMENT where no sums or another number of them is wanted. */
int np_engine_put_block_sums(np_engine *engine, const float *sums, size_t count);
void np_engine_offloaded_matrix(const np_engine *engine, np_offloaded_matrix *wanted); /* all zero where none are wanted */

typedef struct {
    uint64_t neurons;                            /* (neuron, token) pairs of the blocks this participant took */
    uint64_t predicted;                          /* of them, whose gate was computed */
    uint64_t fired, active;                      /* pairs whose gate let them through; whose value is not zero */
    uint64_t gate_rows, up_rows, down_rows;      /* rows read from slots: a row once for each token that reads it */
    uint64_t matrix_rows;                        /* the same of attention's matrices and of the output, computed here or by who holds them */
    uint64_t clusters[2], missed[2];             /* by part: clusters needed, and not there when computing came to them */
    uint64_t foreseen, foreseen_missed;          /* clusters looked at ahead of computing, and asked for then */
    uint64_t guessed, guessed_right;             /* experts asked for before their router chose; of them chosen */
    uint64_t hinted, hinted_fired;               /* clusters that a predictor's hint asked for; of them, those that fired */
    uint64_t step_ns, flash_ns, barrier_ns;         /* the whole step; of it waiting for flash, for other participants */
    int64_t damaged_word;                        /* cluster of the failed part, or -1 */
    int32_t damaged_part, unused;
} np_engine_counters;
void np_engine_read_counters(np_engine *engine, np_engine_counters *out); /* and resets them */

/* ---- steps without messages (steps/) ------------------------------------------------------------------------- */
/* A decode worker's step channel, in shared memory (a "lane" in SPEC.md). A worker that has just computed a step listens on it for a while, and
 * the coordinator sends the next step there instead of a message.
 *   state     AWAY: the worker does not listen. LISTENING: it waits (a futex word). RESERVED: the coordinator is about to send. GIVEN: it has.
 *             Worker: any -> AWAY, or LISTENING when it begins to listen or has computed; LISTENING -> AWAY. Coordinator: LISTENING ->
 *             RESERVED -> GIVEN, or back; LISTENING -> AWAY before it sends a message; any -> AWAY before it welcomes a worker.
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
    uint64_t unused3; /* then int32_t sequences, positions, tokens, each [tokens of np_step_channels] */
} np_step_channel;
typedef struct {
    uint8_t *memory;     /* [count][np_channel_bytes(tokens)] */
    uint32_t count;      /* at most 64 */
    uint32_t tokens;     /* maximum of a step */
    uint32_t *finished;  /* word 0 grows when the last participant of a step has answered; word 1: sleepers on it */
} np_step_channels;
uint32_t np_channel_bytes(uint32_t tokens);
np_step_channel *np_channel_at(const np_step_channels *channels, uint32_t number);
int32_t *np_channel_numbers(const np_step_channels *channels, uint32_t number, int which); /* 0 sequences, 1 positions, 2 tokens */

typedef struct {
    uint64_t step; /* number and epoch of the last step that was begun; 0: none was */
    uint32_t epoch, computed;
} np_channel_progress;
/* The worker: compute the steps that arrive on this channel. Returns NP_OK after serve_ms: the worker may do something else for a moment and must
 * call again, because it still counts as listening. NP_E_TIMEOUT: no step came for idle_ms, or the coordinator has a message. Any other
 * value is np_engine_step's for a step that is not answered here. After these two it does not listen any more. Spins, yielding, for spin_us. */
int np_channel_serve(np_engine *engine, const np_step_channels *channels, uint32_t number, uint32_t spin_us, uint32_t idle_ms, uint32_t serve_ms,
                     np_channel_progress *progress);
/* The coordinator: make a listening worker look for messages. Returns 1 if it was listening. */
int np_channel_release(const np_step_channels *channels, uint32_t number);
/* The coordinator: reset the channel of a worker that is gone. */
void np_channel_clear(const np_step_channels *channels, uint32_t number);

/* The coordinator's step pipeline: a thread that waits for the answers to a step. If the next step is prepared (np_pipeline_arm), it samples the
 * tokens and sends that step before it wakes Python. Only one other thread may call these functions. */
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
/* Send a step to these channels; steps: one per channel, ascending. Resets barrier and claims. Returns 1; 0 if a worker was not listening: nothing
 * was sent, and none of them listens any more; or NP_E_ARGUMENT. */
int np_pipeline_send(np_step_pipeline *pipeline, uint64_t channels, const np_step *steps);
/* The next step. It is sent unless a token cannot be sampled or is one of `ends`. how, uniforms, positions: [count], kept until
 * np_pipeline_collect. */
typedef struct {
    uint64_t number;
    uint32_t count;
    const np_sampling *how;
    const double *uniforms;
    const int32_t *positions;
    const int32_t *ends;
    uint32_t end_count;
} np_pipeline_next;
/* Prepare the next step. Returns NP_OK, or NP_E_ARGUMENT if no step is under way or `count` differs from its tokens. */
int np_pipeline_arm(np_step_pipeline *pipeline, const np_pipeline_next *next);
/* channels: those that have answered. all_answered: the step is over. sampled: its tokens were sampled. next_sent: the next step was sent and is
 * the one under way. Times in ns, 0 for what was not done. */
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
/* The kernel kills this process as soon as `parent` is gone, whatever it is waiting for. */
int np_process_die_with(int32_t parent);
int np_process_name(const char *name); /* as `ps` and `top` show it; 15 characters */
/* Freed memory that the C library keeps for later goes back to the kernel, where the library can do that. */
void np_memory_give_back(void);
/* From now on, what the C library allocates of so many bytes and more goes back to the kernel whenever it is freed, where it can do that.
 * Else such memory stays, in pieces, and how much depends on the order of all that was allocated before. */
void np_memory_map_from(size_t bytes);
/* Give the whole pages within these bytes of a memory file back to the kernel; they read as zeros from now on, in every mapping. Returns
 * NP_OK or -errno. */
int np_file_give_back(int32_t file, uint64_t offset, uint64_t bytes);
/* Ask for huge pages; a kernel that refuses costs speed, nothing else. Returns NP_OK or -errno. */
int np_memory_advise_huge(void *memory, size_t bytes);
/* What of this mapping was touched, or will be, stays in memory: it is neither swapped out nor unmapped as seldom used. A process without
 * the right to so many bytes (RLIMIT_MEMLOCK) does without. Returns NP_OK or -errno. */
int np_memory_lock(const void *memory, size_t bytes);

/* Read memory and do nothing else, for measuring: pieces of piece_bytes (a multiple of 64), one of every `every` (1 to 1024), in ascending
 * order at places that look random. `every` turns (0, 1, ...) read each piece once. sum: every 8 bytes read, exclusive-ored.
 * Returns the bytes read; 0 for a bad argument. */
uint64_t np_probe_read(const void *memory, size_t bytes, size_t piece_bytes, uint32_t every, uint32_t turn, uint64_t *sum);

/* cdef end */

#ifdef __cplusplus
}
#endif
#endif

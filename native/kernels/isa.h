/* One instruction set's kernels: what differs between instruction sets, and nothing else. isa.c picks one at run time.
 *
 * Every file here is built with the same compile options; code for an instruction set carries a function target attribute,
 * and a file for the other architecture compiles to nothing. */
#ifndef NP_KERNELS_ISA_H
#define NP_KERNELS_ISA_H
#include "neuronpipe.h"

#define NP_INLINE static inline __attribute__((always_inline))

enum { NP_GROUP = 32 };      /* weights that share a scale */
enum { NP_TOKEN_BLOCK = 4 }; /* tokens computed together, so that a row's weights are unpacked once for all of them */

/* One np_dot_rows call. */
typedef struct {
    const uint8_t *quants, *scales;
    size_t quant_bytes, scale_bytes; /* of one row */
    size_t rows, n;
    const uint8_t *activations;
    size_t activation_stride_bytes, tokens;
    const float *bias; /* or NULL */
    float *out;
    size_t out_stride;
} np_dot_job;

typedef void np_dot_function(const np_dot_job *job);
typedef void np_add_function(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y);

typedef struct {
    const char *name;
    int (*runs_here)(void);
    np_dot_function *dot_rows[3]; /* by NP_F16, NP_Q8, NP_Q4 */
    np_add_function *add_row[3];
    void (*prepare)(int type, const float *x, size_t n, uint8_t *activation); /* NP_Q8 or NP_Q4 */
    float (*softmax_weights)(float *scores, size_t count); /* x -> exp(x - max); returns their sum */
    void (*f32_to_f16)(const float *x, size_t n, uint16_t *out);
    void (*f16_to_f32)(const uint16_t *x, size_t n, float *out);
} np_isa;

/* The one in use. Aborts with a message when NEURONPIPE_ISA names one that this machine lacks. */
const np_isa *np_isa_current(void);

extern const np_isa np_isa_scalar;
#if defined(__x86_64__)
extern const np_isa np_isa_avx2, np_isa_avx512;
np_dot_function np_avx2_dot_f16, np_avx2_dot_q8, np_avx2_dot_q4;
np_dot_function np_avx512_dot_f16, np_avx512_dot_q8, np_avx512_dot_q4;
#define NP_AVX2 __attribute__((target("avx2,fma,f16c")))
#define NP_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#elif defined(__aarch64__)
extern const np_isa np_isa_neon, np_isa_dotprod;
np_dot_function np_neon_dot_f16, np_neon_dot_q8, np_neon_dot_q4, np_dotprod_dot_q8, np_dotprod_dot_q4;
#endif

/* Define the np_dot_function NAME from ROW(quants, scales, n, ahead, activation, stride_bytes, tokens, sums), an always-inlined
 * function whose token count is a constant at both places it is used. A (row, token) goes through the same operations in
 * either place, which is what makes its bits independent of what else is asked for.
 * `ahead` is how many bytes beyond the quants it reads a row may prefetch: 0 where that would leave the rows asked for. */
enum { NP_AHEAD_BYTES = 1024 };

#define NP_DEFINE_DOT_ROWS(TARGET, NAME, ROW)                                                                         \
    TARGET void NAME(const np_dot_job *job) {                                                                         \
        for (size_t r = 0; r < job->rows; r++) {                                                                      \
            const uint8_t *quants = job->quants + r * job->quant_bytes, *scales = job->scales + r * job->scale_bytes; \
            const size_t ahead = (job->rows - r - 1) * job->quant_bytes >= NP_AHEAD_BYTES ? NP_AHEAD_BYTES : 0;       \
            const float bias = job->bias ? job->bias[r] : 0.0f;                                                       \
            const uint8_t *activation = job->activations;                                                             \
            const size_t stride = job->activation_stride_bytes;                                                       \
            float sums[NP_TOKEN_BLOCK], *out = job->out + r;                                                          \
            size_t left = job->tokens;                                                                                \
            for (; left >= NP_TOKEN_BLOCK; left -= NP_TOKEN_BLOCK, activation += NP_TOKEN_BLOCK * stride) {           \
                ROW(quants, scales, job->n, ahead, activation, stride, NP_TOKEN_BLOCK, sums);                         \
                for (int t = 0; t < NP_TOKEN_BLOCK; t++, out += job->out_stride) *out = sums[t] + bias;               \
            }                                                                                                         \
            for (; left; left--, activation += stride, out += job->out_stride) {                                      \
                ROW(quants, scales, job->n, ahead, activation, stride, 1, sums);                                      \
                *out = sums[0] + bias;                                                                                \
            }                                                                                                         \
        }                                                                                                             \
    }
#endif

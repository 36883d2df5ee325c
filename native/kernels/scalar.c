/* The reference kernels in plain C. */
#include "kernels/activate.h"
#include "kernels/activation.h"
#include "kernels/exponential.h"
#include "kernels/float_rows.h"
#include "kernels/gguf_rows.h"
#include "kernels/narrow.h"
#include "kernels/recurrence.h"
#include "kernels/rope.h"
#include "kernels/sum.h"

NP_INLINE void f16_row(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead, const uint8_t *activation,
                       size_t stride, const int tokens, float *sums) {
    const uint16_t *w = (const uint16_t *)(const void *)quants;
    for (int t = 0; t < tokens; t++) {
        const float *x = (const float *)(const void *)(activation + t * stride);
        float sum = 0.0f;
        for (size_t j = 0; j < n; j++) sum += np_half_to_float(w[j]) * x[j];
        sums[t] = sum;
    }
}

NP_INLINE void q8_row(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead, const uint8_t *activation,
                      size_t stride, const int tokens, float *sums) {
    const int8_t *w = (const int8_t *)quants;
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    for (int t = 0; t < tokens; t++) {
        const np_activation x = np_activation_at(activation + t * stride, n);
        float sum = 0.0f;
        for (size_t g = 0; g < n / NP_GROUP; g++) {
            int32_t dot = 0;
            for (int j = 0; j < NP_GROUP; j++) dot += w[g * NP_GROUP + j] * x.quants[g * NP_GROUP + j];
            sum += (float)dot * (np_half_to_float(s[g]) * x.scales[g]);
        }
        sums[t] = sum;
    }
}

NP_INLINE void nibble_row(const int type, const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead, const uint8_t *activation,
                          size_t stride, const int tokens, float *sums) {
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    for (int t = 0; t < tokens; t++) {
        const np_activation x = np_activation_at(activation + t * stride, n);
        float sum = 0.0f;
        for (size_t g = 0; g < n / NP_GROUP; g++) {
            const uint8_t *w = quants + g * 16;
            const int8_t *low = x.quants + np_q4_place(g), *high = low + 64;
            int32_t dot = 0;
            for (int j = 0; j < 16; j++) dot += np_nibble_value(type, w[j] & 15) * low[j] + np_nibble_value(type, w[j] >> 4) * high[j];
            sum += (float)dot * (np_half_to_float(s[g]) * x.scales[g]);
        }
        sums[t] = sum;
    }
}

NP_INLINE void q3_row(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead, const uint8_t *activation,
                      size_t stride, const int tokens, float *sums) {
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    for (int t = 0; t < tokens; t++) {
        const np_activation x = np_activation_at(activation + t * stride, n);
        float sum = 0.0f;
        for (size_t g = 0; g < n / NP_GROUP; g++) {
            const uint8_t *w = quants + g * NP_Q3_GROUP_BYTES;
            const int8_t *low = x.quants + np_q4_place(g), *high = low + 64;
            int32_t dot = 0;
            for (int j = 0; j < NP_GROUP; j++) {
                const int code = (w[j % 8] >> j / 8 * 2 & 3) | (w[8 + j % 4] >> j / 4 & 1) << 2;
                dot += (code - 4) * (j < 16 ? low[j] : high[j - 16]);
            }
            sum += (float)dot * (np_half_to_float(s[g]) * x.scales[g]);
        }
        sums[t] = sum;
    }
}

static NP_DEFINE_DOT_ROWS(, dot_f16, f16_row)
static NP_DEFINE_DOT_ROWS(, dot_q8, q8_row)
static NP_DEFINE_DOT_ROWS(, dot_q3, q3_row)

NP_INLINE void add_row_f16(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {
    const uint16_t *w = (const uint16_t *)(const void *)quants;
    for (size_t j = 0; j < n; j++) y[j] += a * np_half_to_float(w[j]);
}

NP_INLINE void add_row_q8(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {
    const int8_t *w = (const int8_t *)quants;
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    for (size_t g = 0; g < n / NP_GROUP; g++, w += NP_GROUP, y += NP_GROUP) {
        const float scale = a * np_half_to_float(s[g]);
        for (int j = 0; j < NP_GROUP; j++) y[j] += scale * (float)w[j];
    }
}

NP_INLINE void add_nibble_row(const int type, const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {
    const uint16_t *s = (const uint16_t *)(const void *)scales;
    for (size_t g = 0; g < n / NP_GROUP; g++, quants += 16, y += NP_GROUP) {
        const float scale = a * np_half_to_float(s[g]);
        for (int j = 0; j < 16; j++) {
            y[j] += scale * (float)np_nibble_value(type, quants[j] & 15);
            y[j + 16] += scale * (float)np_nibble_value(type, quants[j] >> 4);
        }
    }
}

static NP_DEFINE_ADD_ROWS(, add_f16, add_row_f16)
static NP_DEFINE_ADD_ROWS(, add_q8, add_row_q8)

#define DEFINE_NIBBLE_ROWS(NAME, TYPE)                                                                                            \
    NP_INLINE void NAME##_row(const uint8_t *quants, const uint8_t *scales, size_t n, size_t ahead, const uint8_t *activation,     \
                              size_t stride, const int tokens, float *sums) {                                                     \
        nibble_row(TYPE, quants, scales, n, ahead, activation, stride, tokens, sums);                                             \
    }                                                                                                                             \
    NP_INLINE void add_row_##NAME(const uint8_t *quants, const uint8_t *scales, size_t n, float a, float *y) {                    \
        add_nibble_row(TYPE, quants, scales, n, a, y);                                                                            \
    }                                                                                                                             \
    static NP_DEFINE_DOT_ROWS(, dot_##NAME, NAME##_row)                                                                           \
    static NP_DEFINE_ADD_ROWS(, add_##NAME, add_row_##NAME)

DEFINE_NIBBLE_ROWS(q4, NP_Q4)
DEFINE_NIBBLE_ROWS(iq4, NP_IQ4)
DEFINE_NIBBLE_ROWS(mxfp4, NP_MXFP4)

static void prepare(int type, const float *x, size_t n, uint8_t *activation) { np_prepare_body(type, x, n, activation); }

static float softmax_weights(float *scores, size_t count) { return np_softmax_body(scores, count); }

static void sum_tree(const float *rows, size_t summed, size_t count, size_t stride, size_t n, float *out) {
    np_sum_tree_body(rows, summed, count, stride, n, out);
}

static void rope(float *head, size_t width, const float *inverse_frequency, int32_t position) {
    np_rope_body(head, width, inverse_frequency, position);
}

static void remember(const np_memory_job *job) {
    np_remember_body(job);
}

NP_DEFINE_DOT_FLOATS(, dot_floats, 16, 2)

static void convolve(const np_convolution_job *job) {
    np_convolve_body(job);
}

static void keep(const float *rates, const float *biases, float decay, size_t n, float *kept) {
    np_keep_body(rates, biases, decay, n, kept);
}

static void activate(int activation, float limit, const float *gates, const float *ups, size_t n, float *values) {
    np_activate_body(activation, limit, gates, ups, n, values);
}

static void f32_to_f16(const float *x, size_t n, uint16_t *out) {
    for (size_t j = 0; j < n; j++) out[j] = np_float_to_half(x[j]);
}

static void f16_to_f32(const uint16_t *x, size_t n, float *out) {
    for (size_t j = 0; j < n; j++) out[j] = np_half_to_float(x[j]);
}

/* An element of a row of the KV cache. */
NP_INLINE float element_of(const np_kv_rows *rows, size_t r, size_t j) {
    const uint8_t *row = rows->rows + r * rows->row_bytes;
    if (rows->type == NP_F16) return np_half_to_float(((const uint16_t *)(const void *)row)[j]);
    return (float)((const int8_t *)row)[j] * np_half_to_float(((const uint16_t *)(const void *)(row + rows->n))[j / NP_GROUP]);
}

void np_scalar_scores(const np_kv_rows *rows, const float *queries, size_t stride, size_t count, float *out, size_t out_stride) {
    for (size_t r = 0; r < rows->count; r++) {
        for (size_t q = 0; q < count; q++) out[q * out_stride + r] = 0.0f;
        for (size_t j = 0; j < rows->n; j++) {
            const float key = element_of(rows, r, j);
            for (size_t q = 0; q < count; q++) out[q * out_stride + r] += key * queries[q * stride + j];
        }
    }
}

void np_scalar_mix(const np_kv_rows *rows, const float *weights, size_t stride, size_t count, float *out, size_t out_stride) {
    for (size_t r = 0; r < rows->count; r++)
        for (size_t j = 0; j < rows->n; j++) {
            const float value = element_of(rows, r, j);
            for (size_t q = 0; q < count; q++) out[q * out_stride + j] += weights[q * stride + r] * value;
        }
}

NP_INLINE void unpack_group(int type, const uint8_t *quants, int8_t *q) {
    if (type == NP_Q8) {
        memcpy(q, quants, NP_GROUP);
        return;
    }
    uint8_t unpacked[NP_GROUP / 2];
    if (type == NP_Q3) {
        const np_q4_group group = np_q4_of_q3(quants);
        quants = memcpy(unpacked, group.words, sizeof unpacked);
    }
    for (int j = 0; j < NP_GROUP / 2; j++) {
        q[j] = (int8_t)np_nibble_value(type, quants[j] & 15);
        q[j + NP_GROUP / 2] = (int8_t)np_nibble_value(type, quants[j] >> 4);
    }
}

NP_INLINE float largest_of_row(int type, const uint8_t *quants, const uint16_t *scales, size_t groups) {
    float max_magnitude = 0.0f;
    for (size_t g = 0; g < groups; g++) {
        int8_t q[NP_GROUP];
        int16_t largest = 0;
        unpack_group(type, quants + g * np_group_bytes(type), q);
        for (int j = 0; j < NP_GROUP; j++) {
            const int16_t magnitude = (int16_t)(q[j] < 0 ? -q[j] : q[j]);
            largest = magnitude > largest ? magnitude : largest;
        }
        const float magnitude = np_half_to_float(scales[g] & 0x7fff) * (float)largest;
        max_magnitude = magnitude > max_magnitude ? magnitude : max_magnitude;
    }
    return max_magnitude;
}

/* Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even. */
NP_INLINE void round_group(int type, const uint8_t *quants, float factor, int8_t *out) {
    int8_t q[NP_GROUP];
    unpack_group(type, quants, q);
    for (int j = 0; j < NP_GROUP; j++) out[j] = (int8_t)(int32_t)(((float)q[j] * factor + 12582912.0f) - 12582912.0f);
}

static NP_DEFINE_NARROW(, narrow, largest_of_row, round_group)
static NP_DEFINE_RECODE(, recode, np_look_up)

static int runs_here(void) { return 1; }

const np_isa np_isa_scalar = {
    "scalar",
    runs_here,
    {dot_f16, dot_q8, dot_q4, dot_q3, np_scalar_dot_q4k, np_scalar_dot_q5k, np_scalar_dot_q6k, dot_iq4, dot_mxfp4,
     np_scalar_dot_q4h, np_scalar_dot_q5h},
    {add_f16, add_q8, add_q4, NULL, np_scalar_add_q4k, np_scalar_add_q5k, np_scalar_add_q6k, add_iq4, add_mxfp4,
     np_scalar_add_q4h, np_scalar_add_q5h},
    prepare,
    softmax_weights,
    f32_to_f16,
    f16_to_f32,
    sum_tree,
    rope,
    remember,
    convolve,
    dot_floats,
    keep,
    activate,
    narrow,
    recode,
    NULL,
    NULL,
    np_scalar_scores,
    np_scalar_mix,
};

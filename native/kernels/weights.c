/* Sizes of rows, and the public kernels, which call the instruction set in use. */
#include "kernels/codebook.h"
#include "kernels/minimum.h"
#include "kernels/three_bits.h"

size_t np_quant_bytes(int type, size_t n) {
    if (type == NP_F16) return 2 * n;
    if (n % NP_GROUP) return 0;
    if (np_has_minimum(type)) return n / 2 + np_high_bits(type) * (n / 8);
    return type == NP_Q8 ? n : type == NP_Q4 || np_has_codebook(type) ? n / 2 : type == NP_Q3 ? n / NP_GROUP * NP_Q3_GROUP_BYTES : 0;
}

size_t np_scale_bytes(int type, size_t n) {
    if (np_has_minimum(type) && n % NP_GROUP == 0) return np_padded(n / NP_GROUP, NP_MINIMUM_GROUPS) * np_minimum_bytes(type);
    const int has_scales = type == NP_Q8 || type == NP_Q4 || type == NP_Q3 || np_has_codebook(type);
    return has_scales && n % NP_GROUP == 0 ? n / NP_GROUP * 2 : 0;
}

/* Types of rows that read the same panels; activations are the same for more of them. */
static int inputs_of(int type) { return np_has_minimum(type) ? NP_Q4K : type == NP_Q3 || np_has_codebook(type) ? NP_Q4 : type; }

int np_reads_inputs_of(int type, int prepared_type) { return inputs_of(type) == inputs_of(prepared_type); }

size_t np_activation_bytes(int type, size_t n) {
    if (type == NP_F16) return np_padded(4 * n, 64);
    if (!np_quant_bytes(type, n)) return 0;
    return np_padded(n, 128) + 8 * np_padded(n / NP_GROUP, 16);
}

void np_activation_prepare(int type, const float *x, size_t n, void *activation) {
    if (type == NP_F16) {
        memcpy(activation, x, 4 * n);
    } else if (np_quant_bytes(type, n)) {
        np_isa_current()->prepare(type, x, n, activation);
    }
}

static np_rows rows_of(int type, size_t rows, size_t n) {
    return (np_rows){.quant_bytes = np_quant_bytes(type, n), .scale_bytes = np_scale_bytes(type, n), .rows = rows, .n = n};
}

void np_dot_rows(int type, const void *quants, const void *scales, size_t rows, size_t n, const void *activations,
                 size_t activation_stride_bytes, size_t tokens, const float *bias, float *out, size_t out_stride) {
    np_dot_job job = {
        .rows = rows_of(type, rows, n),
        .activations = activations,
        .activation_stride_bytes = activation_stride_bytes,
        .tokens = tokens,
        .bias = bias,
        .out = out,
        .out_stride = out_stride,
    };
    job.rows.quants = quants;
    job.rows.scales = scales;
    if (job.rows.quant_bytes) np_isa_current()->dot_rows[type](&job);
}

void np_dot_masked(int type, const void *const *quants, const void *const *scales, const uint16_t *token_masks, size_t rows, size_t n,
                   const np_fetch *fetch, const void *activations, size_t activation_stride_bytes, size_t tokens, float *out,
                   size_t out_stride) {
    np_dot_job job = {
        .rows = rows_of(type, rows, n),
        .activations = activations,
        .activation_stride_bytes = activation_stride_bytes,
        .tokens = tokens,
        .out = out,
        .out_stride = out_stride,
        .token_masks = token_masks,
    };
    job.rows.quants_at = quants;
    job.rows.scales_at = scales;
    if (fetch) job.rows.fetch = *fetch;
    if (job.rows.quant_bytes) np_isa_current()->dot_rows[type](&job);
}

void np_dot_scattered(int type, const void *const *quants, const void *const *scales, size_t rows, size_t n,
                      const np_fetch *fetch, const void *activations, size_t activation_stride_bytes, size_t tokens, float *out,
                      size_t out_stride) {
    np_dot_masked(type, quants, scales, NULL, rows, n, fetch, activations, activation_stride_bytes, tokens, out, out_stride);
}

void np_add_rows(int type, const void *const *quants, const void *const *scales, const float *a, size_t rows, size_t n, float *y) {
    np_rows all = rows_of(type, rows, n);
    all.quants_at = quants;
    all.scales_at = scales;
    np_add_function *add = all.quant_bytes ? np_isa_current()->add_rows[type] : NULL;
    if (add) add(&all, a, y);
}

void np_add_rows_for_tokens(int type, const void *const *quants, const void *const *scales, const float *a, size_t a_stride, size_t rows,
                            size_t tokens, size_t n, float *y, size_t y_stride) {
    np_rows all = rows_of(type, rows, n);
    all.quants_at = quants;
    all.scales_at = scales;
    np_add_tokens_function *add = all.quant_bytes ? np_isa_current()->add_for_tokens : NULL;
    for (size_t t = 0, count; t < tokens; t += count) {
        count = tokens - t < NP_ADD_TOKENS ? tokens - t : NP_ADD_TOKENS;
        if (count > 1 && add && add(type, &all, a + t * a_stride, a_stride, count, y + t * y_stride, y_stride)) continue;
        for (size_t i = t; i < t + count; i++) np_add_rows(type, quants, scales, a + i * a_stride, rows, n, y + i * y_stride);
    }
}

int np_rows_to_s8(int type, const void *const *quants, const void *const *scales, size_t rows, size_t n, int8_t *out,
                  size_t out_stride, float *row_scales) {
    if (type <= NP_F16 || type >= NP_TYPES || n % NP_GROUP || out_stride < n) return NP_E_ARGUMENT;
    const np_isa *isa = np_isa_current();
    for (size_t r = 0; r < rows; r++) isa->narrow(type, quants[r], scales[r], n, out + r * out_stride, row_scales + r);
    return NP_OK;
}

/* Products of an fp16 scale and a small integer are exact, so one version serves all instruction sets. */
void np_decode_row(int type, const void *quants, const void *scales, size_t n, float *w) {
    if (type == NP_F16) {
        np_f16_to_f32(quants, n, w);
        return;
    }
    if (np_has_minimum(type)) {
        const size_t groups = n % NP_GROUP ? 0 : n / NP_GROUP;
        for (size_t first = 0; first < groups; first += NP_MINIMUM_GROUPS)
            np_minimum_decode(type, quants, scales, n, first, np_minimum_count(groups, first), w + first * NP_GROUP);
        return;
    }
    const uint16_t *s = scales;
    const size_t groups = np_quant_bytes(type, n) ? n / NP_GROUP : 0;
    for (size_t g = 0; g < groups; g++, w += NP_GROUP) {
        const float scale = np_half_to_float(s[g]);
        if (type == NP_Q8) {
            const int8_t *q = (const int8_t *)quants + g * NP_GROUP;
            for (int j = 0; j < NP_GROUP; j++) w[j] = scale * (float)q[j];
        } else {
            uint8_t q[16];
            if (type == NP_Q3) {
                const np_q4_group group = np_q4_of_q3((const uint8_t *)quants + g * NP_Q3_GROUP_BYTES);
                memcpy(q, group.words, sizeof q);
            } else {
                memcpy(q, (const uint8_t *)quants + g * 16, sizeof q);
            }
            for (int j = 0; j < 16; j++) {
                w[j] = scale * (float)np_nibble_value(type, q[j] & 15);
                w[j + 16] = scale * (float)np_nibble_value(type, q[j] >> 4);
            }
        }
    }
}

void np_dot_floats(const float *rows, size_t count, size_t n, const float *x, float *out) { np_isa_current()->dot_floats(rows, count, n, x, out); }

void np_f32_to_f16(const float *x, size_t n, uint16_t *out) { np_isa_current()->f32_to_f16(x, n, out); }

void np_f16_to_f32(const uint16_t *x, size_t n, float *out) { np_isa_current()->f16_to_f32(x, n, out); }

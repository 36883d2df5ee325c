/* Attention of query heads that share a key head. Keys and values are f16 rows, so the dot and add kernels are used. */
#include "kernels/isa.h"

#include <string.h>

enum { CHUNK = 64 }; /* positions per chunk: their values stay in the first-level cache for all heads */

void np_attend(const float *queries, size_t heads, const uint16_t *keys, const uint16_t *values, size_t positions, size_t width,
               float scale, float score_cap, const float *sinks, float *scores, float *out) {
    const np_isa *isa = np_isa_current();
    const size_t stride = positions + (sinks != NULL); /* a sink's score lies behind those of the positions */
    float sums[NP_TOKEN_BLOCK];
    memset(out, 0, heads * width * sizeof *out);
    if (!positions || !width) return;
    for (size_t first = 0; first < heads; first += NP_TOKEN_BLOCK) {
        const size_t count = heads - first < NP_TOKEN_BLOCK ? heads - first : NP_TOKEN_BLOCK;
        np_rows rows = {.quants = (const uint8_t *)keys, .quant_bytes = 2 * width, .rows = positions, .n = width};
        const np_dot_job job = {
            .rows = rows,
            .activations = (const uint8_t *)(queries + first * width),
            .activation_stride_bytes = width * sizeof *queries,
            .tokens = count,
            .out = scores,
            .out_stride = stride,
        };
        isa->dot_rows[NP_F16](&job);
        for (size_t i = 0; i < count * stride; i++) scores[i] *= scale;
        for (size_t h = 0; h < count && score_cap != 0.0f; h++) np_soft_cap(scores + h * stride, positions, score_cap);
        for (size_t h = 0; h < count && sinks; h++) scores[h * stride + positions] = sinks[first + h];
        for (size_t h = 0; h < count; h++) sums[h] = isa->softmax_weights(scores + h * stride, stride);
        for (size_t p = 0; p < positions; p += CHUNK) {
            rows.quants = (const uint8_t *)(values + p * width);
            rows.rows = positions - p < CHUNK ? positions - p : CHUNK;
            for (size_t h = 0; h < count; h++)
                isa->add_rows[NP_F16](&rows, scores + h * stride + p, out + (first + h) * width);
        }
        for (size_t h = 0; h < count; h++)
            for (size_t j = 0; j < width; j++) out[(first + h) * width + j] /= sums[h];
    }
}

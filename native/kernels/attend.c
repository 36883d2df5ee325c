/* Attention of one query head. Keys and values are f16 rows, so that the dot and add kernels do the work. */
#include "kernels/isa.h"

#include <string.h>

void np_attend(const float *query, const uint16_t *keys, const uint16_t *values, size_t positions, size_t width, float scale,
               float *scores, float *out) {
    const np_isa *isa = np_isa_current();
    memset(out, 0, width * sizeof *out);
    if (!positions || !width) return;
    const np_rows key_rows = {.quants = (const uint8_t *)keys, .quant_bytes = 2 * width, .rows = positions, .n = width};
    np_rows value_rows = key_rows;
    value_rows.quants = (const uint8_t *)values;
    const np_dot_job job = {.rows = key_rows, .activations = (const uint8_t *)query, .tokens = 1, .out = scores};
    isa->dot_rows[NP_F16](&job);
    for (size_t p = 0; p < positions; p++) scores[p] *= scale;
    const float sum = isa->softmax_weights(scores, positions);
    isa->add_rows[NP_F16](&value_rows, scores, out);
    for (size_t j = 0; j < width; j++) out[j] /= sum;
}

/* Vectors as the kernels read them, and rows of a matrix times each. */
#include "engine/vectors.h"

void np_norm_vector(const np_engine *engine, const np_norm *norm, const float *x, size_t n, float *out)
{
    if (engine->shape.norm == NP_NORM_LAYER)
        np_layer_norm(x, norm->weight, norm->bias, n, engine->shape.norm_epsilon, out);
    else
        np_rms_norm(x, norm->weight, n, engine->shape.norm_epsilon, out);
}

void np_prepare_vectors(np_engine *engine, np_vectors *to, const float *source, uint32_t count, size_t stride, size_t n, const np_norm *norm)
{
    to->n = n;
    to->count = count;
    for (uint32_t t = 0; t < count; t++) {
        const float *x = source + t * stride;
        if (norm) {
            np_norm_vector(engine, norm, x, n, engine->vector);
            x = engine->vector;
        }
        np_activation_prepare(to->type, x, n, to->prepared + t * to->stride);
    }
    if (count >= NP_PANEL_TOKENS)
        np_panel_prepare(to->type, to->prepared, to->stride, count, n, to->panel);
}

void np_multiply_rows(const np_engine *engine, const np_vectors *x, const np_matrix *m, uint32_t first_row, uint32_t rows,
                   const float *bias, float *out, size_t out_stride)
{
    const size_t quant_bytes = np_quant_bytes(m->type, x->n), scale_bytes = np_scale_bytes(m->type, x->n);
    const uint8_t *quants = (const uint8_t *)m->quants + first_row * quant_bytes;
    const uint8_t *scales = scale_bytes ? (const uint8_t *)m->scales + first_row * scale_bytes : NULL;
    if (x->count < NP_PANEL_TOKENS) {
        np_dot_rows(m->type, quants, scales, rows, x->n, x->prepared, x->stride, x->count, bias ? bias + first_row : NULL, out,
                    out_stride);
        return;
    }
    const void *quants_at[NP_PIECE_ROWS], *scales_at[NP_PIECE_ROWS];
    for (uint32_t row = 0; row < rows; row += NP_PIECE_ROWS) {
        const uint32_t piece_rows = rows - row < NP_PIECE_ROWS ? rows - row : NP_PIECE_ROWS;
        for (uint32_t r = 0; r < piece_rows; r++) {
            quants_at[r] = quants + (row + r) * quant_bytes;
            scales_at[r] = scales ? scales + (row + r) * scale_bytes : NULL;
        }
        np_dot_panel(m->type, quants_at, scales_at, piece_rows, x->n, x->panel, x->count, bias ? bias + first_row + row : NULL,
                     out + row, out_stride);
    }
}

/* Input vectors of matrix products, and the products. */
#ifndef NP_VECTORS_H
#define NP_VECTORS_H
#include "engine/engine.h"

/* Apply the model's norm to one vector of n elements. */
void np_norm_vector(const np_engine *engine, const np_norm *norm, const float *x, size_t n, float *out);
/* Prepare `count` vectors of n elements from source [count][stride], normed unless norm is NULL. */
void np_prepare_vectors(np_engine *engine, np_vectors *to, const float *source, uint32_t count, size_t stride, size_t n, const np_norm *norm);
/* out[t*out_stride + r] = row first_row + r of the matrix times vector t, plus its bias unless bias is NULL. */
void np_multiply_rows(const np_engine *engine, const np_vectors *x, const np_matrix *m, uint32_t first_row, uint32_t rows, const float *bias,
                      float *out, size_t out_stride);

#endif

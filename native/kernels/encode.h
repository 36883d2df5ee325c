/* What the encoders of rows share: encode.c and encode_codebook.c. */
#ifndef NP_KERNELS_ENCODE_H
#define NP_KERNELS_ENCODE_H
#include "kernels/isa.h"

#include <math.h>

/* How much the error of each weight of a group counts: more for larger weights and, unless importance is NULL, for more
 * important ones. */
NP_INLINE void np_error_weights(const float *w, const float *importance, float *weight) {
    float squares = 0.0f;
    for (int j = 0; j < NP_GROUP; j++) squares += w[j] * w[j];
    const float level = sqrtf(squares / NP_GROUP);
    for (int j = 0; j < NP_GROUP; j++) weight[j] = (importance ? importance[j] : 1.0f) * (level + fabsf(w[j]));
}

/* np_encode_row for iq4 and mxfp4, of finite weights. */
int np_encode_codebook_row(int type, const float *w, const float *importance, size_t n, uint8_t *quants, uint8_t *scales);
#endif

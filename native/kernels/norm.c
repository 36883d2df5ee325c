/* RMS and layer normalization. Sums are taken in double precision in eight fixed lanes: the same bits on every
 * instruction set. */
#include "neuronpipe.h"

#include <math.h>

static double sum_of(const double *lanes) {
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

static double mean_of(const float *x, size_t n) {
    double lanes[8] = {0};
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] += (double)x[i + j];
    for (size_t j = 0; i + j < n; j++) lanes[j] += (double)x[i + j];
    return sum_of(lanes) / (double)n;
}

void np_rms_norm(const float *x, const float *weight, size_t n, float epsilon, float *out) {
    double lanes[8] = {0};
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] += (double)x[i + j] * x[i + j];
    for (size_t j = 0; i + j < n; j++) lanes[j] += (double)x[i + j] * x[i + j];
    const float scale = (float)(1.0 / sqrt(sum_of(lanes) / (double)n + epsilon));
    for (size_t j = 0; j < n; j++) out[j] = weight ? x[j] * scale * weight[j] : x[j] * scale;
}

void np_layer_norm(const float *x, const float *weight, const float *bias, size_t n, float epsilon, float *out) {
    const double mean = mean_of(x, n);
    double lanes[8] = {0};
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] += (x[i + j] - mean) * (x[i + j] - mean);
    for (size_t j = 0; i + j < n; j++) lanes[j] += (x[i + j] - mean) * (x[i + j] - mean);
    const float scale = (float)(1.0 / sqrt(sum_of(lanes) / (double)n + epsilon));
    for (size_t j = 0; j < n; j++) out[j] = (float)(x[j] - mean) * scale * weight[j] + bias[j];
}

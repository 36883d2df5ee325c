/* RMS normalization. The squares are summed in double precision in eight fixed lanes: the same bits on every instruction set. */
#include "neuronpipe.h"

#include <math.h>

void np_rms_norm(const float *x, const float *weight, size_t n, float epsilon, float *out) {
    double lanes[8] = {0};
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] += (double)x[i + j] * x[i + j];
    for (size_t j = 0; i + j < n; j++) lanes[j] += (double)x[i + j] * x[i + j];
    const double sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    const float scale = (float)(1.0 / sqrt(sum / (double)n + epsilon));
    for (size_t j = 0; j < n; j++) out[j] = x[j] * scale * weight[j];
}

/* Compute block sums of a dReLU feed-forward by the library's kernels, to test kernels of accelerators: reads numbers
 * from standard input, writes sums for the named instruction sets to standard output.
 *
 *   in    uint32 type, n, neurons, tokens; quants of Gate, Up and Down [neurons] each; scales of these; vectors [tokens][n] float
 *   out   for each instruction set: sums [tokens][n] float */
#include "neuronpipe.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNED = 64, MATRICES = 3 };

static void *taken(size_t size)
{
    void *memory = aligned_alloc(ALIGNED, (size / ALIGNED + 1) * ALIGNED);
    if (memory == NULL || fread(memory, 1, size, stdin) != size)
        exit(2);
    return memory;
}

int main(int count, char **names)
{
    uint32_t head[4];
    if (fread(head, sizeof head, 1, stdin) != 1)
        return 2;
    const int type = (int)head[0];
    const size_t n = head[1], neurons = head[2], tokens = head[3];
    const size_t row = np_quant_bytes(type, n), row_scales = np_scale_bytes(type, n);
    const uint8_t *quants[MATRICES], *scales[MATRICES];
    for (int m = 0; m < MATRICES; m++)
        quants[m] = taken(neurons * row);
    for (int m = 0; m < MATRICES; m++)
        scales[m] = taken(neurons * row_scales);
    const float *x = taken(tokens * n * sizeof *x);
    const size_t bytes = np_activation_bytes(type, n);
    uint8_t *vector = aligned_alloc(ALIGNED, (bytes / ALIGNED + 1) * ALIGNED);
    float *gates = malloc(neurons * sizeof *gates), *ups = malloc(neurons * sizeof *ups), *factors = malloc(neurons * sizeof *factors);
    float *sum = malloc(n * sizeof *sum);
    const void **listed = malloc(neurons * sizeof *listed), **listed_scales = malloc(neurons * sizeof *listed_scales);
    for (int name = 1; name < count; name++) {
        if (np_isa_select(names[name]) == NULL)
            return 3;
        for (size_t t = 0; t < tokens; t++) {
            np_activation_prepare(type, x + t * n, n, vector);
            np_dot_rows(type, quants[0], scales[0], neurons, n, vector, 0, 1, NULL, gates, neurons);
            np_dot_rows(type, quants[1], scales[1], neurons, n, vector, 0, 1, NULL, ups, neurons);
            size_t found = 0;
            for (size_t i = 0; i < neurons; i++) {
                const float value = gates[i] > 0 && ups[i] > 0 ? gates[i] * ups[i] : 0.0f;
                if (value != 0.0f) {
                    factors[found] = value;
                    listed[found] = quants[2] + i * row;
                    listed_scales[found++] = scales[2] + i * row_scales;
                }
            }
            memset(sum, 0, n * sizeof *sum);
            np_add_rows(type, listed, listed_scales, factors, found, n, sum);
            fwrite(sum, sizeof *sum, n, stdout);
        }
    }
    return 0;
}

/* Kernels of recurrent layers and of activations, of the instruction set in use. */
#include "kernels/isa.h"

void np_remember(const np_memory_job *job) {
    np_isa_current()->remember(job);
}

void np_convolve(const np_convolution_job *job) {
    np_isa_current()->convolve(job);
}

void np_keep(const float *rates, const float *biases, float decay, size_t n, float *kept) {
    np_isa_current()->keep(rates, biases, decay, n, kept);
}

void np_activate(int activation, float limit, const float *gates, const float *ups, size_t n, float *values) {
    np_isa_current()->activate(activation, limit, gates, ups, n, values);
}

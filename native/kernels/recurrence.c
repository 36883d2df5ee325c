/* Recurrent layers' kernels, of the instruction set in use. */
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

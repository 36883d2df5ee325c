/* Rotary positions. Sine and cosine are computed here and not by the C library, so that bits do not depend on the
 * library, and the compiler can vectorize the loop for each instruction set. */
#ifndef NP_KERNELS_ROPE_H
#define NP_KERNELS_ROPE_H
#include "kernels/isa.h"

#include <string.h>

/* Both for |angle| < 10^6, absolute error below 1e-10: reduce to |r| <= pi/4 and quadrant k, then Taylor series. */
NP_INLINE void np_sine_cosine(double angle, double *sine, double *cosine) {
    /* Adding 1.5 * 2^52 rounds to an integer and leaves it in the low bits. pi/2 in two parts, the first of 33 bits: k
     * times it is exact. */
    const double shifted = angle * 0.63661977236758134308 + 6755399441055744.0;
    const double k = shifted - 6755399441055744.0;
    const double r = (angle - k * 1.57079632673412561417e+00) - k * 6.07710050650619224932e-11;
    const double r2 = r * r;
    const double s =
        r + r * r2 * (-1.0 / 6 + r2 * (1.0 / 120 + r2 * (-1.0 / 5040 + r2 * (1.0 / 362880 - r2 * (1.0 / 39916800)))));
    const double c =
        1 + r2 * (-0.5 + r2 * (1.0 / 24 + r2 * (-1.0 / 720 + r2 * (1.0 / 40320 + r2 * (-1.0 / 3628800 + r2 / 479001600)))));
    uint64_t quadrant;
    memcpy(&quadrant, &shifted, sizeof quadrant);
    const double a = quadrant & 1 ? c : s, b = quadrant & 1 ? s : c;
    *sine = quadrant & 2 ? -a : a;
    *cosine = (quadrant + 1) & 2 ? -b : b;
}

/* The body of np_isa.rope. */
NP_INLINE void np_rope_body(float *head, size_t width, const float *inverse_frequency, int32_t position) {
    const size_t half = width / 2;
    for (size_t j = 0; j < half; j++) {
        /* The angle is a float32 product, as in the code that trains these models. */
        const float angle = (float)position * inverse_frequency[j];
        double sine, cosine;
        np_sine_cosine(angle, &sine, &cosine);
        const float s = (float)sine, c = (float)cosine, first = head[j], second = head[j + half];
        head[j] = first * c - second * s;
        head[j + half] = second * c + first * s;
    }
}
#endif

/* Values of neurons. Plain operations in a fixed order: all instruction sets and C libraries give the same bits. */
#ifndef NP_KERNELS_ACTIVATE_H
#define NP_KERNELS_ACTIVATE_H
#include "kernels/exponential.h"

enum { NP_VALUES = 16 }; /* computed together, so that values may take the place of gates or ups */

/* The value of a neuron from its gate and up. NaN stays NaN. */
NP_INLINE float np_activated(int activation, float limit, float gate, float up) {
    switch (activation) {
    case NP_RELU: return gate * up;
    case NP_DRELU: return up > 0.0f ? gate * up : 0.0f;
    case NP_RELU2: return gate * gate * up;
    case NP_GELU: return np_gelu(gate) * up;
    case NP_GELU_ERF: return np_gelu_erf(gate) * up;
    case NP_SIGMOID: return np_sigmoid(gate) * up;
    case NP_CLAMPED_SWIGLU: { /* of gpt-oss */
        const float below = gate > limit ? limit : gate, within = up > limit ? limit : up < -limit ? -limit : up;
        return (within + 1.0f) * (below * np_sigmoid(1.702f * below));
    }
    default: return np_silu(gate) * up;
    }
}

NP_INLINE void np_activate_with(int activation, float limit, const float *gates, const float *ups, size_t n, float *values) {
    float together[NP_VALUES];
    size_t i = 0;
    for (; i + NP_VALUES <= n; i += NP_VALUES) {
        for (int j = 0; j < NP_VALUES; j++) together[j] = np_activated(activation, limit, gates[i + j], ups[i + j]);
        memcpy(values + i, together, sizeof together);
    }
    for (; i < n; i++) values[i] = np_activated(activation, limit, gates[i], ups[i]);
}

/* The body of np_isa.activate: a loop for each activation, which the compiler can vectorize. */
NP_INLINE void np_activate_body(int activation, float limit, const float *gates, const float *ups, size_t n, float *values) {
    switch (activation) {
    case NP_RELU: np_activate_with(NP_RELU, limit, gates, ups, n, values); return;
    case NP_DRELU: np_activate_with(NP_DRELU, limit, gates, ups, n, values); return;
    case NP_RELU2: np_activate_with(NP_RELU2, limit, gates, ups, n, values); return;
    case NP_GELU: np_activate_with(NP_GELU, limit, gates, ups, n, values); return;
    case NP_GELU_ERF: np_activate_with(NP_GELU_ERF, limit, gates, ups, n, values); return;
    case NP_SIGMOID: np_activate_with(NP_SIGMOID, limit, gates, ups, n, values); return;
    case NP_CLAMPED_SWIGLU: np_activate_with(NP_CLAMPED_SWIGLU, limit, gates, ups, n, values); return;
    default: np_activate_with(NP_SILU, limit, gates, ups, n, values);
    }
}
#endif

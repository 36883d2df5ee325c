/* Panels of many tokens. Where kernel_for finds no panel kernel, the panel is a copy of the activations, and the
 * np_dot_function is used. */
#include "kernels/activation.h"

static const np_panel_kernel *kernel_for(int type, size_t n) {
    const np_panel_kernel *kernel = np_isa_current()->panel;
    return kernel && type != NP_F16 && n <= kernel->most_columns ? kernel : NULL;
}

static size_t stride_bytes(int type, size_t n) { return np_padded(np_activation_bytes(type, n), 64); }

size_t np_panel_bytes(int type, size_t n, size_t tokens) {
    if (!np_quant_bytes(type, n)) return 0;
    const np_panel_kernel *kernel = kernel_for(type, n);
    return kernel ? kernel->bytes(type, n, tokens) : tokens * stride_bytes(type, n);
}

void np_panel_prepare(int type, const void *activations, size_t activation_stride_bytes, size_t tokens, size_t n, void *panel) {
    if (!np_quant_bytes(type, n)) return;
    const np_panel_kernel *kernel = kernel_for(type, n);
    if (kernel) {
        kernel->prepare(type, activations, activation_stride_bytes, tokens, n, panel);
        return;
    }
    const size_t stride = stride_bytes(type, n);
    for (size_t t = 0; t < tokens; t++)
        memcpy((uint8_t *)panel + t * stride, (const uint8_t *)activations + t * activation_stride_bytes, np_activation_bytes(type, n));
}

void np_dot_panel(int type, const void *const *quants, const void *const *scales, size_t rows, size_t n, const void *panel,
                  size_t tokens, const float *bias, float *out, size_t out_stride) {
    const np_dot_job job = {
        .rows = {.quant_bytes = np_quant_bytes(type, n),
                 .scale_bytes = np_scale_bytes(type, n),
                 .quants_at = quants,
                 .scales_at = scales,
                 .rows = rows,
                 .n = n},
        .activations = panel,
        .activation_stride_bytes = stride_bytes(type, n),
        .tokens = tokens,
        .bias = bias,
        .out = out,
        .out_stride = out_stride,
    };
    if (!job.rows.quant_bytes) return;
    const np_panel_kernel *kernel = kernel_for(type, n);
    if (kernel)
        kernel->dot(type, &job);
    else
        np_isa_current()->dot_rows[type](&job);
}

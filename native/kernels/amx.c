/* Whether the tile kernel is used: if the processor has AMX int8, the kernel grants the registers, and a trial gives
 * AVX-512's bits. */
#include "kernels/isa.h"

#if defined(__x86_64__)
#include "kernels/activation.h"

#include <cpuid.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Rows and tokens fill two tiles and begin a third; visits of 5 and 6 groups fill one piece and begin another. */
enum { TRIAL_ROWS = 37, TRIAL_TOKENS = 37, TRIAL_N = 83 * NP_GROUP };

static void fill(uint8_t *bytes, size_t count, uint32_t *state) {
    for (size_t i = 0; i < count; i++) {
        *state = *state * 1664525u + 1013904223u;
        bytes[i] = (uint8_t)(*state >> 24);
    }
}

static void *room(size_t bytes) { return aligned_alloc(64, np_padded(bytes, 64)); }

static int agree(int type, const np_panel_kernel *kernels[2]) {
    const size_t quant_bytes = np_quant_bytes(type, TRIAL_N), scale_bytes = np_scale_bytes(type, TRIAL_N);
    const size_t stride = np_padded(np_activation_bytes(type, TRIAL_N), 64), out_bytes = 4 * TRIAL_ROWS * TRIAL_TOKENS;
    uint8_t *rows = room(TRIAL_ROWS * (quant_bytes + scale_bytes)), *activations = room(TRIAL_TOKENS * stride);
    float *x = room(4 * TRIAL_N), *out[2] = {room(out_bytes), room(out_bytes)};
    const void *quants_at[TRIAL_ROWS], *scales_at[TRIAL_ROWS];
    int same = rows && activations && x && out[0] && out[1];
    uint32_t state = 1;
    for (size_t r = 0; same && r < TRIAL_ROWS; r++) {
        uint8_t *quants = rows + r * quant_bytes, *scales = rows + TRIAL_ROWS * quant_bytes + r * scale_bytes;
        fill(quants, quant_bytes, &state);
        fill(scales, scale_bytes, &state);
        for (size_t i = 1; i < scale_bytes; i += 2) scales[i] = (uint8_t)((scales[i] & 0x83) | 0x24); /* halves near 0.02, either sign */
        quants_at[r] = quants, scales_at[r] = scales;
    }
    for (size_t t = 0; same && t < TRIAL_TOKENS; t++) {
        uint8_t bytes[TRIAL_N];
        fill(bytes, TRIAL_N, &state);
        for (size_t j = 0; j < TRIAL_N; j++) x[j] = (float)((int8_t)bytes[j]);
        np_isa_avx512.prepare(type, x, TRIAL_N, activations + t * stride);
    }
    for (int k = 0; same && k < 2; k++) {
        uint8_t *panel = room(kernels[k]->bytes(type, TRIAL_N, TRIAL_TOKENS));
        const np_dot_job job = {
            .rows = {.quant_bytes = quant_bytes,
                     .scale_bytes = scale_bytes,
                     .quants_at = quants_at,
                     .scales_at = scales_at,
                     .rows = TRIAL_ROWS,
                     .n = TRIAL_N},
            .activations = panel,
            .tokens = TRIAL_TOKENS,
            .out = out[k],
            .out_stride = TRIAL_ROWS,
        };
        if ((same = panel != NULL)) {
            kernels[k]->prepare(type, activations, stride, TRIAL_TOKENS, TRIAL_N, panel);
            kernels[k]->dot(type, &job);
        }
        free(panel);
    }
    same = same && memcmp(out[0], out[1], out_bytes) == 0;
    free(rows), free(activations), free(x), free(out[0]), free(out[1]);
    return same;
}

int np_panels_agree(const np_panel_kernel *a, const np_panel_kernel *b) {
    const np_panel_kernel *both[2] = {a, b};
    int same = 1;
    for (int type = NP_F16 + 1; same && type < NP_TYPES; type++) same = agree(type, both); /* each has code of its own */
    return same;
}

static int processor_has_tiles(void) {
    enum { TILES = 1 << 24, BYTES = 1 << 25 }; /* amx-tile, amx-int8 */
    unsigned a, b, c, d;
    return np_isa_avx512.runs_here() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & TILES) && (d & BYTES);
}

/* Once per process: threads and forked children inherit the permission, a new program has to ask again. Refused by
 * kernels before 5.16, by those that disable the registers, and if a thread's signal stack is too small for them. */
static int kernel_grants_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}

typedef enum { UNKNOWN, NO_TILES, NOT_GRANTED, OTHER_BITS, USABLE } verdict;

static verdict examine(void) {
    if (!processor_has_tiles()) return NO_TILES;
    if (!kernel_grants_tiles()) return NOT_GRANTED;
    return np_panels_agree(&np_amx_panel, &np_avx512_panel) ? USABLE : OTHER_BITS;
}

const char *np_isa_amx_lacks(void) {
    static const char *const reasons[] = {
        [NO_TILES] = "this processor has no matrix engine for bytes (amx_tile, amx_int8)",
        [NOT_GRANTED] = "the kernel does not grant this process the tile registers",
        [OTHER_BITS] = "in a trial its results differed from those of avx512",
        [USABLE] = NULL,
    };
    static _Atomic verdict known; /* racing threads store the same result */
    if (known == UNKNOWN) known = examine();
    return reasons[known];
}
#else
const char *np_isa_amx_lacks(void) { return "this processor is not an x86-64 one"; }
#endif

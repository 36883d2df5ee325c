/* The tile instructions of AMX, as amx_panel.c uses them. tests/native/tile_model.h has the same names for a model in
 * C.
 *
 * Written as assembly: the compiler's intrinsics for loads do not say that they read memory (gcc 12), so that stores
 * may move behind them, and its load of a configuration says that it reads 8 bytes of the 64. `tile` is a number, 0 to
 * 7, in the source. */
#ifndef NP_KERNELS_AMX_TILES_H
#define NP_KERNELS_AMX_TILES_H
#include <stdint.h>

/* What ldtilecfg reads: palette 1 has eight tiles of up to 16 rows and 64 bytes a row. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

#define TILE_CONFIGURE(shapes) __asm__ volatile("ldtilecfg %0" ::"m"(*(const tile_shapes *)(shapes)))
#define TILE_RELEASE() __asm__ volatile("tilerelease")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void *)(from)), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"((void *)(to)), "r"((int64_t)(stride)) : "memory")
/* sums += a times b: signed bytes, four of a row of `a` with four of a column of `b`. */
#define TILE_DOT(sums, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)
#endif

/* A model of AMX's tile instructions in C, with the names of kernels/amx_tiles.h: include this first. What a processor
 * would refuse with a fault counts as a failed check. */
#ifndef NP_KERNELS_AMX_TILES_H
#define NP_KERNELS_AMX_TILES_H
#include "check.h"

#include <string.h>

enum { MODEL_TILES = 8, MODEL_ROWS = 16, MODEL_ROW_BYTES = 64 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;
_Static_assert(sizeof(tile_shapes) == 64, "as ldtilecfg reads it");

static struct {
    tile_shapes shapes; /* palette 0: none in force */
    uint8_t data[MODEL_TILES][MODEL_ROWS][MODEL_ROW_BYTES];
    long products, loads, stores; /* carried out so far */
    long fault_from;              /* not 0: products omit the last row from this one on, to test the trial */
} model;

static inline void model_release(void) {
    memset(&model.shapes, 0, sizeof model.shapes);
    memset(model.data, 0, sizeof model.data);
}

static inline void model_configure(const void *from) {
    tile_shapes s;
    memcpy(&s, from, sizeof s);
    model_release();
    CHECK(s.palette == 1, "palette %d", s.palette);
    CHECK(s.start_row == 0, "start row %d", s.start_row);
    for (int i = 0; i < 14; i++) CHECK(s.reserved[i] == 0, "reserved byte %d", i);
    for (int i = 0; i < 16; i++) {
        CHECK(i < MODEL_TILES || (s.rows[i] == 0 && s.row_bytes[i] == 0), "tile %d does not exist", i);
        CHECK(s.rows[i] <= MODEL_ROWS && s.row_bytes[i] <= MODEL_ROW_BYTES, "tile %d: %d rows of %d", i, s.rows[i], s.row_bytes[i]);
        CHECK(!s.rows[i] == !s.row_bytes[i], "tile %d: %d rows of %d", i, s.rows[i], s.row_bytes[i]);
    }
    model.shapes = s;
}

static inline int model_has(int tile) {
    const int has = model.shapes.palette == 1 && tile < MODEL_TILES && model.shapes.rows[tile] > 0;
    CHECK(has, "tile %d is not configured", tile);
    return has;
}

static inline void model_zero(int tile) {
    if (model_has(tile)) memset(model.data[tile], 0, sizeof model.data[tile]);
}

/* Rows and bytes beyond the tile's shape become zero. */
static inline void model_load(int tile, const void *from, int64_t stride) {
    if (!model_has(tile)) return;
    memset(model.data[tile], 0, sizeof model.data[tile]);
    for (int r = 0; r < model.shapes.rows[tile]; r++)
        memcpy(model.data[tile][r], (const uint8_t *)from + r * stride, model.shapes.row_bytes[tile]);
    model.loads++;
}

static inline void model_store(int tile, void *to, int64_t stride) {
    if (!model_has(tile)) return;
    for (int r = 0; r < model.shapes.rows[tile]; r++)
        memcpy((uint8_t *)to + r * stride, model.data[tile][r], model.shapes.row_bytes[tile]);
    model.stores++;
}

/* Without sanitizers, which took five times as long for it: all it reads are the model's own bytes. */
__attribute__((no_sanitize("address", "undefined"))) static uint32_t model_element(int sums, int a, int b, int r, int column, int rows) {
    uint32_t sum; /* as the instruction: wraps around */
    memcpy(&sum, &model.data[sums][r][4 * column], 4);
    for (int k = 0; k < rows; k++)
        for (int i = 0; i < 4; i++)
            sum += (uint32_t)((int8_t)model.data[a][r][4 * k + i] * (int8_t)model.data[b][k][4 * column + i]);
    return sum;
}

static inline void model_dot(int sums, int a, int b) {
    if (!model_has(sums) || !model_has(a) || !model_has(b)) return;
    const uint16_t *row_bytes = model.shapes.row_bytes;
    const uint8_t *rows = model.shapes.rows;
    CHECK(sums != a && sums != b && a != b, "tiles %d, %d, %d", sums, a, b);
    CHECK(row_bytes[sums] % 4 == 0 && row_bytes[a] % 4 == 0 && row_bytes[b] % 4 == 0, "tiles %d, %d, %d", sums, a, b);
    CHECK(rows[sums] == rows[a], "rows of tiles %d and %d", sums, a);
    CHECK(row_bytes[sums] == row_bytes[b], "bytes of tiles %d and %d", sums, b);
    CHECK(row_bytes[a] / 4 == rows[b], "tiles %d and %d do not fit", a, b);
    static uint8_t result[MODEL_ROWS][MODEL_ROW_BYTES];
    memset(result, 0, sizeof result);
    const int is_faulty = model.fault_from && model.products >= model.fault_from;
    for (int r = 0; r < rows[sums] - is_faulty; r++)
        for (int column = 0; column < row_bytes[sums] / 4; column++) {
            const uint32_t sum = model_element(sums, a, b, r, column, rows[b]);
            memcpy(&result[r][4 * column], &sum, 4);
        }
    memcpy(model.data[sums], result, sizeof result);
    model.products++;
}

#define TILE_CONFIGURE(shapes) model_configure(shapes)
#define TILE_RELEASE() model_release()
#define TILE_ZERO(tile) model_zero(tile)
#define TILE_LOAD(tile, from, stride) model_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) model_store(tile, to, stride)
#define TILE_DOT(sums, a, b) model_dot(sums, a, b)
#endif

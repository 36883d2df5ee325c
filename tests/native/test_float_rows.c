/* Products of float32 rows: against double precision, a row alone and among others, and the same bits on every
 * instruction set. */
#include "isa_loop.h"

#include <math.h>

enum { ROWS = 11, MAX_WIDTH = 333 };

static float rows[ROWS * MAX_WIDTH], x[MAX_WIDTH];
static const size_t widths[] = {1, 15, 16, 17, 64, MAX_WIDTH};
enum { WIDTHS = sizeof widths / sizeof *widths };
static float first[WIDTHS][ROWS]; /* of the first instruction set */
static int has_first;

static void test_products(const char *isa)
{
    for (size_t w = 0; w < WIDTHS; w++) {
        const size_t n = widths[w];
        float products[ROWS];
        np_dot_floats(rows, ROWS, n, x, products);
        for (size_t r = 0; r < ROWS; r++) {
            double sum = 0.0;
            float alone;
            for (size_t i = 0; i < n; i++)
                sum += (double)rows[r * n + i] * x[i];
            np_dot_floats(rows + r * n, 1, n, x, &alone);
            CHECK(fabs(sum - products[r]) < 1e-4, "%s width %zu row %zu: %g", isa, n, r, sum);
            CHECK(memcmp(&alone, &products[r], sizeof alone) == 0, "%s width %zu row %zu: other bits alone", isa, n, r);
        }
        if (!has_first)
            memcpy(first[w], products, sizeof products);
        CHECK(memcmp(first[w], products, sizeof products) == 0, "%s width %zu: other bits", isa, n);
    }
    has_first = 1;
}

int main(void)
{
    for (size_t i = 0; i < ROWS * MAX_WIDTH; i++)
        rows[i] = random_float();
    for (size_t i = 0; i < MAX_WIDTH; i++)
        x[i] = random_float();
    for_each_isa(test_products);
    return checks_report();
}

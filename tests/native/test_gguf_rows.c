/* Rows as GGUF stores them: known blocks, decoded values against decoders that follow GGUF's definition weight by
 * weight, refusals, and no access outside of the rows. */
#include "isa_loop.h"
#include "weights.h"

#include <math.h>
#include <stdlib.h>

enum { MAX_WEIGHTS = 1280, ROWS = 3 };

typedef struct {
    const char *name;
    int number;
    size_t weights, bytes; /* of a block */
} encoding;

static const encoding encodings[] = {
    {"Q4_0", NP_GGUF_Q4_0, 32, 18},     {"Q5_0", NP_GGUF_Q5_0, 32, 22},      {"Q8_0", NP_GGUF_Q8_0, 32, 34},
    {"Q4_K", NP_GGUF_Q4_K, 256, 144},   {"Q5_K", NP_GGUF_Q5_K, 256, 176},    {"Q6_K", NP_GGUF_Q6_K, 256, 210},
    {"IQ4_NL", NP_GGUF_IQ4_NL, 32, 18}, {"IQ4_XS", NP_GGUF_IQ4_XS, 256, 136}, {"MXFP4", NP_GGUF_MXFP4, 32, 17},
};
enum { ENCODINGS = sizeof encodings / sizeof *encodings };

static int nibble(const uint8_t *nibbles, size_t j) { return j < 16 ? nibbles[j] & 15 : nibbles[j - 16] >> 4; }

/* Six-bit scale (of = 0) or minimum (of = 1) of group g in the 12 bytes of Q4_K and Q5_K. */
static int k_field(const uint8_t *packed, size_t g, int of) {
    if (g < 4) return packed[4 * of + g] & 63;
    return (packed[4 + g] >> 4 * of & 15) + (packed[4 * of + g - 4] >> 6) * 16;
}

/* Weight j of a block, as GGUF defines it. All are exact in double precision. */
static double stored_weight(int number, const uint8_t *block, size_t j) {
    const size_t g = j / 32, i = j % 32;
    switch (number) {
    case NP_GGUF_Q4_0: return half_at(block) * (nibble(block + 2, j) - 8);
    case NP_GGUF_Q5_0: return half_at(block) * (nibble(block + 6, j) + 16 * (block[2 + j / 8] >> j % 8 & 1) - 16);
    case NP_GGUF_Q8_0: return half_at(block) * (int8_t)block[2 + j];
    case NP_GGUF_IQ4_NL: return half_at(block) * nibble_value(NP_IQ4, nibble(block + 2, j));
    case NP_GGUF_MXFP4: return ldexp(nibble_value(NP_MXFP4, nibble(block + 1, j)), block[0] - 128);
    case NP_GGUF_IQ4_XS: {
        const int low = block[4 + g / 2] >> g % 2 * 4 & 15, high = block[2 + g / 4] >> g % 4 * 2 & 3;
        return half_at(block) * (low + 16 * high - 32) * nibble_value(NP_IQ4, nibble(block + 8 + 16 * g, i));
    }
    case NP_GGUF_Q6_K: {
        const size_t half = g / 4, place = g % 4;
        const int low = block[64 * half + 32 * (place % 2) + i] >> place / 2 * 4 & 15;
        const int high = block[128 + 32 * half + i] >> 2 * place & 3;
        return half_at(block + 208) * (int8_t)block[192 + j / 16] * (low + 16 * high - 32);
    }
    default: {
        const size_t fifths = number == NP_GGUF_Q5_K ? 32 : 0;
        const int low = block[16 + fifths + g / 2 * 32 + i] >> g % 2 * 4 & 15;
        const int high = fifths ? block[16 + i] >> g & 1 : 0;
        const double minimum = half_at(block + 2) * k_field(block + 4, g, 1);
        return half_at(block) * k_field(block + 4, g, 0) * (low + 16 * high) - minimum;
    }
    }
}

static void put_half(uint8_t *at, float x) {
    const uint16_t half = np_float_to_half(x);
    memcpy(at, &half, 2);
}

/* Random blocks with scales of about 0.01. */
static void fill(const encoding *e, uint8_t *stored, size_t blocks) {
    for (size_t i = 0; i < blocks * e->bytes; i++) stored[i] = (uint8_t)random_bits();
    for (uint8_t *block = stored; block < stored + blocks * e->bytes; block += e->bytes) {
        if (e->number == NP_GGUF_MXFP4)
            block[0] = (uint8_t)(115 + random_bits() % 12);
        else
            put_half(block + (e->number == NP_GGUF_Q6_K ? 208 : 0), 0.01f * random_float());
        if (e->number == NP_GGUF_Q4_K || e->number == NP_GGUF_Q5_K) put_half(block + 2, 0.01f * random_float());
    }
}

/* Rows in memory of their exact sizes, from an odd address on, so that the sanitizer detects accesses outside. Without
 * it, changed bytes around the results show. */
typedef struct {
    size_t n, bytes, quant_bytes, scale_bytes;
    uint8_t *memory[3], *stored, *quants, *scales;
} test_rows;

static test_rows make_rows(const encoding *e, int type, size_t n) {
    test_rows rows = {.n = n, .bytes = np_gguf_row_bytes(e->number, n)};
    rows.quant_bytes = np_quant_bytes(type, n);
    rows.scale_bytes = np_scale_bytes(type, n);
    const size_t sizes[3] = {1 + ROWS * rows.bytes, 1 + ROWS * rows.quant_bytes + 64, 1 + ROWS * rows.scale_bytes + 64};
    for (int i = 0; i < 3; i++) memset(rows.memory[i] = malloc(sizes[i]), 0xa5, sizes[i]);
    rows.stored = rows.memory[0] + 1;
    rows.quants = rows.memory[1] + 1;
    rows.scales = rows.memory[2] + 1;
    fill(e, rows.stored, ROWS * n / e->weights);
    return rows;
}

static int unpack(const encoding *e, int type, test_rows *rows) {
    return np_unpack_gguf_rows(e->number, rows->stored, ROWS, rows->n, type, rows->quants, rows->scales);
}

static void free_rows(test_rows *rows) {
    const size_t ends[2] = {ROWS * rows->quant_bytes, ROWS * rows->scale_bytes};
    for (int i = 0; i < 2; i++) {
        CHECK(rows->memory[1 + i][0] == 0xa5, "the byte before is written");
        for (size_t j = 0; j < 64; j++)
            CHECK(rows->memory[1 + i][1 + ends[i] + j] == 0xa5, "byte %zu behind is written", j);
    }
    for (int i = 0; i < 3; i++) free(rows->memory[i]);
}

/* How much a decoded weight may differ: nothing; a rounded scale; or half a step of the type, for weights of a group
 * from `low` to `high` in a block with the greatest step and the lowest weight given. */
static double allowed(int number, int type, double weight, double low, double high, double block_step,
                      double block_low) {
    if (number == NP_GGUF_Q4_0 || number == NP_GGUF_Q5_0 || number == NP_GGUF_Q8_0) return 0;
    if (type == NP_Q8) return fmax(-low, high) * (0.5005 / 127 + 0x1p-11); /* the scale, and thus 127, is rounded */
    if (number == NP_GGUF_Q6_K) return 0.501 * ((high - fmin(low, 0)) / 63 + block_step / 63 - block_low / 63);
    return number == NP_GGUF_IQ4_XS ? fabs(weight) * 0x1p-11 : fabs(weight) * 0x1p-23; /* float's rounding */
}

static void check_block(const char *isa, const encoding *e, int type, const uint8_t *block, const float *decoded) {
    double steps[8] = {0}, lows[8] = {0}, highs[8] = {0}, step = 0, low = 0;
    for (size_t g = 0; g < e->weights / 32; g++) {
        lows[g] = INFINITY, highs[g] = -INFINITY;
        for (size_t j = 32 * g; j < 32 * g + 32; j++) {
            lows[g] = fmin(lows[g], stored_weight(e->number, block, j));
            highs[g] = fmax(highs[g], stored_weight(e->number, block, j));
        }
        steps[g] = (highs[g] - fmin(lows[g], 0)) / 63;
        step = fmax(step, steps[g]);
        low = fmin(low, lows[g]);
    }
    for (size_t j = 0; j < e->weights; j++) {
        const double weight = stored_weight(e->number, block, j), error = fabs(decoded[j] - weight);
        const double most = allowed(e->number, type, weight, lows[j / 32], highs[j / 32], step, low);
        const int has_minimum = e->number == NP_GGUF_Q4_K || e->number == NP_GGUF_Q5_K;
        const double rounding = has_minimum ? 0x1p-23 : 0; /* of a difference */
        CHECK(error <= most + rounding, "%s %s as %s: weight %zu is %.9g, not %.9g", isa, e->name, type_names[type], j,
              (double)decoded[j], weight);
    }
}

static void test_values(const char *isa) {
    float decoded[MAX_WEIGHTS];
    for (size_t i = 0; i < ENCODINGS; i++)
        for (int type = 0; type < TYPES; type++)
            for (size_t n = 32; n <= MAX_WEIGHTS; n += 32) {
                const encoding *e = encodings + i;
                if (!np_gguf_fits(e->number, type) || n % e->weights) continue;
                test_rows rows = make_rows(e, type, n);
                CHECK(unpack(e, type, &rows) == NP_OK, "%s %s as %s is refused", isa, e->name, type_names[type]);
                for (size_t r = 0; r < ROWS; r++) {
                    const uint8_t *block = rows.stored + r * rows.bytes;
                    uint16_t scales[MAX_WEIGHTS / 32 + 8]; /* np_decode_row wants them aligned */
                    memcpy(scales, rows.scales + r * rows.scale_bytes, rows.scale_bytes);
                    np_decode_row(type, rows.quants + r * rows.quant_bytes, scales, n, decoded);
                    for (size_t j = 0; j < n; j += e->weights, block += e->bytes)
                        check_block(isa, e, type, block, decoded + j);
                }
                free_rows(&rows);
            }
}

/* The same quants and scales as the first instruction set gave. */
static uint64_t sums_of_first[ENCODINGS][TYPES];

static void test_same_bits(const char *isa) {
    random_state = 1;
    for (size_t i = 0; i < ENCODINGS; i++)
        for (int type = 0; type < TYPES; type++) {
            if (!np_gguf_fits(encodings[i].number, type)) continue;
            test_rows rows = make_rows(encodings + i, type, MAX_WEIGHTS);
            uint64_t sum = 1;
            unpack(encodings + i, type, &rows);
            for (size_t j = 0; j < ROWS * rows.quant_bytes; j++) sum = sum * 31 + rows.quants[j];
            for (size_t j = 0; j < ROWS * rows.scale_bytes; j++) sum = sum * 31 + rows.scales[j];
            if (!sums_of_first[i][type]) sums_of_first[i][type] = sum;
            CHECK(sum == sums_of_first[i][type], "%s %s as %s: other bits", isa, encodings[i].name, type_names[type]);
            free_rows(&rows);
        }
}

static void test_known_blocks(void) {
    uint8_t block[256] = {0}, quants[256], scales[16], expected[256];
    put_half(block, 0.5f);
    for (int j = 0; j < 16; j++) block[2 + j] = (uint8_t)(j | (15 - j) << 4); /* codes 0 to 15, then 15 to 0 */
    CHECK(np_unpack_gguf_rows(NP_GGUF_Q4_0, block, 1, 32, NP_Q4, quants, scales) == NP_OK, "Q4_0");
    CHECK(memcmp(quants, block + 2, 16) == 0 && memcmp(scales, block, 2) == 0, "Q4_0 as q4");
    CHECK(np_unpack_gguf_rows(NP_GGUF_Q4_0, block, 1, 32, NP_Q8, quants, scales) == NP_OK, "Q4_0");
    for (int j = 0; j < 32; j++)
        CHECK((int8_t)quants[j] == (j < 16 ? j : 31 - j) - 8, "Q4_0 as q8: code %d is %d", j, (int8_t)quants[j]);

    /* Q5_0: codes 0 to 31. */
    const uint32_t fifths = 0xffff0000u;
    memcpy(block + 2, &fifths, 4);
    for (int j = 0; j < 16; j++) block[6 + j] = (uint8_t)(j | j << 4);
    CHECK(np_unpack_gguf_rows(NP_GGUF_Q5_0, block, 1, 32, NP_Q8, quants, scales) == NP_OK, "Q5_0");
    for (int j = 0; j < 32; j++) CHECK((int8_t)quants[j] == j - 16, "Q5_0 as q8: code %d is %d", j, (int8_t)quants[j]);

    /* MXFP4 of scale 1: mxfp4 has half of it. */
    block[0] = 127;
    CHECK(np_unpack_gguf_rows(NP_GGUF_MXFP4, block, 1, 32, NP_MXFP4, quants, scales) == NP_OK, "MXFP4");
    CHECK(half_at(scales) == 0.5 && memcmp(quants, block + 1, 16) == 0, "MXFP4 as mxfp4: scale %g", half_at(scales));

    /* Q5_K: scale and minimum g are 8 g + 7 and 63 - 7 g; code j of group g is (j + g) % 32. */
    memset(block, 0, sizeof block);
    put_half(block, 2.0f), put_half(block + 2, 3.0f);
    for (int g = 0; g < 8; g++) {
        const int scale = 8 * g + 7, minimum = 63 - 7 * g;
        if (g < 4) {
            block[4 + g] |= (uint8_t)scale, block[8 + g] |= (uint8_t)minimum;
        } else {
            block[8 + g] = (uint8_t)((scale & 15) | (minimum & 15) << 4);
            block[g] |= (uint8_t)(scale >> 4 << 6), block[4 + g] |= (uint8_t)(minimum >> 4 << 6);
        }
        for (int j = 0; j < 32; j++) {
            block[48 + g / 2 * 32 + j] |= (uint8_t)(((j + g) & 15) << g % 2 * 4);
            block[16 + j] |= (uint8_t)(((j + g) % 32 >> 4) << g);
        }
    }
    memset(expected, 0, sizeof expected);
    for (int g = 0; g < 8; g++)
        for (int j = 0; j < 32; j++) {
            expected[16 * g + j % 16] |= (uint8_t)(((j + g) & 15) << j / 16 * 4);
            expected[128 + j / 16 * 16 + 2 * g + j % 16 / 8] |= (uint8_t)(((j + g) % 32 >> 4) << j % 8);
        }
    CHECK(np_unpack_gguf_rows(NP_GGUF_Q5_K, block, 1, 256, NP_Q6K, quants, scales) == NP_OK, "Q5_K");
    CHECK(memcmp(quants, expected, 192) == 0, "Q5_K as q6k: quants"); /* with 32 bytes of zeros */
    CHECK(memcmp(scales, block, 4) == 0, "Q5_K: units");
    for (int g = 0; g < 8; g++) {
        const int scale = (scales[4 + g] & 15) + 16 * (scales[12 + g % 4] >> g / 4 * 4 & 3);
        const int minimum = (scales[4 + g] >> 4) + 16 * (scales[12 + g % 4] >> (g / 4 * 4 + 2) & 3);
        CHECK(scale == 8 * g + 7 && minimum == 63 - 7 * g, "Q5_K: scale %d, minimum %d of group %d", scale, minimum, g);
    }
}

/* Zeros, equal weights and one weight alone have no range, or no minimum. */
static void test_special_blocks(const char *isa) {
    const encoding *e = encodings + 5; /* Q6_K */
    for (int kind = 0; kind < 4; kind++)
        for (int type = NP_Q8; type <= NP_Q6K; type += NP_Q6K - NP_Q8) {
            test_rows rows = make_rows(e, type, 256);
            float decoded[256];
            uint16_t scales[8];
            for (size_t r = 0; r < ROWS; r++) {
                uint8_t *block = rows.stored + r * e->bytes;
                memset(block, 0, e->bytes); /* codes are -32 */
                if (kind == 2) memset(block, 0xff, 192); /* codes are 31 */
                if (kind == 3) memset(block + 128, 0xaa, 64), block[17] = 1; /* all codes are 0, but one is 1 */
                memset(block + 192, 100, 16);
                put_half(block + 208, kind == 0 ? 0.0f : 0.001f);
            }
            CHECK(unpack(e, type, &rows) == NP_OK, "%s kind %d", isa, kind);
            memcpy(scales, rows.scales, 16);
            np_decode_row(type, rows.quants, scales, 256, decoded);
            check_block(isa, e, type, rows.stored, decoded);
            for (int j = 0; j < 256; j++)
                CHECK(kind != 0 || decoded[j] == 0.0f, "%s %s: weight %d of zeros", isa, type_names[type], j);
            free_rows(&rows);
        }
}

static void test_refusals(const char *isa) {
    static const uint16_t bad[] = {0x7c00, 0xfc00, 0x7e00, 0xfe01};
    for (size_t i = 0; i < ENCODINGS; i++)
        for (int type = 0; type < TYPES; type++) {
            const encoding *e = encodings + i;
            if (!np_gguf_fits(e->number, type) || e->number == NP_GGUF_MXFP4) continue;
            test_rows rows = make_rows(e, type, 512);
            uint8_t *half = rows.stored + ROWS * rows.bytes - e->bytes + (e->number == NP_GGUF_Q6_K ? 208 : 0);
            const char *as = type_names[type];
            for (size_t b = 0; b < sizeof bad / sizeof *bad; b++) {
                memcpy(half, bad + b, 2);
                CHECK(unpack(e, type, &rows) == NP_E_ARGUMENT, "%s %s as %s takes %04x", isa, e->name, as, bad[b]);
            }
            put_half(half, 1.0f);
            CHECK(unpack(e, type, &rows) == NP_OK, "%s %s as %s", isa, e->name, as);
            if (e->number == NP_GGUF_Q4_K || e->number == NP_GGUF_Q5_K) {
                memcpy(half + 2, bad, 2);
                CHECK(unpack(e, type, &rows) == NP_E_ARGUMENT, "%s %s as %s: infinite dmin", isa, e->name, as);
            }
            free_rows(&rows);
        }
    uint8_t block[32] = {0}, quants[32], scales[2];
    memset(block + 1, 0x77, 16);
    for (int exponent = 0; exponent < 256; exponent++) {
        block[0] = (uint8_t)exponent;
        const int status = np_unpack_gguf_rows(NP_GGUF_MXFP4, block, 1, 32, NP_MXFP4, quants, scales);
        CHECK((status == NP_OK) == (exponent <= 143), "MXFP4 exponent %d: %d", exponent, status);
        CHECK(status != NP_OK || half_at(scales) == (exponent < 104 ? 0 : ldexp(1, exponent - 128)), "MXFP4 exponent %d", exponent);
        const int as_q8 = np_unpack_gguf_rows(NP_GGUF_MXFP4, block, 1, 32, NP_Q8, quants, scales);
        const int fits = ldexp(12, exponent - 128) / 127 < 65520;
        CHECK((as_q8 == NP_OK) == fits, "%s MXFP4 as q8, exponent %d: %d", isa, exponent, as_q8);
    }
}

static void test_arguments(void) {
    uint8_t stored[512] = {0}, quants[512], scales[64];
    memset(quants, 0xa5, sizeof quants);
    for (size_t i = 0; i < ENCODINGS; i++) {
        const encoding *e = encodings + i;
        CHECK(np_gguf_row_bytes(e->number, 5 * e->weights) == 5 * e->bytes, "%s", e->name);
        CHECK(!np_gguf_row_bytes(e->number, e->weights + 16) && !np_gguf_row_bytes(e->number, 0), "%s", e->name);
        for (int type = -1; type < TYPES + 2; type++) {
            const int status = np_unpack_gguf_rows(e->number, stored, 1, e->weights + 16, type, quants, scales);
            CHECK(status == NP_E_ARGUMENT, "%s takes half a group", e->name);
            const int refused = np_unpack_gguf_rows(e->number, stored, 0, 256, type, quants, scales) == NP_E_ARGUMENT;
            CHECK(refused == !np_gguf_fits(e->number, type), "%s as type %d", e->name, type);
        }
        CHECK(np_gguf_fits(e->number, NP_Q8), "%s does not fit q8", e->name);
        CHECK(np_unpack_gguf_rows(e->number, stored, 0, 256, NP_Q8, quants, scales) == NP_OK, "%s: no rows", e->name);
    }
    CHECK(!np_gguf_fits(NP_GGUF_Q5_K, NP_Q4K) && !np_gguf_fits(NP_GGUF_Q6_K, NP_Q5K), "losses");
    CHECK(!np_gguf_row_bytes(0, 256) && !np_gguf_row_bytes(-1, 256) && !np_gguf_fits(3, NP_Q8), "unknown encodings");
    CHECK(quants[0] == 0xa5 && quants[511] == 0xa5, "a refusal writes");
}

int main(void) {
    test_known_blocks();
    test_arguments();
    for_each_isa(test_values);
    for_each_isa(test_same_bits);
    for_each_isa(test_special_blocks);
    for_each_isa(test_refusals);
    return checks_report();
}

/* Encoding with minima and with codebooks: errors stay within what the codes' steps allow, whatever the row; damaged weights are refused. */
#include "check.h"
#include "neuronpipe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WEIGHTS = 640 };

static float row[MAX_WEIGHTS], decoded[MAX_WEIGHTS];
static uint8_t quants[MAX_WEIGHTS], scales[128];

static double error, power; /* summed squares of the rows since `relative_error` was last read */

static void encode(int type, size_t n) {
    CHECK(np_encode_row(type, row, NULL, n, quants, scales) == NP_OK, "type %d n=%zu is refused", type, n);
    np_decode_row(type, quants, scales, n, decoded);
    for (size_t j = 0; j < n; j++) {
        error += (decoded[j] - row[j]) * (double)(decoded[j] - row[j]);
        power += row[j] * (double)row[j];
    }
}

static double relative_error(void) {
    const double relative = sqrt(power > 0 ? error / power : error);
    error = power = 0;
    return relative;
}

static float normal(void) {
    float sum = 0;
    for (int i = 0; i < 12; i++) sum += 0.5f * random_float();
    return sum;
}

static void test_errors(void) {
    static const struct {
        int type;
        double most; /* relative, of normal weights; a step of 16, 32 or 64 over their range gives about these */
    } cases[] = {{NP_Q4K, 0.077}, {NP_Q5K, 0.038}, {NP_Q6K, 0.021}, {NP_IQ4, 0.077}, {NP_MXFP4, 0.1},
                 {NP_Q4H, 0.077}, {NP_Q5H, 0.038}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (size_t n = 32; n <= MAX_WEIGHTS; n += 32)
            for (int offset = 0; offset < (cases[c].type == NP_IQ4 || cases[c].type == NP_MXFP4 ? 1 : 2); offset++) {
                for (int round = 0; round < 40; round++) {
                    for (size_t j = 0; j < n; j++) row[j] = 0.02f * (normal() + 4.0f * (float)offset * (j / 32 % 3 == 1 ? 1.0f : -1.0f));
                    encode(cases[c].type, n);
                }
                const double relative = relative_error();
                CHECK(relative < cases[c].most, "type %d n=%zu offset %d: error %.4f", cases[c].type, n, offset, relative);
            }
}

static void test_special_rows(void) {
    for (int type = NP_Q4K; type <= NP_Q5H; type++) {
        memset(row, 0, sizeof row);
        encode(type, 256);
        CHECK(relative_error() == 0.0, "type %d: zeros", type);
        for (size_t j = 0; j < 256; j++) row[j] = j % 32 ? 0.0f : -3.0f; /* iq4 has no zero */
        encode(type, 256);
        CHECK(relative_error() < (type == NP_IQ4 ? 0.05 : 0.01), "type %d: one negative weight a group", type);
        for (size_t j = 0; j < 256; j++) row[j] = 1e-35f;
        encode(type, 256);
        CHECK(relative_error() <= 1.0 && isfinite(decoded[0]), "type %d: tiny weights", type);
        const float refused[] = {NAN, INFINITY, -INFINITY, 3e38f};
        for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
            memset(row, 0, sizeof row);
            row[77] = refused[i];
            CHECK(np_encode_row(type, row, NULL, 256, quants, scales) == NP_E_ARGUMENT, "type %d takes %g", type, (double)refused[i]);
        }
    }
    CHECK(np_encode_row(NP_Q4, row, NULL, 256, quants, scales) == NP_E_ARGUMENT, "q4 is encoded elsewhere");
    CHECK(np_encode_row(NP_Q4K, row, NULL, 33, quants, scales) == NP_E_ARGUMENT, "half a group");
}

/* The squared error of a row, each weight's as important as it is. */
static double important_error(int type, const float *importance, int uses_it) {
    double sum = 0;
    CHECK(np_encode_row(type, row, uses_it ? importance : NULL, 256, quants, scales) == NP_OK, "type %d is refused", type);
    np_decode_row(type, quants, scales, 256, decoded);
    for (size_t j = 0; j < 256; j++) sum += importance[j] * (double)(decoded[j] - row[j]) * (decoded[j] - row[j]);
    return sum;
}

static void test_importance(void) {
    float importance[256], ones[256];
    for (size_t j = 0; j < 256; j++) importance[j] = j % 8 ? 0.05f : 10.0f, ones[j] = 1.0f;
    for (int type = NP_Q4K; type <= NP_Q5H; type++) {
        double with = 0, without = 0;
        uint8_t same[sizeof quants];
        for (int round = 0; round < 200; round++) {
            for (size_t j = 0; j < 256; j++) row[j] = 0.02f * normal();
            without += important_error(type, importance, 0);
            memcpy(same, quants, sizeof same);
            important_error(type, ones, 1);
            CHECK(memcmp(same, quants, sizeof same) == 0, "type %d: equal importance changes codes", type);
            with += important_error(type, importance, 1);
        }
        CHECK(with < 0.85 * without, "type %d: error %.3f of that without importance", type, with / without);
        memset(importance, 0, sizeof importance);
        important_error(type, importance, 1);
        for (size_t j = 0; j < 256; j++) {
            CHECK(isfinite(decoded[j]), "type %d: no importance at all gives %g", type, (double)decoded[j]);
            importance[j] = j % 8 ? 0.05f : 10.0f;
        }
    }
}

int main(void) {
    test_importance();
    test_errors();
    test_special_rows();
    return checks_report();
}

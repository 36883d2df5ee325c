/* Encoding of rows of iq4 and mxfp4: for several guesses of a group's scale its weights are rounded to the nearest
 * values, the scale of least weighted squares for these values is computed, and the best stays. */
#include "kernels/codebook.h"
#include "kernels/encode.h"
#include "kernels/half.h"

enum { STEPS = 9 }; /* guesses for each sign of the scale */

/* The values in ascending order, their codes, and the middle between each value and the next. */
typedef struct {
    float values[NP_CODES], middles[NP_CODES - 1];
    uint8_t codes[NP_CODES];
} sorted_values;

static sorted_values sorted_values_of(int type) {
    const int8_t *values = np_codebook(type);
    sorted_values s;
    for (int code = 0; code < NP_CODES; code++) {
        int place = code;
        for (; place > 0 && s.values[place - 1] > (float)values[code]; place--)
            s.values[place] = s.values[place - 1], s.codes[place] = s.codes[place - 1];
        s.values[place] = (float)values[code], s.codes[place] = (uint8_t)code;
    }
    for (int i = 0; i + 1 < NP_CODES; i++) s.middles[i] = 0.5f * (s.values[i] + s.values[i + 1]);
    return s;
}

/* The places of the nearest values of a group divided by a scale. */
static void round_group(const sorted_values *s, const float *w, float inverse, uint8_t places[NP_GROUP]) {
    int32_t counts[NP_GROUP] = {0};
    for (int i = 0; i + 1 < NP_CODES; i++)
        for (int j = 0; j < NP_GROUP; j++) counts[j] += w[j] * inverse > s->middles[i];
    for (int j = 0; j < NP_GROUP; j++) places[j] = (uint8_t)counts[j];
}

#define LARGEST_HALF 65504.0f

/* Infinity if no fp16 scale is large enough. */
static float fit_scale(const sorted_values *s, const float *w, const float *importance) {
    float weight[NP_GROUP], largest = 0.0f, best = 0.0f, most = 0.0f;
    np_error_weights(w, importance, weight);
    for (int j = 0; j < NP_GROUP; j++) largest = fabsf(w[j]) > fabsf(largest) ? w[j] : largest;
    if (!(fabsf(largest) > 1e-30f)) return 0.0f;
    if (fabsf(largest) > LARGEST_HALF * s->values[NP_CODES - 1]) return INFINITY;
    for (int guess = 0; guess < 2 * STEPS; guess++) {
        const float end = guess % 2 ? s->values[NP_CODES - 1] : s->values[0];
        const float inverse = end * (1.0f + 0.025f * (float)(guess / 2 - STEPS / 2)) / largest;
        uint8_t places[NP_GROUP];
        float along = 0.0f, power = 0.0f;
        round_group(s, w, inverse, places);
        for (int j = 0; j < NP_GROUP; j++) {
            const float value = s->values[places[j]];
            along += weight[j] * value * w[j];
            power += weight[j] * value * value;
        }
        /* With the scale along / power the error is smaller by along^2 / power than with zeros. */
        if (power > 0.0f && along * along > most * power) most = along * along / power, best = along / power;
    }
    return best;
}

int np_encode_codebook_row(int type, const float *w, const float *importance, size_t n, uint8_t *quants, uint8_t *scales) {
    const sorted_values s = sorted_values_of(type);
    for (size_t g = 0; g < n / NP_GROUP; g++, w += NP_GROUP, quants += NP_GROUP / 2, scales += 2) {
        const uint16_t half = np_float_to_half(fit_scale(&s, w, importance ? importance + g * NP_GROUP : NULL));
        const float scale = np_half_to_float(half);
        uint8_t places[NP_GROUP];
        if (!isfinite(scale)) return NP_E_ARGUMENT;
        memcpy(scales, &half, sizeof half);
        round_group(&s, w, scale != 0.0f ? 1.0f / scale : 0.0f, places);
        for (int j = 0; j < NP_GROUP / 2; j++) quants[j] = (uint8_t)(s.codes[places[j]] | s.codes[places[j + NP_GROUP / 2]] << 4);
    }
    return NP_OK;
}

/* Encoding of rows with a minimum: q4k, q5k, q6k, q4h, q5h.
 *
 * A group's scale s and minimum z are fitted to its weights by weighted least squares: for several first guesses of the
 * scale the codes are rounded, the best s and z for these codes are computed, and the pair with the least error stays.
 * Then the scales and minima of a block are rounded to six bits each (of q4h and q5h to fp16), and the codes are rounded
 * once more to fit them. */
#include "kernels/encode.h"
#include "kernels/codebook.h"
#include "kernels/minimum.h"

enum { MAX_FIELD = 63, GUESSES = 9 };

typedef struct {
    float scale, minimum; /* w ~ scale * code - minimum */
} group_fit;

static float code_of(float value, float max_code) {
    const float code = rintf(value);
    return code < 0.0f ? 0.0f : code > max_code ? max_code : code;
}

/* Adjust the fit to the codes that it gives. Returns the weighted error. */
static float refine(const float *w, const float *weight, float max_code, group_fit *fit) {
    float codes[NP_GROUP], sum_1 = 0, sum_c = 0, sum_cc = 0, sum_w = 0, sum_cw = 0, error = 0;
    const float inverse = fit->scale > 0.0f ? 1.0f / fit->scale : 0.0f;
    for (int j = 0; j < NP_GROUP; j++) codes[j] = code_of((w[j] + fit->minimum) * inverse, max_code);
    for (int j = 0; j < NP_GROUP; j++) {
        sum_1 += weight[j];
        sum_c += weight[j] * codes[j];
        sum_cc += weight[j] * codes[j] * codes[j];
        sum_w += weight[j] * w[j];
        sum_cw += weight[j] * codes[j] * w[j];
    }
    const float determinant = sum_1 * sum_cc - sum_c * sum_c;
    if (determinant > 0.0f) {
        fit->scale = (sum_1 * sum_cw - sum_c * sum_w) / determinant;
        fit->minimum = (sum_c * sum_cw - sum_cc * sum_w) / determinant;
    }
    if (!(fit->minimum >= 0.0f)) { /* minima have no sign */
        fit->minimum = 0.0f;
        fit->scale = sum_cc > 0.0f ? sum_cw / sum_cc : 0.0f;
    }
    if (!(fit->scale >= 0.0f)) fit->scale = 0.0f;
    for (int j = 0; j < NP_GROUP; j++) {
        const float difference = fit->scale * codes[j] - fit->minimum - w[j];
        error += weight[j] * difference * difference;
    }
    return error;
}

static group_fit fit_group(const float *w, const float *importance, float max_code) {
    float weight[NP_GROUP], lowest = 0.0f, highest = 0.0f;
    np_error_weights(w, importance, weight);
    for (int j = 0; j < NP_GROUP; j++) {
        lowest = w[j] < lowest ? w[j] : lowest;
        highest = w[j] > highest ? w[j] : highest;
    }
    group_fit best = {(highest - lowest) / max_code, -lowest};
    if (!(highest - lowest > 1e-30f)) return (group_fit){0.0f, 0.0f};
    float least = INFINITY;
    for (int i = 0; i < GUESSES; i++) {
        group_fit fit = {(highest - lowest) / (max_code - 1.0f + 0.25f * (float)i), -lowest};
        const float error = refine(w, weight, max_code, &fit);
        if (error < least) least = error, best = fit;
    }
    return best;
}

/* The six-bit fields of a group: bits as in a block's 16 bytes. */
static void put_fields(uint8_t *block, int g, unsigned scale, unsigned minimum) {
    block[4 + g] = (uint8_t)((scale & 15) | (minimum & 15) << 4);
    block[12 + g % 4] |= (uint8_t)((scale >> 4 | minimum >> 4 << 2) << (g < 4 ? 0 : 4));
}

static unsigned field_of(float value, float unit) {
    return (unsigned)code_of(unit > 0.0f ? value / unit : 0.0f, MAX_FIELD);
}

/* planes: where a group's high bits lie, four bytes from one group to the next in each pair of planes. */
static void put_codes(int bits, const float *w, float scale, float minimum, uint8_t *nibbles, uint8_t *planes, size_t groups) {
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f, max_code = (float)((1 << bits) - 1);
    uint8_t codes[NP_GROUP];
    for (int j = 0; j < NP_GROUP; j++) codes[j] = (uint8_t)code_of((w[j] + minimum) * inverse, max_code);
    for (int j = 0; j < NP_GROUP / 2; j++) nibbles[j] = (uint8_t)((codes[j] & 15) | (codes[j + NP_GROUP / 2] & 15) << 4);
    for (int bit = 4; bit < bits; bit++)
        for (int half = 0; half < 2; half++, planes += 2 * groups) {
            uint16_t word = 0;
            for (int j = 0; j < NP_GROUP / 2; j++) word |= (uint16_t)((codes[half * NP_GROUP / 2 + j] >> bit & 1) << j);
            memcpy(planes, &word, sizeof word);
        }
}

/* Write the scales of q4h and q5h, and change the fits to what is stored. */
static void store_halves(group_fit *fits, size_t count, uint8_t *block) {
    for (size_t g = 0; g < count; g++) {
        const uint16_t scale = np_float_to_half(fits[g].scale), minimum = np_float_to_half(fits[g].minimum);
        memcpy(block + 2 * g, &scale, 2);
        memcpy(block + 2 * (NP_MINIMUM_GROUPS + g), &minimum, 2);
        fits[g] = (group_fit){np_half_to_float(scale), np_half_to_float(minimum)};
    }
}

/* The same for six bits each, with their units. */
static void store_fields(group_fit *fits, size_t count, uint8_t *block) {
    float max_scale = 0.0f, max_minimum = 0.0f;
    for (size_t g = 0; g < count; g++) {
        max_scale = fits[g].scale > max_scale ? fits[g].scale : max_scale;
        max_minimum = fits[g].minimum > max_minimum ? fits[g].minimum : max_minimum;
    }
    const uint16_t halves[2] = {np_float_to_half(max_scale / MAX_FIELD), np_float_to_half(max_minimum / MAX_FIELD)};
    const float unit = np_half_to_float(halves[0]), minimum_unit = np_half_to_float(halves[1]);
    memcpy(block, halves, sizeof halves);
    for (size_t g = 0; g < count; g++) {
        const unsigned scale = field_of(fits[g].scale, unit), minimum = field_of(fits[g].minimum, minimum_unit);
        put_fields(block, (int)g, scale, minimum);
        fits[g] = (group_fit){unit * (float)scale, minimum_unit * (float)minimum};
    }
}

int np_encode_row(int type, const float *w, const float *importance, size_t n, void *quants, void *scales) {
    const int bits = 4 + (int)np_high_bits(type);
    if (!(np_has_minimum(type) || np_has_codebook(type)) || n % NP_GROUP) return NP_E_ARGUMENT;
    const size_t groups = n / NP_GROUP;
    for (size_t j = 0; j < n; j++)
        if (!isfinite(w[j])) return NP_E_ARGUMENT;
    if (np_has_codebook(type)) return np_encode_codebook_row(type, w, importance, n, quants, scales);
    memset(scales, 0, np_scale_bytes(type, n));
    for (size_t first = 0; first < groups; first += NP_MINIMUM_GROUPS) {
        const size_t count = np_minimum_count(groups, first);
        uint8_t *block = (uint8_t *)scales + first * np_minimum_bytes(type);
        group_fit fits[NP_MINIMUM_GROUPS];
        for (size_t g = 0; g < count; g++) {
            const size_t place = (first + g) * NP_GROUP;
            fits[g] = fit_group(w + place, importance ? importance + place : NULL, (float)((1 << bits) - 1));
        }
        if (np_has_half_scales(type)) store_halves(fits, count, block);
        else store_fields(fits, count, block);
        for (size_t g = 0; g < count; g++) {
            if (!isfinite(fits[g].scale) || !isfinite(fits[g].minimum)) return NP_E_ARGUMENT;
            put_codes(bits, w + (first + g) * NP_GROUP, fits[g].scale, fits[g].minimum, (uint8_t *)quants + (first + g) * NP_GROUP / 2,
                      (uint8_t *)quants + n / 2 + 2 * (first + g), groups);
        }
    }
    return NP_OK;
}
